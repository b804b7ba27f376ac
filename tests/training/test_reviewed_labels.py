"""Reviewed photos: their labels against a twin written with loops, in every labeler; their boxes among proposals."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from strategies import box_sets, make_labeler_input, plain_views
from tag2box.annotations import ReviewedBoxes, ReviewedObjects
from tag2box.images import Resize
from tag2box.methods.c_wsl import CWsl
from tag2box.methods.discovery import Discovery
from tag2box.methods.mist import Mist
from tag2box.methods.oicr import Oicr
from tag2box.methods.oim import Oim
from tag2box.methods.pcl import Pcl
from tag2box.methods.slv import Slv
from tag2box.methods.wscl import Sampling
from tag2box.methods.wsod2 import Wsod2
from tag2box.ops.boxes import iou, row_iou
from tag2box.training.batches import FeatureBatches, ImageBatches, Loader, draw_rows
from tag2box.training.criterion import run_labeler
from tag2box.training.feature_cache import RoiMaps
from tag2box.training.reviewed import ReviewedSource, jittered, reviewed_labels, with_reviewed
from tag2box.types import (
    CANDIDATE,
    IGNORED,
    TAGS_ONLY,
    LabelerInput,
    Labeling,
    Proposals,
    PseudoBoxes,
    PseudoLabels,
    SideInfo,
    SideInfoLoader,
)
from tiny import tiny_detector, tiny_photos, tiny_store

LABELERS = (Oicr(), Discovery(), Mist(), Pcl(), Oim(), Slv(), CWsl(), Wsod2())
NUM_CLASSES = 3


# ---------------------------------------------------------------- labels, written with loops


def share(a: list[float], b: list[float]) -> tuple[float, float]:
    """IoU of two boxes, and the share of the first that lies in the second."""
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    shared = max(width, 0) * max(height, 0)
    first, second = ((c[2] - c[0]) * (c[3] - c[1]) for c in (a, b))
    return shared / (first + second - shared), shared / first


def labels_by_loop(boxes: list[list[float]], sizes: tuple[int, ...], codes: list[int], weight: float) -> list[tuple]:
    """Class, weight and regression target of each proposal."""
    found, start = [], 0
    for size in sizes:
        rows = range(start, start + size)
        start += size
        true = [row for row in rows if codes[row] >= 0]
        ignored = [row for row in rows if codes[row] == IGNORED]
        for row in rows:
            best, nearest = 0.0, None
            for other in true:
                overlap = share(boxes[row], boxes[other])[0]
                if nearest is None or overlap > best:
                    best, nearest = overlap, other
            cls = codes[nearest] if nearest is not None and best >= 0.5 else NUM_CLASSES
            is_out = any(share(boxes[row], boxes[other])[1] >= 0.5 for other in ignored)
            own = 0.0 if codes[row] == TAGS_ONLY or (cls == NUM_CLASSES and is_out) else weight
            found.append((cls, own, boxes[row] if nearest is None else boxes[nearest]))
    return found


CODES = st.sampled_from([CANDIDATE, CANDIDATE, IGNORED, 0, 1, 2])


@given(st.lists(box_sets(), max_size=3), st.data(), st.sampled_from([1.0, 0.25, 3.0]))
def test_labels_of_reviewed_photos_are_those_of_the_loop(
    sets: list[Tensor], data: st.DataObject, weight: float
) -> None:
    boxes, sizes = torch.cat([torch.zeros(0, 4), *sets]), tuple(map(len, sets))
    codes = []
    for size in sizes:
        is_reviewed = data.draw(st.booleans())
        codes += [data.draw(CODES) if is_reviewed else TAGS_ONLY for _ in range(size)]
    made = reviewed_labels(Proposals(boxes, sizes), torch.tensor(codes, dtype=torch.long), NUM_CLASSES, weight)
    wanted = labels_by_loop(boxes.tolist(), sizes, codes, weight)
    assert [
        tuple(row) for row in zip(made.cls.tolist(), made.weight.tolist(), made.boxes.tolist(), strict=True)
    ] == wanted


CASES = {
    "no photos": ((), [], []),
    "no proposals": ((0,), [], []),
    "a reviewed photo without boxes is background": ((2,), [CANDIDATE] * 2, [(3, 1.0), (3, 1.0)]),
    "a photo without boxes teaches nothing here": ((2,), [TAGS_ONLY] * 2, [(3, 0.0), (3, 0.0)]),
    "an ignore region": ((2,), [IGNORED, CANDIDATE], [(3, 0.0), (3, 1.0)]),
    "a box is its own foreground": ((2,), [1, CANDIDATE], [(1, 1.0), (3, 1.0)]),
}


@pytest.mark.parametrize("name", CASES)
def test_cases(name: str) -> None:
    sizes, codes, wanted = CASES[name]
    boxes = torch.tensor([[0.0, 0.0, 4.0, 4.0], [20.0, 0.0, 24.0, 9.0]])[: sum(sizes)]
    made = reviewed_labels(Proposals(boxes, sizes), torch.tensor(codes, dtype=torch.long), NUM_CLASSES)
    assert list(zip(made.cls.tolist(), made.weight.tolist(), strict=True)) == wanted


def test_an_iou_of_exactly_one_half_is_foreground() -> None:
    boxes = torch.tensor([[0.0, 0.0, 2.0, 2.0], [0.0, 0.0, 2.0, 1.0], [0.0, 0.0, 2.0, 0.99]])
    made = reviewed_labels(Proposals(boxes, (3,)), torch.tensor([0, CANDIDATE, CANDIDATE]), NUM_CLASSES)
    assert made.cls.tolist() == [0, 0, NUM_CLASSES]
    assert torch.equal(made.boxes, boxes[:1].expand(3, 4))  # what regression aims at


# ---------------------------------------------------------------- any labeler


def batch_input() -> tuple[LabelerInput, Tensor]:
    """Three photos, of which the second is reviewed: two boxes of class 1, one of class 2, an ignore region."""
    inputs = make_labeler_input((7, 8, 6), [[1, 1, 0], [0, 1, 1], [1, 0, 1]], seed=3)
    codes = torch.tensor([*[TAGS_ONLY] * 7, 1, 1, 2, IGNORED, *[CANDIDATE] * 4, *[TAGS_ONLY] * 6])
    total, (count, classes) = len(codes), inputs.tags.shape
    side_info = SideInfo(
        counts=torch.full((count, classes), 2),
        evidence=torch.rand(total, generator=torch.Generator().manual_seed(1)),
    )
    return replace(inputs, vectors=inputs.embed, side_info=side_info), codes


@pytest.mark.parametrize("labeler", LABELERS, ids=lambda labeler: labeler.kind)
def test_every_labeler_keeps_the_labels_of_photos_without_boxes(labeler) -> None:
    inputs, codes = batch_input()
    before = run_labeler(labeler, inputs)
    after = run_labeler(labeler, replace(inputs, side_info=replace(inputs.side_info, reviewed=codes)), 0.5)
    is_taught, wanted = codes != TAGS_ONLY, reviewed_labels(inputs.proposals, codes, 3, 0.5)
    assert len(before.stages) == len(after.stages) == 3
    for was, now in zip(before.stages, after.stages, strict=True):
        for name in ("cls", "weight", "boxes"):
            assert torch.equal(getattr(now, name)[~is_taught], getattr(was, name)[~is_taught]), name
            assert torch.equal(getattr(now, name)[is_taught], getattr(wanted, name)[is_taught]), name
        assert owners(now, ~is_taught) == owners(was, ~is_taught)
        assert owners(now, is_taught) == owners(wanted, is_taught)
        assert sorted(now.pseudo_boxes.rows[is_taught[now.pseudo_boxes.rows]].tolist()) == [7, 8, 9]


def owners(labels: PseudoLabels, rows: Tensor) -> list[int]:
    """The proposal that each row's pseudo box is; -1 if it has none."""
    numbers = [*labels.pseudo_boxes.rows.tolist(), -1]
    return [numbers[owner] for owner in labels.owner[rows].tolist()]


