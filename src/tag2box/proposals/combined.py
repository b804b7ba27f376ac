"""Combined proposals: selective search, stable regions, blobs and windows, for small things and faint textures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar, Literal, get_args

import cv2
import numpy as np
import torch
from jaxtyping import Float, Float64, Int, UInt8
from pydantic import Field

from tag2box.ops.boxes import nms
from tag2box.proposals.base import Candidates, FoundBoxes, ProposalMethod, resized_pixels
from tag2box.proposals.selective_search import OLD_ENGINE, SearchEngine, SelectiveSearch

SourceName = Literal["selective_search", "equalized", "mser", "blobs", "windows"]
SOURCES: tuple[SourceName, ...] = get_args(SourceName)
"""In the order in which they take turns."""

_CLIP_LIMIT, _TILES = 3.0, (4, 4)  # of the contrast-limited adaptive histogram equalization
_MSER_DELTA, _MSER_MIN_AREA, _MSER_MAX_SHARE, _MSER_BLURS = 3, 9, 0.5, (0.0, 2.0)
_BLOB_SIGMAS, _BLOB_RATIO, _BLOB_LEVELS = (1.0, 2.0, 4.0, 8.0, 16.0), 3.0, (0.5, 1.0, 2.0, 3.0)
_BLOB_MIN_AREA, _BLOB_NMS = 4, 0.8  # pixels; threshold within a scale
_WINDOW_SCALES = 2.0**0.5  # ratio of one window size to the next
_WINDOW_SMALLEST, _WINDOW_LARGEST = 0.035, 1.0  # side of a square window, as a share of the square root of the area
_WINDOW_ASPECTS, _WINDOW_STRIDE, _WINDOW_NMS = (0.4, 1.0, 2.5), 1 / 3, 0.5
_RING, _NOISE = 1.7, 4.0  # enlarged window by window side; variance (Lab units squared) that every ring has at least
_COLOR = 1.0  # standard deviation of a Lab color channel below which a photo counts as grey
_MAX_RANKED = 4000  # boxes of a source that are compared with each other
_MAX_LEVEL = 1500  # the same, of one scale


@dataclass(frozen=True, kw_only=True)
class Combined(ProposalMethod):
    """Boxes of several sources, thinned per source, which take turns until ``max_boxes``. Boxes are not ranked.

    - ``selective_search``: fast selective search, as the method of that name.
    - ``equalized``: the same after contrast-limited adaptive histogram equalization (Pizer et al., 1987).
    - ``mser``: maximally stable extremal regions (Matas et al., BMVC 2002) of the stretched grey image.
    - ``blobs``: connected regions of differences of Gaussians above several levels, in lightness, color and gradient.
    - ``windows``: sliding windows of all sizes, ranked by contrast to their surroundings, for textures without borders.

    Example:
        Combined(short_side=200, max_boxes=1500)(image).boxes
    """

    kind: Literal["combined"] = "combined"
    unrecorded: ClassVar[Mapping[str, object]] = {**OLD_ENGINE, "short_sides": ()}
    short_side: Annotated[int, Field(ge=32, le=20_000)] | None = 200
    """Short side to which photos are resized for the search; None searches at full size and takes far longer."""
    short_sides: tuple[Annotated[int, Field(ge=32, le=20_000)], ...] = ()
    """Further short sides at which every source searches: larger ones find smaller things, smaller ones larger wholes.

    The boxes of a source in all resolutions take turns and are thinned together; it has ``source_boxes`` as before.
    """
    max_boxes: Annotated[int, Field(ge=1)] | None = 1500
    """Maximum number of boxes per photo."""
    min_side: Annotated[int, Field(ge=0)] = 0
    """Boxes with a shorter side, in pixels of the original photo, are dropped, in addition to ``min_share``."""
    min_share: Annotated[float, Field(ge=0, lt=1)] = 0.015
    """Boxes with a side below this share of the photo's short side are dropped."""
    sources: Annotated[tuple[SourceName, ...], Field(min_length=1)] = SOURCES
    """Which boxes are combined: selective_search, equalized, mser, blobs, windows."""
    source_boxes: Annotated[int, Field(ge=1)] = 500
    """Maximum number of boxes per source."""
    thinning: Annotated[float, Field(gt=0, le=1)] = 0.9
    """NMS threshold within a source: boxes with a higher IoU than this are the same; 1 keeps all."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the shuffle of the sources that do not rank their boxes."""
    engine: SearchEngine = "tag2box"
    """Implementation of selective search: our own, or OpenCV's, which takes several times as long."""

    def working_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Width and height of the copy for the largest short side; the others are reduced from it."""
        if self.short_side is None:
            return size
        return ProposalMethod(short_side=max(self.short_side, *self.short_sides, 0)).working_size(size)

    def search(self, bgr: UInt8[np.ndarray, "h w 3"], min_side: float) -> FoundBoxes:
        """The boxes of all sources in turn; the score is the reciprocal of the turn."""
        levels = [self._level(bgr, factor, min_side) for factor in self._factors(min(bgr.shape[:2]))]
        found = [in_all_resolutions(own, self.thinning)[: self.source_boxes] for own in zip(*levels, strict=True)]
        turns = np.concatenate([np.arange(len(boxes)) for boxes in found])
        corners = np.concatenate(found)
        order = np.argsort(turns, kind="stable")  # within a turn, in the order of the sources
        return FoundBoxes(corners[order], 1.0 / np.arange(1, len(order) + 1))

    def _factors(self, short: int) -> list[float]:
        """The short sides relative to the largest, that of the working copy; ``short_side`` is the first."""
        if self.short_side is None:  # the copy is the photo, which is not enlarged
            sides = [short, *(min(side, short) for side in self.short_sides)]
        else:
            sides = [self.short_side, *self.short_sides]
        return [side / max(sides) for side in dict.fromkeys(sides)]

    def _level(
        self, bgr: UInt8[np.ndarray, "h w 3"], factor: float, min_side: float
    ) -> list[Float64[np.ndarray, "n 4"]]:
        """The boxes of every source in a reduced copy, in pixels of ``bgr``."""
        height, width = bgr.shape[:2]
        cols, rows = max(1, round(factor * width)), max(1, round(factor * height))
        small = resized_pixels(bgr, cols, rows)
        floor, image = max(min_side * factor, self.min_share * min(rows, cols)), Channels(small, self.engine)
        scale = np.array([width / cols, height / rows] * 2)
        return [self._thinned(_FIND[source](image, self.seed), floor) * scale for source in self.sources]

    def __call__(self, image: UInt8[torch.Tensor, "3 H W"], size: tuple[int, int] | None = None) -> Candidates:
        """Propose boxes for a photo, as every method does; scores are zero, because ranks of sources do not compare."""
        return Candidates.unranked(super().__call__(image, size).boxes)

    def _thinned(self, found: FoundBoxes, floor: float) -> Float64[np.ndarray, "n 4"]:
        """The boxes of a source, best first: big enough, thinned and capped."""
        is_big = ((found.corners[:, 2:] - found.corners[:, :2]) >= floor).all(1)
        kept = thin(found.corners[is_big], found.scores[is_big], self.thinning)
        return np.asarray(found.corners[is_big][kept[: self.source_boxes]])


def in_all_resolutions(levels: Sequence[Float64[np.ndarray, "_ 4"]], threshold: float) -> Float64[np.ndarray, "n 4"]:
    """Boxes of one source in several resolutions, each best first: the best of each, then every second best, thinned.

    >>> in_all_resolutions([np.array([[0.0, 0, 8, 8]]), np.array([[0.0, 0, 8, 8], [4.0, 4, 9, 9]])], 0.9).tolist()
    [[0.0, 0.0, 8.0, 8.0], [4.0, 4.0, 9.0, 9.0]]
    """
    if len(levels) == 1:
        return levels[0]
    corners, turns = np.concatenate(levels), np.concatenate([np.arange(len(rows)) for rows in levels])
    return np.asarray(corners[thin(corners, -turns.astype(np.float64), threshold)])


def thin(
    corners: Float64[np.ndarray, "n 4"], scores: Float64[np.ndarray, " n"], threshold: float, most: int = _MAX_RANKED
) -> Int[np.ndarray, " m"]:
    """Rows that NMS keeps, best first, of the ``most`` best. Equal scores keep their order."""
    order = np.argsort(-scores, kind="stable")[:most]
    ranks = -torch.arange(len(order), dtype=torch.float64)
    return np.asarray(order[nms(torch.from_numpy(corners[order]), ranks, threshold).numpy()])


# ---------------------------------------------------------------- an image in several forms


@dataclass(frozen=True)
class Channels:
    """An image, the forms of it that the sources search, each computed once, and how selective search does."""

    bgr: UInt8[np.ndarray, "h w 3"]
    engine: SearchEngine = "tag2box"

    @cached_property
    def lab(self) -> Float[np.ndarray, "h w 3"]:
        """Lightness from 0 to 100, and two color channels."""
        return np.asarray(cv2.cvtColor(self.bgr.astype(np.float32) / 255, cv2.COLOR_BGR2LAB))

    @cached_property
    def cues(self) -> Float[np.ndarray, "h w c"]:
        """Lightness, color channels unless the image is grey, and gradient magnitude: units of Lab."""
        light = self.lab[..., 0]
        dx, dy = cv2.Scharr(light, cv2.CV_32F, 1, 0), cv2.Scharr(light, cv2.CV_32F, 0, 1)
        colors = [self.lab[..., 1], self.lab[..., 2]] if self.lab[..., 1:].std((0, 1)).max() > _COLOR else []
        return np.dstack([light, *colors, np.hypot(dx, dy) / 32])

    @cached_property
    def stretched(self) -> UInt8[np.ndarray, "h w"]:
        """Grey values with their extremes at 0 and 255; a dark or flat 16-bit photo thus has the same contrast."""
        light = self.lab[..., 0]
        low, high = float(light.min()), float(light.max())  # percentiles would cut off the small and bright
        return np.asarray(((light - low) * (255 / max(high - low, 1e-3))).astype(np.uint8))

    @cached_property
    def equalized(self) -> UInt8[np.ndarray, "h w 3"]:
        """The image with its lightness equalized in tiles."""
        lab = cv2.cvtColor(self.bgr, cv2.COLOR_BGR2LAB)
        lab[..., 0] = cv2.createCLAHE(_CLIP_LIMIT, _TILES).apply(lab[..., 0])
        return np.asarray(cv2.cvtColor(lab, cv2.COLOR_LAB2BGR))


# ---------------------------------------------------------------- sources of regions


def _selective_search(image: Channels, seed: int) -> FoundBoxes:
    return _shuffled(SelectiveSearch(engine=image.engine).search(image.bgr, 0.0).corners, seed)


def _equalized(image: Channels, seed: int) -> FoundBoxes:
    return _shuffled(SelectiveSearch(engine=image.engine).search(image.equalized, 0.0).corners, seed)


def _mser(image: Channels, seed: int) -> FoundBoxes:
    """Regions of the grey image and of a blurred copy."""
    search = cv2.MSER.create(_MSER_DELTA, _MSER_MIN_AREA, max(int(_MSER_MAX_SHARE * image.stretched.size), 1))
    rows = [np.zeros((0, 4))]
    for sigma in _MSER_BLURS if min(image.bgr.shape[:2]) > 2 else ():  # OpenCV refuses strips
        grey = cv2.GaussianBlur(image.stretched, (0, 0), sigma) if sigma else image.stretched
        rows.append(np.asarray(search.detectRegions(grey)[1], np.float64).reshape(-1, 4))
    found = np.concatenate(rows)  # (x, y, w, h)
    return _shuffled(np.concatenate([found[:, :2], found[:, :2] + found[:, 2:]], axis=1), seed)


def _shuffled(corners: Float64[np.ndarray, "n 4"], seed: int) -> FoundBoxes:
    """Distinct boxes in seeded random order: OpenCV's order of selective search changes from call to call."""
    single = np.unique(corners, axis=0)
    return FoundBoxes(single[np.random.default_rng(seed).permutation(len(single))], np.zeros(len(single)))


