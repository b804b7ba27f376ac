"""Box operations: areas, IoU, containment, matching, clipping, box coding and non-maximum suppression (NMS)."""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

CODE_WEIGHTS = (10.0, 10.0, 5.0, 5.0)
"""Scale of (dx, dy, dw, dh): standard deviations of about 0.1, 0.1, 0.2 and 0.2 become one."""

MAX_LOG_SIZE = math.log(1000.0 / 16)
"""Predicted log-sizes are clipped here, before exp() can overflow."""

_NMS_BLOCK = 256  # boxes compared with each other at a time
_MIN_COMPILED_BOXES = 256  # fewer are suppressed faster than a compiled kernel is loaded


def areas(boxes: Float[Tensor, "A 4"]) -> Float[Tensor, " A"]:
    """Area of each box; zero for an empty one.

    >>> areas(torch.tensor([[0.0, 0.0, 4.0, 2.0], [3.0, 3.0, 1.0, 5.0]]))
    tensor([8., 0.])
    """
    return (boxes[:, 2] - boxes[:, 0]).clamp(min=0) * (boxes[:, 3] - boxes[:, 1]).clamp(min=0)


def intersections(a: Float[Tensor, "A 4"], b: Float[Tensor, "B 4"]) -> Float[Tensor, "A B"]:
    """Intersection area of every box of ``a`` with every box of ``b``."""
    across, down = (_shared_sides(a[:, axis::2], b[:, axis::2]) for axis in (0, 1))
    return across * down


def _shared_sides(a: Float[Tensor, "A 2"], b: Float[Tensor, "B 2"]) -> Float[Tensor, "A B"]:
    """Overlap length of every interval of ``a`` with every one of ``b``."""
    begins, ends = b.T.contiguous()  # contiguous: several times faster to broadcast over A rows
    return (torch.minimum(a[:, 1:], ends) - torch.maximum(a[:, :1], begins)).clamp_(min=0)


def iou(a: Float[Tensor, "A 4"], b: Float[Tensor, "B 4"]) -> Float[Tensor, "A B"]:
    """Intersection over union of all pairs; zero if both boxes are empty.

    >>> iou(torch.tensor([[0.0, 0.0, 2.0, 2.0]]), torch.tensor([[0.0, 0.0, 2.0, 2.0], [1.0, 0.0, 3.0, 2.0]]))
    tensor([[1.0000, 0.3333]])
    """
    shared = intersections(a, b)
    union = areas(a)[:, None] + areas(b)[None, :] - shared
    return torch.where(union > 0, shared / union, shared.new_zeros(()))


def row_iou(a: Float[Tensor, "A 4"], b: Float[Tensor, "A 4"]) -> Float[Tensor, " A"]:
    """Intersection over union of each box of ``a`` with the box of ``b`` in its row."""
    shared = areas(torch.cat([torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:])], dim=1))
    union = areas(a) + areas(b) - shared
    return torch.where(union > 0, shared / union, shared.new_zeros(()))


def containment(a: Float[Tensor, "A 4"], b: Float[Tensor, "B 4"]) -> Float[Tensor, "A B"]:
    """Intersection over the smaller area of all pairs: the larger fraction of either box that lies in the other."""
    smaller = torch.minimum(areas(a)[:, None], areas(b)[None, :])
    return torch.where(smaller > 0, intersections(a, b) / smaller, smaller.new_zeros(()))


def greedy_match(overlaps: Float[Tensor, "A B"], min_overlap: float) -> Int[Tensor, " A"]:
    """Match rows to columns one to one: the column of each row, -1 for none.

    From the first row on, each takes the free column of the largest overlap, if it is at least ``min_overlap``; ties go
    to the first column. Pairs that must not match, e.g. boxes of different classes, have an overlap below it.

    >>> greedy_match(torch.tensor([[0.6, 0.9], [0.2, 0.8], [0.7, 0.1]]), 0.5)
    tensor([ 1, -1,  0])
    """
    free = overlaps.clone()
    matched = torch.full((len(overlaps),), -1, dtype=torch.long, device=overlaps.device)
    for row in (overlaps >= min_overlap).any(dim=1).nonzero().flatten().tolist():
        best = free[row].max()
        if best >= min_overlap:
            column = int((free[row] == best).nonzero()[0])  # the first: argmax promises none on ties
            matched[row] = column
            free[:, column] = -torch.inf
    return matched


