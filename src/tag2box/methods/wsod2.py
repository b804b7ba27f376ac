"""Bottom-up evidence: what the photo itself says of boxes, mixed into what the detector learns from (WSOD2, 2019)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from tag2box.errors import UserError
from tag2box.ops.nms import nms
from tag2box.ops.refine import assign
from tag2box.types import LabelerInput, Labeling, PseudoBoxes, PseudoLabels, Requirements


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


@dataclass(frozen=True, kw_only=True)
class Wsod2:
    """All proposals nearly as good as the best are seeds, thinned by NMS; superpixels weigh what they teach."""

    kind: Literal["wsod2"] = "wsod2"
    near_best: Annotated[float, Field(ge=0, le=1)] = 0.9
    """A seed has at least this share of the best score of its class in the photo."""
    nms_iou: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Seeds of a photo, of whatever class, overlap no more than this."""
    fade: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The share of the training over which the evidence gives way to the detector."""
    belief: Literal["one", "score"] = "one"
    """What the evidence gives way to: 1 (the authors' code) or the seed's teacher score (the paper)."""
    foreground_iou: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """A proposal joins its nearest seed from this IoU on; others are background."""

    @property
    def requirements(self) -> Requirements:
        """How well proposals keep to superpixels."""
        return Requirements(evidence=True)

    def __call__(self, inputs: LabelerInput) -> Labeling:
        """Seeds and labels of every stage."""
        return Labeling(tuple(self._labels(inputs, self.find(inputs, probs)) for probs in inputs.probs))

    def find(self, inputs: LabelerInput, probs: Float[Tensor, "R C"]) -> PseudoBoxes:
        """The seeds one teacher gives, image after image, best score first; a class may lose all to a better one."""
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

    def _labels(self, inputs: LabelerInput, pseudo_boxes: PseudoBoxes) -> PseudoLabels:
        if inputs.side_info.evidence is None:
            raise UserError("labeler wsod2: weighs proposals by superpixels, and this scene has no evidence: give it")
        num_classes, trust = inputs.tags.shape[1], min(inputs.fraction / self.fade, 1.0)
        labels = assign(inputs.proposals, pseudo_boxes, num_classes, self.foreground_iou, or_equal=True)
        belief = torch.ones_like(labels.weight) if self.belief == "one" else labels.weight
        return mix_evidence(labels, inputs.side_info.evidence, belief, trust=trust, num_classes=num_classes)
