from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from strategies import box_sets
from tag2box.methods.c_midn import (
    cell_seeds,
    cells_inside,
    class_mask,
    coverage,
    is_removed,
    kept_of_two,
    mask_fit,
    seed_loss,
    segment_labels,
)
from tag2box.ops.boxes import containment, iou

LARGE, SMALL, FAR = [0.0, 0, 8, 8], [2.0, 2, 4, 4], [10.0, 10, 14, 14]


def cells(box: list[float], cell: float) -> set[tuple[int, int]]:
    """(x, y) of the cells of a box on a grid that it keeps to."""
    left, top, right, bottom = (round(v / cell) for v in box)
    return {(x, y) for x in range(left, right) for y in range(top, bottom)}


@settings(max_examples=40)
@given(box_sets(), st.sampled_from([1.0, 4.0]), st.integers(0, 99))
def test_cells_coverage_and_fit_match_sets_of_cells(boxes: torch.Tensor, cell: float, seed: int) -> None:
    mask, boxes = torch.rand(9, 11, generator=torch.Generator().manual_seed(seed)) > 0.6, boxes * cell
    held = {(x, y) for x in range(11) for y in range(9) if mask[y, x]}
    for i, box in enumerate(boxes.tolist()):
        own = cells(box, cell)
        assert cells_inside(mask, boxes, cell)[i].item() == len(own & held)
        assert coverage(mask, boxes, cell)[i].item() == pytest.approx(len(own & held) / max(len(held), 1))
        assert mask_fit(mask, boxes, cell)[i].item() == pytest.approx(len(own & held) / len(own | held))


@pytest.mark.parametrize("size", [(0, 0), (3, 4)])
def test_an_empty_mask_is_covered_by_nothing(size: tuple[int, int]) -> None:
    mask, boxes = torch.zeros(size, dtype=torch.bool), torch.tensor([SMALL, LARGE])
    assert coverage(mask, boxes, 1.0).tolist() == [0, 0]
    assert mask_fit(mask, boxes, 1.0).tolist() == [0, 0]
    assert coverage(mask, boxes[:0], 1.0).shape == (0,)


def test_the_mask_is_where_the_votes_are() -> None:
    boxes = torch.tensor([LARGE, SMALL])
    both = class_mask(boxes, torch.tensor([0.4, 0.6]), cell=1.0, threshold=0.3)
    core = class_mask(boxes, torch.tensor([0.4, 0.6]), cell=1.0, threshold=0.5)
    assert both.sum() == 64 and core.sum() == 4
    assert class_mask(boxes, torch.zeros(2), cell=1.0, threshold=0.0).sum() == 0
    assert class_mask(boxes[:0], torch.zeros(0), cell=1.0, threshold=0.5).numel() == 0


