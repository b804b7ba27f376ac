"""Labels as noisy targets: weights and regions, assignment and losses, each against a twin written with loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, strategies as st

from tag2box.labels.labelled import LabelBox, LabelledPhoto
from tag2box.student.student_data import Noise, PhotoLabels, label_weight, least_scores, prepare_labels, top_scores
from tag2box.student.targets import (
    CellTargets,
    assign_cells,
    assign_centres,
    drop_limit,
    giou,
    inside,
    label_losses,
    quality_focal,
    student_loss,
    without_worst,
)

CLASSES = ("cat", "dog", "hen")
BOX = (10.0, 10.0, 30.0, 40.0)


def photo(*boxes: LabelBox, tags: tuple[str, ...] = ("cat", "dog"), unsure: tuple[str, ...] = ()) -> LabelledPhoto:
    return LabelledPhoto("a", "a.jpg", 100, 80, tags, boxes, unsure)


def scored(name: str, score: float | None, *, is_doubtful: bool = False) -> LabelBox:
    return LabelBox(BOX, name, score, is_doubtful=is_doubtful)


def made(boxes: list[list[float]], labels: list[int], weights: list[float] | None = None) -> PhotoLabels:
    return PhotoLabels(
        torch.tensor(boxes).reshape(-1, 4),
        torch.tensor(labels, dtype=torch.long),
        torch.tensor(weights or [1.0] * len(labels)),
        torch.zeros(len(labels), dtype=torch.bool),
        torch.zeros(0, 4),
        torch.zeros(0, dtype=torch.long),
    )


# ---------------------------------------------------------------- weights and regions


@pytest.mark.parametrize(
    ("boxes", "noise", "labels", "weights", "regions"),
    [
        ((), Noise(), [], [], [("cat", (0, 0, 100, 80)), ("dog", (0, 0, 100, 80))]),
        ((), Noise(open_tags=False), [], [], []),
        ((scored("cat", None), scored("dog", 0.5)), Noise(), [0, 1], [1.0, 1.0], []),
        ((scored("cat", 0.4), scored("dog", 0.5)), Noise(), [0, 1], [0.5, 1.0], []),
        ((scored("cat", 0.4), scored("dog", 0.5)), Noise(weights="score"), [0, 1], [0.4, 0.5], []),
        ((scored("cat", 0.4), scored("dog", 0.5)), Noise(weights="none"), [0, 1], [1.0, 1.0], []),
        # far below the best of its class: a region, enlarged, because no certain cat is left
        ((scored("cat", 0.1), scored("dog", 0.5)), Noise(), [1], [1.0], [("cat", (5, 2.5, 35, 47.5))]),
        ((scored("cat", 0.1), scored("dog", 0.5)), Noise(threshold=0), [0, 1], [0.2, 1.0], []),
        # doubtful beside a certain one: a region as it is
        (
            (scored("cat", 0.8), scored("cat", 0.3, is_doubtful=True), scored("dog", 0.5)),
            Noise(),
            [0, 1],
            [1.0, 1.0],
            [("cat", BOX)],
        ),
        ((scored("cat", 0.8), scored("cat", 0.3, is_doubtful=True), scored("dog", 0.5)), Noise(ignore=False), [0, 1],
         [1.0, 1.0], []),
        # further below the best one of its photo than doubtful boxes may be: background
        ((scored("cat", 0.8), scored("cat", 0.3, is_doubtful=True), scored("cat", 0.4, is_doubtful=True),
          scored("dog", 0.5)), Noise(doubtful=0.5), [0, 1], [1.0, 1.0], [("cat", BOX)]),
        ((scored("cat", None), scored("cat", None, is_doubtful=True), scored("dog", 0.5)), Noise(doubtful=1), [0, 1],
         [1.0, 1.0], [("cat", BOX)]),
        # below the range of the scores of its photo: a region; the best one is a label
        ((scored("cat", 0.1), scored("cat", 0.02), scored("dog", 0.5)), Noise(threshold_of="photo"), [0, 1],
         [0.2, 1.0], [("cat", BOX)]),
        ((scored("cat", 0.1), scored("cat", 0.09), scored("dog", 0.5)), Noise(threshold_of="photo"), [0, 0, 1],
         [0.2, 0.2, 1.0], []),
    ],
)  # fmt: skip
def test_doubtful_boxes_become_regions_and_scores_weights(
    boxes: tuple[LabelBox, ...], noise: Noise, labels: list[int], weights: list[float], regions: list[object]
) -> None:
    found = prepare_labels(photo(*boxes), CLASSES, noise, {"cat": 0.8, "dog": 0.5, "hen": 1.0})
    assert found.labels.tolist() == labels
    assert found.weights.tolist() == pytest.approx(weights)
    named = [
        (CLASSES[label], tuple(box))
        for label, box in zip(found.region_labels.tolist(), found.regions.tolist(), strict=True)
    ]
    assert named == regions


def test_an_unsure_tag_has_no_loss_anywhere() -> None:
    found = prepare_labels(photo(scored("cat", 0.8), tags=("cat",), unsure=("hen",)), CLASSES, Noise(), {"cat": 0.8})
    assert (found.region_labels.tolist(), found.regions.tolist()) == ([2], [[0, 0, 100, 80]])


@pytest.mark.parametrize("boxes", [(), (scored("cat", None),), (scored("cat", None), scored("hen", None))])
def test_in_a_reviewed_photo_a_tag_without_a_box_is_background(boxes: tuple[LabelBox, ...]) -> None:
    done = replace(photo(*boxes, unsure=("hen",)), is_reviewed=True)
    found = prepare_labels(done, CLASSES, Noise(), dict.fromkeys(CLASSES, 0.8))
    assert found.labels.tolist() == [CLASSES.index(box.name) for box in boxes]
    assert len(found.regions) == 0


def test_the_top_score_of_a_class_is_that_of_the_best_labels_of_its_photos() -> None:
    photos = [photo(scored("cat", score), scored("cat", 0.01)) for score in (0.1, 0.2, 0.3, 0.9)]
    assert top_scores(photos, CLASSES) == {"cat": 0.3, "dog": 1.0, "hen": 1.0}
    assert top_scores([], CLASSES) == dict.fromkeys(CLASSES, 1.0)


@given(score=st.floats(0, 1), top=st.floats(0.01, 1))
def test_a_weight_is_between_its_least_and_one_and_grows_with_the_score(score: float, top: float) -> None:
    noise = Noise(weights="class", min_weight=0.2)
    low, high = (label_weight(scored("cat", s), noise, {"cat": top}) for s in (score / 2, score))
    assert 0.2 <= low <= high <= 1


def slow_least(boxes: list[LabelBox], noise: Noise, top: dict[str, float]) -> dict[str, float]:
    """The least score of each class, box by box."""
    found: dict[str, float] = {}
    for box in boxes:
        if box.score is None:
            continue
        low = high = box.score
        for other in boxes:
            if other.name == box.name and other.score is not None:
                low, high = min(low, other.score), max(high, other.score)
        found[box.name] = noise.threshold * (top[box.name] if noise.threshold_of == "class" else high - low)
    return found


@given(
    st.lists(st.tuples(st.sampled_from(CLASSES), st.none() | st.floats(0, 1)), max_size=6),
    st.floats(0, 1),
    st.sampled_from(["class", "photo"]),
)
def test_the_least_score_of_a_label_is_the_one_found_with_loops(rows: list, threshold: float, kind: str) -> None:
    boxes, top = [scored(name, score) for name, score in rows], {"cat": 0.8, "dog": 0.5, "hen": 1.0}
    noise = Noise(threshold=threshold, threshold_of=kind)  # type: ignore[arg-type]
    found = least_scores(boxes, noise, top)
    assert found == slow_least(boxes, noise, top)
    if kind == "photo":
        best = {box.name: max(o.score or 0 for o in boxes if o.name == box.name) for box in boxes}
        assert all(least <= best[name] for name, least in found.items())


# ---------------------------------------------------------------- assignment

CELLS = torch.tensor([[4.0 + 8 * x, 4.0 + 8 * y, 8.0] for y in range(4) for x in range(4)])


def slow_iou(a: list[float], b: list[float]) -> float:
    across, down = (max(0.0, min(a[i + 2], b[i + 2]) - max(a[i], b[i])) for i in (0, 1))
    sizes = [(own[2] - own[0]) * (own[3] - own[1]) for own in (a, b)]
    shared = across * down
    return shared / (sum(sizes) - shared) if sum(sizes) > shared else 0.0


def slow_assign(
    probs: torch.Tensor, boxes: torch.Tensor, labels: PhotoLabels, top: int
) -> tuple[list[int], list[float]]:
    """Owner and class target of each cell, label by label and cell by cell."""
    chosen: dict[int, list[tuple[float, int]]] = {}
    metrics: dict[tuple[int, int], float] = {}
    for number, (box, label) in enumerate(zip(labels.boxes.tolist(), labels.labels.tolist(), strict=True)):
        centre = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
        far = [(x - centre[0]) ** 2 + (y - centre[1]) ** 2 for x, y, _ in CELLS.tolist()]
        own = [i for i, (x, y, _) in enumerate(CELLS.tolist()) if box[0] < x < box[2] and box[1] < y < box[3]]
        own = own or [min(range(len(far)), key=lambda i: far[i])]
        for i in own:
            metrics[i, number] = probs[i, label].item() * slow_iou(boxes[i].tolist(), box) ** 6
        for i in sorted(own, key=lambda i: -metrics[i, number])[:top]:
            chosen.setdefault(i, []).append((slow_iou(boxes[i].tolist(), box), number))
    owners = [max(chosen[i], key=lambda pair: (pair[0], -pair[1]))[1] if i in chosen else -1 for i in range(len(CELLS))]
    targets = []
    for i, owner in enumerate(owners):
        mine = [j for j, other in enumerate(owners) if other == owner]
        if owner < 0:
            targets.append(0.0)
            continue
        box = labels.boxes[owner].tolist()
        best = max(metrics[j, owner] for j in mine)
        most = max(slow_iou(boxes[j].tolist(), box) for j in mine)
        targets.append(metrics[i, owner] / max(best, 1e-12) * most)
    return owners, targets


@pytest.mark.parametrize("top", [1, 3, 20])
@pytest.mark.parametrize(
    ("boxes", "labels"),
    [
        ([], []),
        ([[1.0, 1.0, 30.0, 30.0]], [1]),
        ([[1.0, 1.0, 30.0, 30.0], [9.0, 9.0, 31.0, 31.0], [2.0, 17.0, 15.0, 31.0]], [0, 0, 2]),
        ([[9.0, 9.0, 10.0, 10.0]], [2]),  # holds no centre of a cell
    ],
)
def test_cells_belong_to_the_label_that_they_fit_best(boxes: list[list[float]], labels: list[int], top: int) -> None:
    generator = torch.Generator().manual_seed(top)
    probs = torch.rand(16, 3, generator=generator)
    reach = torch.rand(16, 4, generator=generator) * 16 + 2
    predicted = torch.cat([CELLS[:, :2] - reach[:, :2], CELLS[:, :2] + reach[:, 2:]], dim=1)
    own = made(boxes, labels)
    found = assign_cells(probs, predicted, CELLS, own, top=top)
    owners, targets = slow_assign(probs, predicted, own, top)
    assert found.owners.tolist() == owners
    rows = [i for i, owner in enumerate(owners) if owner >= 0]
    got = [found.classes[i, labels[owners[i]]].item() for i in rows]
    assert got == pytest.approx([targets[i] for i in rows], abs=1e-5)
    assert found.classes.sum().item() == pytest.approx(sum(targets), abs=1e-4)
    assert found.fit.tolist() == pytest.approx(targets, abs=1e-5)


LEVELS = torch.tensor(
    [[x + s / 2, y + s / 2, s] for s in (8, 16, 32) for y in range(0, 128, s) for x in range(0, 128, s)]
)


def slow_centres(boxes: list[list[float]]) -> list[int]:
    """Owner of each cell of three levels by FCOS's rule, cell by cell; -1: none."""
    own: list[tuple[float, int]] = [(math.inf, -1)] * len(LEVELS)  # size and number
    for number, (left, top, right, bottom) in enumerate(boxes):
        mine, others = [], []
        for cell, (x, y, stride) in enumerate(LEVELS.tolist()):
            sides = [x - left, y - top, right - x, bottom - y]
            beside = max(abs(x - (left + right) / 2), abs(y - (top + bottom) / 2))
            least, most = {8: (-math.inf, 64), 16: (64, 128), 32: (128, math.inf)}[int(stride)]
            if least < max(sides) <= most:
                others.append((beside, cell))
                if min(sides) > 0 and beside <= 1.5 * stride:
                    mine.append(cell)
        for cell in mine or [min(others)[1]]:
            own[cell] = min(own[cell], ((right - left) * (bottom - top), number))
    return [number for _, number in own]