def _blobs(image: Channels, seed: int) -> FoundBoxes:
    """Regions that differ from their surroundings, strongest mean difference first; the scales take turns."""
    channels = [np.ascontiguousarray(channel) for channel in np.moveaxis(image.cues, 2, 0)]
    scales = []
    for sigma in _BLOB_SIGMAS:
        differences = [center_surround(channel, sigma) for channel in channels]
        area = max(_BLOB_MIN_AREA, sigma**2)
        found = [regions_above(s, level, area) for d in differences for s in (d, -d) for level in _BLOB_LEVELS]
        corners, scores = (np.concatenate(parts) for parts in ([f.corners for f in found], [f.scores for f in found]))
        scales.append(FoundBoxes(corners, scores))
    return _in_turns(scales, _BLOB_NMS)


def center_surround(channel: Float[np.ndarray, "h w"], sigma: float) -> Float[np.ndarray, "h w"]:
    """Difference of Gaussians in units of its own standard deviation over the image; zero in a flat image."""
    inner, outer = (
        cv2.GaussianBlur(channel, (0, 0), s, borderType=cv2.BORDER_REFLECT) for s in (sigma, sigma * _BLOB_RATIO)
    )
    difference = np.asarray(inner - outer)
    return difference / max(float(difference.std()), 1e-3)


