"""``detect`` that is stopped, killed or meets bad photos: nothing finished is lost, and the result is the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tag2box.annotations import Photo
from tag2box.cli.detect import detect
from tag2box.cli.inputs import find_photos
from tag2box.cli.train import train
from tag2box.errors import Busy, Interrupted, UserError
from tag2box.images import DecodedImage, View, load_image
from tag2box.io import LOCK, locked
from tag2box.parallel.pool import LocalPool
from tag2box.progress import Bar, Progress
from tag2box.proposals.base import Candidates
from tag2box.proposals.store import write_store
from tiny import tiny_boxes, tiny_photos
from tiny_world import World, call, environment, small_config, small_data, small_network

UNFINISHED = ".boxes.json.unfinished"


def stored(folder: Path, photos: Path) -> Path:
    """An imported proposal store of a folder of photos."""
    found, generator = find_photos([photos], []), torch.Generator().manual_seed(0)
    boxes = [Candidates.unranked(tiny_boxes(photo, 6, generator)) for photo in found]
    write_store(folder / "proposals", {"kind": "imported"}, found, boxes)
    return folder / "proposals"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that differ in their seed."""
    folder = tmp_path_factory.mktemp("trained")
    small_data(folder)
    with pytest.MonkeyPatch.context() as patch:
        small_network(patch)
        for seed in (0, 7):
            train(small_config(folder, f"plan.seed={seed}", "plan.iterations=1"), folder / f"run{seed}")
    return folder


