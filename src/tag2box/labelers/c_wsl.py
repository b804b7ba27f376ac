"""Count-limited seeds: where somebody counted, as many boxes as there are objects (C-WSL, Gao et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from tag2box.maths.counted import counted_boxes
from tag2box.maths.refine import assign
from tag2box.types import Labeling, Needs, Scene, Seeds


@dataclass(frozen=True, kw_only=True)
class CWsl:
    """As many seeds for a class as it has objects, none inside another; one where nobody counted."""

    kind: Literal["c_wsl"] = "c_wsl"
    overlap: Annotated[float, Field(gt=0, le=1)] = 0.1
    """T: no seed has this share of its area, or more, inside another of its class."""
    openers: Annotated[int, Field(ge=1)] = 100
    """So many of the best proposals are each tried as the first of a set; 1 is plain greedy selection."""
    foreground_iou: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """A proposal joins its nearest seed above this IoU; others are background."""

    @property
    def needs(self) -> Needs:
        """Counts, where there are any."""
        return Needs(counts=True)

    def __call__(self, scene: Scene) -> Labeling:
        """Seeds and labels of every stage."""
        num_classes = scene.tags.shape[1]
        seeds = [self.find(scene, probs) for probs in scene.probs]
        return Labeling(tuple(assign(scene.proposals, s, num_classes, self.foreground_iou) for s in seeds))

    def find(self, scene: Scene, probs: Float[Tensor, "R C"]) -> Seeds:
        """The seeds one teacher gives, image after image, class after class; none serves two classes."""
        counts = scene.tags.long() if scene.clues.counts is None else scene.clues.counts
        left = probs.clone()
        picks = [torch.zeros(0, 2, dtype=torch.long, device=probs.device)]
        for image, span in enumerate(scene.proposals.spans()):
            inside = slice(span.start, span.stop)
            for c in scene.tags[image].nonzero().flatten().tolist():
                boxes, count = scene.proposals.boxes[inside], int(counts[image, c])
                rows = counted_boxes(boxes, left[inside, c], count, overlap=self.overlap, openers=self.openers)
                left[rows + span.start] = -1.0  # below every probability
                picks.append(torch.stack([rows + span.start, torch.full_like(rows, c)], dim=1))
        rows, cls = torch.cat(picks).unbind(dim=1)
        return Seeds(rows, cls, probs[rows, cls])
