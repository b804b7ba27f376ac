from __future__ import annotations

import math

import pytest
import torch

from tag2box.ops.losses import image_scores, mil_loss, mil_partition, mil_scores, mil_view_scores


def scores_with_loops(cls: list, det: list, sizes: tuple[int, ...]) -> list:
    """Eq. (1), a number at a time."""
    out, start = [], 0
    for size in sizes:
        rows = range(start, start + size)
        for r in rows:
            over_classes = [math.exp(x) / sum(math.exp(y) for y in cls[r]) for x in cls[r]]
            over_boxes = [math.exp(det[r][c]) / sum(math.exp(det[q][c]) for q in rows) for c in range(len(det[r]))]
            out.append([a * b for a, b in zip(over_classes, over_boxes, strict=True)])
        start += size
    return out


@pytest.mark.parametrize("sizes", [(0,), (1,), (3, 0, 2), (4, 5)])
@pytest.mark.parametrize("classes", [1, 4])
def test_scores_and_loss_match_the_definition_written_with_loops(sizes: tuple[int, ...], classes: int) -> None:
    cls, det = torch.randn(2, sum(sizes), classes, dtype=torch.float64)
    tags = torch.rand(len(sizes), classes) > 0.5
    got = mil_scores(cls, det, sizes)
    expected = torch.tensor(scores_with_loops(cls.tolist(), det.tolist(), sizes), dtype=torch.float64).reshape(
        -1, classes
    )
    torch.testing.assert_close(got, expected)

    loss, start = 0.0, 0
    for n, size in enumerate(sizes):
        rows = expected[start : start + size]
        start += size
        for c in range(classes):
            phi = min(max(rows[:, c].sum().item(), 1e-6), 1 - 1e-6)
            entropy = -math.log(phi) if tags[n, c] else -math.log(1 - phi)
            loss += entropy / classes / len(sizes) if size else 0.0  # an image without proposals adds nothing
    assert mil_loss(got, tags, sizes).item() == pytest.approx(loss, abs=1e-5)
    assert mil_loss(got, tags, sizes, over_classes="sum").item() == pytest.approx(loss * classes, abs=1e-4)


@pytest.mark.parametrize("background", [0, 1])
def test_an_unsure_class_adds_nothing_and_pulls_nothing(background: int) -> None:
    cls, det = torch.randn(5, 3 + background, requires_grad=True), torch.randn(5, 3 + background)
    tags, unsure = torch.zeros(2, 3 + background, dtype=torch.bool), torch.zeros(2, 3 + background, dtype=torch.bool)
    tags[0, 0] = True
    unsure[:, 1] = True
    mil = mil_scores(cls, det, (3, 2))
    loss = mil_loss(mil, tags, (3, 2), unsure=unsure, over_classes="sum")
    without = [c for c in range(3 + background) if c != 1]
    assert loss.item() == pytest.approx(
        mil_loss(mil[:, without], tags[:, without], (3, 2), over_classes="sum").item(), abs=1e-6
    )
    (slope,) = torch.autograd.grad(loss, mil, retain_graph=True)
    assert (slope[:, 1] == 0).all() and (slope[:, 0] != 0).any()


def test_scores_of_one_image_sum_to_at_most_one_over_everything() -> None:
    scores = mil_scores(torch.randn(7, 5) * 9, torch.randn(7, 5) * 9, (4, 3))
    assert (image_scores(scores, (4, 3)).sum(dim=1) <= 5 + 1e-5).all()
    assert (image_scores(scores, (4, 3)) <= 1 + 1e-6).all()


def test_an_unchanged_copy_scores_as_its_proposal() -> None:
    cls, det, sizes = torch.randn(6, 3), torch.randn(6, 3), (4, 2)
    rows = torch.tensor([0, 3, 5])
    copies = mil_view_scores(cls[rows], det[rows], mil_partition(det, sizes)[[0, 0, 1]])
    torch.testing.assert_close(copies, mil_scores(cls, det, sizes)[rows])


def test_no_copies_no_scores() -> None:
    assert mil_view_scores(torch.zeros(0, 3), torch.zeros(0, 3), torch.zeros(0, 3)).shape == (0, 3)
    assert mil_partition(torch.zeros(0, 3), ()).shape == (0, 3)
    assert mil_partition(torch.zeros(0, 3), (0,)).isneginf().all()


def test_loss_and_gradient_stay_finite_at_certainty() -> None:
    cls = (
        torch.full((2, 2), 0.0).index_put((torch.tensor([0]), torch.tensor([0])), torch.tensor(200.0)).requires_grad_()
    )
    det = (torch.eye(2) * 200).requires_grad_()
    loss = mil_loss(mil_scores(cls, det, (2,)), torch.tensor([[False, True]]), (2,))
    loss.backward()
    assert loss.isfinite() and cls.grad is not None and cls.grad.isfinite().all()
