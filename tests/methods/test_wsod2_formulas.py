from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from strategies import random_boxes
from tag2box.methods.wsod2 import close_to_best, mix_evidence
from tag2box.ops.losses import assign
from tag2box.types import Proposals, PseudoBoxes, PseudoLabels


@pytest.mark.parametrize(
    ("scores", "share", "expected"),
    [
        ([], 0.9, []),
        ([0.0], 0.9, [0]),
        ([0.5], 1.0, [0]),
        ([0.5, 0.46, 0.44, 0.5], 0.9, [0, 1, 3]),
        ([0.5, 0.46], 1.0, [0]),
        ([0.5, 0.0], 0.0, [0, 1]),
    ],
)
def test_what_is_close_to_the_best(scores: list[float], share: float, expected: list[int]) -> None:
    assert close_to_best(torch.tensor(scores), share).tolist() == expected


def some_labels(seed: int, sizes: tuple[int, ...], seeded: bool) -> PseudoLabels:
    generator = torch.Generator().manual_seed(seed)
    proposals = Proposals(random_boxes(sum(sizes), generator, size=20), sizes)
    rows = torch.tensor([0] if seeded else [], dtype=torch.long)
    pseudo_boxes = PseudoBoxes(rows, torch.ones_like(rows), torch.rand(len(rows), generator=generator))
    return assign(proposals, pseudo_boxes, 2, 0.2)


@given(st.integers(0, 999), st.sampled_from([(1,), (5,), (4, 0, 3)]), st.booleans(), st.floats(0, 1))
def test_weights_match_the_loop(seed: int, sizes: tuple[int, ...], seeded: bool, trust: float) -> None:
    labels, total = some_labels(seed, sizes, seeded), sum(sizes)
    evidence, belief = torch.rand(total), torch.rand(total)
    mixed = mix_evidence(labels, evidence, belief, trust=trust, num_classes=2)
    for r in range(total):
        expected = 1.0 if labels.cls[r] == 2 else trust * belief[r].item() + (1 - trust) * evidence[r].item()
        assert mixed.weight[r].item() == pytest.approx(expected if labels.owner[r] >= 0 else 0.0, abs=1e-6)
    assert torch.equal(mixed.cls, labels.cls) and torch.equal(mixed.owner, labels.owner)


@pytest.mark.parametrize("trust", [0.0, 1.0])
def test_evidence_alone_or_the_detector_alone(trust: float) -> None:
    labels = some_labels(3, (6,), True)
    evidence, belief = torch.full((6,), 0.25), torch.full((6,), 0.75)
    weight = mix_evidence(labels, evidence, belief, trust=trust, num_classes=2).weight[labels.cls < 2]
    assert len(weight) >= 1
    assert weight.tolist() == [0.75 if trust else 0.25] * len(weight)


def test_no_proposals() -> None:
    labels = some_labels(0, (0,), False)
    assert mix_evidence(labels, torch.zeros(0), torch.zeros(0), trust=0.5, num_classes=2).weight.shape == (0,)