def regions_above(signed: Float[np.ndarray, "h w"], level: float, min_area: float) -> FoundBoxes:
    """Bounding boxes of the 8-connected regions above a level; the score is the mean value in the region."""
    count, labels, stats, _ = cv2.connectedComponentsWithStats((signed > level).astype(np.uint8), connectivity=8)
    sums = np.bincount(labels.ravel(), signed.ravel().astype(np.float64), count)
    is_big = stats[:, cv2.CC_STAT_AREA] >= min_area
    is_big[0] = False  # what is below the level
    x, y, width, height, area = stats[is_big].astype(np.float64).T
    return FoundBoxes(np.stack([x, y, x + width, y + height], axis=1), sums[is_big] / area)


# ---------------------------------------------------------------- windows


def _windows(image: Channels, seed: int) -> FoundBoxes:
    """Sliding windows by contrast; every size gives its best, then its second best, and so on."""
    height, width = image.bgr.shape[:2]
    levels = window_levels(width, height)
    contrast = center_surround_contrast(image.cues, np.concatenate(levels))
    scores = np.split(contrast, np.cumsum([len(level) for level in levels])[:-1])
    return _in_turns([FoundBoxes(*pair) for pair in zip(levels, scores, strict=True)], _WINDOW_NMS)


def _in_turns(levels: Sequence[FoundBoxes], threshold: float) -> FoundBoxes:
    """The best of every level after NMS, then every second best, and so on; the score is the negative turn."""
    kept = [level.corners[thin(level.corners, level.scores, threshold, _MAX_LEVEL)] for level in levels]
    turns = np.concatenate([np.arange(len(rows), dtype=np.float64) for rows in kept])
    return FoundBoxes(np.concatenate(kept), -turns)


