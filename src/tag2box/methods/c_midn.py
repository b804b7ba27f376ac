"""C-MIDN, coupled MIL detection networks (Gao et al., 2019): a second MIL head without the proposals of the first."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from tag2box.errors import UserError
from tag2box.methods import oicr, protocols, slv
from tag2box.ops import assign, containment, iou, mil_scores
from tag2box.types import (
    BatchMeta,
    LabelerInput,
    Labeling,
    LabelMap,
    Proposals,
    PseudoBoxes,
    Requirements,
    SideInfo,
    StageScores,
)

GuideKind = Literal["segmentation", "class_maps", "mil"]


def class_mask(
    boxes: Float[Tensor, "P 4"], scores: Float[Tensor, " P"], *, cell: float, threshold: float
) -> Bool[Tensor, "h w"]:
    """Mask of a class without segmentation: cells whose likelihood, the sum of the votes of the boxes over them,
    reaches the threshold.
    """
    likelihood = slv.likelihood_map(boxes, scores, cell)
    return (likelihood >= threshold) & (likelihood > 0)


def cell_seeds(
    maps: Float[Tensor, "C h w"], tags: Bool[Tensor, " C"], *, foreground: float, background: float
) -> Int[Tensor, "h w"]:
    """Seeds of a segmentation: class of each cell, C for background, -1 where the maps do not say.

    A cell is a seed of the tagged class whose map is highest there, relative to its peak in the photo, if that is at
    least ``foreground``; it is background if no tagged class reaches ``background``.
    """
    seeds = torch.full(maps.shape[1:], -1, device=maps.device)
    if not tags.any():
        return seeds.fill_(len(maps))
    own = maps[tags]
    share, best = (own / own.amax(dim=(1, 2), keepdim=True).clamp(min=1e-12)).max(dim=0)
    is_object = share >= foreground
    seeds[is_object] = tags.nonzero().flatten()[best[is_object]]
    seeds[(share < background) & ~is_object] = len(maps)
    return seeds


def seed_loss(logits: Float[Tensor, "c1 h w"], seeds: Int[Tensor, "h w"]) -> Float[Tensor, ""]:
    """Cross-entropy of the seeds: mean over seeds of objects, plus mean over those of background."""
    entropy = functional.cross_entropy(logits[None], seeds[None].clamp(min=0), reduction="none")[0]
    is_background = seeds == len(logits) - 1
    parts = ((seeds >= 0) & ~is_background, is_background)
    means = [(entropy * part).sum() / part.sum().clamp(min=1) for part in parts]
    return means[0] + means[1]


def segment_labels(logits: Float[Tensor, "c1 h w"], tags: Bool[Tensor, " C"]) -> Int[Tensor, "h w"]:
    """Class of each cell: the most likely of the tagged ones and background, which is C."""
    possible = torch.cat([tags, tags.new_ones(1)])
    return logits.masked_fill(~possible[:, None, None], -torch.inf).argmax(dim=0)


@dataclass(frozen=True, slots=True)
class Guide:
    """Where the class masks of a batch come from: segmentation, or votes of its boxes (evidence, or MIL scores)."""

    proposals: Proposals
    side_info: SideInfo
    kind: GuideKind
    mask: float
    cell: float

    def __call__(
        self, photo: int, c: int, scores: Float[Tensor, " P"]
    ) -> tuple[Bool[Tensor, "h w"], Float[Tensor, "P 4"]]:
        """The mask of a class in a photo, given MIL scores; and the photo's boxes in units of the mask's cells."""
        span = self.proposals.spans()[photo]
        inside = slice(span.start, span.stop)
        boxes = self.proposals.boxes[inside]
        if self.kind == "segmentation":
            segments, (width, height) = self._segments()[photo], self._frame(photo)
            scale = boxes.new_tensor([segments.shape[1] / width, segments.shape[0] / height] * 2)
            return segments.to(boxes.device) == c, boxes * scale
        evidence = self.side_info.class_evidence if self.kind == "class_maps" else None
        votes = scores if evidence is None else evidence[inside, c].to(scores.dtype)
        return class_mask(boxes, votes, cell=self.cell, threshold=self.mask), boxes / self.cell

    def _segments(self) -> tuple[LabelMap, ...]:
        if self.side_info.segments is None:
            raise UserError("c_midn: is guided by segmentation, and this input has none: set SideInfo.segments")
        return self.side_info.segments

    def _frame(self, photo: int) -> tuple[int, int]:
        assert self.proposals.frames is not None  # a batch source sets them
        return self.proposals.frames[photo]


def cells_inside(mask: Bool[Tensor, "h w"], boxes: Float[Tensor, "P 4"], cell: float) -> Float[Tensor, " P"]:
    """Number of mask cells in each box, from an integral image; boxes are clipped at the grid's border."""
    height, width = mask.shape
    sums = torch.zeros(height + 1, width + 1, dtype=torch.long, device=mask.device)
    sums[1:, 1:] = mask.long().cumsum(dim=0).cumsum(dim=1)
    border = sums.new_tensor([width, height, width, height])
    left, top, right, bottom = slv.cells_of(boxes, cell).minimum(border).unbind(dim=1)
    return (sums[bottom, right] - sums[top, right] - sums[bottom, left] + sums[top, left]).to(boxes.dtype)