@pytest.fixture
def small(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run, and six photos to detect in."""
    small_network(monkeypatch)
    (tmp_path / "run").symlink_to(trained / "run0")
    tiny_photos(tmp_path / "new", 6)
    return tmp_path


class Stop(Exception):
    """The process ends."""


def power_cut() -> None:
    raise Stop


def ctrl_c() -> None:
    raise KeyboardInterrupt


def stopping(title: str, after: int, how: Callable[[], None], seen: list[int] | None = None) -> Progress:
    """A progress that stops the work after some photos of a part of it, and counts the photos that were detected."""

    class Counter:
        def __init__(self, name: str) -> None:
            self.name, self.done = name, 0

        def advance(self, note: str = "") -> None:
            self.done += 1
            if self.name == "detecting" and seen is not None:
                seen.append(self.done)
            if self.name == title and self.done == after:
                how()

    @contextmanager
    def progress(name: str, total: int, done: int = 0) -> Iterator[Bar]:
        yield Counter(name)

    return progress  # type: ignore[return-value]


def counting(seen: list[int]) -> Progress:
    return stopping("", 0, power_cut, seen)


def boxes_of(folder: Path, name: str = "boxes.json", **options: object) -> bytes:
    """The file that ``detect`` writes."""
    detect(folder / "run", [folder / "new" / "photos"], folder / name, min_score=0, **options)
    return (folder / name).read_bytes()


@pytest.mark.parametrize(
    ("how", "error", "pool"), [(ctrl_c, Interrupted, None), (power_cut, Stop, None), (power_cut, Stop, LocalPool(1))]
)
def test_a_stop_anywhere_changes_nothing(small: Path, how, error, pool) -> None:
    wanted = boxes_of(small, "undisturbed.json")
    for title, after in (("proposals", 1), *(("detecting", n) for n in (1, 2, 6))):
        seen: list[int] = []
        with pytest.raises(error):
            boxes_of(small, pool=pool, progress=stopping(title, after, how))
        assert not (small / "boxes.json").exists()
        assert boxes_of(small, pool=pool, progress=counting(seen)) == wanted
        done = after if title == "detecting" else 0
        assert len(seen) == 6 - done, f"{title} {after}: finished photos are not detected again"
        assert not (small / UNFINISHED).exists()
        (small / "boxes.json").unlink()


def test_a_stop_while_files_are_written_loses_no_photo(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, seen = boxes_of(small, "undisturbed.json"), []
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr("tag2box.formats.export.export_detections", lambda *_: power_cut())
        boxes_of(small)
    assert boxes_of(small, progress=counting(seen)) == wanted and seen == []


def test_a_stop_before_anything_is_finished_leaves_nothing(small: Path) -> None:
    (small / "new" / "photos" / "photo0.jpg").write_bytes(b"no photo")
    before = sorted(small.rglob("*"))
    with pytest.raises(UserError, match=r"photo0\.jpg: not readable"):
        boxes_of(small)
    assert sorted(small.rglob("*")) == before


def test_interrupted_work_says_where_it_is_and_how_to_go_on(small: Path) -> None:
    with pytest.raises(Interrupted, match=r"kept in \.boxes\.json\.unfinished; rerun the same command to resume$"):
        boxes_of(small, progress=stopping("detecting", 2, ctrl_c))


def other_inference(small: Path) -> dict[str, object]:
    return {"overrides": ["inference.predict.max_detections=3"]}


def other_weights(small: Path) -> dict[str, object]:
    run = (small / "run").resolve()
    (small / "run").unlink()
    (small / "run").symlink_to(run.with_name("run7"))
    return {}


def other_photo(small: Path) -> dict[str, object]:
    photos = small / "new" / "photos"
    (photos / "photo3.jpg").replace(photos / "photo0.jpg")
    return {}


@pytest.mark.parametrize(("change", "detected"), [(other_inference, 6), (other_weights, 6), (other_photo, 3)])
def test_other_settings_weights_or_photos_are_detected_again(small: Path, change, detected: int) -> None:
    with pytest.raises(Stop):
        boxes_of(small, progress=stopping("detecting", 4, power_cut))
    options, seen = change(small), []
    resumed = boxes_of(small, **options, progress=counting(seen))
    assert resumed == boxes_of(small, "undisturbed.json", **options)
    assert len(seen) == detected


def test_other_photos_into_the_same_file_are_a_new_start(small: Path) -> None:
    with pytest.raises(Stop):
        boxes_of(small, progress=stopping("detecting", 4, power_cut))
    others = tiny_photos(small / "others", 1).photos[0].path
    others.rename(small / "other.jpg")
    detect(small / "run", [small / "other.jpg"], small / "boxes.json", min_score=0)
    detect(small / "run", [small / "other.jpg"], small / "undisturbed.json", min_score=0)
    assert (small / "boxes.json").read_bytes() == (small / "undisturbed.json").read_bytes()
    assert not (small / UNFINISHED).exists()


def test_an_error_loses_no_photo_either(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, seen = boxes_of(small, "undisturbed.json"), []

    def load(photo: Photo, views: Sequence[View]) -> DecodedImage:
        if photo.id == "photo4":
            raise UserError("photo4.jpg: not readable")
        return load_image(photo, views)

    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"photo4\.jpg"):
        patch.setattr("tag2box.training.feature_cache.load_image", load)
        boxes_of(small)
    assert boxes_of(small, progress=counting(seen)) == wanted and len(seen) == 2


def test_two_calls_cannot_write_one_file(small: Path) -> None:
    with locked(small / UNFINISHED / LOCK, "detects"), pytest.raises(Busy, match="another process detects, and will"):
        boxes_of(small)
    assert not (small / "boxes.json").exists()
    assert boxes_of(small) == boxes_of(small, "undisturbed.json")


# ---------------------------------------------------------------- killed


KILLED = """
import os, signal
from tag2box.cli import main
from tag2box.formats.detection_log import DetectionLog

flush = DetectionLog.flush

def last_flush(log):
    flush(log)
    os.kill(os.getpid(), signal.SIGKILL)

DetectionLog.flush = last_flush
main()
"""


def test_a_killed_process_resumes_to_the_same_bytes(world: World, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for copy in range(5):
        for photo in sorted((world.test / "photos").iterdir()):
            os.link(photo, photos / f"{copy:02d}-{photo.name}")
    run, store = world.trained("od-wscl"), stored(tmp_path, photos)
    words = ["--proposals", f"{store}", "--min-score", "0", "--out", f"{tmp_path / 'boxes.json'}"]
    argv = [sys.executable, "-c", KILLED, "detect", f"{run}", f"{photos}", *words]
    killed = subprocess.run(argv, env=environment(), capture_output=True, text=True, timeout=400, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (tmp_path / UNFINISHED).is_dir() and not (tmp_path / "boxes.json").exists()
    seen: list[int] = []
    detect(run, [photos], tmp_path / "boxes.json", proposals=store, min_score=0, progress=counting(seen))
    detect(run, [photos], tmp_path / "undisturbed.json", proposals=store, min_score=0)
    assert 0 < len(seen) < 20
    assert (tmp_path / "boxes.json").read_bytes() == (tmp_path / "undisturbed.json").read_bytes()
    assert not (tmp_path / UNFINISHED).exists()


# ---------------------------------------------------------------- bad photos


def not_a_photo(path: Path) -> str:
    path.write_bytes(b"not a photo")
    return "not readable as a photo"


def cut_short(path: Path) -> str:
    path.write_bytes(path.read_bytes()[:-200])
    return "not readable as a photo"


def gone(path: Path) -> str:
    path.unlink()
    path.symlink_to("nowhere")
    return "no such photo"


@pytest.mark.parametrize(
    ("spoil", "has_store"), [(not_a_photo, True), (cut_short, True), (cut_short, False), (gone, False)]
)
def test_bad_photos_are_skipped_named_and_told_by_the_exit_code(
    small: Path, spoil, has_store: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = small / "new" / "photos"
    bad = [f"photo{n}.jpg: {spoil(photos / f'photo{n}.jpg')}" for n in (2, 5)]
    words = ["--min-score", "0", *(["--proposals", f"{stored(small, photos)}"] if has_store else [])]
    good = [f"{photos / f'photo{n}.jpg'}" for n in (0, 1, 3, 4)]
    first = call(["detect", f"{small / 'run'}", *good, *words, "--out", f"{small / 'good.json'}"], monkeypatch, capsys)
    assert first.code == 0
    argv = ["detect", f"{small / 'run'}", f"{photos}", *words, "--out", f"{small / 'boxes.json'}"]
    refused = call(argv, monkeypatch, capsys)
    assert (refused.code, len(refused.complaints)) == (2, 1) and not (small / "boxes.json").exists()
    done = call([*argv, "--skip-bad", "--draw", f"{small / 'drawn'}"], monkeypatch, capsys)
    assert done.code == 1 and "boxes in 4 photos" in done.out
    assert [line.partition(":")[0] for line in done.complaints] == ["skipped", "skipped"]
    assert all(said in line for said, line in zip(bad, done.complaints, strict=True))
    assert (small / "boxes.json").read_bytes() == (small / "good.json").read_bytes()
    assert len(list((small / "drawn").iterdir())) == 4
    assert not (small / UNFINISHED).exists()


@pytest.mark.parametrize("pool", [None, LocalPool(1)])
def test_bad_photos_are_skipped_in_a_pool_too(small: Path, pool) -> None:
    photos = small / "new" / "photos"
    cut_short(photos / "photo1.jpg")
    store = stored(small, photos)
    skipped: list[str] = []
    found = detect(small / "run", [photos], proposals=store, pool=pool, skipped=skipped)
    assert len(found) == 5 and len(skipped) == 1 and "photo1.jpg" in skipped[0]


def test_if_no_photo_can_be_read_nothing_is_written(small: Path) -> None:
    photos = small / "new" / "photos"
    for photo in photos.iterdir():
        not_a_photo(photo)
    with pytest.raises(UserError, match=r"no photo can be read, 6 were skipped; the first: .*photo0\.jpg"):
        boxes_of(small, skipped=[])
    assert not (small / "boxes.json").exists() and not (small / UNFINISHED).exists()


def test_boxes_that_are_handed_over_are_not_returned(small: Path) -> None:
    seen: dict[str, int] = {}
    places = [small / "new"]
    kept = detect(small / "run", places, min_score=0)
    rest = detect(
        small / "run",
        places,
        small / "boxes.json",
        min_score=0,
        on_found=lambda name, own: seen.update({name: len(own)}),
    )
    assert rest == {} and seen == {name: len(own) for name, own in kept.items()} and sum(seen.values()) > 0
