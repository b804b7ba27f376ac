from __future__ import annotations

import math

import pytest
import torch

from conftest import golden_names, load_golden
from tag2box.maths.contrast import wscl


def with_loops(s: torch.Tensor, t: list[int], omega: list[float], eps: float, inside: bool) -> float:
    """Eq. (11-12), a pair at a time."""
    total, size = 0.0, len(t)
    for i in range(size):
        others = [j for j in range(size) if j != i]
        positives = [j for j in others if t[j] == t[i]]
        if not positives:
            continue
        e = {j: math.exp(float(s[i] @ s[j]) / eps) for j in others}
        if inside:
            loss = -math.log(sum(e[j] for j in positives) / sum(e.values()))
        else:
            loss = -sum(math.log(e[j] / sum(e.values())) for j in positives) / len(positives)
        total += omega[i] * loss
    return total / size


@pytest.mark.parametrize("classes", [[], [0], [0, 1], [0, 0], [0, 1, 0, 2, 1, 0, 0]])
@pytest.mark.parametrize("positives", ["outside", "inside"])
@pytest.mark.parametrize("temperature", [0.05, 0.2, 1.0])
def test_wscl_matches_the_definition_written_with_loops(classes: list[int], positives: str, temperature: float) -> None:
    embed = torch.nn.functional.normalize(torch.randn(len(classes), 6, dtype=torch.float64), dim=1)
    omega = torch.rand(len(classes), dtype=torch.float64)
    got = wscl(embed, torch.tensor(classes, dtype=torch.long), omega, temperature=temperature, positives=positives)
    expected = with_loops(embed, classes, omega.tolist(), temperature, positives == "inside") if classes else 0.0
    assert got.item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("positives", ["outside", "inside"])
def test_gradients_are_finite_and_right(positives: str) -> None:
    cls, omega = torch.tensor([0, 1, 0, 2]), torch.rand(4, dtype=torch.float64)
    embed = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda e: wscl(e, cls, omega, temperature=0.3, positives=positives), embed)


@pytest.mark.parametrize("cls", [[], [3], [0, 1, 2]])
def test_without_positives_the_loss_and_its_gradient_are_zero(cls: list[int]) -> None:
    embed = torch.randn(len(cls), 3, requires_grad=True)
    loss = wscl(embed, torch.tensor(cls, dtype=torch.long), torch.ones(len(cls)), temperature=0.2)
    loss.backward()
    assert loss.item() == 0 and (embed.grad == 0).all()


@pytest.mark.parametrize("name", golden_names("odwscl_loss_*.npz"))
def test_losses_match_the_reference_on_its_exemplars(name: str) -> None:
    """Tolerance: 1e-4 relative, float32. The reference's plain variant divides by positives + self."""
    g = load_golden(name)
    embed, cls = torch.as_tensor(g["contra_features"]), torch.as_tensor(g["contra_row_ids"][:, 0])
    eps, scale = float(g["cfg_temp"]), float(g["cfg_lmda"])
    inside = wscl(embed, cls, torch.as_tensor(g["instance_weights_code_order"]), temperature=eps, positives="inside")
    assert inside.item() * scale == pytest.approx(float(g["out_supconv2_loss_sim"]), rel=1e-4, abs=1e-7)
    aligned = wscl(embed, cls, torch.as_tensor(g["instance_weights_aligned"]), temperature=eps, positives="inside")
    expected = float(g["extra_loss_sim_supconv2_if_weights_were_aligned"])
    assert aligned.item() * scale == pytest.approx(expected, rel=1e-4, abs=1e-7)
    size = torch.bincount(cls)[cls].float()
    outside = wscl(embed, cls, (size - 1) / size, temperature=eps, positives="outside")
    assert outside.item() * scale == pytest.approx(float(g["out_supcon_loss_sim"]), rel=1e-4)
