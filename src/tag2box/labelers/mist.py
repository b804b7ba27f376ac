"""Multiple-instance self-training: the best proposals of a class that lie apart (MIST, Ren et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from tag2box.maths.refine import assign
from tag2box.maths.selftrain import far_from_better
from tag2box.types import Labeling, Needs, Scene, Seeds


@dataclass(frozen=True, kw_only=True)
class Mist:
    """Of each present class's best proposals, those that hardly overlap a better one are its seeds."""

    kind: Literal["mist"] = "mist"
    share: Annotated[float, Field(gt=0, le=1)] = 0.15
    """p: the share of an image's proposals that may be seeds of a class."""
    apart: Annotated[float, Field(gt=0, le=1)] = 0.2
    """A seed overlaps every better proposal of that share by less than this IoU."""
    foreground_iou: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """A proposal joins its nearest seed from this IoU on; others are background."""

    @property
    def needs(self) -> Needs:
        """Ranks and overlaps are enough."""
        return Needs()

    def __call__(self, scene: Scene) -> Labeling:
        """Seeds and labels of every stage."""
        num_classes, seeds = scene.tags.shape[1], [self.find(scene, probs) for probs in scene.probs]
        labels = (assign(scene.proposals, s, num_classes, self.foreground_iou, or_equal=True) for s in seeds)
        return Labeling(tuple(labels))

    def find(self, scene: Scene, probs: Float[Tensor, "R C"]) -> Seeds:
        """The seeds one teacher gives, image after image, class after class."""
        picks = [torch.zeros(0, 2, dtype=torch.long, device=probs.device)]
        for span, tags in zip(scene.proposals.spans(), scene.tags, strict=True):
            inside = slice(span.start, span.stop)
            for c in tags.nonzero().flatten().tolist():
                boxes, scores = scene.proposals.boxes[inside], probs[inside, c]
                rows = far_from_better(boxes, scores, share=self.share, apart=self.apart) + span.start
                picks.append(torch.stack([rows, torch.full_like(rows, c)], dim=1))
        rows, cls = torch.cat(picks).unbind(dim=1)
        return Seeds(rows, cls, probs[rows, cls])
