"""Object discovery: sampling sets, the adaptive threshold and the candidates above it (eq. 5-10)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from tag2box.methods.oicr import Oicr, argmax_pseudo_boxes
from tag2box.ops.boxes import containment, iou
from tag2box.ops.nms import nms
from tag2box.ops.refine import assign
from tag2box.types import LabelerInput, Labeling, PseudoBoxes, Requirements


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


@dataclass(frozen=True, kw_only=True)
class Discovery:
    """Candidates above an adaptive similarity threshold, thinned by NMS, are the pseudo ground truth (eq. 9-10)."""

    kind: Literal["discovery"] = "discovery"
    criterion: Literal["similarity", "score_fixed", "score_adaptive"] = "similarity"
    """What a candidate is judged by: similarity to the top proposal, or (appendix C) its classification score."""
    score_threshold: Annotated[float, Field(ge=0, le=1)] = 0.4
    """The fixed threshold of ``criterion = "score_fixed"``; the paper's best is 0.4."""
    exclusive: bool = True
    """A candidate must resemble its own top proposal more than those of the other classes in the image."""
    nms_iou: Annotated[float, Field(ge=0, le=1)] = 0.1
    """tau_nms: pseudo boxes of one class overlap no more than this."""
    inside: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Where of two pseudo boxes of a class one lies inside the other by more than this share of its area, one goes.

    It is a part of the other, or its surroundings; the better stays. 1 drops none (the paper). NMS cannot tell: a
    wheel's IoU with its car is small.
    """
    foreground_iou: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """A proposal joins its nearest seed above this IoU; others are background."""
    begin: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the training before which the top proposals alone are taken (not in the paper, whose training is long).

    Similarity has to be learnt before it can be trusted; in a short training that takes a good part of it.
    """

    @property
    def requirements(self) -> Requirements:
        """A fixed score threshold needs no exemplars; the two adaptive ones do."""
        return Requirements(exemplars=self.criterion != "score_fixed")

    def __call__(self, inputs: LabelerInput) -> Labeling:
        """Seeds, labels and thresholds of every stage."""
        if inputs.fraction < self.begin:
            return Oicr(foreground_iou=self.foreground_iou)(inputs)
        num_classes = inputs.tags.shape[1]
        found = [self.find(inputs, stage) for stage in range(len(inputs.probs))]
        return Labeling(
            stages=tuple(
                assign(inputs.proposals, pseudo_boxes, num_classes, self.foreground_iou) for pseudo_boxes, _ in found
            ),
            thresholds=tuple(tau for _, tau in found),
        )

    def find(self, inputs: LabelerInput, stage: int) -> tuple[PseudoBoxes, Float[Tensor, " t"]]:
        """Pseudo ground truth of one stage, and tau of each (image, class) it was found with."""
        tops = argmax_pseudo_boxes(inputs, stage)
        probs, spans = inputs.probs[stage], inputs.proposals.spans()
        images = inputs.proposals.image_ids()[tops.rows].tolist()
        exemplars = {c: inputs.exemplars.cls == c for c in set(tops.cls.tolist())}
        pseudo_boxes, thresholds = [tops.rows.new_zeros(0, 2)], [probs.new_zeros(0)]
        for i, (top, c, image) in enumerate(zip(tops.rows.tolist(), tops.cls.tolist(), images, strict=True)):
            inside = slice(spans[image].start, spans[image].stop)
            rivals = [row for j, row in enumerate(tops.rows.tolist()) if images[j] == image and j != i]
            closeness = self._closeness(inputs, stage, top, c, inside)
            tau = self._threshold(inputs, stage, top, exemplars[c])
            to_rivals = inputs.embed[inside] @ inputs.embed[rivals if self._judges_rivals else []].T
            candidate = is_candidate(closeness, tau, to_rivals)
            boxes = inputs.proposals.boxes[inside]
            rows = keep_apart(boxes, probs[inside, c], candidate, top - inside.start, self.nms_iou)
            rows = (rows[drop_parts(boxes[rows], self.inside)] if self.inside < 1 else rows) + inside.start
            pseudo_boxes.append(torch.stack([rows, torch.full_like(rows, c)], dim=1))
            thresholds.append(tau.reshape(1))
        row, cls = torch.cat(pseudo_boxes).unbind(dim=1)
        return PseudoBoxes(row, cls, probs[row, cls]), torch.cat(thresholds)

    @property
    def _judges_rivals(self) -> bool:
        return self.exclusive and self.criterion == "similarity"

    def _closeness(self, inputs: LabelerInput, stage: int, top: int, c: int, inside: slice) -> Float[Tensor, " P"]:
        """How strongly every proposal of an image looks like an object of class c."""
        if self.criterion == "similarity":
            return inputs.embed[inside] @ inputs.embed[top]
        return inputs.probs[stage][inside, c]

    def _threshold(self, inputs: LabelerInput, stage: int, top: int, of_class: Bool[Tensor, " M"]) -> Float[Tensor, ""]:
        """What a candidate has to beat."""
        if self.criterion == "similarity":
            return adaptive_threshold(inputs.embed[top], inputs.exemplars.embed[of_class])
        if self.criterion == "score_adaptive":
            return inputs.exemplars.probs[stage][of_class].mean()
        return inputs.probs[stage].new_tensor(self.score_threshold)
