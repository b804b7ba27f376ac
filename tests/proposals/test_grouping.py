"""Hierarchical grouping against a twin that keeps masks, and its properties."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tag2box.ops.segmentation import grid_edges, segment
from tag2box.proposals.grouping import PixelBins, Regions, Similarities, group, pixel_bins, regions_of

ALL = Similarities()
CHOICES = [ALL, Similarities(color=False), *(Similarities(*(i == j for j in range(4))) for i in range(4))]


def scene(height: int, width: int, seed: int, channels: int = 3) -> np.ndarray:
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 220, (height // 6 + 1, width // 6 + 1, channels)).repeat(6, 0).repeat(6, 1)
    return (blocks[:height, :width] + rng.integers(0, 30, (height, width, channels))).astype(np.uint8)


def gradient(image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Differences of the neighbours across and down; of a pixel itself at the borders."""
    padded = np.pad(image.astype(np.float32), ((1, 1), (1, 1), (0, 0)), mode="edge")
    across, down = padded[1:-1, 2:] - padded[1:-1, :-2], padded[2:, 1:-1] - padded[:-2, 1:-1]
    return np.ascontiguousarray(across), np.ascontiguousarray(down)


def segmented(image: np.ndarray) -> tuple[np.ndarray, PixelBins, Regions]:
    labels, bins = segment(grid_edges(image.astype(np.float32)), 150.0, 6), pixel_bins(image, *gradient(image))
    return labels, bins, regions_of(labels, bins)


def histograms(mask: np.ndarray, bins: PixelBins) -> tuple[np.ndarray, np.ndarray]:
    """Color and texture histogram of a region, pixel by pixel."""
    channels, axes = bins.colors.shape[1], bins.textures.shape[1]
    color, texture = np.zeros((channels, 25)), np.zeros((axes, 2, 10))
    for pixel in np.flatnonzero(mask):
        for channel in range(channels):
            color[channel, bins.colors[pixel, channel]] += 1
        for axis in range(axes):
            level = int(bins.textures[pixel, axis])
            texture[axis, 0, max(level, 0)] += 1
            texture[axis, 1, max(-level, 0)] += 1
    return color / color.sum(), texture / texture.sum()


def box_of(mask: np.ndarray) -> tuple[int, int, int, int]:
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def are_neighbours(a: np.ndarray, b: np.ndarray) -> bool:
    sideways, down = (a[:, 1:] & b[:, :-1]) | (b[:, 1:] & a[:, :-1]), (a[1:] & b[:-1]) | (b[1:] & a[:-1])
    return bool(sideways.any() or down.any())


def similarity_loop(a: np.ndarray, b: np.ndarray, bins: PixelBins, by: Similarities) -> float:
    colors, textures = zip(histograms(a, bins), histograms(b, bins), strict=True)
    size = a.sum() + b.sum()
    left, top, right, bottom = box_of(a | b)
    parts = (
        np.minimum(*colors).sum(), np.minimum(*textures).sum(),
        1 - size / a.size, 1 - ((right - left) * (bottom - top) - size) / a.size,
    )  # fmt: skip
    return float(sum(part for part, is_used in zip(parts, by, strict=True) if is_used))


def group_loop(labels: np.ndarray, bins: PixelBins, by: Similarities) -> list[tuple[int, int, int, int]]:
    """All pairs are compared again before every merge; of equal ones, the pair of the oldest regions is merged."""
    masks = {number: labels == number for number in range(labels.max() + 1)}
    boxes = [box_of(mask) for mask in masks.values()]
    while len(masks) > 1:
        pairs = [(i, j) for i, j in itertools.combinations(masks, 2) if are_neighbours(masks[i], masks[j])]
        i, j = max(pairs, key=lambda p: (similarity_loop(masks[p[0]], masks[p[1]], bins, by), -p[0], -p[1]))
        masks[len(boxes)] = masks.pop(i) | masks.pop(j)
        boxes.append(box_of(masks[len(boxes)]))
    return boxes


@pytest.mark.parametrize("by", CHOICES)
@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 30), (16, 20)])
def test_the_twin_that_keeps_masks_agrees(height: int, width: int, by: Similarities) -> None:
    labels, bins, regions = segmented(scene(height, width, seed=height))
    found = group(regions, by)
    assert len(found) == 2 * labels.max() + 1
    assert [tuple(box) for box in found.tolist()] == group_loop(labels, bins, by)


def test_bins_of_pixels() -> None:
    image = np.array([[[0], [255]], [[10], [11]]], np.uint8)
    bins = pixel_bins(image, *gradient(image))
    assert bins.colors.ravel().tolist() == [0, 24, 0, 1]
    # Of the first pixel: 255 to the right, 10 down, and on the diagonals 265 and 245, times the root of a half; the
    # steepest is a diagonal of the second, 255 + 244.
    slopes = np.array([255, 10, 265 * 0.5**0.5, 245 * 0.5**0.5])
    assert bins.textures[0].tolist() == (slopes / (499 * 0.5**0.5) * 10).astype(int).tolist() == [7, 0, 5, 4]
    assert bins.textures[1].tolist()[:3:2] == [7, 0] and bins.textures[1].tolist()[1::2] == [-6, 9]


@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 99), st.sampled_from([1, 3]), st.sampled_from(CHOICES))
def test_the_hierarchy_is_a_tree_of_boxes_that_ends_in_the_whole_image(
    height: int, width: int, seed: int, channels: int, by: Similarities
) -> None:
    _, _, regions = segmented(scene(height, width, seed, channels))
    found = group(regions, by)
    assert found[-1].tolist() == [0, 0, width, height]
    assert (found[:, :2] >= 0).all() and (found[:, 2:] <= [width, height]).all() and (found[:, 2:] > found[:, :2]).all()
    assert regions.sizes.sum() == regions.pixels == height * width
    color, texture = regions.counts[:, : regions.colors], regions.counts[:, regions.colors :]
    assert (color.sum(1) == channels * regions.sizes).all() and (texture.sum(1) == 8 * channels * regions.sizes).all()
    assert (group(regions, by) == found).all()  # the regions are left as they were


def test_many_neighbours_fit() -> None:
    """A region that touches a hundred others: queue and lists of neighbours grow."""
    labels = np.zeros((21, 200), np.int32)
    labels[::2, ::2] = np.arange(1, 1 + 11 * 100).reshape(11, 100)
    image = scene(21, 200, seed=0)
    found = group(regions_of(labels, pixel_bins(image, *gradient(image))), ALL)
    assert len(found) == 2 * 1101 - 1 and found[-1].tolist() == [0, 0, 200, 21]
