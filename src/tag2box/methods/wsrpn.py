"""Proposals judged anew by the MIL head: what it thinks little of takes no further part (WSRPN, 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from tag2box.ops.nms import nms
from tag2box.types import BatchMeta


@dataclass(frozen=True, kw_only=True)
class Rescore:
    """Which proposals of a photo stay for the stages and for detection: the best, and no two too alike."""

    keep: Annotated[float, Field(gt=0, le=1)] = 1.0
    """At most this share of a photo's proposals stays, the best by the MIL head; 1 does not judge them at all."""
    nms_iou: Annotated[float, Field(gt=0, le=1)] = 0.75
    """Of two that overlap more than this the better one stays."""
    begin: Annotated[float, Field(ge=0, lt=1)] = 0.25
    """Share of the training before anything is judged: the head must have learnt something."""

    def acts(self, fraction: float) -> bool:
        """Whether proposals are judged at this moment of the training."""
        return self.keep < 1 and fraction >= self.begin

    def __call__(self, worth: Float[Tensor, " R"], meta: BatchMeta) -> Bool[Tensor, " R"]:
        """Which proposals stay, given what the MIL head thinks of each; the same in all looks at a photo."""
        spans, stays = meta.proposals.spans(), torch.zeros(len(worth), dtype=torch.bool, device=worth.device)
        for views_per_image, _ in meta.view_groups():
            first = slice(spans[views_per_image[0]].start, spans[views_per_image[0]].stop)
            kept = self.best(worth[first], meta.proposals.boxes[first])
            for look in views_per_image:
                stays[kept + spans[look].start] = True
        return stays

    def best(self, worth: Float[Tensor, " P"], boxes: Float[Tensor, "P 4"]) -> Int[Tensor, " kept"]:
        """The rows of a photo that stay, best first; one at least, where there is any."""
        most = max(1, round(self.keep * len(worth)))
        return nms(boxes, worth, self.nms_iou)[:most]


KEEP_EVERYTHING = Rescore()
"""All stay."""
