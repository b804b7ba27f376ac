"""WSOD2 (Zeng et al., 2019): bottom-up evidence from superpixels mixed into the loss weights of proposals."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field

from tag2box.errors import UserError
from tag2box.ops import assign, decode, first_argmax, iou, nms
from tag2box.types import LabelerInput, Labeling, Proposals, PseudoBoxes, PseudoLabels, Requirements

_NEAR = 0.5  # IoU from which a proposal stands for a regressed box


def close_to_best(scores: Float[torch.Tensor, " P"], share: float) -> Int[torch.Tensor, " s"]:
    """Proposals whose score is at least a fraction ``share`` of the best one's."""
    if len(scores) == 0:
        return torch.zeros(0, dtype=torch.long, device=scores.device)
    return (scores >= share * scores.max()).nonzero().flatten()


def mix_evidence(
    labels: PseudoLabels,
    evidence: Float[torch.Tensor, " R"],
    belief: Float[torch.Tensor, " R"],
    *,
    trust: float,
    num_classes: int,
) -> PseudoLabels:
    """Labels with weight a belief + (1 - a) bu on foreground and 1 on background.

    Proposals of an image without pseudo boxes have weight zero.

    Args:
        belief: weight of each foreground proposal by the detector (top-down).
        trust: a, from 0 (evidence only) to 1 (detector only).
    """
    foreground = trust * belief + (1 - trust) * evidence.to(belief.dtype)
    weight = torch.where(labels.cls < num_classes, foreground, torch.ones_like(belief))
    return replace(labels, weight=torch.where(labels.owner >= 0, weight, torch.zeros_like(weight)))


def regressed_evidence(
    labels: PseudoLabels,
    deltas: Float[torch.Tensor, "R c4"],
    evidence: Float[torch.Tensor, " R"],
    proposals: Proposals,
    num_classes: int,
) -> Float[torch.Tensor, " R"]:
    """Evidence of where each foreground proposal is moved to by box regression: that of the proposal nearest there.

    A background proposal, and one that is moved to a place without proposals (IoU below 0.5), has its own.
    """
    found = evidence.clone()
    for span in proposals.spans():
        inside = slice(span.start, span.stop)
        rows = (labels.cls[inside] < num_classes).nonzero().flatten() + span.start
        moved = decode(deltas[rows], proposals.boxes[rows]).view(len(rows), num_classes, 4)
        overlap = iou(moved[torch.arange(len(rows), device=rows.device), labels.cls[rows]], proposals.boxes[inside])
        if len(rows):
            is_near, nearest = overlap.amax(dim=1) >= _NEAR, first_argmax(overlap) + span.start
            found[rows] = torch.where(is_near, evidence[nearest], evidence[rows])
    return found


@dataclass(frozen=True, kw_only=True)
class Wsod2:
    """Proposals nearly as good as the best become pseudo boxes after NMS; superpixels weight their labels.

    Zhaoyang Zeng, Bei Liu, Jianlong Fu, Hongyang Chao and Lei Zhang: WSOD2: Learning Bottom-up and Top-down Objectness
    Distillation for Weakly-supervised Object Detection, ICCV 2019. https://arxiv.org/abs/1909.04972

    Example:
        >>> from tag2box.recipes import Config
        >>> from tag2box.training.criterion import Criterion
        >>> config = Config(criterion=Criterion(labeler=Wsod2(near_best=0.8)))
        >>> config.criterion.requirements.evidence
        True
    """

    kind: Literal["wsod2"] = "wsod2"
    near_best: Annotated[float, Field(ge=0, le=1)] = 0.9
    """A pseudo box has at least this fraction of the best score of its class in the photo."""
    nms_iou: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Maximum IoU of two pseudo boxes of a photo, of any class."""
    fade: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of the training over which the evidence is replaced by the detector."""
    belief: Literal["one", "score"] = "one"
    """What replaces the evidence: 1 (the authors' code) or the teacher score of the pseudo box (the paper)."""
    evidence_of: Literal["proposal", "regressed"] = "proposal"
    """Box whose evidence weights a positive: the proposal (the authors' code), or the box that regression moves it to
    (the paper), with the superpixel evidence of the proposal nearest to that. Needs ``heads.regress``."""
    foreground_iou: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """A proposal takes the class of its nearest pseudo box from this IoU on; others are background."""

    @property
    def requirements(self) -> Requirements:
        """Superpixel straddling of proposals; box deltas, if regressed boxes are rescored."""
        return Requirements(evidence=True, deltas=self.evidence_of == "regressed")

    def __call__(self, inputs: LabelerInput) -> Labeling:
        """Pseudo boxes and pseudo labels of every stage."""
        return Labeling(tuple(self._labels(inputs, stage) for stage in range(len(inputs.probs))))

    def find(self, inputs: LabelerInput, probs: Float[torch.Tensor, "R C"]) -> PseudoBoxes:
        """Pseudo boxes from one teacher's scores, image after image, best first; NMS may leave a class none."""
        picks = [torch.zeros(0, 2, dtype=torch.long, device=probs.device)]
        for span, tags in zip(inputs.proposals.spans(), inputs.tags, strict=True):
            pairs = [picks[0]]
            for c in tags.nonzero().flatten().tolist():
                rows = close_to_best(probs[span.start : span.stop, c], self.near_best) + span.start
                pairs.append(torch.stack([rows, torch.full_like(rows, c)], dim=1))
            rows, cls = torch.cat(pairs).unbind(dim=1)
            kept = nms(inputs.proposals.boxes[rows], probs[rows, cls], self.nms_iou)
            picks.append(torch.stack([rows[kept], cls[kept]], dim=1))
        rows, cls = torch.cat(picks).unbind(dim=1)
        return PseudoBoxes(rows, cls, probs[rows, cls])

    def _labels(self, inputs: LabelerInput, stage: int) -> PseudoLabels:
        pseudo_boxes = self.find(inputs, inputs.probs[stage])
        if inputs.side_info.evidence is None:
            raise UserError(
                "labeler wsod2: weights proposals by superpixels, and this input has no evidence: set SideInfo.evidence"
            )
        num_classes, trust = inputs.tags.shape[1], min(inputs.fraction / self.fade, 1.0)
        labels = assign(inputs.proposals, pseudo_boxes, num_classes, self.foreground_iou, or_equal=True)
        belief = torch.ones_like(labels.weight) if self.belief == "one" else labels.weight
        evidence = inputs.side_info.evidence
        if self.evidence_of == "regressed" and stage < len(inputs.deltas):
            evidence = regressed_evidence(labels, inputs.deltas[stage], evidence, inputs.proposals, num_classes)
        return mix_evidence(labels, evidence, belief, trust=trust, num_classes=num_classes)
