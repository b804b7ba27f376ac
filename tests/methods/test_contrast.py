from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import golden_names, load_golden
from tag2box.methods import wscl as contrast
from tag2box.methods.wscl import Contrast, no_exemplars, relative_difficulty, wscl
from tag2box.types import Exemplars


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


def loop_relative(omega: list[float], group: list[int]) -> list[float]:
    """Each weight over the mean weight of its group, one at a time."""
    found = []
    for own, number in zip(omega, group, strict=True):
        members = [w for w, other in zip(omega, group, strict=True) if other == number]
        mean = sum(members) / len(members)
        found.append(own / mean if mean > 0 else 0.0)
    return found


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.001, 0.25, 1.0]), st.integers(0, 3)), max_size=8))
def test_relative_difficulty_matches_the_loop_and_has_a_mean_of_one(pairs: list[tuple[float, int]]) -> None:
    omega, group = [w for w, _ in pairs], [g for _, g in pairs]
    found = relative_difficulty(torch.tensor(omega), torch.tensor(group, dtype=torch.long))
    assert found.tolist() == pytest.approx(loop_relative(omega, group), rel=1e-5)
    for number in set(group):
        mean = found[torch.tensor(group) == number].mean().item()
        assert mean == pytest.approx(1, rel=1e-5) or mean == 0


@pytest.mark.parametrize("omega", ["share", "batch", "pair"])
def test_the_loss_has_the_weights_of_its_setting(omega: Literal["share", "batch", "pair"]) -> None:
    """Rows 0 to 5 are proposals of two photos; the same class in two photos is two pairs."""
    g = torch.Generator().manual_seed(3)
    embed = torch.nn.functional.normalize(torch.randn(8, 5, generator=g), dim=1)
    cls, rows = torch.tensor([0, 1, 0, 0, 1, 2, 2, 0]), torch.tensor([0, 0, 1, 4, 2, 5, 5, 3])
    images, weight = torch.tensor([0, 0, 0, 1, 1, 1]), torch.rand(8, generator=g)
    groups = {
        "batch": [0] * 8,
        "pair": [3 * int(images[row]) + c for row, c in zip(rows.tolist(), cls.tolist(), strict=True)],
    }
    wanted = weight.tolist() if omega == "share" else loop_relative(weight.tolist(), groups[omega])
    got = Contrast(omega=omega)(Exemplars(embed, cls, weight, rows), images)
    assert got.item() == pytest.approx(with_loops(embed, cls.tolist(), wanted, 0.2, inside=False), rel=1e-5)


@pytest.mark.parametrize("omega", ["share", "batch", "pair"])
def test_without_exemplars_every_weighting_gives_zero(omega: Literal["share", "batch", "pair"]) -> None:
    assert Contrast(omega=omega)(no_exemplars(torch.zeros(3, 4)), torch.zeros(3, dtype=torch.long)).item() == 0


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


def all_at_once(embed: Tensor, cls: Tensor, weight: Tensor, *, temperature: float, positives: str) -> Tensor:
    """The loss with all |S|^2 logits in one table, differentiated by torch."""
    logits = embed @ embed.T / temperature
    others = ~torch.eye(len(cls), dtype=torch.bool)
    is_positive = (cls[:, None] == cls) & others
    partition = logits.masked_fill(~others, -torch.inf).logsumexp(dim=1)
    if positives == "outside":
        inner = (logits * is_positive).sum(dim=1) / is_positive.sum(dim=1).clamp(min=1)
    else:
        inner = logits.masked_fill(~is_positive, -torch.inf).logsumexp(dim=1)
    has_positive = is_positive.any(dim=1)
    return ((partition - inner)[has_positive] * weight[has_positive]).sum() / len(cls)