def test_pseudo_boxes_that_are_no_proposals_are_joined_with_reviewed_ones() -> None:
    proposals = Proposals(torch.tensor([[0.0, 0, 4, 4], [1, 1, 5, 5], [0, 0, 8, 8]]), (1, 2))
    moved = PseudoBoxes(torch.tensor([0, 2]), torch.tensor([0, 1]), torch.tensor([0.5, 0.6]), torch.ones(2, 4))
    own = PseudoLabels(torch.zeros(3).long(), torch.ones(3), torch.ones(3, 4), moved, torch.tensor([0, 1, 1]))
    codes = torch.tensor([TAGS_ONLY, CANDIDATE, 2])
    (made,) = with_reviewed(Labeling((own,)), proposals, codes, 3).stages
    assert made.pseudo_boxes.boxes is not None
    assert made.pseudo_boxes.boxes.tolist() == [[1, 1, 1, 1], [0, 0, 8, 8]]
    assert (made.pseudo_boxes.rows.tolist(), made.pseudo_boxes.cls.tolist()) == ([0, 2], [0, 2])
    assert made.owner.tolist() == [0, 1, 1]


def test_exemplars_of_a_reviewed_photo_are_its_boxes_and_what_overlaps_them() -> None:
    inputs, codes = batch_input()
    views = plain_views(inputs)
    was = Sampling()(inputs, views)  # type: ignore[arg-type]
    now = Sampling()(replace(inputs, side_info=SideInfo(reviewed=codes)), views)  # type: ignore[arg-type]
    pairs = [set(zip(s.rows.tolist(), s.cls.tolist(), strict=True)) for s in (was, now)]
    others = [{pair for pair in own if codes[pair[0]] == TAGS_ONLY} for own in pairs]
    assert others[0] == others[1]
    overlap = iou(inputs.proposals.boxes[7:15], inputs.proposals.boxes[7:10]) >= 0.5
    wanted = {(row + 7, int(codes[box + 7])) for row, box in overlap.nonzero().tolist()}
    assert pairs[1] - others[1] == wanted and {(7, 1), (8, 1), (9, 2)} <= wanted


