"""Preselection of proposals by class maps: which rows are kept, and that training and detection see the same."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from tag2box import images
from tag2box.cli.detect import detect
from tag2box.cli.train import train
from tag2box.images import LoadedPhoto
from tag2box.models.class_maps import ClassMaps
from tag2box.ops.superpixels import Superpixels
from tag2box.training import class_evidence
from tag2box.training.class_evidence import ClassEvidence, PreselectedBoxes, StraddlingScores, kept_rows, preselected
from tag2box.training.proposal_cache import build_superpixel_cache
from tiny import TinyBackbone, tiny_photos, tiny_store
from tiny_world import small_config, small_data, small_network


def kept_by_loop(rank: list[float], most: int) -> list[int]:
    if len(rank) <= most:
        return list(range(len(rank)))
    order = sorted(range(len(rank)), key=lambda row: (-rank[row], row))
    others = most // 4
    best, rest = order[: most - others], sorted(order[most - others :])
    return sorted([*best, *(rest[k * len(rest) // others] for k in range(others))])


@given(st.lists(st.integers(0, 6), max_size=30), st.integers(1, 12))
def test_kept_rows_are_those_of_the_loop(rank: list[int], most: int) -> None:
    rows = kept_rows(torch.tensor(rank, dtype=torch.float32), most).tolist()
    assert rows == kept_by_loop([float(x) for x in rank], most)
    assert len(set(rows)) == min(len(rank), most)


def made(folder: Path, most: int = 4) -> PreselectedBoxes:
    photos = tiny_photos(folder, 3).photos
    store = tiny_store(folder, photos, counts=[9, 0, 3])
    torch.manual_seed(0)
    found = preselected(ClassMaps(TinyBackbone(), 3, 32), photos, store, most)
    assert isinstance(found, PreselectedBoxes)
    return found


def test_boxes_scores_and_evidence_are_of_the_same_rows(tmp_path: Path) -> None:
    kept = made(tmp_path)
    for photo in kept.photos:
        rows = kept.preselection(photo.id).rows
        assert torch.equal(kept.boxes(photo.id), kept.store.boxes(photo.id)[rows])
        assert torch.equal(kept.class_evidence(photo.id), kept.evidence(photo.id)[rows])
        assert len(kept.scores(photo.id)) == len(rows) == min(4, len(kept.store.boxes(photo.id)))


def test_without_class_maps_or_a_limit_all_are_seen(tmp_path: Path) -> None:
    kept = made(tmp_path)
    assert preselected(None, kept.photos, kept.store, 4) is kept.store
    assert isinstance(kept.evidence, ClassEvidence)
    assert preselected(kept.evidence.class_maps, kept.photos, kept.store, None) is kept.store


def test_few_photos_are_remembered_and_others_get_the_same_rows_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(class_evidence, "_RECENT", 1)
    kept = made(tmp_path)
    first = kept.boxes("photo0").tolist()
    kept.boxes("photo2")
    assert list(kept.recent) == ["photo2"]
    assert kept.boxes("photo0").tolist() == first


def test_other_processes_can_have_it(tmp_path: Path) -> None:
    kept = made(tmp_path)
    again = pickle.loads(pickle.dumps(kept))  # noqa: S301 - our own
    assert again.boxes("photo0").tolist() == kept.boxes("photo0").tolist()


def test_straddling_in_detection_is_that_of_training_for_files_and_for_pixels(tmp_path: Path) -> None:
    photos, superpixels = tiny_photos(tmp_path, 3).photos, Superpixels(short_side=32, min_size=20)
    store = tiny_store(tmp_path, photos, counts=[9, 0, 3])
    cached = build_superpixel_cache(photos, store, superpixels, tmp_path / "cache", workers=1)
    loaded = [LoadedPhoto(p.id, p.path, p.width, p.height, pixels=images.read_photo(p.path)) for p in photos]
    for shown in (photos, loaded):
        scores = StraddlingScores(superpixels, shown, store)
        for photo in photos:
            assert scores(photo.id).tolist() == cached(photo.id).tolist()
    assert len(cached("photo0").unique()) > 1 and len(cached("photo1")) == 0


def test_a_run_trains_on_and_detects_among_the_kept_boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_data(tmp_path)
    small_network(monkeypatch)
    levers = ("adaptation.epochs=1", "adaptation.side=32", "adaptation.keep_boxes=3", "heads.regress=false",
              "inference.prior.evidence=1", "inference.predict.nms_iou=1")  # fmt: skip
    train(small_config(tmp_path, *levers), tmp_path / "run")
    found = detect(tmp_path / "run", [tmp_path / "photos"], min_score=0)
    assert all(len(boxes) <= 3 * 3 for boxes in found.values())  # three boxes of three classes
    assert any(len(boxes) for boxes in found.values())
