from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import background_last, golden_names, load_golden
from strategies import random_boxes
from tag2box.methods.oicr import top_rows
from tag2box.ops.boxes import encode, iou
from tag2box.ops.losses import assign, box_loss, first_argmax, negative_loss, refine_loss
from tag2box.types import Proposals, PseudoBoxes, PseudoLabels

EDGE = torch.tensor([0.0, 0.0, 1.0, 1.0])  # the references count pixels inclusively


def seeds_of(rows: list[int], cls: list[int], score: list[float]) -> PseudoBoxes:
    return PseudoBoxes(torch.tensor(rows, dtype=torch.long), torch.tensor(cls, dtype=torch.long), torch.tensor(score))


def assign_with_loops(
    proposals: Proposals, pseudo_boxes: PseudoBoxes, classes: int, threshold: float
) -> list[tuple[int, float, int]]:
    """Class, weight and pseudo-box row of every proposal, by the definition."""
    out = []
    image = proposals.image_ids().tolist()
    for r in range(len(proposals.boxes)):
        best, chosen = -1.0, -1
        for s in range(len(pseudo_boxes)):
            pseudo_row = int(pseudo_boxes.rows[s])
            if image[pseudo_row] == image[r]:
                overlap = iou(proposals.boxes[r : r + 1], proposals.boxes[pseudo_row : pseudo_row + 1]).item()
                if overlap > best:
                    best, chosen = overlap, s
        if chosen < 0:
            out.append((classes, 0.0, r))
        else:
            cls = int(pseudo_boxes.cls[chosen]) if best > threshold else classes
            out.append((cls, float(pseudo_boxes.score[chosen]), int(pseudo_boxes.rows[chosen])))
    return out


@pytest.mark.parametrize(
    ("sizes", "rows", "cls"),
    [((0,), [], []), ((1,), [0], [0]), ((3, 0, 2), [], []), ((6, 0, 5), [1, 2, 9], [0, 2, 1]), ((8,), [3, 3], [1, 0])],
)
def test_assignment_matches_the_definition_written_with_loops(sizes: tuple, rows: list, cls: list) -> None:
    proposals = Proposals(random_boxes(sum(sizes), torch.Generator().manual_seed(3), size=20), sizes)
    pseudo_boxes = seeds_of(rows, cls, [0.25 + 0.1 * i for i in range(len(rows))])
    got = assign(proposals, pseudo_boxes, num_classes=3, foreground_iou=0.3)
    expected = assign_with_loops(proposals, pseudo_boxes, 3, 0.3)
    assert got.cls.tolist() == [e[0] for e in expected]
    assert got.weight.tolist() == pytest.approx([e[1] for e in expected])
    assert torch.equal(got.boxes, proposals.boxes[[e[2] for e in expected]].reshape(-1, 4))


def test_first_of_equal_maxima_wins() -> None:
    assert first_argmax(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]])).tolist() == [1, 0]


@pytest.mark.parametrize("sizes", [(1,), (3, 0, 2)])
@pytest.mark.parametrize("divisor", ["proposals", "pseudo_boxes"])
def test_losses_match_the_definitions_written_with_loops(sizes: tuple[int, ...], divisor: str) -> None:
    classes, total = 2, sum(sizes)
    proposals = Proposals(random_boxes(total, torch.Generator().manual_seed(1)), sizes)
    pseudo_boxes = seeds_of([0], [1], [0.7])
    labels = assign(proposals, pseudo_boxes, classes, 0.01)
    logits, deltas = torch.randn(total, classes + 1), torch.randn(total, 4 * classes)
    image = proposals.image_ids().tolist()
    cls_loss = reg_loss = 0.0
    for r in range(total):
        c, w, n = int(labels.cls[r]), float(labels.weight[r]), image[r]
        log_p = float(logits[r, c]) - math.log(sum(math.exp(x) for x in logits[r].tolist()))
        cls_loss += -w * log_p / sizes[n] / len(sizes)
        if c < classes:
            target = encode(labels.boxes[r : r + 1], proposals.boxes[r : r + 1])[0]
            for a, b in zip(deltas[r, 4 * c : 4 * c + 4].tolist(), target.tolist(), strict=True):
                d = abs(a - b)
                smooth = 0.5 * d * d if d < 1 else d - 0.5
                reg_loss += w * smooth / (sizes[n] if divisor == "proposals" else 1) / len(sizes)
    assert refine_loss(logits, labels, sizes).item() == pytest.approx(cls_loss, rel=1e-5)
    assert box_loss(deltas, proposals, labels, divisor).item() == pytest.approx(reg_loss, rel=1e-4)