def window_levels(width: int, height: int) -> list[Float64[np.ndarray, "_ 4"]]:
    """Windows of each size in all positions and aspects. Sides that exceed the image are cut to it: bands."""
    steps = int(np.log(_WINDOW_LARGEST / _WINDOW_SMALLEST) / np.log(_WINDOW_SCALES) + 1e-9)
    sides = [_WINDOW_SMALLEST * _WINDOW_SCALES**step * np.sqrt(width * height) for step in range(steps + 1)]
    windows = [[_positions(side * a**0.5, side * a**-0.5, width, height) for a in _WINDOW_ASPECTS] for side in sides]
    return [np.unique(np.concatenate(rows), axis=0) for rows in windows]


def _positions(wide: float, high: float, width: int, height: int) -> Float64[np.ndarray, "n 4"]:
    starts, ends = [], []
    for side, limit in ((wide, width), (high, height)):
        whole = int(min(max(round(side), 1), limit))
        count = int(np.ceil((limit - whole) / max(whole * _WINDOW_STRIDE, 1.0))) + 1
        start = np.linspace(0, limit - whole, count).round()
        starts.append(start)
        ends.append(start + whole)
    x1, y1 = (grid.ravel() for grid in np.meshgrid(*starts))
    x2, y2 = (grid.ravel() for grid in np.meshgrid(*ends))
    return np.stack([x1, y1, x2, y2], axis=1)


