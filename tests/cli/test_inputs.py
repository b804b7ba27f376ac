"""What ``tag2box detect`` takes: patterns, lists on standard input, videos; and what it says about the rest."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from tag2box.annotations import Photo
from tag2box.cli.detect import detect
from tag2box.cli.inputs import Every, extract_frames, find_inputs, find_photos, with_frames, with_listed
from tag2box.cli.train import train
from tag2box.errors import UserError
from tag2box.predictor import load
from tiny import tiny_photos
from tiny_world import call, small_config, small_data, small_network

FRAMES, RATE = 25, 10.0


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    small_data(folder)
    with pytest.MonkeyPatch.context() as patch:
        small_network(patch)
        train(small_config(folder, "plan.iterations=1"), folder / "run")
    return folder


@pytest.fixture
def small(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run, three photos to detect in, and a video."""
    small_network(monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").symlink_to(trained / "run")
    tiny_photos(tmp_path, 3)
    write_video(tmp_path / "clip.avi")
    return tmp_path


def write_video(path: Path, frames: int = FRAMES) -> None:
    """A bright square on a background that becomes brighter from frame to frame."""
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), RATE, (64, 48))
    for number in range(frames):
        frame = np.full((48, 64, 3), 4 * number, np.uint8)
        frame[10:30, 20:44] = (40, 160, 250)
        writer.write(frame)
    writer.release()


def names(path: Path) -> list[str]:
    return [image["file_name"] for image in json.loads(path.read_text())["images"]]


# ---------------------------------------------------------------- photos


def test_patterns_and_folders_are_expanded_once(small, monkeypatch, capsys):
    done = call(
        ["detect", "run", "photos/*1.jpg", "photos", "photos/photo0.jpg", "--out", "a.json"], monkeypatch, capsys
    )
    assert (done.code, done.complaints) == (0, [])
    assert names(small / "a.json") == ["photo1.jpg", "photo0.jpg", "photo2.jpg"]


@pytest.mark.parametrize(
    "text", ["photos/photo2.jpg\nphotos/photo0.jpg\n", "\r\nphotos/photo2.jpg\r\n\r\nphotos/photo0.jpg",
             "photos/photo2.jpg\0photos/photo0.jpg\0"],
)  # fmt: skip
def test_a_list_on_standard_input(text, small, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    done = call(["detect", "run", "-", "photos/photo1.jpg", "--out", "a.json"], monkeypatch, capsys)
    assert (done.code, done.complaints) == (0, [])
    assert names(small / "a.json") == ["photo2.jpg", "photo0.jpg", "photo1.jpg"]


def test_an_empty_list_is_refused(small, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\n \n")))
    done = call(["detect", "run", "-"], monkeypatch, capsys)
    assert (done.code, done.err) == (2, "tag2box: -: standard input names no photo; expected one path per line\n")


def test_standard_input_is_not_read_without_a_dash(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert with_listed([Path("a.jpg")]) == [Path("a.jpg")]


@pytest.mark.parametrize("photos", ["photos/photo1.jpg", Path("photos/photo1.jpg"), ["photos/photo1.jpg"]])
def test_from_python_paths_may_be_text_and_one_needs_no_list(photos, small):
    assert list(detect("run", photos)) == ["photo1"]


def test_a_name_in_other_case_is_suggested(small, monkeypatch, capsys):
    (small / "photos" / "photo1.jpg").rename(small / "photos" / "UPPER.JPG")
    done = call(["detect", "run", "photos/upper.jpg"], monkeypatch, capsys)
    assert done.code == 2
    assert done.err == "tag2box: photos/upper.jpg: no such photo; did you mean UPPER.JPG?\n"


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([], []),
        (["p/a/1.jpg"], ["1.jpg"]),
        (["p/a"], ["1.jpg"]),
        (["p"], ["a/1.jpg", "b/1.jpg", "b/2.jpg"]),
        (["p/*/2.jpg"], ["b/2.jpg"]),
        (["p/b/2.jpg", "p/a"], ["b/2.jpg", "a/1.jpg"]),
        (["p/b/*.jpg"], ["1.jpg", "2.jpg"]),
        (["."], ["p/a/1.jpg", "p/b/1.jpg", "p/b/2.jpg"]),
    ],
)
def test_files_are_named_in_relation_to_what_was_given(places, expected, tmp_path, monkeypatch):
    """Not to what is inside: one more photo of the same name elsewhere does not change the names of the others."""
    monkeypatch.chdir(tmp_path)
    for name in ("a/1", "b/1", "b/2"):
        (tmp_path / "p" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "p" / f"{name}.jpg")
    assert [photo.file for photo in find_photos([Path(place) for place in places])] == expected


@pytest.mark.parametrize("more", [False, True])
def test_names_in_the_output_do_not_depend_on_other_photos(more, small):
    (small / "photos" / "deep").mkdir()
    (small / "photos" / "photo1.jpg").rename(small / "photos" / "deep" / "photo1.jpg")
    if more:
        Image.new("RGB", (40, 40)).save(small / "photos" / "photo1.jpg")
    detect(Path("run"), [Path("photos")], Path("a.json"))
    assert set(names(small / "a.json")) >= {"photo0.jpg", "deep/photo1.jpg", "photo2.jpg"}
    detect(Path("run"), [Path("photos/deep")], Path("a.csv"), export="csv", min_score=0)
    assert (small / "a.csv").read_text().splitlines()[1].startswith("photo1.jpg,")


# ---------------------------------------------------------------- videos


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", Every(frames=1)), ("30", Every(frames=30)), ("2s", Every(seconds=2)), ("0.5s", Every(seconds=0.5))],
)
def test_every_counts_frames_or_seconds(text, expected):
    assert Every.parse(text) == expected


