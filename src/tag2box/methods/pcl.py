"""PCL, proposal cluster learning (Tang et al., 2018): cluster centres of high-scoring proposals, and its bag loss.

The k-means of scores is one-dimensional and solved exactly: groups are intervals of the sorted scores.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from tag2box.ops import assign, iou
from tag2box.types import LabelerInput, Labeling, PseudoBoxes, PseudoLabels, Requirements


def top_group(scores: Float[Tensor, " P"], groups: int) -> Bool[Tensor, " P"]:
    """Mask of the scores in the highest of ``groups`` k-means groups; equal scores stay together.

    The best cuts are found by dynamic programming over the sorted scores: no random start, no local optimum. With fewer
    scores than groups every value is a group of its own.

    >>> top_group(torch.tensor([0.1, 0.12, 0.5, 0.52, 0.9, 0.92]), groups=3)
    tensor([False, False, False, False,  True,  True])
    """
    if len(scores) == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    values = scores.double().nan_to_num()  # NaN belongs to no group; the loss will be NaN
    if len(values) <= groups:
        return values == values.max()
    ranked = values.sort().values
    sums = torch.cat([ranked.new_zeros(1), (ranked - ranked.mean()).cumsum(0)])
    between = _between_scatter(
        sums, torch.zeros_like(sums, dtype=torch.long), torch.arange(len(sums), device=sums.device)
    )
    for _ in range(groups - 2):
        between = _one_more_group(between, sums)
    starts = torch.arange(len(values), device=sums.device)
    last = between[:-1] + _between_scatter(sums, starts, torch.full_like(starts, len(values)))
    return values >= ranked[last.argmax()]


def _between_scatter(
    sums: Float[Tensor, " n1"], start: Int[Tensor, " a"], end: Int[Tensor, " a"]
) -> Float[Tensor, " a"]:
    """Contribution of a group from ``start`` to ``end`` to the scatter between groups, which k-means maximises.

    Scatter within and between groups add up to a constant, and this one needs no sum of squares.
    """
    return (sums[end] - sums[start]).square() / (end - start).clamp(min=1)


def _one_more_group(between: Float[Tensor, " n1"], sums: Float[Tensor, " n1"]) -> Float[Tensor, " n1"]:
    """Largest scatter of the first j values, for all j, with one group more than ``between``.

    The best start of the last group never moves left as j grows. So every second j is solved between its solved
    neighbours, in ever finer steps: n log n comparisons, vectorised within a step.
    """
    n, device = len(sums) - 1, sums.device
    best, start = torch.zeros_like(between), torch.zeros(n + 1, dtype=torch.long, device=device)
    step = 1 << (n.bit_length() - 1)
    while step:
        ends = torch.arange(step, n + 1, 2 * step, device=device)
        after = ends + step
        low = start[ends - step]
        high = torch.where(after <= n, start[after.clamp(max=n)], n).minimum(ends - 1)
        tried = high - low + 1
        owner = torch.arange(len(ends), device=device).repeat_interleave(tried)
        tries = torch.arange(len(owner), device=device) + (low - tried.cumsum(0) + tried)[owner]
        value = between[tries] + _between_scatter(sums, tries, ends[owner])
        best[ends] = torch.full_like(between[ends], -torch.inf).scatter_reduce(0, owner, value, "amax")
        first = torch.where(value == best[ends][owner], tries, n)
        start[ends] = torch.full_like(ends, n).scatter_reduce(0, owner, first, "amin")
        step //= 2
    return best


def cluster_centres(
    boxes: Float[Tensor, "P 4"],
    scores: Float[Tensor, " P"],
    *,
    groups: int = 3,
    graph_iou: float = 0.4,
    leave: int = 5,
    most: int = 5,
) -> tuple[Int[Tensor, " s"], Float[Tensor, " s"]]:
    """Cluster centres of one class in one image, best first, and the best score among the neighbours of each.

    Args:
        groups: number of k-means groups of scores; the graph is made of the proposals in the highest.
        graph_iou: two proposals are neighbours above this IoU.
        leave: the search ends when no more than this many proposals are left.
        most: maximum number of centres.
    """
    ids = top_group(scores, groups).nonzero().flatten()
    ids = ids[scores[ids].argsort(descending=True, stable=True)]
    near = (iou(boxes[ids], boxes[ids]) > graph_iou).fill_diagonal_(True)
    centres, best = most_connected(near, leave)
    order = best.argsort(stable=True)[:most]  # ranks: the lowest is the best
    return ids[centres[order]], scores[ids[best[order]]]


def most_connected(near: Bool[Tensor, "t t"], leave: int) -> tuple[Int[Tensor, " s"], Int[Tensor, " s"]]:
    """Greedy centres of a graph whose nodes come best first, and the best remaining node among the neighbours of each.

    The node with the most remaining neighbours is a centre and is removed with them, until no more than ``leave`` nodes
    remain. On ties the better node is chosen.
    """
    graph = near.cpu().numpy()
    is_left = np.ones(len(graph), dtype=bool)
    degree = graph.sum(axis=1)
    found: list[tuple[int, int]] = []
    while is_left.any() and (not found or is_left.sum() > leave):
        centre = int(degree.argmax())
        members = np.flatnonzero(graph[centre] & is_left)
        found.append((centre, int(members[0])))
        is_left[members] = False
        degree -= graph[members].sum(axis=0)
        degree[members] = 0  # all remaining nodes have a degree of one or more
    centres, best = torch.tensor(found, dtype=torch.long, device=near.device).reshape(-1, 2).unbind(dim=1)
    return centres, best


def bag_loss(logits: Float[Tensor, "R c1"], labels: PseudoLabels, sizes: Sequence[int]) -> Float[Tensor, ""]:
    """L_cls of one stage with each cluster as one bag: -(sum of weights) log(mean probability) per cluster.

    A cluster is the foreground assigned to one pseudo box; background is summed per proposal. Divided by an image's
    number of proposals, then the mean over images. If every cluster has one member this equals ``refine_loss``.
    """
    log_p = logits.log_softmax(dim=1).gather(1, labels.cls[:, None]).squeeze(1)
    is_member = labels.cls < logits.shape[1] - 1
    means = _log_means(log_p[is_member], labels.owner[is_member], len(labels.pseudo_boxes))
    entropy = -log_p.masked_scatter(is_member, means)
    per_image = torch.tensor(sizes, dtype=torch.long, device=logits.device)
    divisor = per_image.repeat_interleave(per_image) * max(len(sizes), 1)
    return (labels.weight * entropy / divisor).sum()


def _log_means(log_p: Float[Tensor, " m"], owner: Int[Tensor, " m"], count: int) -> Float[Tensor, " m"]:
    """Log of the mean probability in each member's cluster, relative to the largest so that nothing underflows."""
    peak = log_p.new_full((count,), -torch.inf).scatter_reduce(0, owner, log_p.detach(), "amax")[owner]
    total = log_p.new_zeros(count).index_add(0, owner, (log_p - peak).exp())
    return (total / owner.bincount(minlength=count).clamp(min=1))[owner].log() + peak


