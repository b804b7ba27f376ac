"""Object discovery: sampling sets, the adaptive threshold and the candidates above it (eq. 5-10)."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tag2box.maths.boxes import containment, iou
from tag2box.maths.nms import nms


def top_rows(probs: Float[Tensor, "P C"], present: Int[Tensor, " c"]) -> Int[Tensor, " c"]:
    """The best proposal of each present class of one image (eq. 2), classes in order.

    A proposal that is the top of one class cannot be the top of a later one; with fewer proposals than classes the
    later classes share what there is.
    """
    left = probs[:, present]
    ids = torch.arange(len(probs), device=probs.device)
    tops: list[Tensor] = []
    for scores in left.unbind(dim=1):
        top = torch.where(scores == scores.max(), ids, len(ids)).min()
        top = top.clamp(max=len(ids) - 1)  # nan equals nothing: any row will do, and the loss will tell
        tops.append(top)
        left[top] = -1.0  # below every probability
    return torch.stack(tops) if tops else present.new_zeros(0)


def neighbours(boxes: Float[Tensor, "P 4"], tops: Int[Tensor, " K"], threshold: float) -> Int[Tensor, " m"]:
    """IoU sampling (eq. 5): the union over teachers of the proposals that overlap a teacher's top proposal."""
    near = (iou(boxes, boxes[tops]) >= threshold).any(dim=1)
    near[tops] = True
    return near.nonzero().flatten()


def adaptive_threshold(top: Float[Tensor, " D"], exemplars: Float[Tensor, "M D"]) -> Float[Tensor, ""]:
    """tau (eq. 9): the mean similarity of the top proposal with the exemplars of its class."""
    if len(exemplars) == 0:
        return top.new_ones(())
    return (exemplars @ top).mean()


def is_candidate(
    similarity: Float[Tensor, " P"], threshold: Float[Tensor, ""], rivals: Float[Tensor, "P r"]
) -> Bool[Tensor, " P"]:
    """Candidates (eq. 10): more similar to the top proposal than tau, and than to any rival class's top proposal.

    Pass no rival columns for the paper's rule, which knows none.
    """
    close = similarity > threshold
    return close & (similarity[:, None] > rivals).all(dim=1)


def keep_apart(
    boxes: Float[Tensor, "P 4"], scores: Float[Tensor, " P"], candidate: Bool[Tensor, " P"], top: int, nms_iou: float
) -> Int[Tensor, " s"]:
    """Pseudo ground truth of one class: NMS over its candidates by teacher score, the top proposal first and kept."""
    ranked = scores.clone()
    ranked[top] = torch.inf
    rows = candidate.clone()
    rows[top] = True
    ids = rows.nonzero().flatten()
    return ids[nms(boxes[ids], ranked[ids], nms_iou)]


def drop_parts(boxes: Float[Tensor, "s 4"], inside: float) -> Int[Tensor, " k"]:
    """Rows of boxes, best first, none of which lies inside another by more than a share of its area; the better stay.

    A wheel hardly overlaps the car it belongs to, by IoU, so NMS leaves it; here it goes.
    """
    within = (containment(boxes, boxes) > inside).tolist()  # (s, s)
    left: list[int] = []
    for row, is_within in enumerate(within):
        if not any(is_within[better] for better in left):
            left.append(row)
    return torch.tensor(left, dtype=torch.long, device=boxes.device)