def coverage(mask: Bool[Tensor, "h w"], boxes: Float[Tensor, "P 4"], cell: float) -> Float[Tensor, " P"]:
    """Fraction of the mask that lies in each box; zero for an empty mask."""
    return cells_inside(mask, boxes, cell) / mask.sum().clamp(min=1)


def mask_fit(mask: Bool[Tensor, "h w"], boxes: Float[Tensor, "P 4"], cell: float) -> Float[Tensor, " P"]:
    """Intersection over union of each box with the mask, in cells: high for a box that is large and tight."""
    shared = cells_inside(mask, boxes, cell)
    left, top, right, bottom = slv.cells_of(boxes, cell).unbind(dim=1)
    union = (right - left) * (bottom - top) + mask.sum() - shared
    return shared / union


def is_removed(
    boxes: Float[Tensor, "P 4"], top: int, covered: Float[Tensor, " P"], *, iou_threshold: float, enough: float
) -> Bool[Tensor, " P"]:
    """Which proposals are removed from the second head for a class.

    Those with an IoU above the threshold to the first head's top box, except those that cover enough of the class
    mask. None if no proposal would be left.
    """
    near = iou(boxes, boxes[top : top + 1]).squeeze(1) > iou_threshold
    removed = near & (covered < enough)
    return removed & ~removed.all()


def kept_of_two(
    boxes: Float[Tensor, "2 4"], mask: Bool[Tensor, "h w"], *, apart: float, cell: float
) -> Bool[Tensor, " 2"]:
    """Which of both heads' top boxes become pseudo boxes: both if they lie apart, else the better fit to the mask.

    On ties the first is kept.
    """
    if containment(boxes[:1], boxes[1:]).item() <= apart:
        return torch.ones(2, dtype=torch.bool, device=boxes.device)
    first, second = mask_fit(mask, boxes, cell)
    return torch.stack([first >= second, first < second])


@dataclass(frozen=True, kw_only=True)
class CMidn(protocols.TagLoss):
    """Two MIL heads; proposals that overlap the top box of the first are removed from the second, per tagged class.

    Yan Gao, Boxiao Liu, Nan Guo, Xiaochun Ye, Fang Wan, Haihang You and Dongrui Fan: C-MIDN: Coupled Multiple Instance
    Detection Network with Segmentation Guidance for Weakly Supervised Object Detection, ICCV 2019.
    https://openaccess.thecvf.com/content_ICCV_2019/papers/Gao_C-MIDN_Coupled_Multiple_Instance_Detection_Network_With_Segmentation_Guidance_for_ICCV_2019_paper.pdf

    Example:
        >>> from tag2box.recipes import Config
        >>> from tag2box.training.criterion import Criterion
        >>> config = Config(criterion=Criterion(mil=CMidn(), labeler=CMidnLabeler()))
        >>> config.criterion.requirements.mil_heads
        2
    """

    kind: Literal["c_midn"] = "c_midn"
    removed_iou: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Proposals with a higher IoU to the first head's top box are removed from the second head."""
    covered: Annotated[float, Field(ge=0)] = 0.8
    """Except those that cover this fraction of the class mask; above 1 there is no exception."""
    mask: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Cells with at least this likelihood belong to the class mask; the maximum is 1."""
    cell: Annotated[float, Field(gt=0)] = 8.0
    """Side of the mask's cells, in pixels of the resized photo."""
    guide: GuideKind = "mil"
    """Source of the class mask: a segmentation branch of its own (the paper; settings ``segmentation``), the class maps
    of adaptation (needs ``adaptation.epochs`` above 0), or the MIL scores themselves."""

    @property
    def requirements(self) -> Requirements:
        """A second MIL head; segmentation or the evidence of class maps, if they guide it."""
        kind = self.guide
        return Requirements(mil_heads=2, class_evidence=kind == "class_maps", segments=kind == "segmentation")

    def __call__(self, scores: StageScores, meta: BatchMeta, fraction: float) -> protocols.MilResult:
        """Proposal scores of both heads, and the sum of their losses."""
        if len(scores.mil_more) != 2:
            raise UserError("heads.mil_heads: criterion.mil.kind c_midn reads two MIL heads; --set heads.mil_heads=2")
        sizes, (cls, det) = meta.proposals.sizes, scores.mil_more
        first = mil_scores(scores.mil_cls, scores.mil_det, sizes)
        second = mil_scores(cls, det.masked_fill(self.removed(first.detach(), meta), -torch.inf), sizes)
        return protocols.MilResult(first, self.tag_loss(first, meta) + self.tag_loss(second, meta), second)

    def removed(self, first: Float[Tensor, "R c"], meta: BatchMeta) -> Bool[Tensor, "R c"]:
        """Mask of the proposals that are removed from the second head, per class."""
        removed = torch.zeros_like(first, dtype=torch.bool)
        guide = Guide(meta.proposals, meta.side_info, self.guide, self.mask, self.cell)
        for photo, (span, tags) in enumerate(zip(meta.proposals.spans(), meta.tags, strict=True)):
            inside = slice(span.start, span.stop)
            for c in tags.nonzero().flatten().tolist() if len(span) else []:
                scores = first[inside, c]
                covered = coverage(*guide(photo, c, scores), 1.0)
                top, boxes = int(scores.argmax()), meta.proposals.boxes[inside]
                removed[inside, c] = is_removed(
                    boxes, top, covered, iou_threshold=self.removed_iou, enough=self.covered
                )
        return removed


