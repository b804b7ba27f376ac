from __future__ import annotations

import functools
import io
import json
import os
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tag2box.data import photos
from tag2box.data.photos import MAX_PIXELS, photo_size, read_photo, reduction
from tag2box.errors import UserError

NOISE = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)
SIDEWAYS = Image.Exif()
SIDEWAYS[0x0112] = 6


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def two_frames(kind: str, **options: Any) -> bytes:
    """A moving picture: noise, then the same upside down."""
    image = Image.fromarray(NOISE)
    return encoded(image, kind, save_all=True, append_images=[image.rotate(180)], **options)


@functools.cache
def formats() -> dict[str, bytes]:
    """Noise in every format people have, 60 wide and 40 high as stored."""
    image = Image.fromarray(NOISE)
    return {
        "jpeg": encoded(image, "JPEG", exif=SIDEWAYS),
        "progressive": encoded(image, "JPEG", progressive=True),
        "cmyk": encoded(image.convert("CMYK"), "JPEG"),
        "mpo": two_frames("MPO"),
        "png": encoded(image, "PNG", exif=SIDEWAYS),
        "palette": encoded(image.quantize(16), "PNG", transparency=0),
        "gif": two_frames("GIF"),
        "webp": encoded(image, "WEBP", lossless=True, exif=SIDEWAYS),
        "moving webp": two_frames("WEBP", lossless=True),
        "bmp": encoded(image, "BMP"),
        "tiff": encoded(image, "TIFF"),
        "lzw": encoded(image, "TIFF", compression="tiff_lzw"),
    }


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
def test_photos_are_turned_upright_as_exif_says(tmp_path: Path, orientation: int, kind: str) -> None:
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
def test_broken_exif_turns_nothing(tmp_path: Path, exif: bytes) -> None:
    path = tmp_path / "p.jpg"
    Image.fromarray(NOISE).save(path, exif=exif)
    assert photo_size(path) == (60, 40)
    assert read_photo(path).shape == (3, 40, 60)


def _saved(image: Image.Image, path: Path) -> torch.Tensor:
    image.save(path)
    seen = read_photo(path)
    assert seen.dtype == torch.uint8 and seen.shape[0] == 3
    assert (seen.shape[2], seen.shape[1]) == photo_size(path) == image.size
    return seen


def test_every_colour_mode_becomes_rgb(tmp_path: Path) -> None:
    red = Image.new("RGB", (6, 4), (255, 0, 0))
    cases = {"palette.png": red.convert("P"), "grey.png": red.convert("L"), "bits.png": red.convert("1")}
    for name, image in cases.items():
        assert torch.equal(
            _saved(image, tmp_path / name), torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
        )
    cmyk = _saved(red.convert("CMYK"), tmp_path / "cmyk.tif")
    assert cmyk[:, 0, 0].tolist() == [255, 0, 0]


def test_transparent_pixels_show_white_and_half_transparent_ones_a_mixture(tmp_path: Path) -> None:
    image = Image.new("RGBA", (3, 1), (200, 0, 0, 255))
    image.putpixel((1, 0), (200, 0, 0, 0))
    image.putpixel((2, 0), (200, 0, 0, 128))
    seen = _saved(image, tmp_path / "alpha.png")
    assert seen[:, 0, 0].tolist() == [200, 0, 0] and seen[:, 0, 1].tolist() == [255] * 3
    assert abs(int(seen[1, 0, 2]) - 127) <= 1
    assert _saved(image.convert("LA"), tmp_path / "la.png")[:, 0, 1].tolist() == [255] * 3


def test_a_palette_with_a_transparent_entry_shows_white_there(tmp_path: Path) -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([0, 0, 0, 10, 20, 30])
    image.putpixel((1, 0), 1)
    image.save(tmp_path / "p.png", transparency=0)
    assert read_photo(tmp_path / "p.png")[:, 0].T.tolist() == [[255, 255, 255], [10, 20, 30]]


def test_sixteen_bit_greys_are_scaled_not_clipped(tmp_path: Path) -> None:
    values = np.array([[0, 257, 32896, 65535]], np.uint16)
    seen = _saved(Image.fromarray(values), tmp_path / "deep.png")
    assert seen[0, 0].tolist() == [0, 1, 128, 255]


@pytest.mark.parametrize(("mode", "kind"), [("RGB", "png"), ("RGB", "tif"), ("RGBA", "png")])
def test_sixteen_bits_a_colour_become_eight(tmp_path: Path, mode: str, kind: str) -> None:
    path = tmp_path / f"deep.{kind}"
    deep = np.array([[[0, 32896, 65535, 65535][: len(mode)], [65535, 257, 514, 65535][: len(mode)]]], np.uint16)
    path.write_bytes(_deep_png(deep) if kind == "png" else _deep_tiff(deep))
    assert read_photo(path)[:, 0].T.tolist() == [[0, 128, 255], [255, 1, 2]]


