"""Loss weights that follow the student: more for what is hard, less for what is dominant (OIM, Lin et al. 2020)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from tag2box.types import PseudoLabels

HARD_FROM = 0.3
"""A proposal that has less than this share of its weight is not hard but probably wrong: its weight stays."""


def reweighted(
    logits: Float[Tensor, "R c1"], labels: PseudoLabels, *, hard_gain: float, seed_cut: float
) -> Float[Tensor, " R"]:
    """Weights of proposals by q = p / w, the student's probability of the label over the weight.

    Foreground with 0.3 <= q < 1 counts (1 + ``hard_gain``) times: it belongs to an object and is not seen as one yet.
    A seed with other foreground around it counts (1 - ``seed_cut``) times, so that its surroundings catch up.
    """
    p = logits.detach().softmax(dim=1).gather(1, labels.cls[:, None]).squeeze(1)
    q = p / labels.weight  # inf or nan where the weight is zero, which is then neither hard nor anything
    is_foreground = labels.cls < logits.shape[1] - 1
    is_hard = is_foreground & (q >= HARD_FROM) & (q < 1)
    members = labels.owner[is_foreground].bincount(minlength=len(labels.seeds))
    is_dominant = torch.zeros_like(is_foreground)
    is_dominant[labels.seeds.rows[members > 1]] = True
    factor = torch.where(is_hard, 1 + hard_gain, 1.0)
    return labels.weight * torch.where(is_dominant & is_foreground, 1 - seed_cut, factor)