def clip(boxes: Float[Tensor, "A 4"], width: float, height: float) -> Float[Tensor, "A 4"]:
    """Boxes clipped to the borders of an image."""
    limit = boxes.new_tensor([width, height, width, height])
    return torch.minimum(boxes.clamp(min=0), limit)


def _centres(boxes: Float[Tensor, "A 4"]) -> tuple[Float[Tensor, "A 2"], Float[Tensor, "A 2"]]:
    size = boxes[:, 2:] - boxes[:, :2]
    return boxes[:, :2] + 0.5 * size, size


def encode(targets: Float[Tensor, "A 4"], proposals: Float[Tensor, "A 4"]) -> Float[Tensor, "A 4"]:
    """Deltas (dx, dy, dw, dh) that move each proposal onto its target, as in Fast R-CNN."""
    to_centre, to_size = _centres(targets)
    centre, size = _centres(proposals)
    deltas = torch.cat([(to_centre - centre) / size, (to_size / size).log()], dim=1)
    return deltas * deltas.new_tensor(CODE_WEIGHTS)


def decode(deltas: Float[Tensor, "A c4"], proposals: Float[Tensor, "A 4"]) -> Float[Tensor, "A c4"]:
    """Proposals moved by their deltas, the inverse of ``encode``; four columns per class in, four per class out."""
    count = deltas.shape[1] // 4
    centre, size = _centres(proposals)
    codes = deltas.reshape(len(deltas), count, 4) / deltas.new_tensor(CODE_WEIGHTS)
    new_centre = codes[..., :2] * size[:, None] + centre[:, None]  # (A, count, 2)
    new_size = codes[..., 2:].clamp(max=MAX_LOG_SIZE).exp() * size[:, None]
    return torch.cat([new_centre - 0.5 * new_size, new_centre + 0.5 * new_size], dim=2).reshape(deltas.shape)


def nms(boxes: Float[Tensor, "A 4"], scores: Float[Tensor, " A"], iou_threshold: float) -> Int[Tensor, " kept"]:
    """Greedy NMS: the rows that survive, best score first.

    A box is suppressed if a kept better one overlaps it by more than the threshold. Equal scores keep their order.

    >>> boxes = torch.tensor([[0.0, 0.0, 10.0, 10.0], [1.0, 0.0, 11.0, 10.0], [20.0, 0.0, 30.0, 10.0]])
    >>> nms(boxes, torch.tensor([0.8, 0.9, 0.7]), iou_threshold=0.5)
    tensor([1, 2])
    """
    left = scores.argsort(descending=True, stable=True)
    if len(left) >= _MIN_COMPILED_BOXES and _has_kernel(boxes):
        return left[_survivors(boxes[left], [len(left)], iou_threshold)]
    kept = [left[:0]]
    # The best block is resolved first, then everything that it suppresses is dropped: most boxes fall to the first few
    # blocks and are never compared with each other.
    while len(left):
        best, left = left[:_NMS_BLOCK], left[_NMS_BLOCK:]
        best = best[_survives(boxes[best], iou_threshold)]
        left = left[~(iou(boxes[best], boxes[left]) > iou_threshold).any(dim=0)]
        kept.append(best)
    return torch.cat(kept)


def _survives(ranked: Float[Tensor, "a 4"], iou_threshold: float) -> Bool[Tensor, " a"]:
    """Which boxes of one block, best first, survive each other.

    Greedy suppression is the only solution of ``kept[j] = no kept i < j suppresses j``, so iterating that equation from
    "all kept" reaches it: after t rounds the first t ranks are final, and a handful of rounds is enough in practice.
    """
    suppresses = (iou(ranked, ranked) > iou_threshold).triu(diagonal=1).to(torch.float32)  # (a, a), better row first
    kept = torch.ones(len(ranked), dtype=torch.bool, device=ranked.device)
    for _ in range(len(ranked)):
        settled = (kept.to(torch.float32) @ suppresses) == 0
        if torch.equal(settled, kept):
            break
        kept = settled
    return kept


def class_nms(
    boxes: Float[Tensor, "A 4"],
    scores: Float[Tensor, " A"],
    labels: Int[Tensor, " A"],
    iou_threshold: float,
) -> Int[Tensor, " kept"]:
    """NMS within each class; rows of all classes, best score first."""
    if len(boxes) >= _MIN_COMPILED_BOXES and _has_kernel(boxes):
        return _class_nms_compiled(boxes, scores, labels, iou_threshold)
    groups = [(labels == label).nonzero().flatten() for label in labels.unique()]
    kept = [ids[nms(boxes[ids], scores[ids], iou_threshold)] for ids in groups]
    if not kept:
        return labels.new_zeros(0)
    rows = torch.cat(kept)
    return rows[scores[rows].argsort(descending=True, stable=True)]


