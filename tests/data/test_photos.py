"""Photos on disk: read upright and whole, or refused in one line."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from photo_files import NOISE, formats
from PIL import Image

from tag2box import images
from tag2box.cli.inputs import find_photos
from tag2box.errors import UserError
from tag2box.images import photo_size, read_photo


@pytest.mark.parametrize("content", [b"", b"hello, not a photo", b"\x89PNG\r\n\x1a\nbroken"])
def test_what_is_not_a_photo_is_one_line_for_the_user(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.jpg"
    path.write_bytes(content)
    for read in (read_photo, photo_size):
        with pytest.raises(UserError) as error:
            read(path)
        assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_missing_photo_and_a_folder_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jpg", tmp_path):
        with pytest.raises(UserError, match="no such photo"):
            read_photo(path)


CUTS = (*range(1, 40, 3), 300, 1000)


@pytest.mark.parametrize("at_least", [None, (5, 4)])
@pytest.mark.parametrize("kind", formats())
def test_a_cut_photo_is_refused_unless_every_pixel_is_there(
    tmp_path: Path, kind: str, at_least: tuple[int, int] | None
) -> None:
    path, whole = tmp_path / "cut.jpg", formats()[kind]
    path.write_bytes(whole)
    expected = read_photo(path, at_least)
    refused = []
    for cut in CUTS:
        path.write_bytes(whole[:-cut])
        try:
            assert torch.equal(read_photo(path, at_least), expected)  # what is gone was behind the pixels
        except UserError as error:
            refused.append(cut)
            assert str(path) in str(error) and "\n" not in str(error)
    can_lose_much = kind in {"gif", "mpo", "moving webp"}  # the second frame
    can_lose_little = kind in {"png", "palette"}  # their last chunks
    assert len(refused) == len(CUTS) or can_lose_much or (can_lose_little and {300, 1000} <= set(refused))


@given(st.sampled_from(sorted(formats())), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=8))
@settings(max_examples=120, deadline=None)
def test_a_scrambled_photo_is_read_or_refused_in_one_line(kind: str, changes: list[tuple[int, int]]) -> None:
    content = bytearray(formats()[kind])
    for place, value in changes:
        content[place % len(content)] = value
    path = Path(f"/proc/self/fd/{_memory_file(bytes(content))}")
    try:
        for read in (photo_size, read_photo, lambda file: read_photo(file, (5, 4))):
            try:
                read(path)
            except UserError as error:
                assert "\n" not in str(error)
    finally:
        os.close(int(path.name))


def _memory_file(content: bytes) -> int:
    handle = os.memfd_create("photo")
    os.write(handle, content)
    return handle


@pytest.mark.parametrize("kind", ["png", "webp", "tif", "late.png"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_are_rotated_by_their_exif_orientation(tmp_path: Path, orientation: int, kind: str) -> None:
    upright = np.zeros((20, 30, 3), np.uint8)
    upright[:10, :15] = 255  # white top left
    # The stored picture is the inverse of what a viewer does with the tag.
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright),
        7: upright[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"turned.{kind}"
    options = {"lossless": True} if kind == "webp" else {}
    Image.fromarray(np.ascontiguousarray(stored)).save(path, exif=exif, **options)
    if kind == "late.png":
        path.write_bytes(_exif_last(path.read_bytes()))
    assert photo_size(path) == (30, 20)
    assert torch.equal(read_photo(path), torch.from_numpy(upright).permute(2, 0, 1))
    small = read_photo(path, at_least=(7, 5))
    assert small.shape == (3, 10, 15) and small[:, 0, 0].tolist() == [255] * 3 and small[:, -1, -1].tolist() == [0] * 3


def _exif_last(png: bytes) -> bytes:
    """The EXIF chunk moved behind the pixels, as some programs write it."""
    start = png.index(b"eXIf") - 4
    length = 12 + int.from_bytes(png[start : start + 4], "big")
    end = png.index(b"IEND") - 4
    return png[:start] + png[start + length : end] + png[start : start + length] + png[end:]


def test_the_size_of_a_png_is_known_without_its_pixels(tmp_path: Path) -> None:
    path = tmp_path / "half.png"
    whole = formats()["png"]
    path.write_bytes(whole[: len(whole) // 2])
    assert photo_size(path) == (40, 60)  # turned, by the EXIF chunk in front


@pytest.mark.parametrize("exif", [b"", b"Exif\0\0", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*junk" * 9])
def test_broken_exif_rotates_nothing(tmp_path: Path, exif: bytes) -> None:
    path = tmp_path / "p.jpg"
    Image.fromarray(NOISE).save(path, exif=exif)
    assert photo_size(path) == (60, 40)
    assert read_photo(path).shape == (3, 40, 60)


@pytest.mark.parametrize("kind", ["gif", "mpo", "moving webp"])
def test_of_moving_pictures_the_first_frame_is_seen(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "moving"
    path.write_bytes(formats()[kind])
    seen = read_photo(path).permute(1, 2, 0).numpy().astype(int)
    assert abs(seen - NOISE).mean() < 0.7 * abs(seen[::-1, ::-1] - NOISE).mean()


def test_the_first_bytes_decide_not_the_name(tmp_path: Path) -> None:
    path = tmp_path / "photo.jpg"
    path.write_bytes(formats()["bmp"])
    assert torch.equal(read_photo(path), torch.from_numpy(NOISE).permute(2, 0, 1))


@pytest.mark.parametrize("content", [b"%!PS-Adobe-3.0 EPSF-3.0\n", b"RIFF\0\0\0\0WAVEfmt ", b"P6 1 1 255 abc", b"8BPS"])
def test_other_formats_are_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "photo.jpg"
    path.write_bytes(content)
    with pytest.raises(UserError, match="expected JPEG, PNG, WebP, BMP, GIF or TIFF"):
        read_photo(path)


def test_nothing_global_is_changed_and_threads_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 7)  # the limit of the library is neither used nor changed
    (tmp_path / "p.jpg").write_bytes(formats()["jpeg"])
    expected, seen = read_photo(tmp_path / "p.jpg"), []
    work = [threading.Thread(target=lambda: seen.append(read_photo(tmp_path / "p.jpg"))) for _ in range(8)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert len(seen) == 8 and all(torch.equal(one, expected) for one in seen)
    assert Image.MAX_IMAGE_PIXELS == 7


def test_no_file_stays_open(tmp_path: Path) -> None:
    broken = formats() | {f"cut {kind}": content[:-900] for kind, content in formats().items()} | {"none": b"?"}
    before = len(list(Path("/proc/self/fd").iterdir()))
    for content in broken.values():
        (tmp_path / "p").write_bytes(content)
        for read in (photo_size, read_photo):
            try:
                read(tmp_path / "p")
            except UserError:
                continue
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_every_suffix_that_is_searched_for_has_a_reader(tmp_path: Path) -> None:
    for suffix in images.SUFFIXES:
        Image.fromarray(NOISE).save(tmp_path / f"p{suffix}")
        assert photo_size(tmp_path / f"p{suffix}") == (60, 40)


# ---------------------------------------------------------------- photos that a user names


def photos_named(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 20)).save(folder / name)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("new", ["a", "b"]),  # a folder
        ("new/*.jpg", ["a", "b"]),  # as a quoted pattern, or a shell that expands none, leaves it
        ("new/[a].jpg", ["a"]),
        ("ne?", ["a", "b"]),
        ("new/**/*.jpg", ["a", "b"]),
        ("odd/[1].jpg", ["[1]"]),  # a file of this name comes first
    ],
)
def test_patterns_are_expanded_if_no_file_has_this_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, found: list[str]
) -> None:
    photos_named(tmp_path, "new/a.jpg", "new/b.jpg", "odd/[1].jpg", "odd/1.jpg")
    monkeypatch.chdir(tmp_path)
    for place in (Path(given), tmp_path / given):
        assert [photo.id for photo in find_photos([place])] == found


def test_a_pattern_without_a_match_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\*\.png: no such photo, and no file matches this pattern; check"):
        find_photos([tmp_path / "*.png"])


@pytest.mark.parametrize(("given", "near"), [("upper.jpg", "UPPER.JPG"), ("upper.jpeg", "UPPER.JPG"), ("cat.jpg", "")])
def test_a_photo_that_is_not_there_is_answered_with_the_nearest_name(tmp_path: Path, given: str, near: str) -> None:
    photos_named(tmp_path, "UPPER.JPG")
    advice = rf"did you mean {near}\?$" if near else "check the name and the photos folder$"
    with pytest.raises(UserError, match=f"{given}: no such photo; {advice}"):
        find_photos([tmp_path / given])


def test_unreadable_photos_are_skipped_if_asked(tmp_path: Path) -> None:
    photos_named(tmp_path, "a.jpg", "c.jpg")
    (tmp_path / "b.jpg").write_bytes(b"no photo")
    (tmp_path / "folder.jpg").mkdir()
    skipped: list[str] = []
    places = [tmp_path, tmp_path / "none.jpg", tmp_path / "a.jpg"]
    assert [photo.id for photo in find_photos(places, skipped)] == ["a", "c"]
    assert ["b.jpg: not readable" in skipped[0], "none.jpg: no such photo" in skipped[1]] == [True, True]
    with pytest.raises(UserError, match=r"b\.jpg: not readable as a photo"):
        find_photos(places)


def test_for_many_missing_photos_their_folder_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "IMG_0001.JPG").write_bytes(b"x")
    read, seen = Path.iterdir, []
    monkeypatch.setattr(Path, "iterdir", lambda folder: (seen.append(folder), read(folder))[1])
    for number in range(5):
        with pytest.raises(UserError, match="did you mean IMG_0001.JPG" if number == 1 else "check the name"):
            photo_size(tmp_path / f"img_000{number}.jpg")
    assert seen == [tmp_path]
