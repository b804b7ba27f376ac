"""Edges from responses: written out with loops, and on lines whose direction is known."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from hypothesis import given, strategies as st

from tag2box.proposals.early_responses import response_edges, ridge_normals
from tag2box.proposals.edge_boxes import boxes_from_edges, thin_edges


def written_out(means: list[np.ndarray], size: tuple[int, int]) -> np.ndarray:
    """The definition, pixel by pixel."""
    total = np.zeros((size[1], size[0]))
    for mean in means:
        big = cv2.resize(mean, size, interpolation=cv2.INTER_LINEAR)
        ordered = sorted(big.ravel().tolist())
        low, high = np.interp([0.5, 0.99], np.linspace(0, 1, len(ordered)), ordered)
        for y in range(size[1]):
            for x in range(size[0]):
                total[y, x] += min(max((big[y, x] - low) / max(high - low, 1e-6), 0), 1) / len(means)
    return total


@given(st.integers(0, 99), st.integers(1, 3))
def test_a_map_is_the_mean_of_layer_responses_above_their_medians(seed: int, layers: int) -> None:
    rng = np.random.default_rng(seed)
    means = [rng.random((12 >> i, 16 >> i)).astype(np.float32) for i in range(layers)]
    edges = response_edges(means, (19, 13))
    assert edges.shape == (13, 19) and edges.dtype == np.float32
    assert np.allclose(edges, written_out(means, (19, 13)), atol=1e-5)
    assert edges.min() >= 0 and edges.max() <= 1


@pytest.mark.parametrize("side", [1, 2, 9])
def test_constant_layers_show_no_edge(side: int) -> None:
    assert not response_edges([np.full((side, side), 3.0, np.float32)], (8, 6)).any()


@pytest.mark.parametrize("degrees", [0, 30, 45, 90, 120])
def test_the_direction_is_across_the_line(degrees: int) -> None:
    across = np.deg2rad(degrees)
    y, x = np.mgrid[:41, :41] - 20.0
    line = np.exp(-((x * np.cos(across) + y * np.sin(across)) ** 2) / 8).astype(np.float32)
    found = ridge_normals(line, 1.0)
    assert found.dtype == np.float32 and found.min() >= 0 and found.max() < np.pi + 1e-6
    off = np.abs(found[20, 20] - across) % np.pi
    assert min(off, np.pi - off) < 0.05
    assert np.count_nonzero(thin_edges(line, found)[10:31, 10:31] > 0.05) <= 2 * 30  # one or two pixels wide


def reflected(index: int, side: int) -> int:
    """Mirrored at the border cell, which is not repeated."""
    index = abs(index)
    return index if index < side else 2 * (side - 1) - index


def filtered(image: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Correlation with a kernel, cell by cell."""
    (height, width), reach = image.shape, len(kernel) // 2
    found = np.zeros((height, width))
    for y in range(height):
        for x in range(width):
            for dy in range(-reach, reach + 1):
                for dx in range(-reach, reach + 1):
                    cell = image[reflected(y + dy, height), reflected(x + dx, width)]
                    found[y, x] += kernel[dy + reach, dx + reach] * cell
    return found


def normals_with_loops(edges: np.ndarray, smoothing: float) -> tuple[np.ndarray, np.ndarray]:
    """The eigenvector of the second derivatives with the largest eigenvalue by size; how far it leads the other."""
    reach = np.arange(-4, 5)
    bell = np.exp(-(reach**2) / (2 * smoothing**2))
    soft = filtered(edges, np.outer(bell, bell) / bell.sum() ** 2)
    along, second, first = np.array([1, 2, 1]), np.array([1, -2, 1]), np.array([-1, 0, 1])
    kernels = (np.outer(along, second), np.outer(second, along), np.outer(first, first))
    xx, yy, xy = (filtered(soft, kernel) for kernel in kernels)
    angles, leads = np.zeros(edges.shape), np.zeros(edges.shape)
    for y in range(edges.shape[0]):
        for x in range(edges.shape[1]):
            values, vectors = np.linalg.eigh([[xx[y, x], xy[y, x]], [xy[y, x], yy[y, x]]])
            sizes = np.abs(values)
            dx, dy = vectors[:, sizes.argmax()]
            angles[y, x] = np.arctan2(dy, dx) % np.pi
            leads[y, x] = sizes.max() - sizes.min()
    return angles, leads


@pytest.mark.parametrize("shape", [(5, 7), (11, 8)])
@pytest.mark.parametrize("seed", range(3))
def test_directions_match_the_eigenvectors_of_second_derivatives(shape: tuple[int, int], seed: int) -> None:
    edges = np.random.default_rng(seed).random(shape).astype(np.float32)
    expected, leads = normals_with_loops(edges.astype(float), 1.0)
    off = np.abs(ridge_normals(edges, 1.0) - expected) % np.pi
    is_clear = leads > 1e-2  # elsewhere both directions curve alike, with opposite signs
    assert is_clear.mean() > 0.8
    assert np.minimum(off, np.pi - off)[is_clear].max() < 1e-3


def test_boxes_enclose_a_ridge_that_closes() -> None:
    means = np.zeros((60, 80), np.float32)
    cv2.rectangle(means, (20, 15), (55, 45), 1.0, 2)
    edges = response_edges([cv2.GaussianBlur(means, (0, 0), 1)], (80, 60))
    normals = ridge_normals(edges, 1.0)
    found = boxes_from_edges(thin_edges(edges, normals), normals, alpha=0.65, beta=0.75, max_boxes=50, min_side=10)
    best = found.corners[found.scores.argmax()]
    assert len(found.scores) and np.abs(best - [20, 15, 56, 46]).max() <= 6