def _deep_png(deep: np.ndarray) -> bytes:
    height, width, channels = deep.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in deep)
    header = struct.pack(">IIBBBBB", width, height, 16, 2 if channels == 3 else 6, 0, 0, 0)
    return _png((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))


def _deep_tiff(deep: np.ndarray) -> bytes:
    height, width, channels = deep.shape
    pixels = deep.astype("<u2").tobytes()
    depths = struct.pack("<HHH", 16, 16, 16)
    data = 8 + len(depths)
    tags = [(256, 3, 1, width), (257, 3, 1, height), (258, 3, 3, 8), (259, 3, 1, 1), (262, 3, 1, 2)]
    tags += [(273, 4, 1, data), (277, 3, 1, channels), (278, 3, 1, height), (279, 4, 1, len(pixels))]
    folder = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags) + bytes(4)
    return b"II*\0" + struct.pack("<I", data + len(pixels)) + depths + pixels + folder


def _png(*chunks: tuple[bytes, bytes]) -> bytes:
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize(("values", "seen"), [((0.0, 0.5, 1.0), [0, 128, 255]), ((0.0, 100.0, 300.0), [0, 100, 255])])
def test_greys_of_floats_are_shown_from_black_to_white(
    tmp_path: Path, values: tuple[float, ...], seen: list[int]
) -> None:
    Image.fromarray(np.array([[*values, float("nan")]], np.float32)).save(tmp_path / "f.tif")
    assert read_photo(tmp_path / "f.tif")[0, 0].tolist() == [*seen, 0]


def test_cmyk_jpegs_are_read_inverted_as_adobe_writes_them(tmp_path: Path) -> None:
    red = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    red.save(tmp_path / "cmyk.jpg", quality=100)
    assert b"Adobe" in (tmp_path / "cmyk.jpg").read_bytes()
    assert read_photo(tmp_path / "cmyk.jpg")[:, 8, 8].tolist() == [255, 0, 0]


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


# ---------------------------------------------------------------- large photos


@pytest.mark.parametrize(
    ("size", "at_least", "factor"),
    [
        ((1, 1), (1, 1), 1),
        ((500, 375), (640, 480), 1),
        ((1000, 1000), (500, 500), 1),
        ((2000, 2000), (500, 500), 2),
        ((1999, 2000), (500, 500), 1),
        ((30_000, 20_000), (720, 480), 16),
        ((4000, 300), (100, 100), 1),
        ((64, 64), (0, 0), 32),
    ],
)
def test_reductions_leave_twice_what_is_wanted(size: tuple[int, int], at_least: tuple[int, int], factor: int) -> None:
    assert reduction(size, at_least) == factor


