"""Superpixels: what they cut, on what copy, and that they are the same at every call."""

from __future__ import annotations

from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch

from tag2box.data.scenes import Scenes
from tag2box.ops.superpixels import Superpixels, straddling

CUT = Superpixels(min_size=10)


def card(width: int = 60, height: int = 40) -> torch.Tensor:
    """A red square on blue."""
    image = torch.zeros(3, height, width, dtype=torch.uint8)
    image[2] = 200
    image[:, 10:30, 20:45] = torch.tensor([220, 30, 20], dtype=torch.uint8)[:, None, None]
    return image


@pytest.mark.parametrize(
    ("size", "short", "wanted"),
    [
        ((1, 1), 400, (1, 1)), ((500, 375), 400, (500, 375)), ((1600, 800), 400, (800, 400)),
        ((800, 1600), 400, (400, 800)), ((4000, 3000), None, (4000, 3000)), ((100_000, 32), 32, (100_000, 32)),
    ],
)  # fmt: skip
def test_large_photos_are_reduced_and_small_ones_are_not_enlarged(
    size: tuple[int, int], short: int | None, wanted: tuple[int, int]
) -> None:
    assert Superpixels(short_side=short).working_size(size) == wanted


def test_a_shape_is_cut_out_along_its_border() -> None:
    labels = CUT(card())
    assert labels.shape == (40, 60) and labels.dtype == np.int32
    inside, outside = labels[12:28, 22:43], labels[:8]
    assert len(np.unique(inside)) == len(np.unique(outside)) == 1 and inside[0, 0] != outside[0, 0]
    boxes = np.array([[20, 10, 45, 30], [20, 10, 33, 30], [0, 0, 60, 40]], np.float32)
    whole, half, photo = straddling(labels, boxes)
    assert whole > 0.8 > half and photo == 1


@pytest.mark.parametrize("size", [(1, 1), (1, 9), (7, 1), (3, 2)])
def test_photos_of_a_few_pixels_survive(size: tuple[int, int]) -> None:
    labels = CUT(torch.zeros(3, size[1], size[0], dtype=torch.uint8))
    assert labels.shape == (size[1], size[0]) and (labels == labels[0, 0]).all()


def test_the_size_of_the_photo_decides_not_that_of_the_copy() -> None:
    method = replace(CUT, short_side=40)
    assert method(card(), (600, 400)).shape == (40, 60)
    assert method(card(120, 80), (600, 400)).shape == (40, 60)


def test_the_same_photo_is_cut_alike() -> None:
    image = torch.randint(0, 256, (3, 50, 70), dtype=torch.uint8)
    assert (CUT(image) == CUT(image)).all()


@pytest.mark.parametrize("change", [{"sigma": 3.0}, {"scale": 3000.0}, {"min_size": 900}, {"short_side": 32}])
def test_every_setting_matters(change: dict[str, float]) -> None:
    rows, cols = torch.meshgrid(torch.arange(80), torch.arange(100), indexing="ij")
    image = torch.stack([(rows // 9 * 37 + cols // 13 * 51) % 256, rows * 3 % 256, cols * 2 % 256]).to(torch.uint8)
    assert CUT(image).tolist() != replace(CUT, **change)(image).tolist()


def test_they_are_those_of_opencv() -> None:
    """Runs of before and after a change of the segmentation must compare."""
    image = torch.from_numpy(Scenes().draw("train", 2).image).permute(2, 0, 1)
    bgr = image.permute(1, 2, 0).numpy()[..., ::-1].copy()
    theirs = cv2.ximgproc.segmentation.createGraphSegmentation(CUT.sigma, CUT.scale, CUT.min_size).processImage(bgr)
    ours = CUT(image)
    pairs = np.unique(np.stack([ours.ravel(), theirs.ravel()]), axis=1).shape[1]
    assert pairs == len(np.unique(ours)) == len(np.unique(theirs)) > 5
