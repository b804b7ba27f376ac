"""Graph segmentation against a twin written with loops, against OpenCV's, and its properties."""

from __future__ import annotations

import math

import cv2
import numpy as np
import pytest
from hypothesis import given, strategies as st

from tag2box.ops.segmentation import grid_edges, segment


def picture(height: int, width: int, seed: int = 0, channels: int = 3) -> np.ndarray:
    """Blocks of color with noise; all distances between pixels differ."""
    rng = np.random.default_rng(seed)
    blocks = rng.uniform(0, 200, (height // 5 + 1, width // 5 + 1, channels)).repeat(5, 0).repeat(5, 1)
    return (blocks[:height, :width] + rng.uniform(0, 20, (height, width, channels))).astype(np.float32)


def segment_loop(image: np.ndarray, k: float, min_size: int) -> np.ndarray:
    """The paper's algorithm with sets of pixels and a list of edges."""
    height, width = image.shape[:2]
    edges = []
    for y in range(height):
        for x in range(width):
            for v, u in ((y, x + 1), (y + 1, x)):
                if v < height and u < width:
                    edges.append((math.dist(image[y, x].tolist(), image[v, u].tolist()), (y, x), (v, u)))
    edges.sort(key=lambda edge: edge[0])
    component = {(y, x): {(y, x)} for y in range(height) for x in range(width)}
    internal = {id(pixels): 0.0 for pixels in component.values()}

    def join(a: set, b: set, weight: float) -> None:
        a |= b
        internal[id(a)] = weight
        component.update(dict.fromkeys(b, a))

    for weight, one, other in edges:
        a, b = component[one], component[other]
        if a is not b and weight <= min(internal[id(c)] + k / len(c) for c in (a, b)):
            join(a, b, weight)
    for weight, one, other in edges:
        a, b = component[one], component[other]
        if a is not b and min(len(a), len(b)) < min_size:
            join(a, b, weight)
    numbers: dict[int, int] = {}
    labels = [numbers.setdefault(id(component[y, x]), len(numbers)) for y in range(height) for x in range(width)]
    return np.array(labels).reshape(height, width)


CASES = [
    (1, 1, 10.0, 1), (1, 9, 10.0, 1), (7, 1, 10.0, 3), (12, 16, 0.0, 1), (12, 16, 100.0, 1), (12, 16, 100.0, 8),
    (17, 13, 900.0, 20), (17, 13, 1e9, 1), (9, 9, 1.0, 1000),
]  # fmt: skip


@pytest.mark.parametrize(("height", "width", "k", "min_size"), CASES)
def test_the_twin_written_with_loops_agrees(height: int, width: int, k: float, min_size: int) -> None:
    for seed in range(3):
        image = picture(height, width, seed)
        assert (segment(grid_edges(image), k, min_size) == segment_loop(image, k, min_size)).all()


def test_edges_are_listed_once_and_sorted_stably() -> None:
    image = np.array([[[0], [3]], [[3], [0]]], np.float32)
    edges = grid_edges(image)
    assert (edges.height, edges.width) == (2, 2)
    assert edges.weights.tolist() == [3, 3, 3, 3] and edges.codes.tolist() == [0, 1, 3, 4]
    edges = grid_edges(picture(40, 30))
    assert len(edges.codes) == len(set(edges.codes.tolist())) == 40 * 29 + 39 * 30
    assert (np.diff(edges.weights) >= 0).all()


def is_partition_of(labels: np.ndarray, other: np.ndarray) -> bool:
    """Whether two segmentations are the same but for their numbers."""
    pairs = np.unique(np.stack([labels.ravel(), other.ravel()]), axis=1).shape[1]
    return pairs == len(np.unique(labels)) == len(np.unique(other))


@pytest.mark.parametrize(("sigma", "k", "min_size"), [(0.5, 300.0, 100), (0.8, 150.0, 100), (0.8, 450.0, 1)])
def test_opencv_segments_alike(sigma: float, k: float, min_size: int) -> None:
    image = picture(90, 120, seed=5).astype(np.uint8)
    theirs = cv2.ximgproc.segmentation.createGraphSegmentation(sigma, k, min_size).processImage(image)
    blurred = cv2.GaussianBlur(image.astype(np.float32), (0, 0), sigma)
    ours = segment(grid_edges(blurred), k, min_size)
    assert len(np.unique(ours)) > 3 and is_partition_of(ours, theirs)


@given(
    st.integers(1, 24), st.integers(1, 24), st.integers(0, 99), st.floats(0, 1e4), st.integers(1, 40), st.integers(1, 3)
)  # fmt: skip
def test_segments_are_connected_big_enough_and_numbered_in_reading_order(
    height: int, width: int, seed: int, k: float, min_size: int, channels: int
) -> None:
    labels = segment(grid_edges(picture(height, width, seed, channels)), k, min_size)
    assert labels.shape == (height, width)
    seen, first = np.unique(labels, return_index=True)
    assert seen.tolist() == list(range(len(seen))) and (np.diff(first) > 0).all()
    assert np.bincount(labels.ravel()).min() >= min(min_size, height * width)
    for number in seen:
        mask = (labels == number).astype(np.uint8)
        assert cv2.connectedComponents(mask, connectivity=4)[0] == 2  # itself and the rest


@given(st.integers(1, 20), st.integers(1, 20), st.integers(0, 99))
def test_a_mirrored_image_is_segmented_alike(height: int, width: int, seed: int) -> None:
    image = picture(height, width, seed)  # without equal weights, whose order a mirror changes
    labels = segment(grid_edges(image), 150.0, 10)
    mirrored = segment(grid_edges(np.ascontiguousarray(image[:, ::-1])), 150.0, 10)
    assert is_partition_of(labels, mirrored[:, ::-1])


@pytest.mark.parametrize("k", [0.0, 150.0])
def test_a_constant_image_is_one_segment(k: float) -> None:
    assert not segment(grid_edges(np.full((20, 30, 3), 7, np.float32)), k, 1).any()
