"""Scores, labels and losses that all methods share.

MIL scores and the image-level loss (eq. 1; WSDDN, Bilen and Vedaldi, CVPR 2016), pseudo labels from pseudo boxes
(eq. 2) and the two losses of a refinement stage on them (eq. 3-4; OICR, Tang et al., CVPR 2017), and one on photos
without a tag, which is not of a paper. Equation numbers are those of OD-WSCL.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from tag2box.ops import boxes as box_ops
from tag2box.types import Proposals, PseudoBoxes, PseudoLabels

CLAMP = 1e-6
"""Image scores stay this far from 0 and 1 before the logarithm; a smaller margin is a known source of NaN."""

_MIN_LENGTH = 1e-6  # shorter rows have no direction


def at_least_single(x: Tensor) -> Tensor:
    """Half precision cast to single precision, other dtypes unchanged: for sums, softmaxes and logarithms."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def unit_rows(x: Float[Tensor, "R D"]) -> Float[Tensor, "R D"]:
    """L2-normalised rows. A row of length zero stays zero and gets no gradient: its direction is undefined.

    Divided by a small epsilon instead, as is common, its gradient would outweigh all others by orders of magnitude.

    >>> unit_rows(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]])
    """
    length = x.norm(dim=1, keepdim=True)
    return torch.where(length > _MIN_LENGTH, x / length.clamp(min=_MIN_LENGTH), torch.zeros_like(x))


def first_argmax(x: Float[Tensor, "a b"]) -> Int[Tensor, " a"]:
    """Column of each row's maximum; the first one on ties, on every device."""
    columns = torch.arange(x.shape[1], device=x.device).expand_as(x)
    return torch.where(x == x.max(dim=1, keepdim=True).values, columns, x.shape[1]).min(dim=1).values


# ---------------------------------------------------------------- multiple-instance learning (MIL)


def mil_scores(cls: Float[Tensor, "R c"], det: Float[Tensor, "R c"], sizes: Sequence[int]) -> Float[Tensor, "R c"]:
    """Proposal scores X (eq. 1): softmax over classes times softmax over an image's proposals.

    >>> mil_scores(torch.zeros(3, 2), torch.zeros(3, 2), sizes=[1, 2])
    tensor([[0.5000, 0.5000],
            [0.2500, 0.2500],
            [0.2500, 0.2500]])
    """
    over_classes = cls.softmax(dim=1)
    over_boxes = torch.cat([det[:0], *(d.softmax(dim=0) for d in torch.split(det, list(sizes)))])
    return over_classes * over_boxes


def mil_partition(det: Float[Tensor, "R c"], sizes: Sequence[int]) -> Float[Tensor, "N c"]:
    """Log of the second softmax's denominator: log-sum-exp of each image's detection logits; -inf without proposals."""
    return torch.stack([d.logsumexp(dim=0) for d in torch.split(det, list(sizes))]) if sizes else det[:0]


def mil_view_scores(
    cls: Float[Tensor, "m c"], det: Float[Tensor, "m c"], partition: Float[Tensor, "m c"]
) -> Float[Tensor, "m c"]:
    """X of augmented copies; the second softmax is normalised by the original proposals of the image."""
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
    target = tags.to(phi.dtype)
    entropy = -(target * phi.log() + (1 - target) * (1 - phi).log())  # (N, c)
    if unsure is not None:
        entropy = entropy.masked_fill(unsure, 0)
    per_image = entropy.mean(dim=1) if over_classes == "mean" else entropy.sum(dim=1)
    has_proposals = per_image.new_tensor([float(size > 0) for size in sizes])
    return (per_image * has_proposals).sum() / max(len(sizes), 1)


# ---------------------------------------------------------------- refinement stages


