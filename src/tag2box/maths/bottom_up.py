"""Bottom-up evidence: what the photo itself says of boxes, mixed into what the detector learns from (WSOD2, 2019)."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tag2box.types import PseudoLabels


def close_to_best(scores: Float[Tensor, " P"], share: float) -> Int[Tensor, " s"]:
    """Proposals whose score is at least a share of the best one's; the best of several is always among them."""
    if len(scores) == 0:
        return torch.zeros(0, dtype=torch.long, device=scores.device)
    return (scores >= share * scores.max()).nonzero().flatten()


def mix_evidence(
    labels: PseudoLabels, evidence: Float[Tensor, " R"], belief: Float[Tensor, " R"], *, trust: float, num_classes: int
) -> PseudoLabels:
    """Labels whose foreground weighs a belief + (1 - a) bu, and whose background weighs 1.

    Proposals of an image without seeds keep no weight.

    Args:
        belief: what the detector thinks of each foreground proposal.
        trust: a, from 0 (evidence alone) to 1 (the detector alone).
    """
    foreground = trust * belief + (1 - trust) * evidence.to(belief.dtype)
    weight = torch.where(labels.cls < num_classes, foreground, torch.ones_like(belief))
    return replace(labels, weight=torch.where(labels.owner >= 0, weight, torch.zeros_like(weight)))