def exemplars(count: int, classes: int, dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings that lean to the middle of their class; the last class has one member."""
    cls = torch.randint(0, classes, (count,))
    cls[count // 2] = classes
    centres = torch.randn(classes + 1, dim, dtype=dtype)
    embed = torch.nn.functional.normalize(centres[cls] + torch.randn(count, dim, dtype=dtype), dim=1)
    return embed.requires_grad_(), cls, torch.rand(count, dtype=dtype)


def both(case: tuple[Tensor, Tensor, Tensor], temperature: float, positives: str) -> list[tuple[Tensor, Tensor]]:
    results = []
    for loss in (wscl, all_at_once):
        value = loss(*case, temperature=temperature, positives=positives)
        results.append((value.detach(), torch.autograd.grad(value * 3, case[0])[0]))
    return results


@pytest.mark.parametrize("positives", ["outside", "inside"])
@pytest.mark.parametrize("side", [1, 4, 7, 1024])
@pytest.mark.parametrize("narrow", [0.0, 40.0])
def test_blocks_change_neither_the_loss_nor_its_gradient(
    positives: str, side: int, narrow: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1e-12 in double precision, whatever the blocks, with shared exponentials and without."""
    monkeypatch.setattr(contrast, "_SIDE", side)
    monkeypatch.setattr(contrast, "_NARROW", narrow)
    ours, twin = both(exemplars(23, 4, 6, torch.float64), 0.2, positives)
    torch.testing.assert_close(ours, twin, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("positives", ["outside", "inside"])
@pytest.mark.parametrize("temperature", [1e-3, 0.02, 0.2, 5.0])
def test_single_precision_stays_close_at_any_temperature(positives: str, temperature: float) -> None:
    """1e-4 relative at two thousand exemplars, 1e-3 at the coldest, where logits reach a thousand."""
    ours, twin = both(exemplars(2000, 5, 32, torch.float32), temperature, positives)
    torch.testing.assert_close(ours[0], twin[0], atol=1e-5, rtol=1e-4)
    assert (ours[1] - twin[1]).norm() <= max(1e-4, 1e-6 / temperature) * twin[1].norm()


@pytest.mark.parametrize("positives", ["outside", "inside"])
def test_sums_are_in_single_precision_under_autocast(positives: str) -> None:
    embed, cls, weight = exemplars(300, 4, 16, torch.float32)
    half = embed.detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = wscl(half, cls, weight, temperature=0.2, positives=positives)
        loss.backward()
    exact = half.detach().float().requires_grad_()
    expected = wscl(exact, cls, weight, temperature=0.2, positives=positives)
    expected.backward()
    assert loss.dtype == torch.float32 and loss.item() == expected.item()
    assert half.grad.dtype == torch.bfloat16
    assert torch.equal(half.grad, exact.grad.bfloat16())


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        self.elements = max(self.elements, out.numel() if isinstance(out, Tensor) else 0)
        return out


@pytest.mark.parametrize("positives", ["outside", "inside"])
def test_no_tensor_is_larger_than_a_block_or_the_embeddings(positives: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contrast, "_SIDE", 16)
    embed, cls, weight = exemplars(200, 3, 4, torch.float32)
    with Largest() as largest:
        wscl(embed, cls, weight, temperature=0.2, positives=positives).backward()
    assert largest.elements == embed.numel()  # 800, where all pairs would be 40,000 and a block is 256


def test_a_nan_is_reported() -> None:
    embed = torch.tensor([[1.0, 0], [math.nan, 0], [0, 1]])
    assert wscl(embed, torch.tensor([0, 0, 1]), torch.ones(3), temperature=0.2).isnan()


@pytest.mark.parametrize("positives", ["outside", "inside"])
@pytest.mark.parametrize("temperature", [0.2, 0.001])  # narrow and wide logits
def test_what_is_kept_for_backward_changes_no_bit(
    positives: Literal["outside", "inside"], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = torch.Generator().manual_seed(0)
    embed = torch.nn.functional.normalize(torch.randn(23, 5, generator=g), dim=1)
    cls, weight = torch.arange(23) % 4, torch.rand(23, generator=g)
    monkeypatch.setattr(contrast, "_SIDE", 8)
    found = []
    for kept in (0, 300, 1 << 20):  # none, the first block, all
        monkeypatch.setattr(contrast, "_KEPT_BYTES", kept)
        leaf = embed.clone().requires_grad_()
        loss = wscl(leaf, cls, weight, temperature=temperature, positives=positives)
        (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
        (again,) = torch.autograd.grad(loss, leaf)
        assert torch.equal(first, again)
        found.append((loss.detach(), first))
    assert all(torch.equal(ours, twin) for one in found[1:] for ours, twin in zip(one, found[0], strict=True))