@given(st.lists(st.tuples(*[st.integers(0, 100)] * 2, *[st.integers(1, 140)] * 2), max_size=4))
def test_cells_near_a_centre_belong_to_the_smallest_label_on_the_level_of_its_size(
    rows: list[tuple[int, int, int, int]],
) -> None:
    boxes = [[float(x), float(y), float(x + w), float(y + h)] for x, y, w, h in rows]
    own = made(boxes, [number % 3 for number in range(len(boxes))], [0.5] * len(boxes))
    predicted = torch.cat([LEVELS[:, :2] - 20, LEVELS[:, :2] + 20], dim=1)
    found = assign_centres(torch.zeros(len(LEVELS), 3), predicted, LEVELS, own)
    owners = slow_centres(boxes)
    assert found.owners.tolist() == owners
    assert found.fit.tolist() == [0.5 * (owner >= 0) for owner in owners]
    for cell, owner in enumerate(owners):
        expected = [0.0] * 3
        if owner >= 0:
            expected[owner % 3] = slow_iou(predicted[cell].tolist(), boxes[owner])
        assert found.classes[cell].tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("assign", [partial(assign_cells, top=3), assign_centres])
def test_a_region_has_no_weight_for_its_class_but_for_all_others(assign: Callable[..., CellTargets]) -> None:
    region = torch.tensor([[0.0, 0.0, 16.0, 16.0]])
    own = replace(made([], []), regions=region, region_labels=torch.tensor([1]))
    found = assign(torch.rand(16, 3), torch.rand(16, 4), CELLS, own)
    within = inside(CELLS, own.regions)[:, 0]
    assert int(within.sum()) == 4
    assert (found.weights[:, 1] == (~within).float()).all()
    assert (found.weights[:, [0, 2]] == 1).all()
    assert (found.owners == -1).all()