@settings(max_examples=40)
@given(box_sets(low=1), st.sampled_from([0.0, 0.3, 0.7]), st.sampled_from([0.0, 0.5, 1.1]), st.integers(0, 99))
def test_what_is_removed_matches_the_loop(boxes: torch.Tensor, threshold: float, enough: float, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    covered, top = torch.rand(len(boxes), generator=g), int(torch.randint(len(boxes), (1,), generator=g))
    got = is_removed(boxes, top, covered, iou_threshold=threshold, enough=enough).tolist()
    near = [iou(box[None], boxes[top][None]).item() > threshold for box in boxes]
    expected = [a and b < enough for a, b in zip(near, covered.tolist(), strict=True)]
    assert got == ([False] * len(boxes) if all(expected) else expected)


def test_what_covers_the_mask_stays_and_something_always_does() -> None:
    boxes = torch.tensor([LARGE, [0.0, 0, 8, 7], FAR])
    removed = is_removed(boxes, 0, torch.tensor([0.2, 0.9, 0.0]), iou_threshold=0.5, enough=0.8)
    assert removed.tolist() == [True, False, False]
    assert not is_removed(boxes[:1], 0, torch.zeros(1), iou_threshold=0.5, enough=0.8).any()


@settings(max_examples=40)
@given(box_sets(low=1), box_sets(low=1))
def test_the_overlap_of_the_smaller_is_one_inside_and_symmetric(a: torch.Tensor, b: torch.Tensor) -> None:
    share = containment(a, b)
    torch.testing.assert_close(share, containment(b, a).T)
    assert (share >= 0).all() and (share <= 1 + 1e-6).all()
    assert torch.allclose(containment(a, a).diagonal(), torch.ones(len(a)))


@pytest.mark.parametrize(
    ("boxes", "mask_box", "expected"),
    [
        ([SMALL, FAR], LARGE, [True, True]),  # apart
        ([SMALL, LARGE], LARGE, [False, True]),  # the larger one, if the mask fills it
        ([LARGE, SMALL], LARGE, [True, False]),
        ([LARGE, SMALL], SMALL, [False, True]),  # the tighter one, if the mask is small
        ([LARGE, LARGE], LARGE, [True, False]),  # the same box is one object
        ([SMALL, LARGE], FAR, [True, False]),  # the mask does not decide: the first head's
    ],
)
def test_coupling(boxes: list, mask_box: list[float], expected: list[bool]) -> None:
    mask = torch.zeros(16, 16, dtype=torch.bool)
    left, top, right, bottom = (int(v) for v in mask_box)
    mask[top:bottom, left:right] = True
    assert kept_of_two(torch.tensor(boxes), mask, apart=0.1, cell=1.0).tolist() == expected


def test_how_much_two_objects_may_touch_is_a_setting() -> None:
    boxes, mask = torch.tensor([[0.0, 0, 4, 4], [3.0, 0, 7, 4]]), torch.ones(8, 8, dtype=torch.bool)
    assert kept_of_two(boxes, mask, apart=0.25, cell=1.0).tolist() == [True, True]
    assert kept_of_two(boxes, mask, apart=0.2, cell=1.0).tolist() == [True, False]


# ---------------------------------------------------------------- segmentation


def random_maps(seed: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.rand(classes, 3, 4, generator=g), torch.rand(classes, generator=g) > 0.4


@given(st.integers(0, 999), st.integers(1, 4), st.sampled_from([0.3, 0.6, 1.0]), st.sampled_from([0.0, 0.3, 0.8]))
def test_seeds_match_the_loop(seed: int, classes: int, foreground: float, background: float) -> None:
    maps, tags = random_maps(seed, classes)
    seeds = cell_seeds(maps, tags, foreground=foreground, background=background)
    for y, x in ((y, x) for y in range(3) for x in range(4)):
        shares = {c: (maps[c, y, x] / maps[c].max()).item() for c in range(classes) if tags[c]}
        best = max(shares, key=lambda c: shares[c], default=-1)
        expected = best if shares and shares[best] >= foreground else -1
        if expected < 0 and all(share < background for share in shares.values()):
            expected = classes
        assert seeds[y, x] == expected


@given(st.integers(0, 999), st.integers(1, 4))
def test_every_tag_has_a_seed_unless_a_better_one_takes_its_peak(seed: int, classes: int) -> None:
    maps, tags = random_maps(seed, classes)
    seeds = cell_seeds(maps, tags, foreground=1.0, background=0.0)
    assert set(seeds.unique().tolist()) <= {-1, classes, *tags.nonzero().flatten().tolist()}
    if tags.sum() == 1:
        c = int(tags.nonzero())
        assert seeds.flatten()[maps[c].argmax()] == c
    elif not tags.any():
        assert (seeds == classes).all()


@given(st.integers(0, 999), st.integers(1, 4))
def test_the_loss_of_seeds_matches_the_loop(seed: int, classes: int) -> None:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(classes + 1, 3, 4, generator=g, requires_grad=True)
    seeds = torch.randint(-1, classes + 1, (3, 4), generator=g)
    objects, background = [], []
    for y, x in ((y, x) for y in range(3) for x in range(4)):
        if seeds[y, x] >= 0:
            entropy = -logits[:, y, x].log_softmax(dim=0)[seeds[y, x]].item()
            (background if seeds[y, x] == classes else objects).append(entropy)
    wanted = sum(sum(part) / len(part) for part in (objects, background) if part)
    loss = seed_loss(logits, seeds)
    assert loss.item() == pytest.approx(wanted, abs=1e-5)
    loss.backward()
    assert logits.grad is not None and (logits.grad.abs().sum(dim=0) > 0).tolist() == (seeds >= 0).tolist()


@given(st.integers(0, 999), st.integers(1, 4))
def test_segments_are_tags_or_background(seed: int, classes: int) -> None:
    _, tags = random_maps(seed, classes)
    logits = torch.randn(classes + 1, 3, 4, generator=torch.Generator().manual_seed(seed))
    possible = [*tags.nonzero().flatten().tolist(), classes]
    found = segment_labels(logits, tags)
    for y, x in ((y, x) for y in range(3) for x in range(4)):
        assert found[y, x] == max(possible, key=lambda c: logits[c, y, x].item())
