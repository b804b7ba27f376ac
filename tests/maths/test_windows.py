"""The best windows of a photo, against loops."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from strategies import box_sets
from tag2box.maths.boxes import iou
from tag2box.maths.windows import best_windows


def by_loops(boxes: torch.Tensor, worth: torch.Tensor, most: int, nms_iou: float) -> list[int]:
    kept: list[int] = []
    for row in sorted(range(len(boxes)), key=lambda r: (-worth[r].item(), r)):
        alike = any(bool(iou(boxes[row : row + 1], boxes[k : k + 1]) > nms_iou) for k in kept)  # in single precision
        if len(kept) < most and not alike:
            kept.append(row)
    return kept


def test_no_window_is_none() -> None:
    assert best_windows(torch.zeros(0, 4), torch.zeros(0), most=3, nms_iou=0.5).tolist() == []


@given(box_sets(high=12), st.integers(1, 6), st.sampled_from([0.1, 0.5, 0.75, 1.0]), st.integers(0, 99))
def test_they_are_those_of_the_loops(boxes: torch.Tensor, most: int, nms_iou: float, seed: int) -> None:
    worth = torch.rand(len(boxes), generator=torch.Generator().manual_seed(seed))
    expected = by_loops(boxes, worth, most, nms_iou)
    assert best_windows(boxes, worth, most=most, nms_iou=nms_iou).tolist() == expected