def test_cells_of_a_doubtful_label_have_its_weight_for_its_class() -> None:
    own = made([[0.0, 0.0, 16.0, 16.0]], [1], [0.25])
    found = assign_cells(
        torch.rand(16, 3), CELLS[:, [0, 1, 0, 1]] + torch.tensor([-4.0, -4, 12, 12]), CELLS, own, top=1
    )
    within = inside(CELLS, own.boxes)[:, 0]
    assert (found.weights[within, 1] == 0.25).all() and (found.weights[~within, 1] == 1).all()
    assert found.fit.max().item() == pytest.approx(0.25 * found.classes.max().item())


# ---------------------------------------------------------------- losses


def test_quality_focal_loss_is_the_sum_of_its_cells() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, targets, weights = (torch.rand(2, 5, 3, generator=generator) * 4 - shift for shift in (2, 0, 0))
    targets = targets / 4
    total = 0.0
    for logit, target, weight in zip(
        logits.flatten().tolist(), targets.flatten().tolist(), weights.flatten().tolist(), strict=True
    ):
        p = 1 / (1 + math.exp(-logit))
        entropy = -(target * math.log(p) + (1 - target) * math.log(1 - p))
        total += weight * abs(target - p) ** 2 * entropy
    assert quality_focal(logits, targets, weights).item() == pytest.approx(total, rel=1e-5)