@given(st.integers(1, 40_000), st.integers(1, 40_000), st.integers(1, 3000), st.integers(1, 3000))
def test_a_reduction_is_the_largest_that_may_be(width: int, height: int, want_w: int, want_h: int) -> None:
    factor = reduction((width, height), (want_w, want_h))
    fits = [k for k in (1 << p for p in range(17)) if width // k >= 2 * want_w and height // k >= 2 * want_h]
    assert factor == max(fits, default=1)


@pytest.mark.parametrize("size", [(513, 259), (512, 256), (71, 2000)])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "BMP"])
@pytest.mark.parametrize("at_least", [(2, 2), (5, 4), (16, 9), (60, 40), (600, 400)])
def test_a_photo_may_come_reduced_and_still_shows_the_same(
    tmp_path: Path, size: tuple[int, int], kind: str, at_least: tuple[int, int]
) -> None:
    x, y = np.meshgrid(np.linspace(0, 200, size[0]), np.linspace(0, 250, size[1]))
    path = tmp_path / "ramp"
    Image.fromarray(np.stack([x, y, 0 * x + 30], 2).astype(np.uint8)).save(path, kind)
    factor = reduction(size, at_least)
    seen, whole = read_photo(path, at_least), read_photo(path)
    assert tuple(seen.shape) == (3, -(-size[1] // factor), -(-size[0] // factor))
    cells = torch.nn.functional.avg_pool2d(whole.float(), factor, ceil_mode=True)
    assert (seen.float() - cells).abs().mean() < 2
    if factor == 1:
        assert torch.equal(seen, whole)


def flat_jpeg(width: int, height: int, *, frame: int = 0xC0, scans: int = 1) -> bytes:
    """A grey JPEG of any size without an encoder: every coefficient is zero, and each zero is one bit, 0."""
    components = b"".join(bytes([i, 0x11, 0]) for i in (1, 2, 3))
    tables = b"".join(_segment(0xC4, bytes([kind, 1]) + bytes(16)) for kind in (0x00, 0x10))
    blocks = -(-width // 8) * -(-height // 8) * 3
    groups = [(1, 2, 3)] if scans == 1 else [(1,), (2,), (3,)]
    data = b"".join(
        _segment(0xDA, bytes([len(group), *(b for i in group for b in (i, 0)), 0, 63, 0]))
        + bytes(-(-blocks // len(groups) * 2 // 8))
        for group in groups
    )
    size = struct.pack(">BHHB", 8, height, width, 3)
    return (
        b"\xff\xd8" + _segment(0xDB, b"\0" + b"\1" * 64) + _segment(frame, size + components)
        + tables + data + b"\xff\xd9"
    )  # fmt: skip


def _segment(marker: int, content: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(content) + 2) + content


MEASURE = """
import json, resource, sys
from pathlib import Path
from tag2box.data.photos import photo_size, read_photo
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
read_photo(Path(sys.argv[1]))
before = peak()
big = Path(sys.argv[2])
seen = read_photo(big, (1500, 1000))
print(json.dumps([photo_size(big), list(seen.shape), int(seen.min()), int(seen.max()), peak() - before]))
"""


def test_memory_follows_what_is_wanted_of_a_very_large_photo(tmp_path: Path) -> None:
    small, big = tmp_path / "small.jpg", tmp_path / "big.jpg"
    small.write_bytes(flat_jpeg(64, 64))
    big.write_bytes(flat_jpeg(30_000, 20_000))
    done = subprocess.run([sys.executable, "-c", MEASURE, small, big], capture_output=True, text=True, check=True)
    size, shape, darkest, brightest, megabytes = json.loads(done.stdout)
    assert size == [30_000, 20_000] and shape == [3, 2500, 3750]
    assert (darkest, brightest) == (128, 128)
    assert megabytes < 200  # decoded whole, it would take 2400
    with pytest.raises(UserError, match="30000x20000 pixels, more than 178 million"):
        read_photo(big)


@pytest.mark.parametrize(
    "content",
    [
        flat_jpeg(20_000, 20_000, frame=0xC2)[:2000],  # progressive
        flat_jpeg(20_000, 20_000, scans=3)[:2000],
        _png((b"IHDR", struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0)), (b"IDAT", b"x"), (b"IEND", b"")),
        b"BM" + struct.pack("<IHHI", 0, 0, 0, 54) + struct.pack("<IiiHHIIiiII", 40, 20_000, 20_000, 1, 24, *[0] * 6),
    ],
    ids=["progressive", "three scans", "png", "bmp"],
)
def test_photos_that_cannot_be_reduced_while_decoded_have_a_limit(tmp_path: Path, content: bytes) -> None:
    assert MAX_PIXELS < 20_000**2
    path = tmp_path / "huge"
    path.write_bytes(content)
    reads: list[Callable[[Path], object]] = [photo_size, read_photo, lambda file: read_photo(file, (100, 100))]
    for read in reads:
        with pytest.raises(UserError) as error:
            read(path)
        assert str(error.value) == f"{path}: 20000x20000 pixels, more than 178 million; save a smaller copy of it"


def test_photos_of_one_scan_a_colour_are_read_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "p.jpg").write_bytes(flat_jpeg(100, 50, scans=3))
    assert read_photo(tmp_path / "p.jpg").unique().tolist() == [128]


@pytest.mark.parametrize("kind", [b"zTXt", b"iTXt", b"iCCP"])
def test_metadata_that_unpacks_to_a_flood_is_one_line(tmp_path: Path, kind: bytes) -> None:
    flood = zlib.compress(bytes(5_000_000), 9)
    name = b"name\0" + (b"\1\0\0\0" if kind == b"iTXt" else b"\0")
    path = tmp_path / "flood.png"
    header = (b"IHDR", struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0))
    path.write_bytes(_png(header, (kind, name + flood), (b"IDAT", zlib.compress(bytes(4))), (b"IEND", b"")))
    with pytest.raises(UserError, match="too large") as error:
        read_photo(path)
    assert "\n" not in str(error.value)


def test_nothing_global_is_changed_and_threads_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 7)  # somebody else's limit is neither heard nor touched
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
    for suffix in photos.SUFFIXES:
        Image.fromarray(NOISE).save(tmp_path / f"p{suffix}")
        assert photo_size(tmp_path / f"p{suffix}") == (60, 40)