def assign(
    proposals: Proposals,
    pseudo_boxes: PseudoBoxes,
    num_classes: int,
    foreground_iou: float = 0.5,
    *,
    or_equal: bool = False,
    ignore_below: float = 0.0,
) -> PseudoLabels:
    """Pseudo labels of one stage (eq. 2): every proposal is assigned to the pseudo box of its image with highest IoU.

    Above ``foreground_iou`` it takes the class of the pseudo box, else it is background; either way its loss weight is
    the score of the pseudo box. In an image without pseudo boxes all weights are zero.

    Args:
        or_equal: an IoU of exactly ``foreground_iou`` is foreground too, as in PCL, MIST and later methods.
        ignore_below: proposals with a lower IoU get weight zero: they may show objects without a pseudo box.
    """
    total = sum(proposals.sizes)
    cls = torch.full((total,), num_classes, dtype=torch.long, device=proposals.boxes.device)
    weight = proposals.boxes.new_zeros(total)
    boxes = proposals.boxes.clone()
    owner = torch.full_like(cls, -1)
    pseudo = pseudo_boxes.placed(proposals)
    for span in proposals.spans():
        inside = ((pseudo_boxes.rows >= span.start) & (pseudo_boxes.rows < span.stop)).nonzero().flatten()
        if len(inside) == 0:
            continue
        rows = slice(span.start, span.stop)
        overlap = box_ops.iou(proposals.boxes[rows], pseudo[inside])  # (P, s)
        nearest = first_argmax(overlap)
        best = overlap.gather(1, nearest[:, None]).squeeze(1)
        chosen = inside[nearest]
        is_foreground = best >= foreground_iou if or_equal else best > foreground_iou
        cls[rows] = torch.where(is_foreground, pseudo_boxes.cls[chosen], num_classes)
        weight[rows] = torch.where(best < ignore_below, 0, pseudo_boxes.score[chosen].to(weight.dtype))
        boxes[rows] = pseudo[chosen]
        owner[rows] = chosen
    return PseudoLabels(cls, weight, boxes, pseudo_boxes, owner)


def refine_loss(logits: Float[Tensor, "R c1"], labels: PseudoLabels, sizes: Sequence[int]) -> Float[Tensor, ""]:
    """L_cls of one stage (eq. 3): weighted cross-entropy, mean over an image's proposals, then over images."""
    entropy = functional.cross_entropy(logits, labels.cls, reduction="none")
    return _image_mean(labels.weight * entropy, sizes, sizes)


def box_loss(
    deltas: Float[Tensor, "R c4"],
    proposals: Proposals,
    labels: PseudoLabels,
    divisor: Literal["proposals", "pseudo_boxes"] = "proposals",
) -> Float[Tensor, ""]:
    """L_reg of one stage (eq. 4): weighted smooth-L1 of the labelled class's deltas, on foreground proposals.

    The paper divides by the number of pseudo boxes; the published numbers come from dividing by all proposals.
    """
    num_classes = deltas.shape[1] // 4
    is_foreground = labels.cls < num_classes
    own = labels.cls.clamp(max=max(num_classes - 1, 0))[:, None, None].expand(-1, 1, 4)
    predicted = deltas.reshape(len(deltas), num_classes, 4).gather(1, own).squeeze(1)  # (R, 4)
    target = box_ops.encode(labels.boxes, proposals.boxes)
    error = functional.smooth_l1_loss(predicted, target, reduction="none").sum(dim=1)
    weighted = torch.where(is_foreground, labels.weight * error, error.new_zeros(()))
    divisors = proposals.sizes if divisor == "proposals" else _pseudo_box_counts(proposals, labels.pseudo_boxes)
    return _image_mean(weighted, proposals.sizes, divisors)


def negative_loss(
    logits: Float[Tensor, "R c1"],
    tags: Bool[Tensor, "N C"],
    sizes: Sequence[int],
    *,
    hardest: int,
    unsure: Bool[Tensor, "N C"] | None = None,
) -> Float[Tensor, ""]:
    """Loss of certain negatives of one stage: no proposal of an image shows a class that is not among its tags.

    Per image and absent class, the mean of -log(1 - p) over the ``hardest`` proposals, those with the highest
    probability p; summed over absent classes, mean over images. Classes that are ``unsure`` are not absent.

    >>> tags = torch.tensor([[True, False]])
    >>> negative_loss(torch.zeros(2, 3), tags, [2], hardest=1)  # -log(1 - 1/3)
    tensor(0.4055)
    """
    absent = ~tags if unsure is None else ~(tags | unsure)
    probs = at_least_single(logits).softmax(dim=1)[:, : tags.shape[1]]
    per_image = [probs.new_zeros(())]
    for own, is_absent in zip(torch.split(probs, list(sizes)), absent, strict=True):
        hard = own[:, is_absent].topk(min(hardest, len(own)), dim=0).values
        if hard.numel():
            per_image.append(-(1 - hard).clamp(min=CLAMP).log().mean(dim=0).sum())
    return torch.stack(per_image).sum() / max(len(sizes), 1)


def _image_mean(per_proposal: Float[Tensor, " R"], sizes: Sequence[int], divisors: Sequence[int]) -> Float[Tensor, ""]:
    """Sum within an image over its divisor, then mean over images."""
    sums = torch.stack([x.sum() for x in per_proposal.split(list(sizes))])
    return (sums / sums.new_tensor([max(d, 1) for d in divisors])).sum() / max(len(sizes), 1)


def _pseudo_box_counts(proposals: Proposals, pseudo_boxes: PseudoBoxes) -> tuple[int, ...]:
    counts = torch.bincount(proposals.image_ids()[pseudo_boxes.rows], minlength=len(proposals.sizes))
    return tuple(int(n) for n in counts)