@given(st.lists(st.tuples(*[st.floats(0, 20), st.floats(0, 20), st.floats(1, 20), st.floats(1, 20)] * 2), max_size=4))
def test_generalised_iou_is_iou_minus_the_empty_share_of_the_box_around(rows: list[tuple[float, ...]]) -> None:
    a, b = ([[x, y, x + w, y + h] for x, y, w, h in (row[i : i + 4] for row in rows)] for i in (0, 4))
    found = giou(torch.tensor(a).reshape(-1, 4), torch.tensor(b).reshape(-1, 4)).tolist()
    for one, other, value in zip(a, b, found, strict=True):
        around = (max(one[2], other[2]) - min(one[0], other[0])) * (max(one[3], other[3]) - min(one[1], other[1]))
        across, down = (max(0.0, min(one[i + 2], other[i + 2]) - max(one[i], other[i])) for i in (0, 1))
        union = sum((own[2] - own[0]) * (own[3] - own[1]) for own in (one, other)) - across * down
        assert value == pytest.approx(across * down / union - (around - union) / around, abs=1e-4)


def test_a_photo_without_labels_teaches_background_alone() -> None:
    logits = torch.zeros(1, 16, 3, requires_grad=True)
    boxes = torch.zeros(1, 16, 4, requires_grad=True)
    loss = student_loss(logits, boxes, CELLS, [made([], [])])
    loss.total(0.0, 2.0).backward()
    assert logits.grad is not None and (logits.grad > 0).all()
    assert loss.boxes.item() == 0 and (boxes.grad is None or not boxes.grad.any())