def vote(
    boxes: Float[Tensor, "A 4"],
    scores: Float[Tensor, " A"],
    labels: Int[Tensor, " A"],
    kept: Int[Tensor, " kept"],
    iou_threshold: float,
) -> Float[Tensor, "kept 4"]:
    """Box voting: the mean of all boxes of its class that overlap a kept one enough, weighted by their scores.

    Spyros Gidaris and Nikos Komodakis: Object detection via a multi-region & semantic segmentation-aware CNN model,
    ICCV 2015, eq. 4. https://arxiv.org/abs/1505.01749

    Args:
        kept: rows that NMS kept; each votes for itself.
        iou_threshold: boxes of at least this IoU vote.

    >>> boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 8, 10]])
    >>> vote(boxes, torch.tensor([0.75, 0.25]), torch.tensor([1, 1]), torch.tensor([0]), 0.5).tolist()
    [[0.0, 0.0, 9.5, 10.0]]
    """
    is_voter = (labels[kept][:, None] == labels) & (iou(boxes[kept], boxes) >= iou_threshold)
    weights = torch.where(is_voter, scores, 0).to(boxes)  # (kept, A)
    total = weights.sum(dim=1, keepdim=True)
    return torch.where(total > 0, weights @ boxes / total.clamp(min=torch.finfo(boxes.dtype).tiny), boxes[kept])


def _class_nms_compiled(
    boxes: Float[Tensor, "A 4"], scores: Float[Tensor, " A"], labels: Int[Tensor, " A"], iou_threshold: float
) -> Int[Tensor, " kept"]:
    """``class_nms`` by one call of the kernel; of equal scores the lower class is first, as without it."""
    by_class = labels.argsort(stable=True)
    ranked = by_class[scores[by_class].argsort(descending=True, stable=True)]
    grouped = labels[ranked].argsort(stable=True)
    sizes = labels[by_class].unique_consecutive(return_counts=True)[1].tolist()
    kept = torch.empty(len(ranked), dtype=torch.bool)
    kept[grouped] = _survivors(boxes[ranked[grouped]], sizes, iou_threshold)
    return ranked[kept]


def _has_kernel(boxes: Float[Tensor, "A 4"]) -> bool:
    """Whether the compiled kernel of NMS takes such boxes."""
    return boxes.device.type == "cpu" and boxes.dtype in (torch.float32, torch.float64)


def _survivors(ranked: Float[Tensor, "A 4"], sizes: list[int], iou_threshold: float) -> Bool[Tensor, " A"]:
    from tag2box.ops import box_kernels  # on first use: numba takes a while to load

    return box_kernels.survivors(ranked.detach(), areas(ranked).detach(), sizes, iou_threshold)


def mask_boxes(logits: Float[Tensor, "K h w"]) -> Float[Tensor, "K 4"]:
    """Box of the positive part of each map, in cells; zeros if there is none.

    Between the centres of two cells a map is interpolated linearly, so the boxes are those of the bilinearly enlarged
    maps, without enlarging them: the outermost zero crossing of a bilinear patch lies on an edge of the patch.

    >>> mask_boxes(torch.tensor([[[-1.0, 1.0, 1.0, -3.0]]]))
    tensor([[1.0000, 0.0000, 2.7500, 1.0000]])
    """
    height, width = logits.shape[1:]
    sideways = logits.transpose(1, 2)
    left, top = _first_crossings(logits), _first_crossings(sideways)
    right, bottom = width - _first_crossings(logits.flip(2)), height - _first_crossings(sideways.flip(2))
    boxes = torch.stack([left, top, right, bottom], dim=1)
    return torch.where((logits > 0).flatten(1).any(dim=1)[:, None], boxes, 0.0)


def _first_crossings(logits: Float[Tensor, "K h w"]) -> Float[Tensor, " K"]:
    """Where the first column with a positive cell begins: between its centre and that of the column before it."""
    first = (logits > 0).any(dim=1).int().argmax(dim=1)  # (K,)
    rows = torch.arange(len(logits), device=logits.device)
    here, before = logits[rows, :, first], logits[rows, :, (first - 1).clamp(min=0)]  # (K, h)
    reach = torch.where(here > 0, here / (here - before), 0.0).amax(dim=1)  # from the centre, in cells
    return torch.where(first > 0, first + 0.5 - reach, 0.0)
