"""OD-WSCL, object discovery (Seo et al., 2022): pseudo boxes by similarity to the top proposal (eq. 5, 9, 10)."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from tag2box.methods.oicr import Oicr, argmax_pseudo_boxes
from tag2box.ops import assign, containment, iou, nms
from tag2box.ops.losses import first_argmax
from tag2box.types import LabelerInput, Labeling, Proposals, PseudoBoxes, PseudoLabels, Requirements


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


def paper_candidates(
    similarity: Float[Tensor, " P"], threshold: Float[Tensor, ""], to_others: Float[Tensor, "P r"]
) -> Bool[Tensor, " P"]:
    """Candidates of eq. 10: similarity to the top proposal above tau, whatever other classes are in the image."""
    return similarity > threshold


def exclusive_candidates(
    similarity: Float[Tensor, " P"], threshold: Float[Tensor, ""], to_others: Float[Tensor, "P r"]
) -> Bool[Tensor, " P"]:
    """Candidates of eq. 10 that are more similar to their own top proposal than to that of any other class."""
    return (similarity > threshold) & (similarity[:, None] > to_others).all(dim=1)


def published_candidates(
    similarity: Float[Tensor, " P"], threshold: Float[Tensor, ""], to_others: Float[Tensor, "P r"]
) -> Bool[Tensor, " P"]:
    """Candidates of the published code: tau itself suffices, and so does a similarity <= 0 to another class's top.

    Its rule for other classes compares the mask of candidates (0 or 1) with similarities: 1 >= s holds for all, 0 >= s
    for whatever points away from the other class. So it rejects none and adds what resembles neither class. Only
    rounding, a similarity of 1 plus an epsilon, removes a top proposal of another class there; here it stays.
    """
    return (similarity >= threshold) | (to_others <= 0).any(dim=1)


CANDIDATE_RULES = {"paper": paper_candidates, "exclusive": exclusive_candidates, "published": published_candidates}
"""The rules of ``Discovery.rule``: similarity to the top proposal (P), tau and similarity to the top proposals of the
image's other classes (P, r) in, mask of the candidates (P) out."""


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


def drop_nested(
    labels: PseudoLabels, proposals: Proposals, num_classes: int, inside: float, *, foreground_iou: float = 0.5
) -> PseudoLabels:
    """Labels of one stage, of any labeler, without pseudo boxes that ``drop_parts`` drops from their image and class.

    Of an image and class the pseudo boxes are ranked by score. A proposal of a dropped one goes to the pseudo box that
    is left in its image with the highest IoU, as in eq. 2: its class above ``foreground_iou``, else background. Its
    loss weight stays.
    """
    found, images, placed = labels.pseudo_boxes, proposals.image_ids(), labels.pseudo_boxes.placed(proposals)
    is_left, groups = torch.zeros_like(found.rows, dtype=torch.bool), images[found.rows] * num_classes + found.cls
    for group in groups.unique():
        own = (groups == group).nonzero().flatten()
        ranked = own[found.score[own].argsort(descending=True, stable=True)]
        is_left[ranked[drop_parts(placed[ranked], inside)]] = True
    numbers = torch.cat([is_left.cumsum(dim=0) - 1, found.rows.new_tensor([-1])])  # the last is that of no owner
    left = is_left.nonzero().flatten()
    cls, boxes, owner = labels.cls.clone(), labels.boxes.clone(), numbers[labels.owner]
    moved = (labels.owner >= 0) & ~torch.cat([is_left, is_left.new_ones(1)])[labels.owner]
    for image in images[moved].unique().tolist():
        rows = (moved & (images == image)).nonzero().flatten()
        candidates = (images[found.rows[left]] == image).nonzero().flatten()  # numbers among those that are left
        overlap = iou(proposals.boxes[rows], placed[left[candidates]])
        nearest = first_argmax(overlap)
        owner[rows], boxes[rows] = candidates[nearest], placed[left[candidates]][nearest].to(boxes)
        is_foreground = overlap.gather(1, nearest[:, None]).squeeze(1) > foreground_iou
        cls[rows] = torch.where(is_foreground, found.cls[left[candidates]][nearest], num_classes)
    moved_boxes = None if found.boxes is None else placed[left]
    kept = PseudoBoxes(found.rows[left], found.cls[left], found.score[left], moved_boxes)
    return PseudoLabels(cls, labels.weight, boxes, kept, owner)


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
    rule: Literal["paper", "exclusive", "published"] = "paper"
    """What a candidate by similarity must satisfy, beside tau, if other classes are in the image.

    ``paper``: nothing. ``exclusive``: it is more similar to its own top proposal than to theirs. ``published``, the
    behaviour of the published code: nothing, and proposals with a similarity of 0 or less to one of theirs are added.
    """
    nms_iou: Annotated[float, Field(ge=0, le=1)] = 0.1
    """tau_nms: pseudo boxes of one class overlap no more than this."""
    inside: Annotated[float, Field(ge=0, le=1)] = 1.0
    """If a pseudo box lies in another of its class by more than this fraction of its area, the worse one is dropped.

    It is a part of the object, or the object with its surroundings. 1 drops none (the paper). NMS does not catch this
    case: the IoU of a wheel with its car is low.
    """
    score_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """A candidate needs at least this share of the teacher score of its top proposal, with the criterion's prior.

    0 takes any (the paper). What is similar to an object is often a part of it, to which the teacher gives little.
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
            rule = self.rule if self.criterion == "similarity" else "paper"
            to_others = inputs.embed[inside] @ inputs.embed[[] if rule == "paper" else others].T
            boxes, scores = inputs.proposals.boxes[inside], probs[inside, c]
            candidate = CANDIDATE_RULES[rule](closeness, tau, to_others) & (scores >= self.score_share * probs[top, c])
            rows = keep_apart(boxes, scores, candidate, top - inside.start, self.nms_iou)
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
