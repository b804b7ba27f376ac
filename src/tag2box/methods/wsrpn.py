"""WSRPN, weakly supervised region proposal network (Tang et al., 2018): proposals rescored by the MIL head."""

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field

from tag2box.ops import nms
from tag2box.types import BatchMeta


@dataclass(frozen=True, kw_only=True)
class Rescore:
    """Keeps the best proposals of a photo by MIL score, after NMS, for the refinement stages and for detection.

    Peng Tang, Xinggang Wang, Angtian Wang, Yongluan Yan, Wenyu Liu, Junzhou Huang and Alan Yuille: Weakly Supervised
    Region Proposal Network and Object Detection, ECCV 2018.
    https://openaccess.thecvf.com/content_ECCV_2018/papers/Peng_Tang_Weakly_Supervised_Region_ECCV_2018_paper.pdf

    Example:
        >>> from tag2box.recipes import Config
        >>> from tag2box.training.criterion import Criterion
        >>> config = Config(criterion=Criterion(rescore=Rescore(keep=0.5)))
        >>> config.criterion.rescore
        Rescore(keep=0.5, nms_iou=0.75, begin=0.25)
    """

    keep: Annotated[float, Field(gt=0, le=1)] = 1.0
    """At most this fraction of a photo's proposals is kept, the best by MIL score; 1 turns rescoring off."""
    nms_iou: Annotated[float, Field(gt=0, le=1)] = 0.75
    """IoU of the NMS by MIL score."""
    begin: Annotated[float, Field(ge=0, lt=1)] = 0.25
    """Fraction of the training before rescoring begins: the MIL head must be trained first."""

    def acts(self, fraction: float) -> bool:
        """Whether proposals are rescored at this fraction of the training."""
        return self.keep < 1 and fraction >= self.begin

    def __call__(self, scores: Float[torch.Tensor, " R"], meta: BatchMeta) -> Bool[torch.Tensor, " R"]:
        """Mask of the proposals that are kept, given a MIL score each; the same in all views of a photo."""
        spans, is_kept = meta.proposals.spans(), torch.zeros(len(scores), dtype=torch.bool, device=scores.device)
        for views, _ in meta.view_groups():
            first = slice(spans[views[0]].start, spans[views[0]].stop)
            kept = self.best(scores[first], meta.proposals.boxes[first])
            for view in views:
                is_kept[kept + spans[view].start] = True
        return is_kept

    def best(self, scores: Float[torch.Tensor, " P"], boxes: Float[torch.Tensor, "P 4"]) -> Int[torch.Tensor, " kept"]:
        """Rows of a photo that are kept, best first; at least one, if there is any."""
        most = max(1, round(self.keep * len(scores)))
        return nms(boxes, scores, self.nms_iou)[:most]


KEEP_EVERYTHING = Rescore()
"""No rescoring."""
