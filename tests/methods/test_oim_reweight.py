from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from strategies import random_boxes
from tag2box.methods.oim import reweighted
from tag2box.ops.losses import assign
from tag2box.types import Proposals, PseudoBoxes, PseudoLabels


def some(total: int, pseudo_boxes: int, seed: int) -> tuple[torch.Tensor, PseudoLabels]:
    """Logits and labels of one image, few boxes so close that clusters form."""
    g = torch.Generator().manual_seed(seed)
    proposals = Proposals(random_boxes(total, g, size=20), (total,))
    rows = torch.randperm(total, generator=g)[:pseudo_boxes]
    found = PseudoBoxes(rows, torch.randint(0, 2, (len(rows),), generator=g), torch.rand(len(rows), generator=g))
    return torch.randn(total, 3, generator=g), assign(proposals, found, 2, 0.3)


def weights_with_loops(logits: torch.Tensor, labels: PseudoLabels, gain: float, cut: float) -> list[float]:
    """Proposal after proposal, by the definition."""
    out = []
    for r in range(len(logits)):
        w, c = float(labels.weight[r]), int(labels.cls[r])
        p = float(logits[r].softmax(dim=0)[c])
        factor = 1.0
        if c < 2:
            if w > 0 and 0.3 <= p / w < 1:
                factor = 1 + gain
            for s, row in enumerate(labels.pseudo_boxes.rows.tolist()):
                others = [o for o in range(len(logits)) if labels.owner[o] == s and labels.cls[o] < 2 and o != r]
                if row == r and others:
                    factor = 1 - cut
        out.append(w * factor)
    return out


@given(st.integers(0, 12), st.integers(0, 4), st.integers(0, 10_000), st.sampled_from([0.0, 0.2, 1.0]), st.floats(0, 1))
def test_weights_match_the_definition_written_with_loops(
    total: int, pseudo_boxes: int, seed: int, gain: float, cut: float
) -> None:
    logits, labels = some(total, pseudo_boxes, seed)
    got = reweighted(logits, labels, hard_gain=gain, seed_cut=cut)
    assert got.tolist() == pytest.approx(weights_with_loops(logits, labels, gain, cut), rel=1e-5, abs=1e-7)


@given(st.integers(0, 12), st.integers(0, 4), st.integers(0, 10_000))
def test_without_gain_and_cut_nothing_changes(total: int, pseudo_boxes: int, seed: int) -> None:
    logits, labels = some(total, pseudo_boxes, seed)
    assert torch.equal(reweighted(logits, labels, hard_gain=0.0, seed_cut=0.0), labels.weight)


@pytest.mark.parametrize(
    ("p", "factor"), [(0.05, 1.0), (0.16, 1.2), (0.3, 1.2), (0.49, 1.2), (0.6, 1.0)]
)  # of a weight of 0.5: too far, hard, hard, hard, seen
def test_what_is_hard(p: float, factor: float) -> None:
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 9], [50, 50, 60, 60]])
    labels = assign(Proposals(boxes, (3,)), PseudoBoxes(torch.tensor([0]), torch.tensor([0]), torch.tensor([0.5])), 1)
    logits = torch.tensor([[p, 1 - p]] * 3).log()
    got = reweighted(logits, labels, hard_gain=0.2, seed_cut=0.2)
    assert got.tolist() == pytest.approx([0.4, 0.5 * factor, 0.5])  # the pseudo box, its neighbour, background


def test_a_pseudo_box_alone_is_not_dominant_and_no_gradient_passes() -> None:
    boxes = torch.tensor([[0.0, 0, 10, 10], [50, 50, 60, 60]])
    labels = assign(Proposals(boxes, (2,)), PseudoBoxes(torch.tensor([0]), torch.tensor([0]), torch.tensor([0.5])), 1)
    logits = torch.tensor([[4.0, 0.0], [0.0, 0.0]], requires_grad=True)
    got = reweighted(logits, labels, hard_gain=0.2, seed_cut=0.2)
    assert got.tolist() == pytest.approx([0.5, 0.5])
    assert not got.requires_grad
