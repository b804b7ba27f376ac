"""Recall of proposals: by hand, against loops, by score and by stored order, and of nothing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from strategies import box_sets
from tag2box.annotations import Objects, Truth
from tag2box.proposals.base import Candidates
from tag2box.proposals.recall import PhotoRecall, RecallCurves, RecallMeter, best_overlaps, find_misses, measure_recall

EDGES = (0.01, 0.1)


def _truth(*objects: Objects) -> Truth:
    names = tuple(str(i) for i in range(len(objects)))
    return Truth(("x",), names, ((100, 100),) * len(objects), objects)


def test_nothing_to_find() -> None:
    for truth, boxes in ((_truth(), []), (_truth(Objects.of([], [])), [torch.rand(3, 4)])):
        found = measure_recall(boxes, truth)
        assert found.objects == 0 and all(math.isnan(r) for r in found.recall) and math.isnan(found.mean_best_overlap)


def test_nothing_proposed_finds_nothing() -> None:
    found = measure_recall([torch.zeros(0, 4)], _truth(Objects.of([[0, 0, 10, 10]], [0])))
    assert found.recall == (0.0, 0.0, 0.0) and found.mean_best_overlap == 0.0 and found.boxes_per_image == 0.0


def test_by_hand() -> None:
    truth = _truth(Objects.of([[0, 0, 10, 10], [20, 20, 30, 40]], [0, 0]), Objects.of([[0, 0, 4, 4]], [0]))
    boxes = [torch.tensor([[0.0, 0, 10, 8], [20, 20, 30, 30], [0, 0, 10, 5]]), torch.tensor([[0.0, 0, 4, 4]])]
    found = measure_recall(boxes, truth, (0.5, 0.7, 0.9))
    assert found.recall == pytest.approx((1.0, 2 / 3, 1 / 3))  # overlaps 0.8, 0.5 and 1
    assert found.mean_best_overlap == pytest.approx(2.3 / 3) and found.boxes_per_image == 2.0


def test_difficult_objects_and_crowds_do_not_count() -> None:
    boxes = torch.tensor([[0.0, 0, 5, 5]] * 3)
    marks = Objects(
        boxes, torch.zeros(3, dtype=torch.long), torch.tensor([1, 0, 0]).bool(), torch.tensor([0, 1, 0]).bool()
    )
    assert measure_recall([torch.zeros(0, 4)], _truth(marks)).objects == 1
    assert int(measure([(Candidates.unranked(boxes), marks)]).objects.sum()) == 1
    assert [miss.row for miss in find_misses(Candidates.unranked(torch.zeros(0, 4)), marks)] == [2]


def test_images_must_match() -> None:
    with pytest.raises(ValueError):
        measure_recall([], _truth(Objects.of([], [])))


# ---------------------------------------------------------------- against the number of boxes


def measure(
    photos: list[tuple[Candidates, Objects]], classes: int = 3, budgets: tuple[int, ...] = (1, 2, 5)
) -> RecallCurves:
    meter = RecallMeter(classes, EDGES, budgets=budgets)
    for candidates, objects in photos:
        meter.add(candidates, objects, (20, 20))
    return meter.result()


def test_a_meter_that_saw_nothing() -> None:
    found = measure([])
    assert found.recall().isnan().all() and found.best_overlap().isnan().all() and found.boxes_per_photo().isnan().all()
    assert found.photos == found.most == 0 and not found.ranked


@pytest.mark.parametrize("objects", [Objects.of([], []), Objects.of([[0, 0, 5, 5]], [1])])
def test_photos_without_boxes_reach_nothing(objects: Objects) -> None:
    meter = RecallMeter(3, EDGES)
    left = meter.add(Candidates.unranked(torch.zeros(0, 4)), objects, (20, 20))
    assert left == PhotoRecall(len(objects), float(len(objects)))
    assert int(meter.result().hits.sum()) == 0 and meter.result().boxes_per_photo().tolist() == [0.0] * 12


def test_the_first_boxes_are_those_of_highest_score() -> None:
    boxes = torch.tensor([[0.0, 0, 1, 1], [0, 0, 10, 10], [0, 0, 10, 5]])
    wanted = torch.tensor([[0.0, 0, 10, 10]], dtype=torch.double)
    scored = best_overlaps(Candidates(boxes, torch.tensor([0.1, 0.2, 0.3])), wanted, (1, 2, 3, 9))
    assert scored.tolist() == [[0.5, 1.0, 1.0, 1.0, 1.0]]
    stored = best_overlaps(Candidates.unranked(boxes), wanted, (1, 2, 3, 9))
    assert stored.tolist() == [[0.01, 1.0, 1.0, 1.0, 1.0]]


def test_equal_scores_keep_the_stored_order_however_many() -> None:
    boxes = torch.tensor([[0.0, 0, 1, 1]]).repeat(3000, 1)
    boxes[1000] = torch.tensor([0.0, 0, 10, 10])
    wanted = torch.tensor([[0.0, 0, 10, 10]], dtype=torch.double)
    for scores in (torch.zeros(3000), torch.arange(3000) // 1000 * -1.0):  # alike, or in three blocks of ties
        found = best_overlaps(Candidates(boxes, scores), wanted, (999, 1000, 1001, 2000))
        assert found.tolist() == [[0.01, 0.01, 1.0, 1.0, 1.0]]


def test_an_overlap_of_exactly_one_half_is_reached() -> None:
    found = measure([(Candidates.unranked(torch.tensor([[0.0, 0, 10, 5]])), Objects.of([[0, 0, 10, 10]], [0]))])
    assert found.recall()[:, -1].tolist() == [1.0, 0.0, 0.0]


def test_reach_by_class_and_size_by_hand() -> None:
    objects = Objects.of([[0, 0, 1, 1], [0, 0, 4, 5], [0, 0, 20, 20]], [0, 1, 1])  # 1/400, 20/400, all
    found = measure([(Candidates.unranked(torch.tensor([[0.0, 0, 20, 20], [0, 0, 4, 4]])), objects)])
    assert found.objects.tolist() == [[1, 0, 0], [0, 1, 1], [0, 0, 0]]
    assert found.recall_by_class()[0, :2].tolist() == [0.0, 1.0] and found.recall_by_class()[0, 2].isnan()
    assert found.recall_by_size()[1].tolist() == [0.0, 1.0, 1.0]
    assert found.recall()[0].tolist() == pytest.approx([1 / 3, 2 / 3, 2 / 3, 2 / 3])
    assert found.best_overlap_by_class()[1].item() == pytest.approx(0.9)
    assert found.boxes_per_photo().tolist() == [1.0, 2.0, 2.0, 2.0] and found.most == 2


@st.composite
def photos(draw: st.DrawFn) -> list[tuple[Candidates, Objects]]:
    out = []
    for _ in range(draw(st.integers(0, 3))):
        boxes, wanted = draw(box_sets(high=9)), draw(box_sets(high=4))
        scores = draw(st.lists(st.integers(0, 2), min_size=len(boxes), max_size=len(boxes)))  # ties are frequent
        labels = draw(st.lists(st.integers(0, 2), min_size=len(wanted), max_size=len(wanted)))
        hard = torch.tensor(draw(st.lists(st.booleans(), min_size=len(wanted), max_size=len(wanted))), dtype=torch.bool)
        objects = Objects(wanted, torch.tensor(labels, dtype=torch.long), hard, torch.zeros(len(wanted)).bool())
        out.append((Candidates(boxes, torch.tensor(scores, dtype=torch.float32)), objects))
    return out


def overlap(a: list[float], b: list[float]) -> float:
    sides = [max(0.0, min(a[i + 2], b[i + 2]) - max(a[i], b[i])) for i in range(2)]
    area = [(box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)]
    shared = sides[0] * sides[1]
    return shared / (area[0] + area[1] - shared)


@settings(deadline=None, max_examples=50)
@given(photos())
def test_reach_matches_loops(given_photos: list[tuple[Candidates, Objects]]) -> None:
    found = measure(given_photos)
    for k, budget in enumerate((1, 2, 5, 10**9)):
        best, kinds = [], []
        for candidates, objects in given_photos:
            order = sorted(range(len(candidates)), key=lambda i: (-float(candidates.scores[i]), i))[:budget]
            chosen = [candidates.boxes[i].tolist() for i in order]
            for row, box in enumerate(objects.boxes.tolist()):
                if not objects.difficult[row]:
                    best.append(max([overlap(box, other) for other in chosen], default=0.0))
                    share = (box[2] - box[0]) * (box[3] - box[1]) / 400
                    kinds.append((int(objects.labels[row]), sum(share >= edge for edge in EDGES)))
        assert int(found.objects.sum()) == len(best)
        assert float(found.overlap[k].sum()) == pytest.approx(sum(best))
        for t, threshold in enumerate((0.5, 0.7, 0.9)):
            hits = torch.zeros(3, 3, dtype=torch.long)
            for kind, value in zip(kinds, best, strict=True):
                hits[kind] += int(value >= threshold)
            assert torch.equal(found.hits[t, k], hits)
        assert int(found.used[k]) == sum(min(budget, len(c)) for c, _ in given_photos)


@settings(deadline=None, max_examples=30)
@given(photos())
def test_more_boxes_never_reach_less_and_parts_add_up(given_photos: list[tuple[Candidates, Objects]]) -> None:
    found = measure(given_photos)
    assert (found.hits.diff(dim=1) >= 0).all() and (found.hits.diff(dim=0) <= 0).all()
    assert (found.hits <= found.objects).all()
    truth = Truth(("a", "b", "c"), tuple(map(str, range(len(given_photos)))), ((20, 20),) * len(given_photos),
                  tuple(objects for _, objects in given_photos))  # fmt: skip
    simple = measure_recall([candidates.boxes for candidates, _ in given_photos], truth)
    assert found.recall()[:, -1].tolist() == pytest.approx(simple.recall, nan_ok=True)
    assert float(found.best_overlap()[-1]) == pytest.approx(simple.mean_best_overlap, nan_ok=True, abs=1e-6)


def test_results_do_not_change_when_the_meter_continues() -> None:
    meter = RecallMeter(1, EDGES)
    photo = Candidates.unranked(torch.tensor([[0.0, 0, 5, 5]])), Objects.of([[0, 0, 5, 5]], [0])
    meter.add(*photo, (20, 20))
    before = meter.result()
    meter.add(*photo, (20, 20))
    assert (int(before.objects.sum()), int(meter.result().objects.sum())) == (1, 2)
    assert int(before.hits[0, 0].sum()) == 1


# ---------------------------------------------------------------- what is out of reach


def test_misses_name_the_best_box() -> None:
    objects = Objects.of([[0, 0, 10, 10], [10, 10, 20, 20], [0, 0, 4, 10]], [0, 1, 0])
    boxes = torch.tensor([[0.0, 0, 10, 4], [0, 0, 4, 10], [9, 9, 10, 10]])
    first, second = find_misses(Candidates.unranked(boxes), objects)
    assert (first.row, first.best, first.overlap) == (0, 0, pytest.approx(0.4))
    assert (second.row, second.overlap) == (1, 0.0)


@settings(deadline=None, max_examples=30)
@given(photos())
def test_misses_are_as_many_as_the_meter_counts(given_photos: list[tuple[Candidates, Objects]]) -> None:
    meter = RecallMeter(3, EDGES)
    for candidates, objects in given_photos:
        left = meter.add(candidates, objects, (20, 20))
        assert left.missed == len(find_misses(candidates, objects))
        assert left.shortfall >= 0.5 * left.missed
