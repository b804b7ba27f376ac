"""The multiple-instance head: proposal scores and the image-level loss (eq. 1; WSDDN, Bilen and Vedaldi 2016)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

CLAMP = 1e-6
"""Image scores stay this far from 0 and 1 before the logarithm; a smaller margin is a known source of NaN."""


def mil_scores(cls: Float[Tensor, "R c"], det: Float[Tensor, "R c"], sizes: Sequence[int]) -> Float[Tensor, "R c"]:
    """Proposal scores X (eq. 1): softmax over classes times softmax over an image's proposals."""
    over_classes = cls.softmax(dim=1)
    over_boxes = torch.cat([det[:0], *(d.softmax(dim=0) for d in torch.split(det, list(sizes)))])
    return over_classes * over_boxes


def mil_partition(det: Float[Tensor, "R c"], sizes: Sequence[int]) -> Float[Tensor, "N c"]:
    """Log of the second softmax's denominator: log-sum-exp of each image's detection logits; -inf without proposals."""
    return torch.stack([d.logsumexp(dim=0) for d in torch.split(det, list(sizes))]) if sizes else det[:0]


def mil_view_scores(
    cls: Float[Tensor, "m c"], det: Float[Tensor, "m c"], partition: Float[Tensor, "m c"]
) -> Float[Tensor, "m c"]:
    """X of augmented copies: each is weighed against its image's original proposals in the second softmax."""
    return cls.softmax(dim=1) * (det - partition).exp()


def image_scores(scores: Float[Tensor, "R c"], sizes: Sequence[int]) -> Float[Tensor, "N c"]:
    """phi (eq. 1): an image's score for a class is the sum over its proposals."""
    return torch.stack([s.sum(dim=0) for s in torch.split(scores, list(sizes))]) if sizes else scores[:0]


def mil_loss(
    scores: Float[Tensor, "R c"],
    tags: Bool[Tensor, "N c"],
    sizes: Sequence[int],
    *,
    unsure: Bool[Tensor, "N c"] | None = None,
    over_classes: Literal["mean", "sum"] = "mean",
) -> Float[Tensor, ""]:
    """L_mil (eq. 1): binary cross-entropy of image scores, mean over images; an image without proposals adds zero.

    The paper writes a sum over classes; the published numbers come from the mean, which is the default. A class that
    is ``unsure`` in an image adds zero there.
    """
    phi = image_scores(scores, sizes).clamp(CLAMP, 1 - CLAMP)
    wanted = tags.to(phi.dtype)
    entropy = -(wanted * phi.log() + (1 - wanted) * (1 - phi).log())  # (N, c)
    if unsure is not None:
        entropy = entropy.masked_fill(unsure, 0)
    per_image = entropy.mean(dim=1) if over_classes == "mean" else entropy.sum(dim=1)
    has_proposals = per_image.new_tensor([float(size > 0) for size in sizes])
    return (per_image * has_proposals).sum() / max(len(sizes), 1)