@pytest.mark.parametrize("text", ["", "0", "0s", "0.0s", "-1", "s", "2 s", "1.5", "nan", "1e3s", "two"])
def test_other_texts_are_refused(text):
    with pytest.raises(UserError, match=r"--every .*: expected a number of frames, such as 30, or of seconds"):
        Every.parse(text)


@pytest.mark.parametrize(
    ("every", "rate", "step"), [("7", 0, 7), ("1s", 10, 10), ("0.25s", 10, 2), ("0.001s", 10, 1), ("2s", 29.97, 60)]
)
def test_steps_of_seconds_depend_on_the_frame_rate(every, rate, step):
    assert Every.parse(every).step(Path("a.mp4"), rate) == step


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_seconds_need_a_frame_rate(rate):
    with pytest.raises(UserError, match=r"a\.mp4: states no frame rate; give --every a number of frames"):
        Every.parse("1s").step(Path("a.mp4"), rate)


def test_frames_are_those_of_the_video(tmp_path):
    write_video(tmp_path / "clip.avi")
    frames = extract_frames(tmp_path / "clip.avi", "clip.avi", Every(frames=8), tmp_path)
    assert [frame.id for frame in frames] == [f"clip.avi#{number:06d}" for number in (0, 8, 16, 24)]
    for frame, number in zip(frames, (0, 8, 16, 24), strict=True):
        assert (frame.width, frame.height) == (64, 48)
        with Image.open(frame.path) as image:
            pixels = np.asarray(image)
        assert abs(int(pixels[2, 2, 0]) - 4 * number) < 4
        assert pixels[20, 30, 0] > 200 > pixels[20, 30, 2]  # RGB


def test_a_video_gives_rows_and_pictures_of_its_frames(small, monkeypatch, capsys):
    argv = ["detect", "run", "clip.avi", "photos/photo0.jpg", "--out", "a.json", "--draw", "drawn", "--min-score", "0"]
    done = call([*argv, "--every", "10"], monkeypatch, capsys)
    assert (done.code, done.complaints) == (0, [])
    frames = ["clip.avi#000000", "clip.avi#000010", "clip.avi#000020"]
    assert names(small / "a.json") == ["photos/photo0.jpg", *frames]
    assert {path.name for path in (small / "drawn").iterdir()} == {f"{name}.jpg" for name in ("photo0", *frames)}
    assert len(json.loads((small / "a.json").read_text())["annotations"]) > 0