# ---------------------------------------------------------------- boxes among the proposals


def taught(folder: Path, copies: int = 3) -> ReviewedSource:
    """Four photos; photo1 is reviewed and has no proposals, photo2 is reviewed and shows nothing."""
    photos = tiny_photos(folder, 4).photos
    store = tiny_store(folder, photos, counts=[5, 0, 9, 6])
    boxes = torch.tensor([[1.5, 2.0, 20.0, 30.0], [30.0, 4.0, 56.0, 44.0]])
    objects = ReviewedObjects(boxes, torch.tensor([2, 0]), torch.tensor([[0.0, 0.0, 9.0, 9.0]]))
    none = ReviewedObjects(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long), torch.zeros(0, 4))
    return ReviewedSource(
        store, photos, ReviewedBoxes(("disc", "box", "bar"), {"photo1": objects, "photo2": none}), copies
    )


def test_boxes_follow_the_proposals_of_their_photo(tmp_path: Path) -> None:
    source = taught(tmp_path)
    objects = source.reviewed.photos["photo1"]
    for name in ("photo0", "photo2", "photo3"):
        assert torch.equal(source.boxes(name), source.store.boxes(name))
        assert torch.equal(source.scores(name), source.store.scores(name))
    assert torch.equal(source.boxes("photo1")[:2], objects.boxes)
    assert torch.equal(source.boxes("photo1")[8:], objects.ignore)
    assert source.codes("photo0").tolist() == [TAGS_ONLY] * 5
    assert source.codes("photo1").tolist() == [2, 0, *[CANDIDATE] * 6, IGNORED]
    assert source.codes("photo2").tolist() == [CANDIDATE] * 9
    assert len(source.scores("photo1")) == len(source.boxes("photo1")) == 9
    again = pickle.loads(pickle.dumps(source))  # noqa: S301 - as worker processes get it
    assert torch.equal(again.boxes("photo1"), source.boxes("photo1"))