def test_the_gradient_moves_boxes_towards_their_label() -> None:
    reach = torch.full((1, 16, 4), 10.0, requires_grad=True)
    boxes = torch.cat([CELLS[:, :2] - reach[..., :2], CELLS[:, :2] + reach[..., 2:]], dim=2)
    own = made([[0.0, 0.0, 32.0, 32.0]], [0])
    student_loss(torch.zeros(1, 16, 3), boxes, CELLS, [own], top=1).total(1.0, 1.0).backward()
    assert reach.grad is not None
    rows = reach.grad.abs().sum(dim=2)[0].nonzero().flatten()
    assert len(rows) == 1 and (reach.grad[0, rows] <= 0).all()


def test_the_gradients_of_ranks_add_up_to_those_of_the_whole_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 16, 3, generator=generator)
    reach = torch.rand(3, 16, 4, generator=generator) * 16 + 2
    own = [made([[1.0, 1.0, 30.0, 30.0]], [1]), made([], []), made([[9.0, 9.0, 31.0, 31.0]], [2], [0.5])]

    def gradients(parts: list[slice]) -> torch.Tensor:
        found = [leaf.clone().requires_grad_() for leaf in (logits, reach)]
        boxes = torch.cat([CELLS[:, :2] - found[1][..., :2], CELLS[:, :2] + found[1][..., 2:]], dim=2)
        losses = [student_loss(found[0][part], boxes[part], CELLS, own[part]) for part in parts]
        fit = sum(loss.fit.item() for loss in losses)
        torch.stack([loss.total(fit, 2.0) for loss in losses]).sum().backward()
        return torch.cat([leaf.grad for leaf in found if leaf.grad is not None], dim=2)

    assert torch.allclose(gradients([slice(0, 3)]), gradients([slice(0, 1), slice(1, 3)]), atol=1e-6)


# ---------------------------------------------------------------- labels that are dropped


