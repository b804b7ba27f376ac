from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from strategies import box_sets, random_boxes
from tag2box.methods.oim import distances, embedding_spread, label_instances, mine_instances
from tag2box.ops.boxes import iou
from tag2box.types import Proposals, PseudoBoxes


def overlap(boxes: Tensor, a: int, b: int) -> float:
    return iou(boxes[a][None], boxes[b][None]).item()


def spread_with_loops(boxes: Tensor, distance: Tensor, core: int, near_iou: float) -> float:
    near = [r for r in range(len(boxes)) if r == core or overlap(boxes, r, core) >= near_iou]
    return sum(distance[r].item() for r in near) / len(near)


def instances_with_loops(
    boxes: Tensor, distance: Tensor, core: int, limit: float, free: Tensor, apart_iou: float
) -> list[int]:
    """Nearest first, a proposal at a time."""
    accepted = [core]
    for row in sorted(range(len(boxes)), key=lambda r: (distance[r].item(), r)):
        open_ = bool(free[row]) and row != core and distance[row].item() < limit
        if open_ and all(overlap(boxes, row, other) <= apart_iou for other in accepted):
            accepted.append(row)
    return accepted


def labels_with_loops(
    proposals: Proposals, pseudo_boxes: PseudoBoxes, cores: int, classes: int, foreground_iou: float
) -> list[tuple[int, float, int]]:
    """(class, weight, owner) of every proposal."""
    image, out = proposals.image_ids().tolist(), []
    for r in range(len(proposals.boxes)):
        own = [s for s in range(len(pseudo_boxes)) if image[int(pseudo_boxes.rows[s])] == image[r]]
        mined = [s for s in own if s >= cores and int(pseudo_boxes.rows[s]) == r]
        with_cores = [(-overlap(proposals.boxes, r, int(pseudo_boxes.rows[s])), s) for s in own if s < cores]
        with_all = [(-overlap(proposals.boxes, r, int(pseudo_boxes.rows[s])), s) for s in own]
        if mined:
            owner, cls = mined[0], int(pseudo_boxes.cls[mined[0]])
        elif with_cores and -min(with_cores)[0] >= foreground_iou:
            owner = min(with_cores)[1]
            cls = int(pseudo_boxes.cls[owner])
        else:
            owner, cls = min(with_all)[1] if with_all else -1, classes
        out.append((cls, float(pseudo_boxes.score[owner]) if owner >= 0 else 0.0, owner))
    return out


@pytest.mark.parametrize(("count", "cores"), [(1, [0]), (5, []), (6, [2]), (9, [0, 3, 8])])
def test_distances_match_the_definition(count: int, cores: list[int]) -> None:
    vectors = torch.randn(count, 7)
    got = distances(vectors, torch.tensor(cores, dtype=torch.long))
    assert got.shape == (count, len(cores))
    for column, core in enumerate(cores):
        for row in range(count):
            expected = sum((a - b) ** 2 for a, b in zip(vectors[row].tolist(), vectors[core].tolist(), strict=True))
            assert got[row, column].item() == pytest.approx(expected**0.5, abs=1e-5)
        assert got[core, column] == 0


