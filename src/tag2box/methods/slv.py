"""SLV, spatial likelihood voting (Chen et al., 2020): boxes around the connected components of a likelihood map."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, Self

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from tag2box.methods.oicr import argmax_pseudo_boxes
from tag2box.ops import assign, first_argmax, iou
from tag2box.types import LabelerInput, Labeling, PseudoBoxes, PseudoLabels, Requirements


def rectangles(mask: Bool[np.ndarray, "h w"]) -> Int[np.ndarray, "n 4"]:
    """Bounding box (xyxy, exclusive) of every 8-connected component of a mask.

    In reading order of the first cell of each. Works on runs of cells, not on cells.

    >>> rectangles(np.array([[1, 0, 0], [0, 1, 0], [0, 0, 0], [1, 1, 1]], bool)).tolist()
    [[0, 0, 2, 2], [0, 3, 3, 4]]
    """
    runs = _runs(mask)
    part = _joined(len(runs), _touching(runs, mask.shape[1]))
    firsts, which = np.unique(part, return_inverse=True)
    found = np.empty((len(firsts), 4), np.int64)
    found[:, :2], found[:, 2:] = np.iinfo(np.int64).max, 0
    row, begin, end = runs.T
    for column, values, reduce in (
        (0, begin, np.minimum), (1, row, np.minimum), (2, end, np.maximum), (3, row + 1, np.maximum),
    ):  # fmt: skip
        reduce.at(found[:, column], which, values)
    return found


def _runs(mask: Bool[np.ndarray, "h w"]) -> Int[np.ndarray, "r 3"]:
    """(row, first column, column after the last) of every unbroken run, in reading order."""
    padded = np.zeros((mask.shape[0], mask.shape[1] + 2), np.int8)
    padded[:, 1:-1] = mask
    change = np.diff(padded, axis=1)
    row, begin = np.nonzero(change == 1)
    _, end = np.nonzero(change == -1)
    return np.stack([row, begin, end], axis=1)


def _touching(runs: Int[np.ndarray, "r 3"], width: int) -> Int[np.ndarray, "t 2"]:
    """Pairs of runs in neighbouring rows that share an edge or a corner."""
    row, begin, end = runs.T
    line = width + 2  # longer than a row, so that runs of different rows never compare as neighbours
    first = np.searchsorted(row * line + end, (row + 1) * line + begin, side="left")
    last = np.searchsorted(row * line + begin, (row + 1) * line + end, side="right")
    count = np.maximum(last - first, 0)
    upper = np.repeat(np.arange(len(runs)), count)
    lower = np.arange(count.sum()) - np.repeat(count.cumsum() - count, count) + np.repeat(first, count)
    return np.stack([upper, lower], axis=1)


def _joined(count: int, pairs: Int[np.ndarray, "t 2"]) -> Int[np.ndarray, " r"]:
    """First run of the component of each run (union-find)."""
    above = list(range(count))

    def root(i: int) -> int:
        while above[i] != i:
            above[i] = above[above[i]]
            i = above[i]
        return i

    for a, b in pairs.tolist():
        low, high = sorted((root(a), root(b)))
        above[high] = low
    return np.array([root(i) for i in range(count)], np.int64)


_VOTE = 2.0**32  # the strongest vote as an integer: sums are exact, in any order, on every device


def cells_of(boxes: Float[Tensor, "P 4"], cell: float) -> Int[Tensor, "P 4"]:
    """Boxes in cells (xyxy, exclusive): edges rounded to the nearest line, at least one cell wide and high."""
    lines = (boxes.clamp(min=0) / cell).round().long()
    return torch.cat([lines[:, :2], torch.maximum(lines[:, 2:], lines[:, :2] + 1)], dim=1)


def likelihood_map(boxes: Float[Tensor, "P 4"], scores: Float[Tensor, " P"], cell: float) -> Float[Tensor, "h w"]:
    """Sum of the scores of the boxes over each cell, divided by its maximum; the grid extends as far as the boxes.

    A difference array with four entries per box, then cumulative sums along both axes.
    """
    edges = cells_of(boxes, cell)
    width, height = edges[:, 2:].amax(dim=0).tolist() if len(edges) else (0, 0)
    votes = (scores / scores.max() * _VOTE).round().long() if len(scores) and scores.max() > 0 else scores.long()
    left, top, right, bottom = edges.unbind(dim=1)
    corners = torch.cat([top * (width + 1) + left, bottom * (width + 1) + right])
    others = torch.cat([top * (width + 1) + right, bottom * (width + 1) + left])
    counted = votes.new_zeros((height + 1) * (width + 1))
    counted.index_add_(0, corners, votes.repeat(2)).index_add_(0, others, -votes.repeat(2))
    total = counted.view(height + 1, width + 1).cumsum(dim=0).cumsum(dim=1)[:height, :width]
    most = total.amax() if total.numel() else 0
    return total.to(scores.dtype) / max(int(most), 1)


def voted_boxes(
    boxes: Float[Tensor, "P 4"], scores: Float[Tensor, " P"], *, threshold: float, cell: float
) -> Float[Tensor, "n 4"]:
    """Bounding box of every connected component of the likelihood map at or above the threshold.

    Each side of a component on the grid comes from a side of some box that voted; the exact side of the highest-scoring
    such box is used. So a single box votes for itself exactly.
    """
    mask = likelihood_map(boxes, scores, cell) >= threshold
    found = torch.from_numpy(rectangles(mask.cpu().numpy())).to(boxes.device)  # (n, 4), in cells
    edges = cells_of(boxes, cell)
    sides = [_own_side(found, edges, boxes, scores, side) for side in range(4)]
    own, lines = torch.stack(sides, dim=1), found.to(boxes.dtype) * cell
    is_box = (own[:, 2:] > own[:, :2]).repeat(1, 2)  # sides of boxes smaller than a cell may cross
    return torch.where(is_box, own, lines)


def _own_side(
    found: Int[Tensor, "n 4"],
    edges: Int[Tensor, "P 4"],
    boxes: Float[Tensor, "P 4"],
    scores: Float[Tensor, " P"],
    side: int,
) -> Float[Tensor, " n"]:
    """One side (0 to 3, as in xyxy) of each rectangle: that of the highest-scoring box it can have come from."""
    if len(boxes) == 0:
        return boxes.new_zeros(0)
    other = 1 - side % 2  # the axis along the side
    same_line = edges[:, side] == found[:, side, None]
    beside = (edges[:, other] < found[:, other + 2, None]) & (edges[:, other + 2] > found[:, other, None])
    strength = torch.where(same_line & beside, scores, -torch.inf)  # (n, P)
    return boxes[first_argmax(strength), side]


@dataclass(frozen=True, kw_only=True)
class Slv:
    """The last stage is trained on voted boxes, with a growing weight; the stages before it on their top proposals.

    Use with one more stage (``heads.stages = 4``) and ``criterion.refine.last_teacher = "mean"``.

    Ze Chen, Zhihang Fu, Rongxin Jiang, Yaowu Chen and Xian-Sheng Hua: SLV: Spatial Likelihood Voting for Weakly
    Supervised Object Detection, CVPR 2020. https://arxiv.org/abs/2006.12884

    Example:
        >>> from tag2box.recipes import Config
        >>> from tag2box.training.criterion import Criterion
        >>> config = Config(criterion=Criterion(labeler=Slv(threshold=0.4)))
        >>> config.criterion.labeler.cell
        4.0
    """

    kind: Literal["slv"] = "slv"
    min_score: Annotated[float, Field(ge=0, lt=1)] = 0.001
    """Proposals above this score vote; if there is none, only the best one votes."""
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Cells with this fraction of the maximum votes of their class belong to an object."""
    low_threshold: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The same for the classes of ``low_classes``."""
    low_classes: tuple[str, ...] = ("person",)
    """Names of classes with the lower threshold; in the paper, people."""
    cell: Annotated[float, Field(gt=0)] = 4.0
    """Side of the cells of the likelihood map, in pixels of the resized photo."""
    ramp: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Fraction of the training over which the weight of the last stage grows from 0 to 1."""
    weights: Literal["even", "score"] = "even"
    """Loss weights of the last stage: equal, or the score of the pseudo box as in the stages before."""
    foreground_iou: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """A proposal takes the class of its nearest pseudo box above this IoU (in the last stage: from it on)."""
    names: tuple[str, ...] = field(default=(), init=False, repr=False)  # of the classes; empty until they are known

    def for_classes(self, names: Sequence[str]) -> Self:
        """The same labeler for classes of these names."""
        bound = replace(self)
        object.__setattr__(bound, "names", tuple(names))
        return bound

    def threshold_of(self, c: int) -> float:
        """The threshold of a class; that of all others, if names are not known."""
        return self.low_threshold if c < len(self.names) and self.names[c] in self.low_classes else self.threshold

    @property
    def requirements(self) -> Requirements:
        """None beyond scores and boxes."""
        return Requirements()

    def __call__(self, inputs: LabelerInput) -> Labeling:
        """Pseudo boxes and pseudo labels of every stage."""
        num_classes, last = inputs.tags.shape[1], len(inputs.probs) - 1
        tops = [argmax_pseudo_boxes(inputs, stage) for stage in range(last)]
        stages = [assign(inputs.proposals, pseudo_boxes, num_classes, self.foreground_iou) for pseudo_boxes in tops]
        return Labeling((*stages, self._voted(inputs, self.find(inputs, inputs.probs[last]))))

    def find(self, inputs: LabelerInput, probs: Float[Tensor, "R C"]) -> PseudoBoxes:
        """Voted boxes, image after image, class after class; each has the score of the proposal nearest to it."""
        none = torch.zeros(0, dtype=torch.long, device=probs.device)
        found = [(none, none, inputs.proposals.boxes[:0])]
        for span, tags in zip(inputs.proposals.spans(), inputs.tags, strict=True):
            inside = slice(span.start, span.stop)
            boxes = inputs.proposals.boxes[inside]
            for c in tags.nonzero().flatten().tolist() if len(span) else ():
                voted = self._vote(boxes, probs[inside, c], self.threshold_of(c))
                rows = first_argmax(iou(voted, boxes)) + span.start
                found.append((rows, torch.full_like(rows, c), voted))
        rows, cls, placed = (torch.cat(part) for part in zip(*found, strict=True))
        return PseudoBoxes(rows, cls, probs[rows, cls], placed)

    def _vote(self, boxes: Float[Tensor, "P 4"], scores: Float[Tensor, " P"], threshold: float) -> Float[Tensor, "n 4"]:
        voters = (scores > self.min_score).nonzero().flatten()
        if len(voters):
            return voted_boxes(boxes[voters], scores[voters], threshold=threshold, cell=self.cell)
        alone = boxes[scores.argmax()][None]
        return voted_boxes(alone, torch.ones_like(scores[:1]), threshold=threshold, cell=self.cell)

    def _voted(self, inputs: LabelerInput, pseudo_boxes: PseudoBoxes) -> PseudoLabels:
        labels = assign(inputs.proposals, pseudo_boxes, inputs.tags.shape[1], self.foreground_iou, or_equal=True)
        weight = (labels.owner >= 0).to(labels.weight.dtype) if self.weights == "even" else labels.weight
        return replace(labels, weight=weight * min(inputs.fraction / self.ramp, 1.0))
