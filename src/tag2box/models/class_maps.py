"""Class maps: an image classifier on a backbone, whose logits per cell say where the evidence for a tag is.

``ClassMaps`` is trained on tags alone (``training.adaptation``). ``box_evidence`` turns its maps into a number per
proposal and class, which ``Prior`` uses as a factor on scores, together with the area of the proposal: MIL scores have
no sense of size, a part of an object scores as high as the whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import cv2
import numpy as np
import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from tag2box.models.backbone import Backbone
from tag2box.models.context import surroundings
from tag2box.ops.boxes import areas
from tag2box.ops.losses import at_least_single, mil_partition
from tag2box.types import AugmentedRois, AugmentRois, BatchMeta, Proposals, StageScores

RING = 1.5
"""Sides of the ring around a box, relative to those of the box."""
PEAK_SHARE = 0.5
"""Share of a map's peak from which on a cell is part of its component: a constant, chosen without truth."""
CELL_SHARPNESS = 1.0
"""Of the pooling of ``CellMaps``: near the mean, so that all cells of a defect take part, not only the clearest."""
_HIDDEN, _HIDDEN_DROPOUT = 64, 0.3  # of the classifier of cells
_MAX_DEVIATION = 8.0  # features of cells are clamped to so many standard deviations
_CELL_BIAS = -3.0  # of a cell's logits before training: most cells show no object
_MIN_CELLS = 0.25  # a smaller area, in cells, counts as this: what lies within a cell is unknown
_SHARPNESS = 4.0
_FLOOR = 1e-3  # evidence, area share and straddling are at least this, so that a factor is never zero


class ClassMaps(nn.Module):
    """An image classifier whose logits are pooled over the cells of a photo (class activation maps).

    Bolei Zhou, Aditya Khosla, Agata Lapedriza, Aude Oliva and Antonio Torralba: Learning Deep Features for
    Discriminative Localization, CVPR 2016. https://arxiv.org/abs/1512.04150. Pooling is log-sum-exp, as in Pedro
    Pinheiro and Ronan Collobert: From Image-level to Pixel-level Labeling, CVPR 2015. https://arxiv.org/abs/1411.6228

    Args:
        side: short side of the photos that maps are computed of, in pixels.

    Example:
        class_maps = ClassMaps(Lite0().build(), num_classes=20)
        logits = class_maps(images)  # (N, C)
        maps = class_maps.maps(images)  # (N, C, h, w), probabilities
    """

    def __init__(self, backbone: Backbone, num_classes: int, side: int = 256) -> None:
        super().__init__()
        self.backbone, self.num_classes, self.side = backbone, num_classes, side
        self.classifier = nn.Conv2d(backbone.photo_channels, num_classes, 1)
        nn.init.normal_(self.classifier.weight, std=0.01)
        nn.init.zeros_(self.classifier.bias)  # type: ignore[arg-type]

    def forward(
        self, images: Float[Tensor, "N 3 H W"], keep: Float[Tensor, "N F"] | None = None
    ) -> Float[Tensor, "N C"]:
        """Logits of the tags of each photo.

        Args:
            keep: factors on the channels of the features (dropout of whole channels).
        """
        features = self.backbone.photo_features(self.backbone.trunk(images))
        return pooled_logits(self.classifier(features if keep is None else features * keep[:, :, None, None]))

    def maps(self, images: Float[Tensor, "N 3 H W"]) -> Float[Tensor, "N C h w"]:
        """Probability of each class in each cell, at the stride of the trunk."""
        logits: Tensor = self.classifier(self.backbone.photo_features(self.backbone.trunk(images), dense=True))
        return logits.sigmoid()

    @property
    def multiple(self) -> int:
        """Sides of photos are rounded to multiples of this, so that cells of a photo and of its flip agree."""
        return self.backbone.stride


