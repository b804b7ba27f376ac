"""Recall of proposals against ground truth: by IoU threshold, number of boxes, class and object size."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int

from tag2box.annotations import Objects, Truth
from tag2box.ops.boxes import areas, iou
from tag2box.proposals.base import Candidates

THRESHOLDS = (0.5, 0.7, 0.9)
BUDGETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
"""Numbers of boxes per photo at which recall is measured, in addition to all boxes."""


@dataclass(frozen=True, slots=True)
class Recall:
    """Recall at several IoU thresholds, and the mean over objects of the IoU of their best box."""

    thresholds: tuple[float, ...]
    recall: tuple[float, ...]  # at each threshold; nan without objects
    mean_best_overlap: float
    objects: int
    boxes_per_image: float


def measure_recall(
    boxes: Sequence[Float[torch.Tensor, "_ 4"]], truth: Truth, thresholds: Sequence[float] = THRESHOLDS
) -> Recall:
    """Recall of the objects that count (neither difficult nor crowd), given the boxes of each image in order."""
    best = [torch.zeros(0)]
    for candidates, objects in zip(boxes, truth.objects, strict=True):
        wanted = objects.boxes[counts_in_recall(objects)]
        overlap = iou(wanted, candidates.to(wanted.dtype))  # (G, P)
        best.append(overlap.amax(1) if len(candidates) else torch.zeros(len(wanted)))
    overlaps = torch.cat(best)
    shares = tuple(float((overlaps >= t).float().mean()) for t in thresholds)  # the mean of nothing is nan
    per_image = sum(len(b) for b in boxes) / max(len(boxes), 1)
    return Recall(tuple(thresholds), shares, float(overlaps.mean()), len(overlaps), per_image)


def counts_in_recall(objects: Objects) -> Bool[torch.Tensor, " B"]:
    """Mask of the objects that count: neither difficult nor a crowd."""
    return ~(objects.difficult | objects.crowd)


# ---------------------------------------------------------------- against the number of boxes


@dataclass(frozen=True, slots=True)
class RecallCurves:
    """Recall of one source with its first 1, 2, 5, ... boxes per photo.

    T thresholds, K budgets (the last is all boxes), C classes, B bins of object size.
    """

    thresholds: tuple[float, ...]
    budgets: tuple[int, ...]  # K - 1 numbers of boxes; the last column is unlimited
    hits: Int[torch.Tensor, "T K C B"]  # objects whose best box has an IoU of the threshold or more
    overlap: Float64[torch.Tensor, "K C B"]  # sums of the best IoUs
    objects: Int[torch.Tensor, "C B"]
    used: Int[torch.Tensor, " K"]  # boxes used, summed over photos
    photos: int
    most: int  # largest number of boxes of a photo
    ranked: bool  # whether boxes have scores; otherwise they are taken in stored order

    def recall(self) -> Float64[torch.Tensor, "T K"]:
        """Share of objects recalled; nan without objects."""
        return self.hits.sum((2, 3)).double() / self.objects.sum().double()

    def recall_by_class(self) -> Float64[torch.Tensor, "T C"]:
        """Recall per class, with all boxes."""
        return self.hits[:, -1].sum(2).double() / self.objects.sum(1).double()

    def recall_by_size(self) -> Float64[torch.Tensor, "T B"]:
        """Recall per object size, small to large, with all boxes."""
        return self.hits[:, -1].sum(1).double() / self.objects.sum(0).double()

    def best_overlap(self) -> Float64[torch.Tensor, " K"]:
        """Mean IoU of each object's best box."""
        return self.overlap.sum((1, 2)) / self.objects.sum().double()

    def best_overlap_by_class(self) -> Float64[torch.Tensor, " C"]:
        """Mean IoU of the best box per class, with all boxes."""
        return self.overlap[-1].sum(1) / self.objects.sum(1).double()

    def boxes_per_photo(self) -> Float64[torch.Tensor, " K"]:
        """Mean number of boxes used; photos may have fewer than the budget."""
        return self.used.double() / self.photos if self.photos else torch.full((len(self.used),), torch.nan).double()


@dataclass(frozen=True, slots=True)
class PhotoRecall:
    """Objects of one photo that its boxes miss."""

    missed: int  # objects without a box of IoU 0.5
    shortfall: float  # sum over all objects of 1 - best IoU


class RecallMeter:
    """Accumulates the recall of one source photo by photo, in constant memory."""

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
            size_edges: ascending boundaries of the object-size bins, as fractions of the photo's area.
        """
        self._thresholds, self._budgets = tuple(thresholds), tuple(budgets)
        self._edges = torch.tensor(list(size_edges), dtype=torch.double)
        columns, bins = len(budgets) + 1, len(size_edges) + 1
        self._hits = torch.zeros(len(thresholds), columns, classes * bins, dtype=torch.long)
        self._overlap = torch.zeros(columns, classes * bins, dtype=torch.double)
        self._objects = torch.zeros(classes * bins, dtype=torch.long)
        self._used = torch.zeros(columns, dtype=torch.long)
        self._photos, self._most, self._ranked = 0, 0, False

    def add(self, candidates: Candidates, objects: Objects, size: tuple[int, int]) -> PhotoRecall:
        """Add one photo of the given width and height."""
        kept = counts_in_recall(objects)
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
        return PhotoRecall(int((best[:, -1] < 0.5).sum()), float((1 - best[:, -1]).sum()))

    def result(self) -> RecallCurves:
        """The recall over all photos added so far."""
        bins = len(self._edges) + 1
        return RecallCurves(
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
    candidates: Candidates, wanted: Float64[torch.Tensor, "G 4"], budgets: Sequence[int] = BUDGETS
) -> Float64[torch.Tensor, "G K"]:
    """IoU of each object with the best of the first n boxes, for every budget n (ascending), and of all boxes.

    Boxes are taken by descending score, ties in stored order; boxes without scores thus keep the stored order.
    """
    count = len(candidates)
    if not count or not len(wanted):
        return torch.zeros(len(wanted), len(budgets) + 1, dtype=torch.double)
    order = torch.argsort(candidates.scores, descending=True, stable=True)
    overlap = iou(wanted, candidates.boxes[order].double()).numpy()  # (G, P)
    starts = [0, *(n for n in budgets if n < count)]
    running = np.maximum.accumulate(np.maximum.reduceat(overlap, starts, axis=1), axis=1)
    # The maximum over the first n boxes is that of the segment ending at n; larger budgets use all boxes.
    columns = [starts.index(n) - 1 if n < count else len(starts) - 1 for n in budgets]
    return torch.from_numpy(running[:, [*columns, len(starts) - 1]])


# ---------------------------------------------------------------- missed objects


@dataclass(frozen=True, slots=True)
class Miss:
    """A missed object: its row among the objects, the row of its best box (None without boxes), and their IoU."""

    row: int
    best: int | None
    overlap: float


def find_misses(candidates: Candidates, objects: Objects, threshold: float = 0.5) -> tuple[Miss, ...]:
    """The objects that count and have no box with an IoU of the threshold or more."""
    rows = counts_in_recall(objects).nonzero().flatten().tolist()
    if not len(candidates):
        return tuple(Miss(row, None, 0.0) for row in rows)
    overlap, best = iou(objects.boxes[rows].double(), candidates.boxes.double()).max(1)
    found = zip(rows, best.tolist(), overlap.tolist(), strict=True)
    return tuple(Miss(row, column, value) for row, column, value in found if value < threshold)