@dataclass(frozen=True, kw_only=True)
class Pcl:
    """The most connected high-scoring proposals of a class are the centres of its clusters.

    Use with ``criterion.refine.over = "clusters"`` for the paper's loss.

    Peng Tang, Xinggang Wang, Song Bai, Wei Shen, Xiang Bai, Wenyu Liu and Alan Yuille: PCL: Proposal Cluster Learning
    for Weakly Supervised Object Detection, PAMI 2018. https://arxiv.org/abs/1807.03342

    Example:
        >>> from tag2box.recipes import Config
        >>> from tag2box.training.criterion import Criterion
        >>> config = Config(criterion=Criterion(labeler=Pcl(max_centres=3)))
        >>> config.criterion.labeler.graph_iou
        0.4
    """

    kind: Literal["pcl"] = "pcl"
    groups: Annotated[int, Field(ge=2)] = 3
    """Number of k-means groups of a class's scores; centres come from the highest."""
    graph_iou: Annotated[float, Field(ge=0, lt=1)] = 0.4
    """Two proposals are neighbours above this IoU."""
    leave: Annotated[int, Field(ge=0)] = 5
    """The search for centres ends when no more than this many proposals are left."""
    max_centres: Annotated[int, Field(ge=1)] = 5
    """Maximum number of centres per tag."""
    foreground_iou: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """A proposal takes the class of its nearest centre from this IoU on; others are background."""
    ignore_below: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """A proposal with a lower IoU to every centre has weight zero in the loss."""

    @property
    def requirements(self) -> Requirements:
        """None beyond scores and boxes."""
        return Requirements()

    def __call__(self, inputs: LabelerInput) -> Labeling:
        """Cluster centres and pseudo labels of every stage."""
        return Labeling(tuple(self._labels(inputs, self.find(inputs, probs)) for probs in inputs.probs))

    def find(self, inputs: LabelerInput, probs: Float[Tensor, "R C"]) -> PseudoBoxes:
        """Centres from one teacher's scores, image after image, class after class; none belongs to two classes."""
        none = torch.zeros(0, dtype=torch.long, device=probs.device)
        found = [(none, none, probs.new_zeros(0))]
        for span, tags in zip(inputs.proposals.spans(), inputs.tags, strict=True):
            is_free = torch.ones(len(span), dtype=torch.bool, device=probs.device)
            for c in tags.nonzero().flatten().tolist() if len(span) else ():
                if not is_free.any():  # more tags than proposals: classes share them
                    is_free = ~is_free
                pool = is_free.nonzero().flatten()
                rows, score = self._centres(inputs.proposals.boxes[pool + span.start], probs[pool + span.start, c])
                is_free[pool[rows]] = False
                found.append((pool[rows] + span.start, torch.full_like(rows, c), score))
        rows, cls, score = (torch.cat(part) for part in zip(*found, strict=True))
        return PseudoBoxes(rows, cls, score)

    def _centres(
        self, boxes: Float[Tensor, "P 4"], scores: Float[Tensor, " P"]
    ) -> tuple[Int[Tensor, " s"], Float[Tensor, " s"]]:
        return cluster_centres(
            boxes, scores, groups=self.groups, graph_iou=self.graph_iou, leave=self.leave, most=self.max_centres
        )

    def _labels(self, inputs: LabelerInput, pseudo_boxes: PseudoBoxes) -> PseudoLabels:
        return assign(
            inputs.proposals,
            pseudo_boxes,
            inputs.tags.shape[1],
            self.foreground_iou,
            or_equal=True,
            ignore_below=self.ignore_below,
        )