class CellMaps(ClassMaps):
    """Class maps for small things: a classifier of single cells of the two finest pyramid maps of a frozen backbone.

    The maps (strides 8 and 16 of lite0) are averaged over 3 x 3 cells, as in Karsten Roth et al.: Towards Total Recall
    in Industrial Anomaly Detection, CVPR 2022. https://arxiv.org/abs/2106.08265, and standardized; two layers turn each
    cell into logits, which are pooled over the photo. A defect of a few pixels is a few cells here; a cell of
    ``ClassMaps`` sees half of the photo.

    Example:
        cell_maps = CellMaps(Lite0().build(), num_classes=5, side=320)
        cell_maps.standardize(cell_maps.cells(images))
        maps = cell_maps.maps(images)  # (N, C, h, w), probabilities
    """

    def __init__(self, backbone: Backbone, num_classes: int, side: int = 320) -> None:
        super().__init__(backbone, num_classes, side)
        channels = sum(width for _, width in backbone.pyramid_levels[:2])
        last = nn.Conv2d(_HIDDEN, num_classes, 1)
        nn.init.constant_(last.bias, _CELL_BIAS)  # type: ignore[arg-type]
        self.classifier = nn.Sequential(nn.Conv2d(channels, _HIDDEN, 1), nn.ReLU(), nn.Dropout(_HIDDEN_DROPOUT), last)  # type: ignore[assignment]
        self.mean: Tensor
        self.deviation: Tensor
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("deviation", torch.ones(channels))

    @property
    def multiple(self) -> int:
        """The stride of the coarsest map of the pyramid."""
        return self.backbone.pyramid_levels[-1][0]

    def cells(self, images: Float[Tensor, "N 3 H W"]) -> Float[Tensor, "N F h w"]:
        """Features of the cells at the finest stride; sides of photos are multiples of ``multiple``."""
        levels = self.backbone.pyramid(images)[:2]
        shape = levels[0].shape[2:]
        fine = [functional.interpolate(level, shape, mode="bilinear", align_corners=False) for level in levels]
        return functional.avg_pool2d(torch.cat(fine, dim=1), 3, 1, 1, count_include_pad=False)

    def standardize(self, cells: Float[Tensor, "N F h w"]) -> None:
        """Take mean and standard deviation of features from those of some photos."""
        rows = cells.transpose(0, 1).flatten(1).double()
        self.mean.copy_(rows.mean(dim=1))
        self.deviation.copy_(rows.std(dim=1, correction=0).clamp(min=1e-3))

    def cell_logits(self, cells: Float[Tensor, "N F h w"]) -> Float[Tensor, "N C h w"]:
        """Logits of each cell from its features."""
        standard = (cells - self.mean[:, None, None]) / self.deviation[:, None, None]
        logits: Tensor = self.classifier(standard.clamp(-_MAX_DEVIATION, _MAX_DEVIATION))
        return logits

    def forward(
        self, images: Float[Tensor, "N 3 H W"], keep: Float[Tensor, "N F"] | None = None
    ) -> Float[Tensor, "N C"]:
        """Logits of the tags of each photo; ``keep`` is not used."""
        return pooled_logits(self.cell_logits(self.cells(images)), CELL_SHARPNESS)

    def maps(self, images: Float[Tensor, "N 3 H W"]) -> Float[Tensor, "N C h w"]:
        """Probability of each class in each cell, at the finest stride of the pyramid."""
        return self.cell_logits(self.cells(images)).sigmoid()


def pooled_logits(logits: Float[Tensor, "N C h w"], sharpness: float = _SHARPNESS) -> Float[Tensor, "N C"]:
    """Log-sum-exp over cells, (1/r) log mean exp(r z): between the mean (r to 0) and the maximum (r to infinity).

    >>> pooled_logits(torch.tensor([[[[0.0, 0.0], [0.0, 0.0]]]]))
    tensor([[0.]])
    """
    cells = at_least_single(logits).flatten(2)
    return (torch.logsumexp(sharpness * cells, dim=2) - math.log(cells.shape[2])) / sharpness