def center_surround_contrast(
    cues: Float[np.ndarray, "h w c"], windows: Float64[np.ndarray, "n 4"]
) -> Float64[np.ndarray, " n"]:
    """Largest difference over channels between the mean of a window and of the ring around it, in units of the ring.

    ``max_c |m_in - m_ring| / sqrt(var_ring + 4)``. The ring is the window enlarged 1.7 times, without the window, as
    far as it lies in the image; 4 is the variance of noise (Lab units squared). Zero for a window without a ring.
    Compare the color contrast of Alexe et al., "Measuring the Objectness of Image Windows", PAMI 2012.
    """
    height, width = cues.shape[:2]
    rings = _enlarged(windows, width, height)
    sums, squares = (_integral(values) for values in (cues, np.square(cues, dtype=np.float64)))
    inside, ring_sum, ring_squares = _sums(sums, windows), _sums(sums, rings), _sums(squares, rings)
    area, ring_area = _areas(windows), _areas(rings) - _areas(windows)
    has_ring = ring_area > 0
    pixels = np.where(has_ring, ring_area, 1.0)[:, None]
    mean = (ring_sum - inside) / pixels
    variance = ((ring_squares - _sums(squares, windows)) / pixels - mean**2).clip(0)
    contrast = np.abs(inside / area[:, None] - mean) / np.sqrt(variance + _NOISE)
    return np.where(has_ring, contrast.max(1), 0.0)


def _enlarged(windows: Float64[np.ndarray, "n 4"], width: int, height: int) -> Float64[np.ndarray, "n 4"]:
    margin = np.maximum(np.round((windows[:, 2:] - windows[:, :2]) * (_RING - 1) / 2), 1)
    return np.concatenate([windows[:, :2] - margin, windows[:, 2:] + margin], axis=1).clip(0, [width, height] * 2)


def _integral(values: Float[np.ndarray, "h w c"]) -> Float64[np.ndarray, "h1 w1 c"]:
    """Integral image: entry (y, x) is the sum over all rows above y and columns left of x."""
    padded = np.zeros((values.shape[0] + 1, values.shape[1] + 1, values.shape[2]))
    padded[1:, 1:] = values.astype(np.float64).cumsum(0).cumsum(1)
    return padded


def _sums(integral: Float64[np.ndarray, "h1 w1 c"], boxes: Float64[np.ndarray, "n 4"]) -> Float64[np.ndarray, "n c"]:
    x1, y1, x2, y2 = boxes.astype(np.intp).T
    return np.asarray(integral[y2, x2] - integral[y1, x2] - integral[y2, x1] + integral[y1, x1])


def _areas(boxes: Float64[np.ndarray, "n 4"]) -> Float64[np.ndarray, " n"]:
    return np.asarray((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]))


_FIND = {
    "selective_search": _selective_search,
    "equalized": _equalized,
    "mser": _mser,
    "blobs": _blobs,
    "windows": _windows,
}
