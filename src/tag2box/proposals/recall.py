"""How much of the truth sets of candidate boxes could ever find, by number of boxes, class and size of the object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from tag2box.annotations import Objects, Truth
from tag2box.ops.boxes import areas, iou
from tag2box.proposals.base import Candidates

THRESHOLDS = (0.5, 0.7, 0.9)
BUDGETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
"""Numbers of boxes a photo at which recall is taken; and all of them."""


@dataclass(frozen=True, slots=True)
class Recall:
    """Recall of true objects at some overlaps, and the mean overlap of each object's best box."""

    thresholds: tuple[float, ...]
    recall: tuple[float, ...]  # at each threshold; nan without any object
    mean_best_overlap: float
    objects: int
    boxes_per_image: float


def measure_recall(
    boxes: Sequence[Float[Tensor, "_ 4"]], truth: Truth, thresholds: Sequence[float] = THRESHOLDS
) -> Recall:
    """Recall of the plain (neither difficult nor crowd) objects of a truth by the boxes of each image, in its order."""
    best = [torch.zeros(0)]
    for candidates, objects in zip(boxes, truth.objects, strict=True):
        wanted = objects.boxes[plain_recall(objects)]
        overlap = iou(wanted, candidates.to(wanted.dtype))  # (G, P)
        best.append(overlap.amax(1) if len(candidates) else torch.zeros(len(wanted)))
    overlaps = torch.cat(best)
    shares = tuple(float((overlaps >= t).float().mean()) for t in thresholds)  # the mean of nothing is nan
    per_image = sum(len(b) for b in boxes) / max(len(boxes), 1)
    return Recall(tuple(thresholds), shares, float(overlaps.mean()), len(overlaps), per_image)


def plain_recall(objects: Objects) -> Bool[Tensor, " B"]:
    """The objects that count: neither difficult nor a crowd."""
    return ~(objects.difficult | objects.crowd)


# ---------------------------------------------------------------- against the number of boxes


@dataclass(frozen=True, slots=True)
class Reach:
    """What one source of boxes reaches with its first 1, 2, 5, ... boxes of each photo.

    T thresholds, K budgets (the last one is all boxes), C classes, B bins of object size.
    """

    thresholds: tuple[float, ...]
    budgets: tuple[int, ...]  # K - 1 numbers of boxes; the last column has no limit
    hits: Int[Tensor, "T K C B"]  # objects whose best box overlaps them by the threshold or more
    overlap: Float64[Tensor, "K C B"]  # sums of the best overlaps
    objects: Int[Tensor, "C B"]
    used: Int[Tensor, " K"]  # boxes looked at, all photos together
    photos: int
    most: int  # boxes of the photo that has most
    ranked: bool  # the boxes have scores; else their order is the stored one

    def recall(self) -> Float64[Tensor, "T K"]:
        """Share of the objects reached; nan without objects."""
        return self.hits.sum((2, 3)).double() / self.objects.sum().double()

    def recall_by_class(self) -> Float64[Tensor, "T C"]:
        """The same with all boxes, class by class."""
        return self.hits[:, -1].sum(2).double() / self.objects.sum(1).double()

    def recall_by_size(self) -> Float64[Tensor, "T B"]:
        """The same with all boxes, small objects first."""
        return self.hits[:, -1].sum(1).double() / self.objects.sum(0).double()

    def best_overlap(self) -> Float64[Tensor, " K"]:
        """Mean overlap of each object's best box."""
        return self.overlap.sum((1, 2)) / self.objects.sum().double()

    def best_overlap_by_class(self) -> Float64[Tensor, " C"]:
        """The same with all boxes, class by class."""
        return self.overlap[-1].sum(1) / self.objects.sum(1).double()

    def boxes_per_photo(self) -> Float64[Tensor, " K"]:
        """Mean number of boxes looked at: photos may have fewer than the budget."""
        return self.used.double() / self.photos if self.photos else torch.full((len(self.used),), torch.nan).double()


@dataclass(frozen=True, slots=True)
class PhotoReach:
    """What the boxes of one photo leave out."""

    missed: int  # objects no box overlaps by one half
    shortfall: float  # sum over all objects of one minus the best overlap


