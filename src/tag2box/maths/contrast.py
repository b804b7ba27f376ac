"""The weakly supervised contrastive loss (eq. 11-12), as the paper writes it and as its published code does."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor


def wscl(
    embed: Float[Tensor, "M D"],
    cls: Int[Tensor, " M"],
    weight: Float[Tensor, " M"],
    *,
    temperature: float,
    positives: Literal["outside", "inside"] = "outside",
) -> Float[Tensor, ""]:
    """L_wscl (eq. 11-12): pull exemplars of one class together, push other classes away, easy instances first.

    ``outside`` is eq. 11, the mean over positives of log-ratios. ``inside`` is the published code's variant: one
    logarithm of the positives' summed share. An exemplar alone in its class has no positive and adds zero.
    """
    if len(cls) == 0:
        return embed.sum() * 0.0
    logits = embed @ embed.T / temperature  # (M, M)
    others = ~torch.eye(len(cls), dtype=torch.bool, device=cls.device)
    is_positive = (cls[:, None] == cls[None, :]) & others
    count = is_positive.sum(dim=1)
    has_positive = count > 0
    partition = logits.masked_fill(~others, -torch.inf).logsumexp(dim=1)  # (M,)
    if positives == "outside":
        mean_logit = (logits * is_positive).sum(dim=1) / count.clamp(min=1)
        per_exemplar = partition - mean_logit
    else:
        share = logits.masked_fill(~is_positive, -torch.inf).logsumexp(dim=1) - partition
        per_exemplar = -share
    usable = has_positive & partition.isfinite()
    return (torch.where(usable, per_exemplar, 0.0) * weight).sum() / len(cls)
