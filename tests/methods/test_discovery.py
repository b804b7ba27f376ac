from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from strategies import box_sets, random_boxes
from tag2box.methods.discovery import (
    CANDIDATE_RULES,
    adaptive_threshold,
    drop_nested,
    drop_parts,
    keep_apart,
    neighbours,
)
from tag2box.methods.oicr import top_rows
from tag2box.ops.boxes import iou, nms
from tag2box.ops.losses import assign
from tag2box.types import Proposals, PseudoBoxes, PseudoLabels

GRID = st.integers(0, 4).map(lambda n: n / 4)  # few values: ties happen


@st.composite
def score_tables(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Scores of a few proposals and classes, and some of the classes present."""
    proposals, classes = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    rows = [[draw(GRID) for _ in range(classes)] for _ in range(proposals)]
    present = sorted(draw(st.sets(st.integers(0, classes - 1))))
    return torch.tensor(rows), torch.tensor(present, dtype=torch.long)


def loop_top_rows(probs: list[list[float]], present: list[int]) -> list[int]:
    taken: list[int] = []
    for c in present:
        free = [r for r in range(len(probs)) if r not in taken]
        taken.append(max(free, key=lambda r: (probs[r][c], -r)) if free else 0)
    return taken


def loop_iou(a: list[float], b: list[float]) -> float:
    across = min(a[2], b[2]) - max(a[0], b[0])
    down = min(a[3], b[3]) - max(a[1], b[1])
    shared = max(across, 0.0) * max(down, 0.0)
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared
    return shared / union if union > 0 else 0.0


def loop_keep_apart(
    boxes: list[list[float]], scores: list[float], candidate: list[bool], top: int, nms_iou: float
) -> list[int]:
    rest = [i for i in range(len(boxes)) if candidate[i] and i != top]
    kept = [top]
    for i in sorted(rest, key=lambda i: (-scores[i], i)):
        if all(loop_iou(boxes[i], boxes[k]) <= nms_iou for k in kept):
            kept.append(i)
    return kept


def loop_inside(a: list[float], b: list[float]) -> float:
    """Of the smaller box, the share that lies inside the other."""
    across = min(a[2], b[2]) - max(a[0], b[0])
    down = min(a[3], b[3]) - max(a[1], b[1])
    smaller = min((a[2] - a[0]) * (a[3] - a[1]), (b[2] - b[0]) * (b[3] - b[1]))
    return max(across, 0.0) * max(down, 0.0) / smaller if smaller > 0 else 0.0


def unit(rows: int, dim: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(rows, dim, generator=generator), dim=-1)


@pytest.mark.parametrize(
    ("probs", "present", "expected"),
    [
        ([[0.1, 0.2]], [], []),  # no tags
        ([[0.3]], [0], [0]),  # one proposal, one class
        ([[0.3], [0.3]], [0], [0]),  # the first of equals
        ([[0.9, 0.8], [0.1, 0.7]], [0, 1], [0, 1]),  # row 0 is taken, so class 1 gets its second best
        ([[0.9, 0.8], [0.1, 0.7]], [1], [0]),  # but not if class 0 is absent
        ([[0.9, 0.8, 0.7]], [0, 1, 2], [0, 0, 0]),  # fewer proposals than classes: they share
        ([[0.0, 0.0], [0.0, 0.0]], [0, 1], [0, 1]),  # a score of zero still beats a taken row
    ],
)
def test_top_rows_table(probs: list[list[float]], present: list[int], expected: list[int]) -> None:
    assert top_rows(torch.tensor(probs), torch.tensor(present, dtype=torch.long)).tolist() == expected


@given(score_tables())
def test_top_rows_matches_the_loop(table: tuple[Tensor, Tensor]) -> None:
    probs, present = table
    before = probs.clone()
    assert top_rows(probs, present).tolist() == loop_top_rows(probs.tolist(), present.tolist())
    assert torch.equal(probs, before)


@given(score_tables())
def test_tops_differ_while_there_are_proposals_enough(table: tuple[Tensor, Tensor]) -> None:
    probs, present = table
    tops = top_rows(probs, present).tolist()
    assert len(set(tops)) == min(len(probs), len(present))


@given(box_sets(low=1), st.data(), st.sampled_from([0.1, 0.5, 1.0]))
def test_neighbours_match_the_loop(boxes: Tensor, data: st.DataObject, threshold: float) -> None:
    tops = data.draw(st.lists(st.integers(0, len(boxes) - 1), min_size=1, max_size=3))
    rows = boxes.tolist()
    expected = [
        i for i, box in enumerate(rows) if i in tops or any(round(loop_iou(box, rows[t]), 6) >= threshold for t in tops)
    ]
    assert neighbours(boxes, torch.tensor(tops), threshold).tolist() == expected


def test_neighbours_without_teachers_are_none() -> None:
    boxes = torch.tensor([[0.0, 0, 4, 4]])
    assert neighbours(boxes, torch.zeros(0, dtype=torch.long), 0.5).tolist() == []


def test_a_box_without_area_is_its_own_neighbour() -> None:
    boxes = torch.tensor([[3.0, 3, 3, 3], [0.0, 0, 4, 4]])
    assert neighbours(boxes, torch.tensor([0]), 0.5).tolist() == [0]


@pytest.mark.parametrize("count", [0, 1, 7])
def test_threshold_matches_the_loop(count: int) -> None:
    top, exemplars = unit(1, 5, 1)[0], unit(count, 5, 2)
    dots = [sum(float(a) * float(b) for a, b in zip(top, row, strict=True)) for row in exemplars]
    expected = sum(dots) / count if count else 1.0
    assert adaptive_threshold(top, exemplars).item() == pytest.approx(expected, abs=1e-6)


def test_threshold_of_copies_of_the_top_is_one() -> None:
    top = unit(1, 5, 3)[0]
    assert adaptive_threshold(top, top.expand(4, -1)).item() == pytest.approx(1.0)


SIGNED = st.integers(-4, 4).map(lambda n: n / 4)


def loop_candidate(rule: str, similarity: float, tau: float, others: list[float]) -> bool:
    """One proposal by one rule; that of the published code step by step, as a mask of 0 and 1 passed on."""
    if rule == "published":
        mask = similarity >= tau
        for other in others:
            mask = float(mask) >= other
        return mask
    if rule == "exclusive" and any(similarity <= other for other in others):
        return False
    return similarity > tau


@pytest.mark.parametrize("rule", CANDIDATE_RULES)
@given(st.lists(SIGNED, max_size=6), SIGNED, st.integers(0, 3), st.data())
def test_candidates_match_the_loop(
    rule: str, similarity: list[float], tau: float, columns: int, data: st.DataObject
) -> None:
    others = [[data.draw(SIGNED) for _ in range(columns)] for _ in similarity]
    expected = [loop_candidate(rule, s, tau, row) for s, row in zip(similarity, others, strict=True)]
    table = torch.tensor(others).reshape(len(similarity), columns)
    found = CANDIDATE_RULES[rule](torch.tensor(similarity), torch.tensor(tau), table)
    assert found.tolist() == expected


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("paper", [False, True, True, False]),
        ("exclusive", [False, False, True, False]),
        ("published", [True, True, True, True]),  # tau itself; nothing is rejected; what points away is added
    ],
)
def test_rules_differ_at_tau_and_where_another_class_is_nearer_or_far(rule: str, expected: list[bool]) -> None:
    similarity = torch.tensor([0.5, 0.6, 0.6, -0.2])
    columns = torch.tensor([[0.1], [0.6], [0.5], [-0.3]])
    assert CANDIDATE_RULES[rule](similarity, torch.tensor(0.5), columns).tolist() == expected


@pytest.mark.parametrize("rule", CANDIDATE_RULES)
@given(st.lists(GRID, max_size=8), GRID, GRID)
def test_raising_tau_never_adds_candidates(rule: str, similarity: list[float], low: float, more: float) -> None:
    values, none = torch.tensor(similarity), torch.zeros(len(similarity), 0)
    loose = CANDIDATE_RULES[rule](values, torch.tensor(low), none)
    strict = CANDIDATE_RULES[rule](values, torch.tensor(low + more), none)
    assert not (strict & ~loose).any()


@given(st.lists(SIGNED, max_size=8), SIGNED, st.data())
def test_another_class_removes_none_adds_none_or_only_adds(
    similarity: list[float], tau: float, data: st.DataObject
) -> None:
    values, threshold = torch.tensor(similarity), torch.tensor(tau)
    column = torch.tensor([data.draw(SIGNED) for _ in similarity]).reshape(-1, 1)
    alone = {name: rule(values, threshold, column[:, :0]) for name, rule in CANDIDATE_RULES.items()}
    beside = {name: rule(values, threshold, column) for name, rule in CANDIDATE_RULES.items()}
    assert torch.equal(alone["paper"], beside["paper"]) and torch.equal(alone["paper"], alone["exclusive"])
    assert not (beside["exclusive"] & ~alone["exclusive"]).any()
    assert not (alone["published"] & ~beside["published"]).any()
    assert not (beside["paper"] & ~beside["published"]).any()


@given(box_sets(low=1), st.sampled_from([0.0, 0.1, 0.4, 1.0]), st.data())
def test_keep_apart_matches_the_loop(boxes: Tensor, nms_iou: float, data: st.DataObject) -> None:
    scores = [data.draw(GRID) for _ in boxes]
    candidate = [data.draw(st.booleans()) for _ in boxes]
    top = data.draw(st.integers(0, len(boxes) - 1))
    kept = keep_apart(boxes, torch.tensor(scores), torch.tensor(candidate), top, nms_iou)
    assert kept.tolist() == loop_keep_apart(boxes.tolist(), scores, candidate, top, nms_iou)


@given(st.integers(1, 30), st.integers(0, 1000), st.sampled_from([0.0, 0.1, 0.5]))
def test_what_is_kept_is_apart_and_begins_with_the_top(count: int, seed: int, nms_iou: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    boxes, scores = random_boxes(count, generator), torch.rand(count, generator=generator)
    top = int(scores.argmin())  # even the worst scored, if it is the top
    kept = keep_apart(boxes, scores, torch.rand(count, generator=generator) > 0.5, top, nms_iou)
    overlap = iou(boxes[kept], boxes[kept]).fill_diagonal_(0)
    assert kept[0] == top
    assert (overlap <= nms_iou).all()


def test_without_candidates_the_top_stands_alone_and_inputs_are_left_alone() -> None:
    boxes, scores = random_boxes(4, torch.Generator().manual_seed(0)), torch.tensor([0.1, 0.9, 0.3, 0.2])
    candidate = torch.zeros(4, dtype=torch.bool)
    assert keep_apart(boxes, scores, candidate, 2, 0.1).tolist() == [2]
    assert scores[2] == pytest.approx(0.3)
    assert not candidate.any()


@given(st.integers(1, 20), st.integers(0, 1000))
def test_with_the_best_as_top_it_is_plain_nms(count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    boxes, scores = random_boxes(count, generator), torch.rand(count, generator=generator)
    every = torch.ones(count, dtype=torch.bool)
    kept = keep_apart(boxes, scores, every, int(scores.argmax()), 0.3)
    assert torch.equal(kept, nms(boxes, scores, 0.3))


@given(box_sets(), st.sampled_from([0.0, 0.3, 0.5, 1.0]))
def test_dropping_parts_matches_the_loop(boxes: Tensor, inside: float) -> None:
    kept: list[int] = []
    for row, box in enumerate(boxes.tolist()):
        if all(loop_inside(box, boxes[k].tolist()) <= inside for k in kept):
            kept.append(row)
    assert drop_parts(boxes, inside).tolist() == kept


def test_a_wheel_and_a_street_go_and_a_second_car_stays() -> None:
    car, wheel, street, other = [10.0, 10, 50, 30], [14.0, 24, 20, 30], [0.0, 0, 200, 60], [120.0, 10, 160, 30]
    boxes = torch.tensor([car, wheel, street, other])
    assert iou(boxes[:1], boxes[1:3]).max() < 0.1  # nothing that NMS would suppress
    assert drop_parts(boxes, 0.5).tolist() == [0, 3]


@pytest.mark.parametrize(("threshold", "expected"), [(0.25, [0, 1, 2]), (0.26, [0, 1]), (0.5, [0, 1]), (0.51, [0])])
def test_an_overlap_of_exactly_the_threshold_makes_a_neighbour(threshold: float, expected: list[int]) -> None:
    boxes = torch.tensor([[0.0, 0, 4, 4], [0.0, 0, 4, 2], [0.0, 0, 4, 1]])  # IoU with the first: 1, 1/2, 1/4
    assert neighbours(boxes, torch.tensor([0]), threshold).tolist() == expected


def loop_nested(labels: PseudoLabels, proposals: Proposals, num_classes: int, inside: float) -> tuple[list, list]:
    """Twin of ``drop_nested``: the pseudo boxes that are left, and class and pseudo box of each proposal."""
    boxes, images = labels.pseudo_boxes.placed(proposals).tolist(), proposals.image_ids().tolist()
    image_of = [images[row] for row in labels.pseudo_boxes.rows.tolist()]
    cls, scores = labels.pseudo_boxes.cls.tolist(), labels.pseudo_boxes.score.tolist()
    left: list[int] = []
    for k in sorted(range(len(boxes)), key=lambda k: -scores[k]):
        others = [j for j in left if (image_of[j], cls[j]) == (image_of[k], cls[k])]
        if all(loop_inside(boxes[k], boxes[j]) <= inside for j in others):
            left.append(k)
    left.sort()
    found = []
    for r, (owner, c) in enumerate(zip(labels.owner.tolist(), labels.cls.tolist(), strict=True)):
        if owner < 0 or owner in left:
            found.append((owner, c))
            continue
        mates = [k for k in left if image_of[k] == images[r]]
        overlaps = [loop_iou(proposals.boxes[r].tolist(), boxes[k]) for k in mates]
        best = mates[overlaps.index(max(overlaps))]
        found.append((best, cls[best] if max(overlaps) > 0.5 else num_classes))
    return left, found


@pytest.mark.parametrize("sizes", [(), (0,), (1,), (7, 0, 12)])
@pytest.mark.parametrize("inside", [0.0, 0.4, 0.9])
@pytest.mark.parametrize("is_placed", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_nested_pseudo_boxes_of_any_labeler_go_as_in_the_loop(
    sizes: tuple[int, ...], inside: float, is_placed: bool, seed: int
) -> None:
    g, count = torch.Generator().manual_seed(seed), sum(sizes)
    proposals = Proposals(random_boxes(count, g, 30.0), sizes)
    rows = torch.randperm(count, generator=g)[: count - count // 3]
    placed = random_boxes(len(rows), g, 30.0) if is_placed else None
    pseudo = PseudoBoxes(rows, torch.randint(2, (len(rows),), generator=g), torch.rand(len(rows), generator=g), placed)
    labels = assign(proposals, pseudo, 2)
    left, found = loop_nested(labels, proposals, 2, inside)
    got = drop_nested(labels, proposals, 2, inside)
    assert got.pseudo_boxes.rows.tolist() == rows[left].tolist() and torch.equal(got.weight, labels.weight)
    kept = got.pseudo_boxes.placed(proposals)
    for r, (owner, c) in enumerate(found):
        assert int(got.cls[r]) == c and int(got.owner[r]) == (left.index(owner) if owner >= 0 else -1)
        assert torch.equal(got.boxes[r], kept[got.owner[r]] if owner >= 0 else labels.boxes[r])


def test_a_wheel_teaches_that_wheels_are_background() -> None:
    boxes = torch.tensor([[10.0, 10, 50, 30], [14.0, 24, 20, 30], [15.0, 24, 21, 30]])
    proposals = Proposals(boxes, (3,))
    pseudo = PseudoBoxes(torch.tensor([0, 1]), torch.zeros(2, dtype=torch.long), torch.tensor([0.9, 0.5]))
    labels = assign(proposals, pseudo, 1)
    assert labels.cls.tolist() == [0, 0, 0]
    assert drop_nested(labels, proposals, 1, 0.5).cls.tolist() == [0, 1, 1]
