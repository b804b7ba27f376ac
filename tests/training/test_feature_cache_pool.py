"""The feature cache filled by several processes, and resumed: the same bytes, and no photo computed twice."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tag2box import storage
from tag2box.annotations import Photo
from tag2box.errors import UserError
from tag2box.images import View
from tag2box.parallel.pool import LocalPool
from tag2box.run_inputs import NetworkPool
from tag2box.training import feature_cache
from tag2box.training.class_evidence import ClassEvidence
from tag2box.training.feature_cache import FeatureCache, RoiMaps, TrunkMaps
from tag2box.training.proposal_cache import build_evidence_cache
from tiny import tiny_detector, tiny_photos, tiny_store

VIEWS = (View(32, long_max=64), View(40, flip=True))
COUNTS = (4, 0, 1, 6, 2)
KINDS = (RoiMaps, TrunkMaps)
BUILD = partial(tiny_detector, 3, seed=9, maps_side=32)  # of other weights than those here

Features = RoiMaps | TrunkMaps


def live_world(folder: Path, kind: type[Features], counts: Sequence[int] = COUNTS) -> Features:
    photos = tiny_photos(folder, len(counts)).photos
    backbone = tiny_detector(3).backbone
    return RoiMaps(backbone, photos, tiny_store(folder, photos, counts=counts)) if kind is RoiMaps else TrunkMaps(
        backbone, photos
    )  # fmt: skip


def content(folder: Path) -> dict[str, bytes]:
    """All files but the digests of photos, which are remembered after two seconds."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".digests"}


def built(live: Features, folder: Path, pool: object = None) -> dict[str, bytes]:
    cache = FeatureCache(live, folder)
    cache.build(VIEWS, compute=pool and partial(NetworkPool(pool, BUILD).features, live))  # type: ignore[arg-type]
    cache.close()
    return content(folder)


def backwards(work, files, *, lost, threads=1) -> Iterator[tuple[object, object]]:
    """A pool that finishes the last first."""
    yield from [(file, work(file)) for file in [*files][::-1]]


@pytest.mark.parametrize("counts", [(), (0,), COUNTS])
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_order_photos_are_finished_in_the_bytes_are_the_same(
    tmp_path: Path, kind: type[Features], counts: Sequence[int]
) -> None:
    live = live_world(tmp_path, kind, counts)
    here = built(live, tmp_path / "here")
    assert len(here) == len(VIEWS) and here == built(live, tmp_path / "there", backwards)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_write_the_bytes_of_one(tmp_path: Path, kind: type[Features]) -> None:
    live = live_world(tmp_path, kind)
    assert built(live, tmp_path / "here") == built(live, tmp_path / "there", LocalPool(2))


def test_evidence_of_class_maps_is_the_same_from_a_pool(tmp_path: Path) -> None:
    photos = tiny_photos(tmp_path, len(COUNTS)).photos
    class_maps = tiny_detector(3, maps_side=32).class_maps
    assert class_maps is not None
    evidence = ClassEvidence(class_maps, photos, tiny_store(tmp_path, photos, counts=COUNTS))
    build_evidence_cache(evidence, tmp_path / "here")
    compute = NetworkPool(backwards, BUILD).evidence  # type: ignore[arg-type]
    build_evidence_cache(evidence, tmp_path / "there", compute=compute)
    assert content(tmp_path / "here") == content(tmp_path / "there")


def test_a_process_that_dies_is_a_line(tmp_path: Path) -> None:
    def pool(work, files, *, lost, threads=1) -> Iterator[tuple[object, object]]:
        yield from ((file, lost(file, 9)) for file in files)

    with pytest.raises(UserError, match=r"photo0\.jpg: the process that worked on it was ended by signal 9"):
        built(live_world(tmp_path, RoiMaps), tmp_path / "maps", pool)


# ---------------------------------------------------------------- resumed


def stopping(live: Features, after: int, stop: Callable[[], None]) -> feature_cache.MakeFeatures:
    def compute(view: View, indices: Sequence[int]) -> Generator[tuple[int, bytes], None, None]:
        for index in indices[:after]:
            yield index, feature_cache.stored_bytes(live, index, view)
        stop()

    return compute


def interrupt() -> None:
    raise KeyboardInterrupt


def killed(folder: Path, kind: type[Features]) -> None:
    """Another process: it is killed when two photos are finished."""
    live = live_world(folder, kind)
    FeatureCache(live, folder / "maps").build(VIEWS, compute=stopping(live, 2, lambda: os.kill(os.getpid(), 9)))