@dataclass(frozen=True, kw_only=True)
class CMidnLabeler:
    """Labeler of C-MIDN: stage 1 uses the top proposals of both MIL heads, later stages those of the stage before.

    Yan Gao, Boxiao Liu, Nan Guo, Xiaochun Ye, Fang Wan, Haihang You and Dongrui Fan: C-MIDN: Coupled Multiple Instance
    Detection Network with Segmentation Guidance for Weakly Supervised Object Detection, ICCV 2019.
    https://openaccess.thecvf.com/content_ICCV_2019/papers/Gao_C-MIDN_Coupled_Multiple_Instance_Detection_Network_With_Segmentation_Guidance_for_ICCV_2019_paper.pdf

    Example:
        >>> from tag2box.recipes import Config
        >>> from tag2box.training.criterion import Criterion
        >>> config = Config(criterion=Criterion(labeler=CMidnLabeler(apart=0.2)))
        >>> config.criterion.labeler.cell
        8.0
    """

    kind: Literal["c_midn"] = "c_midn"
    apart: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Both top proposals are kept if no more than this fraction of the smaller lies in the other."""
    mask: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Cells with at least this likelihood belong to the class mask; the maximum is 1."""
    cell: Annotated[float, Field(gt=0)] = 8.0
    """Side of the mask's cells, in pixels of the resized photo."""
    guide: GuideKind = "mil"
    """Source of the class mask: a segmentation branch, class maps of adaptation, or MIL scores, as of the MIL heads."""
    foreground_iou: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """A proposal takes the class of its nearest pseudo box above this IoU; others are background."""

    @property
    def requirements(self) -> Requirements:
        """A second MIL head; segmentation or the evidence of class maps, if they guide it."""
        kind = self.guide
        return Requirements(mil_heads=2, class_evidence=kind == "class_maps", segments=kind == "segmentation")

    def __call__(self, inputs: LabelerInput) -> Labeling:
        """Pseudo boxes and pseudo labels of every stage."""
        later = [oicr.argmax_pseudo_boxes(inputs, stage) for stage in range(1, len(inputs.probs))]
        pseudo_boxes, num_classes = [self.coupled(inputs), *later], inputs.tags.shape[1]
        return Labeling(tuple(assign(inputs.proposals, s, num_classes, self.foreground_iou) for s in pseudo_boxes))

    def coupled(self, inputs: LabelerInput) -> PseudoBoxes:
        """Pseudo boxes of stage 1; those of the first head if the MIL head strategy has no second."""
        first = oicr.argmax_pseudo_boxes(inputs, 0)
        if inputs.second is None:
            return first
        # the same images and classes in the same order
        second = oicr.argmax_pseudo_boxes(replace(inputs, probs=(inputs.second,)), 0)
        rows = torch.stack([first.rows, second.rows], dim=1)  # (pairs, 2)
        scores = torch.stack([first.score, second.score], dim=1)
        cls = first.cls[:, None].expand_as(rows)
        guide = Guide(inputs.proposals, inputs.side_info, self.guide, self.mask, self.cell)
        keep = [self.keep(inputs, guide, pair, c) for pair, c in zip(rows, first.cls.tolist(), strict=True)]
        is_kept = torch.stack(keep) if keep else rows > 0
        return PseudoBoxes(rows[is_kept], cls[is_kept], scores[is_kept])

    def keep(self, inputs: LabelerInput, guide: Guide, pair: Int[Tensor, " 2"], c: int) -> Bool[Tensor, " 2"]:
        """Which of two top proposals of one class of one image are kept, by the mask of the guide."""
        assert inputs.second is not None
        spans = inputs.proposals.spans()
        photo = next(number for number, span in enumerate(spans) if int(pair[0]) in span)
        inside = slice(spans[photo].start, spans[photo].stop)
        mask, boxes = guide(photo, c, inputs.probs[0][inside, c] + inputs.second[inside, c])
        return kept_of_two(boxes[pair - inside.start], mask, apart=self.apart, cell=1.0)