@given(box_sets(low=1), st.data(), st.sampled_from([0.3, 0.5]))
def test_the_spread_matches_the_loop(boxes: Tensor, data: st.DataObject, near_iou: float) -> None:
    core = data.draw(st.integers(0, len(boxes) - 1))
    distance = torch.rand(len(boxes), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    got = embedding_spread(boxes, distance, core, near_iou).item()
    assert got == pytest.approx(spread_with_loops(boxes, distance, core, near_iou))


@given(box_sets(low=1, high=12), st.data(), st.sampled_from([1e-6, 0.21]), st.sampled_from([0.0, 0.4, 2.0]))
def test_instances_match_the_loop(boxes: Tensor, data: st.DataObject, apart_iou: float, limit: float) -> None:
    core = data.draw(st.integers(0, len(boxes) - 1))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    distance = torch.randint(0, 8, (len(boxes),), generator=generator) / 8  # ties
    free = torch.rand(len(boxes), generator=generator) < 0.8
    got = mine_instances(boxes, distance, core, limit=torch.tensor(limit), free=free, apart_iou=apart_iou)
    assert got.tolist() == instances_with_loops(boxes, distance, core, limit, free, apart_iou)


def test_a_translated_copy_of_the_core_is_found() -> None:
    """The same features elsewhere; a shifted neighbour of the copy differs a little, an unrelated box a lot."""
    boxes = torch.tensor([[0.0, 0, 10, 10], [1, 0, 11, 10], [50, 0, 60, 10], [51, 0, 61, 10], [80, 0, 90, 10]])
    vectors = torch.tensor([[1.0, 0], [1, 0.2], [1, 0], [1, 0.2], [-9, 9]])
    far = distances(vectors, torch.tensor([0])).squeeze(1)
    limit = 5 * embedding_spread(boxes, far, 0, 0.5)
    free = torch.ones(5, dtype=torch.bool)
    assert mine_instances(boxes, far, 0, limit=limit, free=free, apart_iou=1e-6).tolist() == [0, 2]


def test_a_core_without_neighbours_has_no_spread_and_no_instances() -> None:
    boxes = torch.tensor([[0.0, 0, 10, 10], [50, 0, 60, 10]])
    limit = 5 * embedding_spread(boxes, torch.zeros(2), 0, 0.5)
    assert limit == 0
    free = torch.ones(2, dtype=torch.bool)
    assert mine_instances(boxes, torch.zeros(2), 0, limit=limit, free=free, apart_iou=1e-6).tolist() == [0]


@st.composite
def labelled(draw: st.DrawFn) -> tuple[Proposals, PseudoBoxes, int]:
    """Proposals of some images, cores anywhere, and mined instances that are not cores, each row once."""
    sizes = tuple(draw(st.integers(0, 7)) for _ in range(draw(st.integers(1, 3))))
    total = sum(sizes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    proposals = Proposals(random_boxes(total, generator, size=20), sizes)
    cores = draw(st.lists(st.integers(0, total - 1), max_size=4)) if total else []
    rest = [r for r in range(total) if r not in cores]
    mined = draw(st.lists(st.sampled_from(rest), max_size=3, unique=True)) if rest else []
    rows = torch.tensor([*cores, *mined], dtype=torch.long)
    cls = torch.randint(0, 3, (len(rows),), generator=generator)
    return proposals, PseudoBoxes(rows, cls, torch.rand(len(rows), generator=generator)), len(cores)


@given(labelled(), st.sampled_from([0.1, 0.3, 0.5]))
def test_labels_match_the_loop(world: tuple[Proposals, PseudoBoxes, int], foreground_iou: float) -> None:
    proposals, pseudo_boxes, cores = world
    got = label_instances(proposals, pseudo_boxes, cores, 3, foreground_iou)
    expected = labels_with_loops(proposals, pseudo_boxes, cores, 3, foreground_iou)
    assert list(zip(got.cls.tolist(), got.weight.tolist(), got.owner.tolist(), strict=True)) == expected
    targets = [int(pseudo_boxes.rows[owner]) if owner >= 0 else r for r, (_, _, owner) in enumerate(expected)]
    assert torch.equal(got.boxes, proposals.boxes[targets].reshape(-1, 4))


def test_the_neighbours_of_a_mined_instance_are_background_of_its_weight() -> None:
    boxes = torch.tensor([[0.0, 0, 10, 10], [1, 0, 11, 10], [50, 0, 60, 10], [51, 0, 61, 10], [0, 0, 5, 10]])
    pseudo_boxes = PseudoBoxes(torch.tensor([0, 2]), torch.tensor([1, 1]), torch.tensor([0.8, 0.4]))
    labels = label_instances(Proposals(boxes, (5,)), pseudo_boxes, 1, 3, 0.5)
    assert labels.cls.tolist() == [1, 1, 1, 3, 1]  # the last one's IoU is just 0.5
    assert labels.weight.tolist() == pytest.approx([0.8, 0.8, 0.4, 0.4, 0.8])
    assert labels.owner.tolist() == [0, 0, 1, 1, 0]