def resumed(live: Features, folder: Path) -> tuple[dict[str, bytes], list[list[int]]]:
    """The files, and the photos that were computed for each."""
    asked: list[list[int]] = []

    def compute(view: View, indices: Sequence[int]) -> Generator[tuple[int, bytes], None, None]:
        asked.append([*indices])
        yield from ((index, feature_cache.stored_bytes(live, index, view)) for index in indices)

    cache = FeatureCache(live, folder)
    cache.build(VIEWS, compute=compute)
    cache.close()
    return {name: raw for name, raw in content(folder).items() if not name.endswith(".lock")}, asked


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_build_is_resumed(tmp_path: Path, kind: type[Features]) -> None:
    live = live_world(tmp_path, kind)
    child = multiprocessing.get_context("spawn").Process(target=killed, args=(tmp_path, kind))
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL
    assert resumed(live, tmp_path / "maps") == (built(live, tmp_path / "whole"), [[2, 3, 4], [0, 1, 2, 3, 4]])


def interrupted(tmp_path: Path, kind: type[Features] = TrunkMaps) -> tuple[Features, Path, Path]:
    """A build that was stopped after three photos: its file and its journal."""
    live = live_world(tmp_path, kind)
    with pytest.raises(KeyboardInterrupt):
        FeatureCache(live, tmp_path / "maps").build(VIEWS, compute=stopping(live, 3, interrupt))
    (values,), (journal,) = ((tmp_path / "maps").glob(f"*.{kind}") for kind in ("unfinished", "journal"))
    return live, values, journal


def cut_journal(values: Path, journal: Path) -> None:
    journal.write_bytes(journal.read_bytes()[:-1])


def foreign_journal(values: Path, journal: Path) -> None:
    journal.write_bytes(journal.read_bytes()[:80] + (99).to_bytes(8, "little") + bytes(32) + b"rubbish")


def damaged_values(values: Path, journal: Path) -> None:
    raw = bytearray(values.read_bytes())
    raw[8 * (2 + 4 * 5) + 32 * 6] ^= 1  # the first value of the first photo
    values.write_bytes(raw)


def cut_values(values: Path, journal: Path) -> None:
    values.write_bytes(values.read_bytes()[: 8 * (2 + 4 * 5) + 32 * 6])


def no_journal(values: Path, journal: Path) -> None:
    journal.unlink()


@pytest.mark.parametrize(
    ("harm", "left"),
    [
        (lambda values, journal: None, [3, 4]),
        (cut_journal, [2, 3, 4]),
        (foreign_journal, [2, 3, 4]),
        (damaged_values, [0, 3, 4]),
        (cut_values, [0, 1, 2, 3, 4]),
        (no_journal, [0, 1, 2, 3, 4]),
    ],
)
def test_only_what_is_intact_is_kept(tmp_path: Path, harm: Callable[[Path, Path], None], left: list[int]) -> None:
    live, values, journal = interrupted(tmp_path)
    harm(values, journal)
    files, asked = resumed(live, tmp_path / "maps")
    assert asked == [left, [0, 1, 2, 3, 4]] and files == built(live, tmp_path / "whole")


def test_a_network_of_other_weights_resumes_nothing(tmp_path: Path) -> None:
    live, _, _ = interrupted(tmp_path)
    other = replace(live, backbone=tiny_detector(3, seed=1).backbone)
    assert resumed(other, tmp_path / "maps")[1] == [[0, 1, 2, 3, 4]] * 2


def test_features_of_another_size_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="part 1 has 2 bytes, expected those from 6 on"),
        storage.unfinished_file(tmp_path / "x", [4, 6, 9]) as made,
    ):
        made.add(1, b"ab")


def test_evidence_is_resumed(tmp_path: Path) -> None:
    photos = tiny_photos(tmp_path, 3).photos
    class_maps = tiny_detector(3, maps_side=32).class_maps
    assert class_maps is not None
    evidence = ClassEvidence(class_maps, photos, tiny_store(tmp_path, photos))
    asked: list[list[str]] = []

    def compute(
        own: ClassEvidence, wanted: Sequence[Photo], stop: int | None = None
    ) -> Generator[tuple[str, np.ndarray], None, None]:
        asked.append([photo.id for photo in wanted])
        yield from ((photo.id, own(photo.id).numpy()) for photo in wanted[:stop])
        if stop is not None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_evidence_cache(evidence, tmp_path / "maps", compute=partial(compute, stop=1))
    build_evidence_cache(evidence, tmp_path / "maps", compute=compute)
    build_evidence_cache(evidence, tmp_path / "whole")
    assert asked == [["photo0", "photo1", "photo2"], ["photo1", "photo2"]]
    assert content(tmp_path / "maps") == content(tmp_path / "whole")
