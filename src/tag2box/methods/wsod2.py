"""WSOD2 (Zeng et al., 2019): bottom-up evidence from superpixels mixed into the loss weights of proposals."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field

from tag2box.errors import UserError
from tag2box.ops import assign, decode, nms
from tag2box.ops.superpixels import straddling
from tag2box.types import LabelerInput, Labeling, LabelMap, Proposals, PseudoBoxes, PseudoLabels, Requirements


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


def regressed_boxes(
    boxes: Float[torch.Tensor, "r 4"], deltas: Float[torch.Tensor, "r c4"], cls: Int[torch.Tensor, " r"]
) -> Float[torch.Tensor, "r 4"]:
    """Boxes moved by the box regression of their classes."""
    moved: torch.Tensor = decode(deltas, boxes).unflatten(1, (-1, 4))
    return moved[torch.arange(len(boxes), device=boxes.device), cls]


def superpixel_evidence(
    rows: Int[torch.Tensor, " r"], boxes: Float[torch.Tensor, "r 4"], proposals: Proposals, maps: tuple[LabelMap, ...]
) -> Float[torch.Tensor, " r"]:
    """bu of any boxes: their straddling of the superpixels of the photos that the proposals ``rows`` belong to.

    Boxes are cut off at the borders of the photo.
    """
    assert proposals.frames is not None  # a batch source sets them
    found, photos = boxes.new_zeros(len(rows)), proposals.image_ids()[rows]
    for photo in photos.unique().tolist():
        labels, (width, height) = maps[photo], proposals.frames[photo]
        own = photos == photo
        scaled = boxes[own] * boxes.new_tensor([labels.shape[1] / width, labels.shape[0] / height] * 2)
        found[own] = torch.from_numpy(straddling(labels.numpy(), scaled.cpu().numpy())).to(found)
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
    (the paper), computed from the superpixels in every iteration. Needs ``heads.regress``."""
    regressor: Literal["last", "own"] = "last"
    """Stage whose box regression moves boxes: the last for all stages (the paper has one regressor), or each its own.
    """
    targets: Literal["proposals", "regressed"] = "proposals"
    """Pseudo boxes: proposals, or the boxes that regression moves them to where their evidence is as high or higher.
    With ``evidence_of = "regressed"`` only."""
    foreground_iou: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """A proposal takes the class of its nearest pseudo box from this IoU on; others are background."""

    @property
    def requirements(self) -> Requirements:
        """Superpixel straddling of proposals; or the superpixels themselves and box deltas, for regressed boxes."""
        is_regressed = self.evidence_of == "regressed"
        return Requirements(evidence=not is_regressed, superpixels=is_regressed, deltas=is_regressed)

    def __call__(self, inputs: LabelerInput) -> Labeling:
        """Pseudo boxes and pseudo labels of every stage."""
        found, num_classes = [self.find(inputs, probs) for probs in inputs.probs], inputs.tags.shape[1]
        if self.targets == "regressed" and self.evidence_of == "regressed":
            found = [self._moved(inputs, pseudo_boxes, stage) for stage, pseudo_boxes in enumerate(found)]
        stages = [assign(inputs.proposals, x, num_classes, self.foreground_iou, or_equal=True) for x in found]
        trust, evidence, mixed = min(inputs.fraction / self.fade, 1.0), self._evidence(inputs, stages), []
        for labels, own in zip(stages, evidence, strict=True):
            belief = torch.ones_like(labels.weight) if self.belief == "one" else labels.weight
            mixed.append(mix_evidence(labels, own, belief, trust=trust, num_classes=num_classes))
        return Labeling(tuple(mixed))

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

    def _evidence(self, inputs: LabelerInput, stages: list[PseudoLabels]) -> list[Float[torch.Tensor, " R"]]:
        """Evidence of every proposal by stage; of regressed boxes, that of foreground alone is computed."""
        side_info, num_classes = inputs.side_info, inputs.tags.shape[1]
        if self.evidence_of == "proposal":
            if side_info.evidence is None:
                raise UserError(
                    "labeler wsod2: weights proposals by superpixels, and this input has no evidence: set "
                    "SideInfo.evidence"
                )
            return [side_info.evidence] * len(stages)
        rows = [(labels.cls < num_classes).nonzero().flatten() for labels in stages]
        moved = [self._regressed(inputs, own, stages[k].cls[own], k) for k, own in enumerate(rows)]
        values = superpixel_evidence(torch.cat(rows), torch.cat(moved), inputs.proposals, _superpixels(inputs))
        parts = values.split([len(own) for own in rows])
        zeros = [x.new_zeros(len(inputs.proposals.boxes)) for x in parts]
        return [zero.index_copy(0, own, part) for zero, own, part in zip(zeros, rows, parts, strict=True)]

    def _regressed(
        self, inputs: LabelerInput, rows: Int[torch.Tensor, " r"], cls: Int[torch.Tensor, " r"], stage: int
    ) -> Float[torch.Tensor, "r 4"]:
        """Where box regression moves proposals; without it they stay."""
        stage = len(inputs.deltas) - 1 if self.regressor == "last" else stage
        boxes = inputs.proposals.boxes[rows]
        return regressed_boxes(boxes, inputs.deltas[stage][rows], cls) if 0 <= stage < len(inputs.deltas) else boxes

    def _moved(self, inputs: LabelerInput, pseudo_boxes: PseudoBoxes, stage: int) -> PseudoBoxes:
        """Pseudo boxes at their regressed places, where these have as much evidence."""
        rows, maps, before = pseudo_boxes.rows, _superpixels(inputs), pseudo_boxes.placed(inputs.proposals)
        after = self._regressed(inputs, rows, pseudo_boxes.cls, stage)
        old, new = (superpixel_evidence(rows, boxes, inputs.proposals, maps) for boxes in (before, after))
        return replace(pseudo_boxes, boxes=torch.where((new >= old)[:, None], after, before))


def _superpixels(inputs: LabelerInput) -> tuple[LabelMap, ...]:
    if inputs.side_info.superpixels is None:
        raise UserError(
            "labeler wsod2: scores regressed boxes by superpixels, and this input has none: set SideInfo.superpixels"
        )
    return inputs.side_info.superpixels
