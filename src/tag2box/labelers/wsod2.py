"""Bottom-up and top-down: boxes that keep to the photo's superpixels count more, at first (WSOD2, 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from tag2box.errors import UserError
from tag2box.maths.bottom_up import close_to_best, mix_evidence
from tag2box.maths.nms import nms
from tag2box.maths.refine import assign
from tag2box.types import Labeling, Needs, PseudoLabels, Scene, Seeds


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
    def needs(self) -> Needs:
        """How well proposals keep to superpixels."""
        return Needs(evidence=True)

    def __call__(self, scene: Scene) -> Labeling:
        """Seeds and labels of every stage."""
        return Labeling(tuple(self._labels(scene, self.find(scene, probs)) for probs in scene.probs))

    def find(self, scene: Scene, probs: Float[Tensor, "R C"]) -> Seeds:
        """The seeds one teacher gives, image after image, best score first; a class may lose all to a better one."""
        picks = [torch.zeros(0, 2, dtype=torch.long, device=probs.device)]
        for span, tags in zip(scene.proposals.spans(), scene.tags, strict=True):
            pairs = [picks[0]]
            for c in tags.nonzero().flatten().tolist():
                rows = close_to_best(probs[span.start : span.stop, c], self.near_best) + span.start
                pairs.append(torch.stack([rows, torch.full_like(rows, c)], dim=1))
            rows, cls = torch.cat(pairs).unbind(dim=1)
            kept = nms(scene.proposals.boxes[rows], probs[rows, cls], self.nms_iou)
            picks.append(torch.stack([rows[kept], cls[kept]], dim=1))
        rows, cls = torch.cat(picks).unbind(dim=1)
        return Seeds(rows, cls, probs[rows, cls])

    def _labels(self, scene: Scene, seeds: Seeds) -> PseudoLabels:
        if scene.clues.evidence is None:
            raise UserError("labeler wsod2: weighs proposals by superpixels, and this scene has no evidence: give it")
        num_classes, trust = scene.tags.shape[1], min(scene.progress / self.fade, 1.0)
        labels = assign(scene.proposals, seeds, num_classes, self.foreground_iou, or_equal=True)
        belief = torch.ones_like(labels.weight) if self.belief == "one" else labels.weight
        return mix_evidence(labels, scene.clues.evidence, belief, trust=trust, num_classes=num_classes)