class ReachMeter:
    """Adds up the reach of one source, photo after photo; its size does not depend on how many there are."""

    def __init__(
        self,
        classes: int,
        size_edges: Sequence[float],
        *,
        thresholds: Sequence[float] = THRESHOLDS,
        budgets: Sequence[int] = BUDGETS,
    ) -> None:
        """Start at zero.

        Args:
            size_edges: shares of the photo's area that part the bins of object size, ascending.
        """
        self._thresholds, self._budgets = tuple(thresholds), tuple(budgets)
        self._edges = torch.tensor(list(size_edges), dtype=torch.double)
        columns, bins = len(budgets) + 1, len(size_edges) + 1
        self._hits = torch.zeros(len(thresholds), columns, classes * bins, dtype=torch.long)
        self._overlap = torch.zeros(columns, classes * bins, dtype=torch.double)
        self._objects = torch.zeros(classes * bins, dtype=torch.long)
        self._used = torch.zeros(columns, dtype=torch.long)
        self._photos, self._most, self._ranked = 0, 0, False

    def add(self, candidates: Candidates, objects: Objects, size: tuple[int, int]) -> PhotoReach:
        """Count one photo of the given width and height."""
        kept = plain_recall(objects)
        boxes = objects.boxes[kept].double()
        best = best_overlaps(candidates, boxes, self._budgets)  # (G, K)
        size_bin = torch.bucketize(areas(boxes) / (size[0] * size[1]), self._edges, right=True)
        cell = objects.labels[kept] * (len(self._edges) + 1) + size_bin
        for row, threshold in enumerate(self._thresholds):
            self._hits[row].index_add_(1, cell, (best >= threshold).long().T)
        self._overlap.index_add_(1, cell, best.T)
        self._objects += torch.bincount(cell, minlength=len(self._objects))
        self._used += torch.tensor([min(n, len(candidates)) for n in self._budgets] + [len(candidates)])
        self._photos += 1
        self._most = max(self._most, len(candidates))
        self._ranked = self._ranked or len(candidates.scores.unique()) > 1
        return PhotoReach(int((best[:, -1] < 0.5).sum()), float((1 - best[:, -1]).sum()))

    def result(self) -> Reach:
        """What all photos so far add up to."""
        bins = len(self._edges) + 1
        return Reach(
            thresholds=self._thresholds,
            budgets=self._budgets,
            hits=self._hits.unflatten(2, (-1, bins)).clone(),
            overlap=self._overlap.unflatten(1, (-1, bins)).clone(),
            objects=self._objects.unflatten(0, (-1, bins)).clone(),
            used=self._used.clone(),
            photos=self._photos,
            most=self._most,
            ranked=self._ranked,
        )


def best_overlaps(
    candidates: Candidates, wanted: Float64[Tensor, "G 4"], budgets: Sequence[int] = BUDGETS
) -> Float64[Tensor, "G K"]:
    """Overlap of each object with the best of the first n boxes, for every budget n (ascending), and of all of them.

    The first are those of highest score; equal scores keep the stored order, so boxes without scores keep it, too.
    """
    count = len(candidates)
    if not count or not len(wanted):
        return torch.zeros(len(wanted), len(budgets) + 1, dtype=torch.double)
    order = torch.argsort(candidates.scores, descending=True, stable=True)
    overlap = iou(wanted, candidates.boxes[order].double()).numpy()  # (G, P)
    starts = [0, *(n for n in budgets if n < count)]
    running = np.maximum.accumulate(np.maximum.reduceat(overlap, starts, axis=1), axis=1)
    # The best of the first n lies in the segment that ends at n; a budget beyond the last box has them all.
    columns = [starts.index(n) - 1 if n < count else len(starts) - 1 for n in budgets]
    return torch.from_numpy(running[:, [*columns, len(starts) - 1]])


# ---------------------------------------------------------------- a look at what is out of reach


@dataclass(frozen=True, slots=True)
class Miss:
    """An object no box fits: its row among the objects, the row of the best box (None without any), their overlap."""

    row: int
    best: int | None
    overlap: float


def misses(candidates: Candidates, objects: Objects, threshold: float = 0.5) -> tuple[Miss, ...]:
    """The plain objects of a photo that no box overlaps by the threshold."""
    rows = plain_recall(objects).nonzero().flatten().tolist()
    if not len(candidates):
        return tuple(Miss(row, None, 0.0) for row in rows)
    overlap, best = iou(objects.boxes[rows].double(), candidates.boxes.double()).max(1)
    found = zip(rows, best.tolist(), overlap.tolist(), strict=True)
    return tuple(Miss(row, column, value) for row, column, value in found if value < threshold)
