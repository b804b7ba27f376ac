"""Hierarchical grouping of regions (Uijlings et al., "Selective Search for Object Recognition", IJCV 2013, section 3).

The two most similar neighbouring regions of a segmentation are merged, again and again, until one is left; every region
on the way gives a box. A region is a row of features, never a mask: its number of pixels, its bounding box, and counts
of its colors and gradients, of which those of a merged region are sums. Compiled by numba, without the GIL. Histograms
are compared in whole numbers, so that results do not depend on the processor.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int8, Int32, Int64, UInt8

from tag2box.ops.kernels import compiled

_COLOR_BINS = 25  # per channel
_AXES, _TEXTURE_BINS = 4, 10  # each axis has two orientations; bins per channel and orientation
_DIAGONAL = np.float32(0.5**0.5)
_UNIT = float(1 << 24)  # a whole histogram, as a sum of integers


class Similarities(NamedTuple):
    """Which similarities of two regions are added (equations 2 to 6)."""

    color: bool = True
    texture: bool = True
    size: bool = True
    fill: bool = True


class PixelBins(NamedTuple):
    """Histogram bins of each pixel: of its colors, and of its gradients along four axes.

    An axis is two opposite orientations: the bin is positive for one of them, negative for the other. In that other
    orientation the pixel is in bin 0.
    """

    colors: UInt8[np.ndarray, "p c"]
    textures: Int8[np.ndarray, "p ca"]


class Regions(NamedTuple):
    """Regions of a segmentation, and which of them are neighbours."""

    pixels: int  # of the image
    boxes: Int32[np.ndarray, "n 4"]
    sizes: Int32[np.ndarray, " n"]
    counts: Int32[np.ndarray, "n bins"]  # of the color histogram, then of the texture histogram
    colors: int  # length of the color histogram
    starts: Int64[np.ndarray, " n1"]  # of each region's neighbours, in the next array
    neighbours: Int32[np.ndarray, " m"]


# ---------------------------------------------------------------- features


@compiled
def _slopes(across: Any, down: Any) -> Any:
    """Gradient along the four axes, of which two are diagonal."""
    return across, down, (across + down) * _DIAGONAL, (across - down) * _DIAGONAL


@compiled
def _texture_bins(across: Any, down: Any, textures: Any) -> None:
    height, width, channels = across.shape
    for channel in range(channels):
        highest = np.float32(1e-6)
        for y in range(height):
            for x in range(width):
                for slope in _slopes(across[y, x, channel], down[y, x, channel]):
                    highest = max(highest, abs(slope))
        scale = np.float32(_TEXTURE_BINS) / highest
        for y in range(height):
            for x in range(width):
                for axis, slope in enumerate(_slopes(across[y, x, channel], down[y, x, channel])):
                    level = min(int(abs(slope) * scale), _TEXTURE_BINS - 1)
                    textures[y * width + x, channel * _AXES + axis] = level if slope > 0 else -level


@compiled
def _count_pixels(labels: Any, colors: Any, textures: Any, boxes: Any, sizes: Any, counts: Any) -> None:
    height, width = labels.shape
    first = colors.shape[1] * _COLOR_BINS
    for y in range(height):
        for x in range(width):
            region, pixel = labels[y, x], y * width + x
            box, row = boxes[region], counts[region]
            if sizes[region] == 0:
                box[0], box[1], box[2] = x, y, x + 1
            box[0], box[2], box[3] = min(box[0], x), max(box[2], x + 1), y + 1
            sizes[region] += 1
            for channel in range(colors.shape[1]):
                row[channel * _COLOR_BINS + colors[pixel, channel]] += 1
            for axis in range(textures.shape[1]):
                level = textures[pixel, axis]
                if level != 0:
                    row[first + (2 * axis + (level < 0)) * _TEXTURE_BINS + abs(level)] += 1
    for region in range(len(sizes)):
        for start in range(first, counts.shape[1], _TEXTURE_BINS):
            counts[region, start] = sizes[region] - counts[region, start + 1 : start + _TEXTURE_BINS].sum()


@compiled
def _neighbour_pairs(labels: Any, regions: int) -> Any:
    """``a * regions + b`` of all pixels side by side in different regions, both ways."""
    height, width = labels.shape
    pairs, count = np.empty(4 * labels.size, np.int64), 0
    for y in range(height):
        for x in range(width):
            a = np.int64(labels[y, x])
            for down in range(2):
                v, u = y + down, x + 1 - down
                if v < height and u < width and labels[v, u] != a:
                    b = np.int64(labels[v, u])
                    pairs[count], pairs[count + 1] = a * regions + b, b * regions + a
                    count += 2
    return pairs[:count]


# ---------------------------------------------------------------- grouping


@compiled
def _normalize(counts: Any, size: int, colors: int, shares: Any) -> None:
    """Counts of a region as shares of its color and of its texture histogram."""
    color_unit = _UNIT / (size * (colors // _COLOR_BINS))
    texture_unit = _UNIT / (size * ((len(counts) - colors) // _TEXTURE_BINS))
    for i in range(colors):
        shares[i] = np.int32(counts[i] * color_unit)
    for i in range(colors, len(counts)):
        shares[i] = np.int32(counts[i] * texture_unit)


@compiled
def _shared(a: Any, b: Any) -> Any:
    total = np.int32(0)
    for i in range(len(a)):
        total += min(a[i], b[i])
    return total


@compiled
def _united(a: Any, b: Any) -> Any:
    return min(a[0], b[0]), min(a[1], b[1]), max(a[2], b[2]), max(a[3], b[3])


@compiled
def _similarity(a: int, b: int, features: Any, pixels: int, by: Any) -> Any:
    """Sum of the chosen similarities of two regions."""
    boxes, sizes, rows, shares, colors = features
    one, other = shares[rows[a]], shares[rows[b]]
    size = sizes[a] + sizes[b]
    total = 0.0
    if by.color:
        total += _shared(one[:colors], other[:colors]) / _UNIT
    if by.texture:
        total += _shared(one[colors:], other[colors:]) / _UNIT
    if by.size:
        total += 1 - size / pixels
    if by.fill:
        left, top, right, bottom = _united(boxes[a], boxes[b])
        total += 1 - ((right - left) * (bottom - top) - size) / pixels
    return total


@compiled
def _is_before(queue: Any, pairs: Any, i: int, j: int) -> Any:
    return queue[i] > queue[j] or (queue[i] == queue[j] and pairs[i] < pairs[j])


@compiled
def _push(queue: Any, pairs: Any, count: int, similarity: float, pair: int) -> Any:
    """Add a pair to the priority queue, a heap with the most similar pair first; returns the arrays, perhaps longer."""
    if count == len(queue):
        queue, pairs = _longer(queue, 2 * count), _longer(pairs, 2 * count)
    queue[count], pairs[count] = similarity, pair
    while count > 0 and _is_before(queue, pairs, count, (count - 1) // 2):
        above = (count - 1) // 2
        queue[above], queue[count] = queue[count], queue[above]
        pairs[above], pairs[count] = pairs[count], pairs[above]
        count = above
    return queue, pairs


@compiled
def _pop(queue: Any, pairs: Any, count: int) -> Any:
    """Remove the first of ``count`` pairs from the priority queue, and return it."""
    first, last = pairs[0], count - 1
    queue[0], pairs[0] = queue[last], pairs[last]
    node = 0
    while 2 * node + 1 < last:
        below = 2 * node + 1
        if below + 1 < last and _is_before(queue, pairs, below + 1, below):
            below += 1
        if not _is_before(queue, pairs, below, node):
            break
        queue[below], queue[node] = queue[node], queue[below]
        pairs[below], pairs[node] = pairs[node], pairs[below]
        node = below
    return first


@compiled
def _current(merged: Any, region: Any) -> Any:
    """The region that a former region is now part of."""
    while merged[region] != region:
        merged[region] = merged[merged[region]]
        region = merged[region]
    return region


@compiled
def _new_neighbours(region: int, a: int, b: int, known: Any, spans: Any, merged: Any, seen: Any) -> Any:
    """Append the neighbours of a region, merged from two, to all that are known; returns these, perhaps longer."""
    count = spans[region - 1, 1]
    most = count + spans[a, 1] - spans[a, 0] + spans[b, 1] - spans[b, 0]
    if most > len(known):
        known = _longer(known, 2 * most)
    spans[region, 0] = count
    for old in (a, b):
        for i in range(spans[old, 0], spans[old, 1]):
            neighbour = _current(merged, known[i])
            if neighbour != region and seen[neighbour] != region:
                seen[neighbour] = region
                known[count] = neighbour
                count += 1
    spans[region, 1] = count
    return known


@compiled
def _merge(a: int, b: int, region: int, features: Any, counts: Any) -> None:
    """Features of a region merged from two; its histograms take the rows of the first."""
    boxes, sizes, rows, shares, colors = features
    boxes[region, 0], boxes[region, 1], boxes[region, 2], boxes[region, 3] = _united(boxes[a], boxes[b])
    sizes[region], rows[region] = sizes[a] + sizes[b], rows[a]
    row, other = counts[rows[a]], counts[rows[b]]
    for i in range(len(row)):
        row[i] += other[i]
    _normalize(row, sizes[region], colors, shares[rows[a]])


@compiled
def _longer(array: Any, count: int) -> Any:
    """A copy of an array with room for more."""
    copy = np.empty(count, array.dtype)
    for i in range(len(array)):
        copy[i] = array[i]
    return copy


@compiled
def _group(boxes: Any, sizes: Any, counts: Any, colors: int, starts: Any, known: Any, pixels: int, by: Any) -> None:
    n, total = len(counts), len(boxes)
    rows, merged, seen = np.arange(total), np.arange(total), np.full(total, -1)  # a merged region takes a row over
    shares, spans = np.empty(counts.shape, np.int32), np.empty((total, 2), np.int64)
    features = (boxes, sizes, rows, shares, colors)
    queue, pairs, count = np.empty(len(known) + 1), np.empty(len(known) + 1, np.int64), 0
    for a in range(n):
        _normalize(counts[a], sizes[a], colors, shares[a])
        spans[a, 0], spans[a, 1] = starts[a], starts[a + 1]
        for b in known[starts[a] : starts[a + 1]]:
            if b < a:
                similarity = _similarity(b, a, features, pixels, by)
                queue, pairs = _push(queue, pairs, count, similarity, np.int64(b) * total + a)
                count += 1
    for region in range(n, total):
        pair: Any = np.int64(-1)
        while pair < 0 or merged[pair // total] != pair // total or merged[pair % total] != pair % total:
            pair = _pop(queue, pairs, count)
            count -= 1
        a, b = pair // total, pair % total
        _merge(a, b, region, features, counts)
        merged[a] = merged[b] = region
        known = _new_neighbours(region, a, b, known, spans, merged, seen)
        for c in known[spans[region, 0] : spans[region, 1]]:
            similarity = _similarity(c, region, features, pixels, by)
            queue, pairs = _push(queue, pairs, count, similarity, np.int64(c) * total + region)
            count += 1


# ---------------------------------------------------------------- what others call


@compiled
def pixel_bins(
    image: UInt8[np.ndarray, "h w c"], across: Float32[np.ndarray, "h w c"], down: Float32[np.ndarray, "h w c"]
) -> PixelBins:
    """Bins of an image's pixels: 25 per color channel; 10 per channel and orientation of the gradient across and down.

    The paper leaves the range of gradients open. Here it is that of the channel in this image.
    """
    height, width, channels = image.shape
    colors = np.empty((height * width, channels), np.uint8)
    for y in range(height):
        for x in range(width):
            for channel in range(channels):
                colors[y * width + x, channel] = np.int64(image[y, x, channel]) * _COLOR_BINS // 256
    textures = np.empty((height * width, channels * _AXES), np.int8)
    _texture_bins(across, down, textures)
    return PixelBins(colors, textures)


@compiled
def regions_of(labels: Int32[np.ndarray, "h w"], bins: PixelBins) -> Regions:
    """Features of the segments of an image, which are numbered from 0."""
    count = labels.max() + 1
    colors, textures = bins.colors.shape[1] * _COLOR_BINS, 2 * bins.textures.shape[1] * _TEXTURE_BINS
    boxes, sizes = np.empty((count, 4), np.int32), np.zeros(count, np.int32)
    counts = np.zeros((count, colors + textures), np.int32)
    _count_pixels(labels, bins.colors, bins.textures, boxes, sizes, counts)
    pairs = np.unique(_neighbour_pairs(labels, count))
    starts, neighbours = np.zeros(count + 1, np.int64), np.empty(len(pairs), np.int32)
    for i in range(len(pairs)):
        starts[pairs[i] // count + 1] += 1
        neighbours[i] = pairs[i] % count
    for region in range(count):
        starts[region + 1] += starts[region]
    return Regions(labels.size, boxes, sizes, counts, colors, starts, neighbours)


@compiled
def group(regions: Regions, by: Similarities) -> Int32[np.ndarray, "n2 4"]:
    """Boxes of all regions of the hierarchy: those of the segmentation, then the merged ones, the whole image last."""
    n = len(regions.sizes)
    boxes, sizes = np.empty((2 * n - 1, 4), np.int32), np.empty(2 * n - 1, np.int32)
    boxes[:n], sizes[:n] = regions.boxes, regions.sizes
    counts = regions.counts.copy()
    _group(boxes, sizes, counts, regions.colors, regions.starts, regions.neighbours, regions.pixels, by)
    return boxes
