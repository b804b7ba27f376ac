from __future__ import annotations

import math

import pytest
import torch

from tag2box.proposals.recall import recall
from tag2box.types import Objects, Truth


def _truth(*objects: Objects) -> Truth:
    names = tuple(str(i) for i in range(len(objects)))
    return Truth(("x",), names, ((100, 100),) * len(objects), objects)


def test_nothing_to_find() -> None:
    for truth, boxes in ((_truth(), []), (_truth(Objects.of([], [])), [torch.rand(3, 4)])):
        found = recall(boxes, truth)
        assert found.objects == 0 and all(math.isnan(r) for r in found.recall) and math.isnan(found.mean_best_overlap)


def test_nothing_proposed_finds_nothing() -> None:
    found = recall([torch.zeros(0, 4)], _truth(Objects.of([[0, 0, 10, 10]], [0])))
    assert found.recall == (0.0, 0.0, 0.0) and found.mean_best_overlap == 0.0 and found.boxes_per_image == 0.0


def test_by_hand() -> None:
    truth = _truth(Objects.of([[0, 0, 10, 10], [20, 20, 30, 40]], [0, 0]), Objects.of([[0, 0, 4, 4]], [0]))
    boxes = [torch.tensor([[0.0, 0, 10, 8], [20, 20, 30, 30], [0, 0, 10, 5]]), torch.tensor([[0.0, 0, 4, 4]])]
    found = recall(boxes, truth, (0.5, 0.7, 0.9))
    assert found.recall == pytest.approx((1.0, 2 / 3, 1 / 3))  # overlaps 0.8, 0.5 and 1
    assert found.mean_best_overlap == pytest.approx(2.3 / 3) and found.boxes_per_image == 2.0


def test_difficult_objects_and_crowds_do_not_count() -> None:
    boxes = torch.tensor([[0.0, 0, 5, 5]] * 3)
    marks = Objects(
        boxes, torch.zeros(3, dtype=torch.long), torch.tensor([1, 0, 0]).bool(), torch.tensor([0, 1, 0]).bool()
    )
    assert recall([torch.zeros(0, 4)], _truth(marks)).objects == 1


def test_images_must_match() -> None:
    with pytest.raises(ValueError):
        recall([], _truth(Objects.of([], [])))
