"""WSRPN, weakly supervised region proposal network (Tang et al., 2018): proposals rescored by a region classifier."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field

from tag2box.ops import nms
from tag2box.types import BatchMeta, Labeling, PseudoLabels

TurnStart = Annotated[float, Field(ge=0, le=1)]
_FIRST_SHARED = 2  # turn


def turn_of(fraction: float, turns: Sequence[float]) -> int:
    """The turn of an alternate training: 0 before the first of ``turns``, 1 from there on, and so on.

    >>> [turn_of(fraction, (0.25, 0.65, 0.8)) for fraction in (0.0, 0.25, 0.7, 1.0)]
    [0, 1, 2, 3]
    """
    return sum(fraction >= begin for begin in turns)


@dataclass(frozen=True, kw_only=True)
class Rescore:
    """Keeps the best proposals of a photo, after NMS, for the detector, in training and in detection.

    The scores are those of the region classifier (``heads.region``), summed over classes: then it and the detector are
    trained in turn, at first each with its own convolutions, then with those of the detector. Without a region
    classifier they are those of the detector's own MIL head, which then learns from all proposals.

    Peng Tang, Xinggang Wang, Angtian Wang, Yongluan Yan, Wenyu Liu, Junzhou Huang and Alan Yuille: Weakly Supervised
    Region Proposal Network and Object Detection, ECCV 2018.
    https://openaccess.thecvf.com/content_ECCV_2018/papers/Peng_Tang_Weakly_Supervised_Region_ECCV_2018_paper.pdf

    Example:
        >>> from tag2box.recipes import Config
        >>> from tag2box.training.criterion import Criterion
        >>> config = Config(criterion=Criterion(rescore=Rescore(keep=0.5)))
        >>> config.criterion.rescore
        Rescore(keep=0.5, nms_iou=0.75, begin=0.25, turns=(0.25, 0.65, 0.8))
    """

    keep: Annotated[float, Field(gt=0, le=1)] = 1.0
    """At most this fraction of a photo's proposals is kept, the best by score; 1 turns rescoring off."""
    nms_iou: Annotated[float, Field(gt=0, le=1)] = 0.75
    """IoU of the NMS by score."""
    begin: Annotated[float, Field(ge=0, lt=1)] = 0.25
    """Without a region classifier: fraction of the training before rescoring, as the MIL head must be trained first."""
    turns: tuple[TurnStart, TurnStart, TurnStart] = (0.25, 0.65, 0.8)
    """Fractions of the training at which, after the region classifier, the detector is trained, then the region
    classifier on the detector's convolutions, then the detector on what that one keeps; both leave these fixed."""

    def __post_init__(self) -> None:
        if list(self.turns) != sorted(self.turns):
            raise ValueError(f"turns are {self.turns}, expected rising fractions such as (0.25, 0.65, 0.8)")

    def trains_region(self, fraction: float) -> bool:
        """Whether the region classifier is trained at this fraction of the training, else the detector."""
        return turn_of(fraction, self.turns) % 2 == 0

    def shares(self, fraction: float) -> bool:
        """Whether both use the convolutions of the detector, which are then fixed."""
        return turn_of(fraction, self.turns) >= _FIRST_SHARED

    def acts(self, fraction: float) -> bool:
        """Whether proposals are rescored at this fraction of the training."""
        return self.keep < 1 and fraction >= self.begin

    def __call__(self, scores: Float[torch.Tensor, " R"], meta: BatchMeta) -> Bool[torch.Tensor, " R"]:
        """Mask of the proposals that are kept, given a score each; the same in all views of a photo."""
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


def scatter_labels(labeling: Labeling, rows: Int[torch.Tensor, " r"], meta: BatchMeta) -> Labeling:
    """Labels of some proposals as labels of all; the others get weight zero."""
    return replace(labeling, stages=tuple(_scatter_stage(labels, rows, meta) for labels in labeling.stages))


def _scatter_stage(labels: PseudoLabels, rows: Int[torch.Tensor, " r"], meta: BatchMeta) -> PseudoLabels:
    total = len(meta.proposals.boxes)
    return PseudoLabels(
        labels.cls.new_full((total,), meta.tags.shape[1]).index_copy(0, rows, labels.cls),
        labels.weight.new_zeros(total).index_copy(0, rows, labels.weight),
        meta.proposals.boxes.to(labels.boxes.dtype).index_copy(0, rows, labels.boxes),
        replace(labels.pseudo_boxes, rows=rows[labels.pseudo_boxes.rows]),
        labels.owner.new_full((total,), -1).index_copy(0, rows, labels.owner),
    )