@given(box_sets(low=1, high=4), st.integers(0, 20), st.text(max_size=5))
def test_copies_are_near_their_box_and_within_the_photo(boxes: Tensor, copies: int, name: str) -> None:
    objects = ReviewedObjects(boxes, torch.zeros(len(boxes), dtype=torch.long), torch.zeros(0, 4))
    made = jittered(name, objects, copies, (24, 24))
    assert torch.equal(made, jittered(name, objects, copies, (24, 24)))
    assert made.shape == (copies * len(boxes), 4)
    assert bool((made >= 0).all()) and bool((made <= 24).all())
    assert bool((row_iou(made, boxes.repeat_interleave(copies, dim=0)) > 0.35).all())


def rows_by_loop(count: int, most: int, kept: list[int], rows: list[int]) -> bool:
    """Whether rows are a subset that the rule allows."""
    if count <= most:
        return rows == list(range(count))
    return rows == sorted(set(rows)) and set(kept) <= set(rows) and len(rows) == max(most, len(kept))


@given(st.integers(0, 30), st.integers(1, 20), st.data())
def test_drawn_rows_have_all_reviewed_boxes(count: int, most: int, data: st.DataObject) -> None:
    kept = sorted(data.draw(st.sets(st.integers(0, count - 1))) if count else ())
    rows = draw_rows(count, most, (1, 2), torch.tensor(kept, dtype=torch.long)).tolist()
    assert rows_by_loop(count, most, kept, rows)
    if not kept:
        assert rows == draw_rows(count, most, (1, 2)).tolist()


@pytest.mark.parametrize("kind", ["pixels", "maps"])
def test_batches_have_the_boxes_of_reviewed_photos_in_every_view(tmp_path: Path, kind: str) -> None:
    source = taught(tmp_path)
    photos = tiny_photos(tmp_path, 4)
    loader = Loader(batch_size=4, resize=Resize(scales=(30,), flip=0.5), max_proposals=4, workers=0)
    side_info = SideInfoLoader(reviewed=source.codes)
    if kind == "pixels":
        batches: FeatureBatches | ImageBatches = ImageBatches(photos, source, loader, 0, side_info=side_info)
    else:
        maps = RoiMaps(tiny_detector(3).backbone, photos.photos, source)
        batches = FeatureBatches(photos, source, loader, 0, maps, side_info=side_info)
    seen = set()
    for iteration in range(8):
        batch = batches.batch(iteration)
        codes = batch.side_info.reviewed
        assert codes is not None and batch.proposals.frames is not None
        for number, (name, view) in enumerate(zip(batch.ids, batches.shard(iteration), strict=True)):
            rows = batch.proposals.spans()[number]
            own, boxes = codes[rows.start : rows.stop].tolist(), batch.proposals.boxes[rows.start : rows.stop]
            assert len(own) == 4
            assert own.count(TAGS_ONLY) == (0 if name in source.reviewed.photos else 4)
            if name == "photo1":
                assert [code for code in own if code != CANDIDATE] == [2, 0, IGNORED]
                width, height = batch.proposals.frames[number]
                box = boxes[own.index(0)] / torch.tensor([width, height] * 2)
                right = 30 / 56, 4 / 44, 1.0, 1.0  # the second box, in shares of the sides
                flipped = 0.0, 4 / 44, 26 / 56, 1.0
                assert box.tolist() == pytest.approx(flipped if view.view.flip else right, abs=1e-5)
                seen.add(view.view.flip)
    assert seen == {False, True}