def peak_boxes(
    maps: Float[Tensor, "C h w"], size: tuple[float, float], share: float = PEAK_SHARE
) -> Float[Tensor, "C 4"]:
    """Box around the peak of each map, in pixels: the cells of at least ``share`` of it that are connected with it.

    Cells are connected by their sides; of equal peaks the first counts.

    Args:
        size: (width, height) of the photo.
    """
    height, width = maps.shape[1:]
    boxes = []
    for one in maps.float().numpy():
        row, column = np.unravel_index(int(one.argmax()), one.shape)
        _, parts = cv2.connectedComponents((one >= share * one[row, column]).astype(np.uint8), connectivity=4)
        rows, columns = np.nonzero(parts == parts[row, column])
        boxes.append([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
    scale = maps.new_tensor([size[0] / width, size[1] / height] * 2)
    return maps.new_tensor(boxes).reshape(-1, 4) * scale


# ---------------------------------------------------------------- evidence of boxes


def integral_image(maps: Float[Tensor, "C h w"]) -> Float[Tensor, "C h1 w1"]:
    """Sums of all cells above and left of each corner, in double precision."""
    return functional.pad(maps.double().cumsum(dim=1).cumsum(dim=2), (1, 0, 1, 0))


def box_sums(integral: Float[Tensor, "C h1 w1"], boxes: Float[Tensor, "P 4"]) -> Float[Tensor, "P C"]:
    """Sums over boxes in units of cells; a cell that a box covers in part counts by its share.

    >>> box_sums(integral_image(torch.ones(1, 2, 2)), torch.tensor([[0.5, 0.0, 2.0, 1.0]])).tolist()
    [[1.5]]
    """
    x1, y1, x2, y2 = boxes.double().unbind(1)
    corners = _at(integral, y2, x2) - _at(integral, y1, x2) - _at(integral, y2, x1) + _at(integral, y1, x1)
    return corners.T


def _at(integral: Float[Tensor, "C h1 w1"], y: Float[Tensor, " P"], x: Float[Tensor, " P"]) -> Float[Tensor, "C P"]:
    """The integral image between its corners: bilinear, because cells are constant."""
    height, width = integral.shape[1] - 1, integral.shape[2] - 1
    y, x = y.clamp(0, height), x.clamp(0, width)
    top, left = y.floor().long().clamp(max=height - 1), x.floor().long().clamp(max=width - 1)
    down, across = y - top, x - left
    upper = integral[:, top, left] * (1 - across) + integral[:, top, left + 1] * across
    lower = integral[:, top + 1, left] * (1 - across) + integral[:, top + 1, left + 1] * across
    return upper * (1 - down) + lower * down


def box_evidence(
    maps: Float[Tensor, "C h w"], boxes: Float[Tensor, "P 4"], size: tuple[float, float]
) -> Float[Tensor, "P C"]:
    """Evidence that ends where the box does: mean probability inside minus that in the ring around it, at least 0.

    The ring is what the box enlarged ``RING`` times around its centre adds, within the photo; without any, its mean
    is 0. A part of an object has evidence around it, a box that is too large has little inside.

    Args:
        maps: probabilities of a photo.
        boxes: in pixels of the photo.
        size: (width, height) of the photo.
    """
    height, width = maps.shape[1:]
    cells = boxes * boxes.new_tensor([width / size[0], height / size[1]] * 2)
    frame = Proposals(cells, (len(cells),), ((width, height),))
    around = surroundings(frame, RING).boxes
    integral, own = integral_image(maps), areas(cells).double()
    ring = (areas(around).double() - own).clamp(min=0)
    inside = box_sums(integral, cells)
    outside = (box_sums(integral, around) - inside) / ring.clamp(min=_MIN_CELLS)[:, None]
    return (inside / own.clamp(min=_MIN_CELLS)[:, None] - outside).clamp(min=0).to(maps)


# ---------------------------------------------------------------- the prior


@dataclass(frozen=True, kw_only=True)
class Prior:
    """Prior on boxes, learned or set without boxes: score x evidence^e x (share of the photo's area)^a x bu^s."""

    evidence: Annotated[float, Field(ge=0, le=10)] = 0.0
    """e, the exponent of the class maps' evidence for a box; needs ``adaptation.epochs`` above 0."""
    area: Annotated[float, Field(ge=-10, le=10)] = 0.0
    """a, the exponent of the area share; above 0 it prefers large boxes, and costs small objects."""
    straddling: Annotated[float, Field(ge=0, le=10)] = 0.0
    """s, the exponent of the superpixel straddling score bu, which is 1 for a box that consists of whole superpixels
    (settings ``superpixels``); it prefers boxes whose sides follow boundaries in the photo."""

    def mean(
        self,
        scores: Float[Tensor, "P C"],
        shares: Float[Tensor, " P"],
        evidence: Float[Tensor, "P C"] | None,
        straddling: Float[Tensor, " P"] | None = None,
    ) -> Float[Tensor, "P C"]:
        """The weighted geometric mean of score and factors: ranks like their product, and stays a score.

        >>> Prior(area=1.0).mean(torch.tensor([[0.9]]), torch.tensor([0.4]), None)
        tensor([[0.6000]])
        """
        if self == NO_PRIOR:
            return scores
        product = scores * self.factors(shares, evidence, scores.shape[1], straddling)
        return product.pow(self.power)

    @property
    def power(self) -> float:
        """The power that turns the product of score and factors into their mean."""
        return 1 / (1 + self.evidence + max(self.area, 0.0) + self.straddling)

    def factors(
        self,
        shares: Float[Tensor, " P"],
        evidence: Float[Tensor, "P C"] | None,
        num_classes: int,
        straddling: Float[Tensor, " P"] | None = None,
    ) -> Float[Tensor, "P C"]:
        """The factor of each box and class."""
        factors = shares.clamp(min=_FLOOR**2)[:, None].pow(self.area).expand(-1, num_classes)
        if self.straddling != 0:
            assert straddling is not None  # a requirement of the criterion; computed in detection
            factors = factors * straddling.to(factors).clamp(min=_FLOOR).pow(self.straddling)[:, None]
        if self.evidence == 0:
            return factors
        assert evidence is not None  # checked before training starts
        return factors * evidence.to(factors).clamp(min=_FLOOR).pow(self.evidence)


NO_PRIOR = Prior()


def area_shares(proposals: Proposals) -> Float[Tensor, " R"]:
    """The share of its photo's area that each proposal covers."""
    assert proposals.frames is not None  # a batch source sets them
    photo = torch.tensor([width * height for width, height in proposals.frames]).to(proposals.boxes)
    return areas(proposals.boxes) / photo[proposals.image_ids()].clamp(min=1)


def relative_factors(prior: Prior, meta: BatchMeta) -> Float[Tensor, "R C"]:
    """Factors of a prior, divided by the largest of each photo and class, so that scores keep their scale."""
    proposals, side_info = meta.proposals, meta.side_info
    shares, num_classes = area_shares(proposals), meta.tags.shape[1]
    factors = prior.factors(shares, side_info.class_evidence, num_classes, side_info.evidence)
    parts = [own / own.max(dim=0).values if len(own) else own for own in proposals.split(factors)]
    return torch.cat([factors[:0], *parts])


def with_prior(probs: tuple[Tensor, ...], factors: Float[Tensor, "R C"], teachers: slice) -> tuple[Tensor, ...]:
    """Scores of all teachers, those of some of them multiplied by factors."""
    chosen = range(len(probs))[teachers]
    return tuple(p * factors if k in chosen else p for k, p in enumerate(probs))


def with_factors(augment_rois: AugmentRois, factors: Float[Tensor, "R C"], teachers: slice) -> AugmentRois:
    """Augmented copies whose scores by some teachers have the factors of their proposals."""

    def augment(rows: Int[Tensor, " m"]) -> AugmentedRois:
        made = augment_rois(rows)
        return replace(made, probs=with_prior(made.probs, factors[rows], teachers))

    return augment


# ---------------------------------------------------------------- the prior inside MIL


def log_factors(prior: Prior, meta: BatchMeta) -> Float[Tensor, "R C"]:
    """log f of the factors of a prior, at most 0."""
    factors = relative_factors(prior, meta)
    return factors.clamp(min=torch.finfo(factors.dtype).tiny).log()


def with_prior_in_mil(scores: StageScores, logs: Float[Tensor, "R C"]) -> StageScores:
    """Scores whose MIL heads share out an image by f exp(det): log f is added to detection logits, not to background.

    >>> scores = StageScores(torch.zeros(1, 2), torch.zeros(1, 2), (), ())
    >>> with_prior_in_mil(scores, torch.tensor([[-1.0]])).mil_det
    tensor([[-1.,  0.]])
    """
    added = functional.pad(logs, (0, scores.mil_det.shape[1] - logs.shape[1]))
    more, region = (
        tuple(x + added.to(x) if k % 2 else x for k, x in enumerate(own)) for own in (scores.mil_more, scores.region)
    )
    return replace(scores, mil_det=scores.mil_det + added.to(scores.mil_det), mil_more=more, region=region)


def prior_gain(det: Float[Tensor, "R c"], logs: Float[Tensor, "R C"], sizes: Sequence[int]) -> Float[Tensor, "R C"]:
    """What the prior inside MIL multiplies the score of a proposal by: f_r sum_i exp(d_i) / sum_i f_i exp(d_i).

    An augmented copy of a proposal has the detection logit of its own, but the sums and f of the original proposals.
    """
    own, logs = det[:, : logs.shape[1]], logs.to(det)
    shift = mil_partition(own, sizes) - mil_partition(own + logs, sizes)  # (N, C)
    images = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes, dtype=torch.long)).to(det.device)
    return (logs + shift[images]).exp()
