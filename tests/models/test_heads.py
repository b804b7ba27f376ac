from __future__ import annotations

import pytest
import torch
from torch import nn

from tag2box.models.detector import HEAD_STD, MilHead, RefineHead, SimilarityHead


def test_a_stage_has_a_background_column_and_deltas_of_each_class() -> None:
    head = RefineHead(7, 3, regress=True)
    assert head.box is not None
    assert (head.cls.out_features, head.box.out_features) == (4, 12)
    assert RefineHead(7, 3, regress=False).box is None


def test_the_two_streams_of_mil_have_weights_of_their_own() -> None:
    head = MilHead(7, 3)
    assert head.cls.weight.shape == head.det.weight.shape == (3, 7)
    assert not torch.equal(head.cls.weight, head.det.weight)


def test_the_temperature_divides_detection_logits_alone() -> None:
    head, warm, vector = MilHead(7, 3), MilHead(7, 3, temperature=2.0), torch.randn(4, 7)
    warm.load_state_dict(head.state_dict())
    (cls, det), (warm_cls, warm_det) = head.logits(vector), warm.logits(vector)
    assert torch.equal(cls, head.cls(vector)) and torch.equal(det, head.det(vector))
    assert torch.equal(warm_cls, cls) and torch.equal(warm_det, det / 2)


def test_fresh_scores_are_nearly_uniform() -> None:
    head = RefineHead(4096, 20, regress=True)
    for layer in (head.cls, head.box):
        assert isinstance(layer, nn.Linear)
        assert layer.weight.std().item() == pytest.approx(HEAD_STD, rel=0.05)
        assert layer.weight.mean().item() == pytest.approx(0.0, abs=HEAD_STD / 20)
        assert not layer.bias.any()
    probs = head.cls(torch.rand(5, 4096)).softmax(dim=1)
    assert probs.sub(1 / 21).abs().max() < 0.02


@pytest.mark.parametrize("rows", [0, 1, 6])
def test_embeddings_have_unit_length(rows: int) -> None:
    embed = SimilarityHead(9, 4)(torch.randn(rows, 9))
    assert embed.shape == (rows, 4)
    assert torch.allclose(embed.norm(dim=1), torch.ones(rows), atol=1e-6)


def test_a_vector_of_zeros_has_no_direction_and_no_nan() -> None:
    head = SimilarityHead(9, 4)
    vector = torch.zeros(1, 9, requires_grad=True)
    embed = head(vector)
    embed.sum().backward()
    assert embed.tolist() == [[0.0] * 4]
    assert vector.grad is not None
    assert torch.isfinite(vector.grad).all()


def test_the_similarity_head_matches_its_formula() -> None:
    head, vector = SimilarityHead(5, 3), torch.randn(2, 5)
    for row, embed in zip(vector, head(vector), strict=True):
        hidden = (head.hidden.weight @ row + head.hidden.bias).clamp(min=0)
        out = head.out.weight @ hidden + head.out.bias
        assert torch.allclose(embed, out / out.pow(2).sum().sqrt(), atol=1e-6)


def test_kaiming_spread_of_the_similarity_head() -> None:
    head = SimilarityHead(400, 200)
    for layer, fan_out in ((head.hidden, 400), (head.out, 200)):
        assert layer.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.05)
        assert not layer.bias.any()
