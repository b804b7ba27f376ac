"""Detection spread over processes: the same boxes as in one process, whichever process worked on which photo."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from tag2box.annotations import Detections, Photo
from tag2box.cli.detect import detect
from tag2box.cli.inputs import find_photos
from tag2box.cli.train import train
from tag2box.errors import UserError
from tag2box.inference.fitting import Trim, TrimPhotos
from tag2box.inference.predict import PhotoResult, PhotoTask
from tag2box.labels.rule import LabelRule, PhotoTags
from tag2box.parallel.pool import LocalPool
from tag2box.proposals.store import ProposalStore
from tag2box.run_detect import Fitter, SelectTagged, detect_in_pool, detect_photos, detect_task
from tag2box.runs import TrainedRun, load_run
from tiny import tiny_store
from tiny_world import small_config, small_data, small_network


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainedRun:
    small_network(monkeypatch)
    small_data(tmp_path)
    train(small_config(tmp_path), tmp_path / "run")
    return load_run(tmp_path / "run")


@pytest.fixture
def photos(trained: TrainedRun, tmp_path: Path) -> tuple[Photo, ...]:
    return find_photos([tmp_path / "photos"])


def same(a: dict[str, Detections], b: dict[str, Detections]) -> bool:
    pairs = [(x, y) for name in a for x, y in zip(_parts(a[name]), _parts(b[name]), strict=True)]
    return [*a] == [*b] and all(torch.equal(x, y) and x.dtype == y.dtype for x, y in pairs)


def _parts(found: Detections) -> Iterator[torch.Tensor]:
    return iter((found.boxes, found.scores, found.labels))


def backwards(work, files, *, lost, threads=1) -> Iterator[tuple[object, object]]:
    """A pool that finishes the last first."""
    yield from [(file, work(file)) for file in [*files][::-1]]


def test_no_photos_no_detections(trained: TrainedRun, tmp_path: Path) -> None:
    assert detect_in_pool(LocalPool(1), trained, (), tiny_store(tmp_path, ())) == {}


@pytest.mark.parametrize("pool", [LocalPool(1), backwards])
def test_boxes_are_those_of_one_process_in_the_order_of_the_photos(
    trained: TrainedRun, photos: tuple[Photo, ...], tmp_path: Path, pool
) -> None:
    here = detect_photos(trained, photos, proposals=tmp_path / "here")
    there = detect_photos(trained, photos, proposals=tmp_path / "there", pool=pool)
    assert len(here) == 4 and sum(map(len, here.values())) > 0 and same(here, there)
    assert ProposalStore.open(tmp_path / "there").spans == ProposalStore.open(tmp_path / "here").spans


def test_proposals_from_elsewhere_and_none_at_all_are_taken_as_they_are(
    trained: TrainedRun, photos: tuple[Photo, ...], tmp_path: Path
) -> None:
    store = tiny_store(tmp_path, photos, counts=[6, 0, 1, 3])
    found = detect_in_pool(LocalPool(1), trained, photos, store)
    assert len(found["photo1"]) == 0
    assert same(found, detect_in_pool(backwards, trained, photos, store))


def test_the_files_written_are_equal_to_the_byte(trained: TrainedRun, tmp_path: Path) -> None:
    for name, pool in (("here", None), ("there", LocalPool(1))):
        detect(trained.folder, [tmp_path / "photos"], tmp_path / f"{name}.json", min_score=0, pool=pool)
    assert (tmp_path / "here.json").read_bytes() == (tmp_path / "there.json").read_bytes()


def test_a_photo_that_went_away_is_a_line(trained: TrainedRun, photos: tuple[Photo, ...], tmp_path: Path) -> None:
    store = tiny_store(tmp_path, photos)
    photos[2].path.unlink()
    with pytest.raises(UserError, match=r"photo2\.jpg: no such photo"):
        detect_in_pool(LocalPool(1), trained, photos, store)


def test_a_network_that_cannot_be_built_is_no_fault_of_a_photo(
    trained: TrainedRun, photos: tuple[Photo, ...], tmp_path: Path
) -> None:
    def refused() -> nn.Module:
        raise UserError("no weights here")

    store = tiny_store(tmp_path, photos)
    task = PhotoTask(photos[0], store.boxes("photo0").numpy(), store.scores("photo0").numpy())
    with pytest.raises(UserError, match="no weights here"):
        replace(detect_task(trained), build=refused)(task)


@pytest.mark.parametrize(("number", "says"), [(9, "was ended by signal 9"), (0, "died at every attempt")])
def test_a_photo_that_ends_its_process_is_a_line(
    trained: TrainedRun, photos: tuple[Photo, ...], tmp_path: Path, number: int, says: str
) -> None:
    def pool(work, files, *, lost, threads=1) -> Iterator[tuple[object, object]]:
        yield from ((file, lost(file, number)) for file in files)

    with pytest.raises(UserError, match=f"photo0.jpg: the process that worked on it {says}; perhaps out of memory"):
        detect_in_pool(pool, trained, photos, tiny_store(tmp_path, photos))


@pytest.mark.parametrize("fitter", [None, partial(TrimPhotos, Trim(on=True), nms_iou=0.4)])
def test_what_is_selected_and_fitted_in_a_pool_is_what_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fitter: Fitter | None
) -> None:
    """Selection is part of the work: a process sends the candidates of the tags, and one box of each absent class."""
    small_network(monkeypatch)
    small_data(tmp_path)
    train(small_config(tmp_path, "adaptation.epochs=1", "adaptation.side=32"), tmp_path / "run")
    trained, photos = load_run(tmp_path / "run"), find_photos([tmp_path / "photos"])
    assert isinstance(trained, TrainedRun)
    tags = {photo.id: PhotoTags(frozenset({0}), frozenset(), {}) for photo in photos}
    select = SelectTagged(LabelRule(), tags, fitter)
    assert pickle.dumps(select)  # it reaches other processes
    sent: list[object] = []  # proposals, too

    def pool(work, files, *, lost, threads=1) -> Iterator[tuple[object, object]]:
        for file in files:
            sent.append(work(file))
            yield file, sent[-1]

    here = detect_photos(trained, photos, proposals=tmp_path / "here", select=select)
    there = detect_photos(trained, photos, proposals=tmp_path / "there", select=select, pool=pool)
    assert sum(map(len, here.values())) > 0 and same(here, there)
    found = [result.labels for result in sent if isinstance(result, PhotoResult) and result.labels is not None]
    assert len(found) == 4 and all(list(labels).count(absent) <= 1 for labels in found for absent in (1, 2))


def test_a_gpu_is_asked_for_unless_the_settings_say_cpu(trained: TrainedRun) -> None:
    assert detect_task(trained).is_gpu_used
    on_cpu = replace(trained.config, compute=replace(trained.config.compute, device="cpu"))
    assert not detect_task(replace(trained, config=on_cpu)).is_gpu_used


def test_detections_need_no_writable_memory() -> None:
    arrays = [x.numpy() for x in _parts(Detections.empty())]
    for array in arrays:
        array.flags.writeable = False
    assert len(PhotoResult(*arrays).outcome()) == 0