def outputs(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits and boxes of the cells of some photos."""
    generator = torch.Generator().manual_seed(count)
    reach = torch.rand(count, 16, 4, generator=generator) * 16 + 2
    boxes = torch.cat([CELLS[:, :2] - reach[..., :2], CELLS[:, :2] + reach[..., 2:]], dim=2)
    return torch.randn(count, 16, 3, generator=generator), boxes, CELLS


@pytest.mark.parametrize("boxes", [[], [[1.0, 1.0, 30.0, 30.0]], [[0.0, 0.0, 8.0, 8.0], [9.0, 9.0, 31.0, 31.0]]])
def test_the_loss_of_a_label_is_that_of_the_cell_that_says_it_best(boxes: list[list[float]]) -> None:
    logits, reached, _ = outputs(1)
    own = made(boxes, list(range(len(boxes))))
    wanted = []
    for number, box in enumerate(boxes):
        least = math.inf
        for cell in range(len(CELLS)):
            p = 1 / (1 + math.exp(-logits[0, cell, number].item()))
            if overlap := slow_iou(reached[0, cell].tolist(), box):
                least = min(least, -math.log(p) - math.log(overlap))
        wanted.append(least)
    assert label_losses(logits[0].sigmoid(), reached[0], own).tolist() == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    ("losses", "share", "limit"),
    [([], 0.5, math.inf), ([2.0], 0.9, 2.0), ([2.0, 1.0], 0.5, 1.0), ([1.0, 1.0, 1.0], 0.5, 1.0),
     ([4.0, 1.0, 3.0, 2.0], 0.25, 3.0), ([4.0, 1.0, 3.0, 2.0], 0.0, 4.0)],
)  # fmt: skip
def test_the_limit_leaves_the_share_of_largest_losses_above_it(losses: list[float], share: float, limit: float) -> None:
    assert drop_limit(losses, share) == limit


def slow_dropped(labels: list[PhotoLabels], found: tuple[torch.Tensor, ...], share: float) -> list[list[bool]]:
    """Which labels are dropped, one after another: the one with the largest loss that is left."""
    losses = {
        (photo, row): value
        for photo, own in enumerate(labels)
        for row, value in enumerate(label_losses(found[0][photo].sigmoid(), found[1][photo], own).tolist())
        if not own.certain[row]
    }
    gone = sorted(losses, key=lambda place: -losses[place])[: int(share * len(losses))]
    return [[(photo, row) in gone for row in range(len(own))] for photo, own in enumerate(labels)]


def batch_of_labels() -> list[PhotoLabels]:
    """No label; three; a certain one, which nothing says, and one more."""
    third = made([[31.0, 31.0, 31.5, 31.5], [1.0, 1.0, 30.0, 30.0]], [0, 1])
    three = made([[1.0, 1.0, 30.0, 30.0], [9.0, 9.0, 31.0, 31.0], [0.0, 0.0, 4.0, 4.0]], [0, 1, 2], [0.5, 1.0, 0.3])
    return [made([], []), three, replace(third, certain=torch.tensor([True, False]))]


@pytest.mark.parametrize("share", [0.2, 0.25, 0.5, 0.8, 0.99])
def test_labels_with_the_largest_losses_of_a_batch_become_regions(share: float) -> None:
    labels, found = batch_of_labels(), outputs(3)
    left = without_worst(labels, found, share)
    for own, after, gone in zip(labels, left, slow_dropped(labels, found, share), strict=True):
        rows = torch.tensor(gone, dtype=torch.bool)
        assert torch.equal(after.boxes, own.boxes[~rows]) and torch.equal(after.weights, own.weights[~rows])
        assert torch.equal(after.regions, own.boxes[rows]) and torch.equal(after.region_labels, own.labels[rows])
    assert left[2].certain.any()  # a reviewed box is never dropped
    assert without_worst([], None, share) == []


def test_ranks_drop_what_one_process_drops() -> None:
    labels, found = batch_of_labels(), outputs(3)
    whole = without_worst(labels, found, 0.5)
    told: dict[int, list[float]] = {}

    class Rank:
        """One of two ranks; the second time it knows what the other one has."""

        def __init__(self, number: int) -> None:
            self.number = number

        def all_gather_object(self, value: list[float]) -> list[list[float]]:
            told[self.number] = value
            return [told.get(0, []), told.get(1, [])]

    for _ in range(2):
        parts = [
            without_worst(labels[rows], (found[0][rows], found[1][rows], found[2]), 0.5, Rank(number))  # type: ignore[arg-type]
            for number, rows in enumerate((slice(0, 2), slice(2, 3)))
        ]
    for one, other in zip(whole, [*parts[0], *parts[1]], strict=True):
        assert torch.equal(one.boxes, other.boxes) and torch.equal(one.regions, other.regions)