def test_an_image_without_pseudo_boxes_contributes_zero_and_a_zero_gradient() -> None:
    proposals = Proposals(random_boxes(4, torch.Generator().manual_seed(0)), (4,))
    labels = assign(proposals, seeds_of([], [], []), num_classes=2)
    logits, deltas = torch.randn(4, 3, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    loss = refine_loss(logits, labels, (4,)) + box_loss(deltas, proposals, labels)
    loss.backward()
    assert loss.item() == 0 and (logits.grad == 0).all() and (deltas.grad == 0).all()


@pytest.mark.parametrize("name", golden_names("od_layer_*.npz") + golden_names("oicr_layer_*.npz"))
def test_labels_weights_and_targets_match_the_reference(name: str) -> None:
    """Labels exact; weights and targets to float32 rounding (targets 1e-4: logs of ratios)."""
    g = load_golden(name)
    boxes = torch.as_tensor(g["in_boxes"]) + EDGE
    scores = background_last(torch.as_tensor(g["in_source_score"]))
    classes = scores.shape[1] - 1
    present = torch.as_tensor(g["in_labels"])[1:].nonzero().flatten()
    tops = dict(zip(present.tolist(), top_rows(scores[:, :classes], present).tolist(), strict=True))
    found = {c: [top] for c, top in tops.items()}
    if Path(name).name.startswith("od_"):  # its pseudo boxes; the top proposal if a present class has none
        pieces = np.split(g["in_pgt_idx"], np.cumsum(g["in_pgt_len"]))[:classes]
        found |= {c: piece.tolist() for c, piece in enumerate(pieces) if len(piece)}
    rows = [row for c in sorted(found) for row in found[c]]
    cls = [c for c in sorted(found) for _ in found[c]]
    pseudo_boxes = PseudoBoxes(
        torch.tensor(rows, dtype=torch.long), torch.tensor(cls, dtype=torch.long), scores[rows, cls]
    )
    labels = assign(Proposals(boxes, (len(boxes),)), pseudo_boxes, classes)
    reference = torch.as_tensor(np.asarray(g["out_pseudo_labels"]))
    assert torch.equal(labels.cls, torch.where(reference == 0, classes, reference - 1))
    torch.testing.assert_close(labels.weight, torch.as_tensor(g["out_loss_weights"]).float())
    if rows:
        expected = torch.as_tensor(g["out_regression_targets"])
        torch.testing.assert_close(encode(labels.boxes, boxes), expected, atol=1e-4, rtol=1e-4)


def test_labels_are_a_type_with_its_parts() -> None:
    proposals = Proposals(torch.tensor([[0.0, 0.0, 5.0, 5.0]]), (1,))
    assert isinstance(assign(proposals, seeds_of([0], [0], [1.0]), 1), PseudoLabels)


# ---------------------------------------------------------------- borders


@pytest.mark.parametrize("sizes", [(), (0,), (5,), (1, 0, 7)])
@pytest.mark.parametrize(("foreground_iou", "ignore_below"), [(0.5, 0.0), (0.3, 0.1), (0.2, 0.2)])
def test_borders_match_the_definition_written_with_loops(
    sizes: tuple[int, ...], foreground_iou: float, ignore_below: float
) -> None:
    total = sum(sizes)
    proposals = Proposals(random_boxes(total, torch.Generator().manual_seed(2), size=20), sizes)
    rows = list(range(0, total, 3))
    pseudo_boxes = PseudoBoxes(torch.tensor(rows, dtype=torch.long), torch.arange(len(rows)) % 2, torch.rand(len(rows)))
    labels = assign(proposals, pseudo_boxes, 2, foreground_iou)
    got = assign(proposals, pseudo_boxes, 2, foreground_iou, or_equal=True, ignore_below=ignore_below)
    for r in range(total):
        owner = int(labels.owner[r])
        overlap = iou(proposals.boxes[r : r + 1], labels.boxes[r : r + 1]).item() if owner >= 0 else 0.0
        assert got.cls[r] == (pseudo_boxes.cls[owner] if owner >= 0 and overlap >= foreground_iou else 2)
        assert got.weight[r] == (0 if overlap < ignore_below else labels.weight[r])
    assert torch.equal(got.boxes, labels.boxes) and torch.equal(got.owner, labels.owner)


def test_an_overlap_of_just_the_border_is_foreground() -> None:
    proposals = Proposals(torch.tensor([[0.0, 0, 10, 10], [0, 0, 5, 10], [0, 0, 1, 10], [0, 0, 0.5, 10]]), (4,))
    pseudo_boxes = PseudoBoxes(torch.tensor([0]), torch.tensor([0]), torch.ones(1))
    labels, got = (
        assign(proposals, pseudo_boxes, 1),
        assign(proposals, pseudo_boxes, 1, or_equal=True, ignore_below=0.1),
    )
    assert labels.cls.tolist() == [0, 1, 1, 1]
    assert got.cls.tolist() == [0, 0, 1, 1]
    assert got.weight.tolist() == [1, 1, 1, 0]  # just 0.1 counts


def test_without_pseudo_boxes_all_is_background_of_no_weight() -> None:
    proposals = Proposals(torch.tensor([[0.0, 0, 10, 10]]), (1,))
    none = torch.zeros(0, dtype=torch.long)
    labels = assign(proposals, PseudoBoxes(none, none, torch.zeros(0)), 2, or_equal=True, ignore_below=0.1)
    assert (labels.cls.tolist(), labels.weight.tolist(), labels.owner.tolist()) == ([2], [0.0], [-1])


def test_boxes_beside_their_rows_are_judged_where_they_are() -> None:
    proposals = Proposals(torch.tensor([[0.0, 0, 10, 10], [20, 0, 30, 10]]), (2,))
    pseudo_boxes = PseudoBoxes(torch.tensor([0]), torch.tensor([0]), torch.ones(1), torch.tensor([[20.0, 0, 30, 10]]))
    labels = assign(proposals, pseudo_boxes, 1, or_equal=True, ignore_below=0.1)
    assert labels.cls.tolist() == [1, 0] and labels.weight.tolist() == [0, 1]
    assert labels.pseudo_boxes is pseudo_boxes


def negatives_with_loops(
    logits: torch.Tensor, tags: list[list[bool]], unsure: list[list[bool]], sizes: tuple[int, ...], hardest: int
) -> float:
    """The loss of certain negatives, by its definition."""
    total, start = 0.0, 0
    for image, size in enumerate(sizes):
        for c in range(len(tags[image])):
            if tags[image][c] or unsure[image][c]:
                continue
            rows = [[math.exp(x) for x in row] for row in logits[start : start + size].tolist()]
            probs = sorted((row[c] / sum(row) for row in rows), reverse=True)[:hardest]
            total += sum(-math.log(1 - p) for p in probs) / max(len(probs), 1)
        start += size
    return total / max(len(sizes), 1)


@pytest.mark.parametrize(
    ("sizes", "hardest"), [((), 1), ((0,), 2), ((1,), 2), ((3, 0, 2), 2), ((6, 4), 1), ((5, 7), 100)]
)
def test_certain_negatives_match_the_definition_written_with_loops(sizes: tuple[int, ...], hardest: int) -> None:
    g = torch.Generator().manual_seed(7)
    logits = torch.randn(sum(sizes), 4, generator=g, dtype=torch.float64, requires_grad=True)
    tags = torch.rand(len(sizes), 3, generator=g) < 0.4
    unsure = ~tags & (torch.rand(len(sizes), 3, generator=g) < 0.3)
    for unknown in (unsure, None):
        got = negative_loss(logits, tags, sizes, hardest=hardest, unsure=unknown)
        known = torch.zeros_like(tags) if unknown is None else unknown
        expected = negatives_with_loops(logits.detach(), tags.tolist(), known.tolist(), sizes, hardest)
        assert got.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_certain_negatives_push_down_the_hardest_proposals_of_absent_classes_alone() -> None:
    logits = torch.tensor([[2.0, 3.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0]], requires_grad=True)
    negative_loss(logits, torch.tensor([[True, False], [True, True]]), (2, 1), hardest=1).backward()
    assert logits.grad is not None
    assert logits.grad[0, 1] > 0 and logits.grad[0, [0, 2]].max() < 0  # a step lowers the absent class
    assert not logits.grad[1:].any()  # easier, or in a photo with all tags


def test_a_certain_mistake_has_a_finite_gradient() -> None:
    logits = torch.tensor([[1000.0, 0.0]], requires_grad=True)
    loss = negative_loss(logits, torch.tensor([[False]]), (1,), hardest=8)
    loss.backward()
    assert loss.isfinite() and logits.grad is not None and logits.grad.isfinite().all()
