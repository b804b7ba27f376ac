"""OD-WSCL, object discovery (Seo et al., 2022): pseudo boxes by similarity to the top proposal (eq. 5, 9, 10)."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from tag2box.methods.oicr import Oicr, argmax_pseudo_boxes
from tag2box.ops import assign, containment, iou, nms
from tag2box.types import LabelerInput, Labeling, PseudoBoxes, Requirements


def neighbours(boxes: Float[Tensor, "P 4"], tops: Int[Tensor, " K"], threshold: float) -> Int[Tensor, " m"]:
    """IoU sampling (eq. 5): the proposals that overlap the top proposal of any teacher."""
    near = (iou(boxes, boxes[tops]) >= threshold).any(dim=1)
    near[tops] = True
    return near.nonzero().flatten()


def adaptive_threshold(top: Float[Tensor, " D"], exemplars: Float[Tensor, "M D"]) -> Float[Tensor, ""]:
    """tau (eq. 9): mean similarity of the top proposal to the exemplars of its class; 1 without exemplars."""
    if len(exemplars) == 0:
        return top.new_ones(())
    return (exemplars @ top).mean()


def is_candidate(
    similarity: Float[Tensor, " P"], threshold: Float[Tensor, ""], to_others: Float[Tensor, "P r"]
) -> Bool[Tensor, " P"]:
    """Candidates (eq. 10): similarity to the top proposal above tau, and above that to any other class's top proposal.

    Pass no columns in ``to_others`` for the rule of the paper, which ignores other classes.
    """
    close = similarity > threshold
    return close & (similarity[:, None] > to_others).all(dim=1)


def keep_apart(
    boxes: Float[Tensor, "P 4"], scores: Float[Tensor, " P"], candidate: Bool[Tensor, " P"], top: int, nms_iou: float
) -> Int[Tensor, " s"]:
    """Pseudo boxes of one class: NMS over its candidates by teacher score; the top proposal is always kept, first."""
    ranked = scores.clone()
    ranked[top] = torch.inf
    rows = candidate.clone()
    rows[top] = True
    ids = rows.nonzero().flatten()
    return ids[nms(boxes[ids], ranked[ids], nms_iou)]


def drop_parts(boxes: Float[Tensor, "s 4"], inside: float) -> Int[Tensor, " k"]:
    """Rows of boxes, best first, without those that contain, or lie in, a better one by more than ``inside``.

    ``inside`` is a fraction of the smaller area. The IoU of a wheel with its car is low, so NMS keeps it.
    """
    within = (containment(boxes, boxes) > inside).tolist()  # (s, s)
    left: list[int] = []
    for row, is_within in enumerate(within):
        if not any(is_within[better] for better in left):
            left.append(row)
    return torch.tensor(left, dtype=torch.long, device=boxes.device)


@dataclass(frozen=True, kw_only=True)
class Discovery:
    """Candidates above an adaptive similarity threshold, filtered by NMS, are the pseudo boxes (eq. 9-10).

    Jinhwan Seo, Wonho Bae, Danica J. Sutherland, Junhyug Noh and Daijin Kim: Object Discovery via Contrastive Learning
    for Weakly Supervised Object Detection, ECCV 2022. https://arxiv.org/abs/2208.07576

    Example:
        >>> from tag2box.recipes import Config
        >>> from tag2box.training.criterion import Criterion
        >>> config = Config(criterion=Criterion(labeler=Discovery(nms_iou=0.3)))
        >>> config.criterion.requirements.exemplars
        True
    """

    kind: Literal["discovery"] = "discovery"
    criterion: Literal["similarity", "score_fixed", "score_adaptive"] = "similarity"
    """How candidates are selected: by similarity to the top proposal, or (appendix C) by classification score."""
    score_threshold: Annotated[float, Field(ge=0, le=1)] = 0.4
    """The fixed threshold of ``criterion = "score_fixed"``; the paper's best is 0.4."""
    exclusive: bool = True
    """A candidate must be more similar to its own top proposal than to those of the other classes in the image."""
    nms_iou: Annotated[float, Field(ge=0, le=1)] = 0.1
    """tau_nms: pseudo boxes of one class overlap no more than this."""
    inside: Annotated[float, Field(ge=0, le=1)] = 1.0
    """If a pseudo box lies in another of its class by more than this fraction of its area, the worse one is dropped.

    It is a part of the object, or the object with its surroundings. 1 drops none (the paper). NMS does not catch this
    case: the IoU of a wheel with its car is low.
    """
    foreground_iou: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """A proposal takes the class of its nearest pseudo box above this IoU; others are background."""
    begin: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the training before discovery begins; until then only the top proposals are used, as in OICR.

    Not in the paper, whose training is long. Embeddings must be trained before their similarity is meaningful; in a
    short training that takes a good part of it.
    """

    @property
    def requirements(self) -> Requirements:
        """Exemplars, except for a fixed score threshold."""
        return Requirements(exemplars=self.criterion != "score_fixed")

    def __call__(self, inputs: LabelerInput) -> Labeling:
        """Pseudo boxes, pseudo labels and thresholds of every stage."""
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
        """Pseudo boxes of one stage, and tau of each (image, class)."""
        tops = argmax_pseudo_boxes(inputs, stage)
        probs, spans = inputs.probs[stage], inputs.proposals.spans()
        images = inputs.proposals.image_ids()[tops.rows].tolist()
        exemplars = {c: inputs.exemplars.cls == c for c in set(tops.cls.tolist())}
        pseudo_boxes, thresholds = [tops.rows.new_zeros(0, 2)], [probs.new_zeros(0)]
        for i, (top, c, image) in enumerate(zip(tops.rows.tolist(), tops.cls.tolist(), images, strict=True)):
            inside = slice(spans[image].start, spans[image].stop)
            others = [row for j, row in enumerate(tops.rows.tolist()) if images[j] == image and j != i]
            closeness = self._closeness(inputs, stage, top, c, inside)
            tau = self._threshold(inputs, stage, top, exemplars[c])
            is_exclusive = self.exclusive and self.criterion == "similarity"
            to_others = inputs.embed[inside] @ inputs.embed[others if is_exclusive else []].T
            candidate = is_candidate(closeness, tau, to_others)
            boxes = inputs.proposals.boxes[inside]
            rows = keep_apart(boxes, probs[inside, c], candidate, top - inside.start, self.nms_iou)
            rows = (rows[drop_parts(boxes[rows], self.inside)] if self.inside < 1 else rows) + inside.start
            pseudo_boxes.append(torch.stack([rows, torch.full_like(rows, c)], dim=1))
            thresholds.append(tau.reshape(1))
        row, cls = torch.cat(pseudo_boxes).unbind(dim=1)
        return PseudoBoxes(row, cls, probs[row, cls]), torch.cat(thresholds)

    def _closeness(self, inputs: LabelerInput, stage: int, top: int, c: int, inside: slice) -> Float[Tensor, " P"]:
        """Similarity, or classification score, of every proposal of an image for class c."""
        if self.criterion == "similarity":
            return inputs.embed[inside] @ inputs.embed[top]
        return inputs.probs[stage][inside, c]

    def _threshold(self, inputs: LabelerInput, stage: int, top: int, of_class: Bool[Tensor, " M"]) -> Float[Tensor, ""]:
        """The threshold that a candidate must exceed."""
        if self.criterion == "similarity":
            return adaptive_threshold(inputs.embed[top], inputs.exemplars.embed[of_class])
        if self.criterion == "score_adaptive":
            return inputs.exemplars.probs[stage][of_class].mean()
        return inputs.probs[stage].new_tensor(self.score_threshold)