def test_a_frame_has_the_boxes_of_its_pixels(small):
    found = detect(Path("run"), [Path("clip.avi")], every="2s", min_score=0)
    capture = cv2.VideoCapture("clip.avi")
    _, bgr = capture.read()
    capture.release()
    alone = load("run")(bgr[..., ::-1], min_score=0)
    assert list(found) == ["clip.avi#000000", "clip.avi#000020"]
    assert len(alone) > 0
    assert np.array_equal(alone.boxes, found["clip.avi#000000"].boxes.numpy())
    assert np.array_equal(alone.scores, found["clip.avi#000000"].scores.numpy())


def test_a_folder_format_gets_copies_of_the_frames(small):
    detect(Path("run"), [Path("clip.avi")], Path("yolo"), export="yolo", every="20")
    (first, _) = sorted((small / "yolo" / "images").rglob("*.png"))
    assert not first.is_symlink()
    with Image.open(first) as image:
        assert image.size == (64, 48)


def test_frames_are_temporary(small):
    (video,) = find_inputs([Path("*.avi")]).videos
    with with_frames(find_inputs([video], every="20")) as frames:
        paths = [frame.path for frame in frames]
        assert all(path.exists() for path in paths)
    assert not any(path.exists() for path in paths)


def test_videos_of_the_same_name_have_frames_of_different_names(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_video(tmp_path / folder / "clip.avi", frames=2)
    with with_frames(find_inputs([tmp_path / "a" / "clip.avi", tmp_path / "b" / "clip.avi"])) as frames:
        assert len({frame.id for frame in frames}) == len(frames) == 2


def test_without_videos_photos_pass_unchanged():
    photo = Photo("a", Path("a.jpg"), 3, 4)
    with with_frames(find_inputs([])) as none, with_frames(replace(find_inputs([]), photos=(photo,))) as one:
        assert (none, one) == ((), (photo,))


BROKEN = {
    "empty.mp4": b"",
    "text.mp4": b"this is not a video " * 50,
    "playlist.mp4": b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nclip.avi\n#EXT-X-ENDLIST\n",
}


@pytest.mark.parametrize("name", [*BROKEN, "none.mp4"])
def test_a_broken_video_is_one_line(name, small, monkeypatch, capfd):
    if name in BROKEN:
        (small / name).write_bytes(BROKEN[name])
    done = call(["detect", "run", name, "--out", "a.json"], monkeypatch, capfd)
    assert done.code == 2
    words = "not readable as a video" if name in BROKEN else "no such video"
    assert len(done.complaints) == 1
    assert done.err.startswith(f"tag2box: {name}: {words}; ")
    assert not (small / "a.json").exists()
    assert not (small / ".a.json.unfinished").exists()


def test_a_broken_video_is_skipped_on_request(small, monkeypatch, capfd):
    (small / "bad.mp4").write_bytes(BROKEN["text.mp4"])
    argv = ["detect", "run", "bad.mp4", "photos/photo0.jpg", "--out", "a.json", "--skip-bad"]
    done = call(argv, monkeypatch, capfd)
    assert done.code == 1
    assert done.complaints[0].startswith("skipped: bad.mp4: not readable as a video")
    assert names(small / "a.json") == ["photos/photo0.jpg"]


def test_of_a_video_that_was_cut_short_the_rest_is_used_with_a_warning(small, monkeypatch, capfd):
    whole = (small / "clip.avi").read_bytes()
    (small / "cut.avi").write_bytes(whole[: len(whole) // 2])
    done = call(["detect", "run", "cut.avi", "--every", "3", "--out", "a.json"], monkeypatch, capfd)
    assert done.code == 0
    assert len(done.complaints) == 1
    assert "cut.avi: ends after " in done.err
    assert f"of {FRAMES} frames: damaged or cut short" in done.err
    assert 1 <= len(names(small / "a.json")) < FRAMES // 3


def test_videos_do_not_go_to_a_cluster(small):
    with pytest.raises(UserError, match=r"clip\.avi: frames are read on this machine; leave out --on ray"):
        detect(Path("run"), [Path("clip.avi")], pool=lambda *_, **__: iter(()))  # type: ignore[arg-type]
