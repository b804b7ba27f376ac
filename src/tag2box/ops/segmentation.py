"""Graph-based segmentation: Felzenszwalb and Huttenlocher, Efficient Graph-Based Image Segmentation, IJCV 2004.

Pixels are joined along the edges of the 4-connected grid, lightest first, as long as an edge is not heavier than what
both of its components tolerate: ``Int(C) + k / |C|`` (equations 2 to 5). The sorted edges do not depend on ``k``, so
all segmentations of an image share them. Compiled by numba, without the GIL; results do not depend on the processor.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int32, Int64

from tag2box.ops.kernels import compiled

_DIGIT = 11  # bits of a digit of the radix sort; three digits hold the bits of a float
_DIGITS = 3


class GridEdges(NamedTuple):
    """Edges between neighbouring pixels of an image, lightest first; equal ones in the order of their pixels."""

    height: int
    width: int
    weights: Float32[np.ndarray, " e"]  # Euclidean distance of the two pixels' colors
    codes: Int32[np.ndarray, " e"]  # 2 * first pixel, + 1 if the other is below, not right


@compiled
def _distance(image: Any, y: int, x: int, v: int, u: int) -> Any:
    total = np.float32(0)
    for channel in range(image.shape[2]):
        step = image[y, x, channel] - image[v, u, channel]
        total += step * step
    return np.sqrt(total)


@compiled
def _list_edges(image: Any, weights: Any, codes: Any) -> None:
    height, width = image.shape[0], image.shape[1]
    count = 0
    for y in range(height):
        for x in range(width):
            for down in range(2):
                v, u = y + down, x + 1 - down
                if v < height and u < width:
                    weights[count] = _distance(image, y, x, v, u)
                    codes[count] = 2 * (y * width + x) + down
                    count += 1


@compiled
def _radix_sort(keys: Any, codes: Any, sorted_keys: Any, sorted_codes: Any) -> None:
    """Stable; an odd number of passes leaves the result in the second pair of arrays."""
    buckets, mask = 1 << _DIGIT, np.uint32((1 << _DIGIT) - 1)
    for digit in range(_DIGITS):
        shift = np.uint32(digit * _DIGIT)
        place = np.zeros(buckets + 1, np.int64)
        for i in range(len(keys)):
            place[((keys[i] >> shift) & mask) + 1] += 1
        for bucket in range(buckets):
            place[bucket + 1] += place[bucket]
        for i in range(len(keys)):
            bucket = (keys[i] >> shift) & mask
            sorted_keys[place[bucket]] = keys[i]
            sorted_codes[place[bucket]] = codes[i]
            place[bucket] += 1
        keys, codes, sorted_keys, sorted_codes = sorted_keys, sorted_codes, keys, codes


@compiled
def _root(parent: Any, node: Any) -> Any:
    while parent[node] != node:
        parent[node] = parent[parent[node]]
        node = parent[node]
    return node


@compiled
def _join(parent: Any, size: Any, a: Any, b: Any) -> Any:
    """Join two roots; the larger component stays the root."""
    if size[a] < size[b]:
        a, b = b, a
    parent[b] = a
    size[a] += size[b]
    return a


@compiled
def _segment(weights: Any, codes: Any, width: int, k: Any, min_size: int, labels: Any) -> None:
    steps = np.array([1, width], np.int32)
    parent, size = np.arange(len(labels)).astype(np.int32), np.ones(len(labels), np.int32)
    limit = np.full(len(labels), k)
    rejected, count = np.empty(len(codes), np.int32), 0
    for i in range(len(codes)):
        code = codes[i]
        pixel = code >> 1
        a, b = _root(parent, pixel), _root(parent, pixel + steps[code & 1])
        if a == b:
            continue
        if weights[i] <= limit[a] and weights[i] <= limit[b]:
            a = _join(parent, size, a, b)
            limit[a] = weights[i] + k / np.float32(size[a])
        else:
            rejected[count] = code
            count += 1
    for i in range(count):  # the edges between components, still lightest first
        pixel = rejected[i] >> 1
        a, b = _root(parent, pixel), _root(parent, pixel + steps[rejected[i] & 1])
        if a != b and (size[a] < min_size or size[b] < min_size):
            _join(parent, size, a, b)
    _number(parent, labels)


@compiled
def _number(parent: Any, labels: Any) -> None:
    number, count = np.full(len(labels), -1, np.int32), 0
    for pixel in range(len(labels)):
        root = _root(parent, pixel)
        if number[root] < 0:
            number[root] = count
            count += 1
        labels[pixel] = number[root]


# ---------------------------------------------------------------- what others call


@compiled
def grid_edges(image: Float32[np.ndarray, "h w c"]) -> GridEdges:
    """The edges of a contiguous image, which is usually blurred a little (the paper: sigma 0.8)."""
    height, width = image.shape[0], image.shape[1]
    count = 2 * height * width - height - width
    weights, codes = np.empty(count, np.float32), np.empty(count, np.int32)
    _list_edges(image, weights, codes)
    sorted_weights, sorted_codes = np.empty(count, np.float32), np.empty(count, np.int32)
    # The bits of floats that are not negative sort as the floats do.
    _radix_sort(weights.view(np.uint32), codes, sorted_weights.view(np.uint32), sorted_codes)
    return GridEdges(height, width, sorted_weights, sorted_codes)


@compiled
def segment(edges: GridEdges, k: float, min_size: int) -> Int32[np.ndarray, "h w"]:
    """Segment of each pixel, numbered from 0 in reading order.

    Args:
        k: the tolerance of small components, in units of weight times pixels; higher gives larger segments.
        min_size: segments of fewer pixels are merged with a neighbour along the lightest edge.
    """
    labels = np.empty(edges.height * edges.width, np.int32)
    _segment(edges.weights, edges.codes, edges.width, np.float32(k), min_size, labels)
    return labels.reshape(edges.height, edges.width)


@compiled
def straddled_pixels(labels: Int32[np.ndarray, "h w"], edges: Int64[np.ndarray, "p 4"]) -> Int64[np.ndarray, " p"]:
    """Sum over segments s of min(|s inside b|, |s outside b|), in pixels, of each box b.

    Every segment, connected or not, has an integral image of its bounding rectangle, which is read for all boxes.

    Args:
        labels: numbers from 0 on.
        edges: left, top, right and bottom of boxes within the map.
    """
    height, width = labels.shape
    count = labels.max() + 1 if labels.size else 0
    first, last = np.full((count, 2), height + width, np.int64), np.zeros((count, 2), np.int64)
    for y in range(height):
        for x in range(width):
            s = labels[y, x]
            first[s, 0], first[s, 1] = min(first[s, 0], y), min(first[s, 1], x)
            last[s, 0], last[s, 1] = max(last[s, 0], y + 1), max(last[s, 1], x + 1)
    total = np.zeros((height + 1, width + 1), np.int64)
    out = np.zeros(len(edges), np.int64)
    for s in range(count):
        top, left, high, wide = first[s, 0], first[s, 1], last[s, 0] - first[s, 0], last[s, 1] - first[s, 1]
        for y in range(high):
            run = 0
            for x in range(wide):
                run += labels[top + y, left + x] == s
                total[y + 1, x + 1] = total[y, x + 1] + run
        for b in range(len(edges)):
            x1, x2 = min(max(edges[b, 0] - left, 0), wide), min(max(edges[b, 2] - left, 0), wide)
            y1, y2 = min(max(edges[b, 1] - top, 0), high), min(max(edges[b, 3] - top, 0), high)
            if x1 < x2 and y1 < y2:
                inside = total[y2, x2] - total[y1, x2] - total[y2, x1] + total[y1, x1]
                out[b] += min(inside, total[high, wide] - inside)
    return out
