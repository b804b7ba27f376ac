"""Class maps: pooling, sums over boxes, evidence, and the prior, each against a loop-written twin."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from tag2box.models.class_maps import (
    CELL_SHARPNESS,
    RING,
    CellMaps,
    ClassMaps,
    Prior,
    area_shares,
    box_evidence,
    box_sums,
    integral_image,
    log_factors,
    peak_boxes,
    pooled_logits,
    prior_gain,
    with_prior_in_mil,
)
from tag2box.ops.losses import mil_scores
from tag2box.types import BatchMeta, Proposals, SideInfo, StageScores
from tiny import TinyBackbone

MAPS = torch.rand(2, 5, 7, generator=torch.Generator().manual_seed(0))
sides = st.floats(0, 1)


def boxes_within(width: float, height: float) -> st.SearchStrategy[list[float]]:
    def box(x: float, y: float, w: float, h: float) -> list[float]:
        return [x * width, y * height, (x + (1 - x) * w) * width, (y + (1 - y) * h) * height]

    return st.builds(box, sides, sides, sides, sides)


def sum_by_loop(plane: Tensor, box: list[float]) -> float:
    """Cell by cell: its value times the share of it that the box covers."""
    total = 0.0
    for y in range(plane.shape[0]):
        for x in range(plane.shape[1]):
            across = max(0.0, min(box[2], x + 1) - max(box[0], x))
            down = max(0.0, min(box[3], y + 1) - max(box[1], y))
            total += float(plane[y, x]) * across * down
    return total


def evidence_by_loop(plane: Tensor, box: list[float]) -> float:
    """Mean inside minus mean in the ring, in units of cells."""
    height, width = plane.shape
    cx, cy, w, h = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2, box[2] - box[0], box[3] - box[1]
    ring = [max(0, cx - RING * w / 2), max(0, cy - RING * h / 2)]
    ring += [min(width, cx + RING * w / 2), min(height, cy + RING * h / 2)]
    inside, own = sum_by_loop(plane, box), w * h
    around = (ring[2] - ring[0]) * (ring[3] - ring[1]) - own
    outside = (sum_by_loop(plane, ring) - inside) / max(around, 0.25)
    return max(0.0, inside / max(own, 0.25) - outside)


@pytest.mark.parametrize("sharpness", [0.5, 4.0])
def test_pooling_is_the_log_mean_exp_of_the_loop(sharpness: float) -> None:
    logits = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = [
        [math.log(sum(math.exp(sharpness * float(z)) for z in plane.flatten()) / 20) / sharpness for plane in photo]
        for photo in logits
    ]
    torch.testing.assert_close(pooled_logits(logits, sharpness), torch.tensor(expected, dtype=torch.float64))


def test_no_boxes_have_no_evidence() -> None:
    assert box_sums(integral_image(MAPS), torch.zeros(0, 4)).shape == (0, 2)
    assert box_evidence(MAPS, torch.zeros(0, 4), (70, 50)).shape == (0, 2)


@given(st.lists(boxes_within(7, 5), min_size=1, max_size=4))
def test_sums_over_boxes_are_those_of_the_loop(boxes: list[list[float]]) -> None:
    found = box_sums(integral_image(MAPS), torch.tensor(boxes, dtype=torch.float64))
    expected = [[sum_by_loop(plane, box) for plane in MAPS] for box in boxes]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=1e-6)


@given(st.lists(boxes_within(7, 5), min_size=1, max_size=4))
def test_evidence_is_that_of_the_loop_and_between_zero_and_one(boxes: list[list[float]]) -> None:
    pixels = torch.tensor(boxes, dtype=torch.float64) * 10  # cells of ten pixels
    found = box_evidence(MAPS.double(), pixels, (70, 50))
    expected = [[evidence_by_loop(plane, box) for plane in MAPS] for box in boxes]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-5, rtol=1e-5)
    assert bool((found >= 0).all())
    assert bool((found <= 1 + 1e-9).all())


def test_a_box_that_ends_where_the_evidence_does_has_more_than_a_part_and_an_enlargement() -> None:
    maps = torch.zeros(1, 8, 8)
    maps[0, 2:6, 2:6] = 1
    boxes = torch.tensor([[20.0, 20, 60, 60], [30, 30, 50, 50], [0, 0, 80, 80]])
    whole, part, large = box_evidence(maps, boxes, (80, 80))[:, 0].tolist()
    assert whole > part
    assert whole > large


def test_maps_are_probabilities_at_the_stride_of_the_trunk() -> None:
    backbone = TinyBackbone()
    class_maps = ClassMaps(backbone, 3)
    images = torch.rand(2, 3, 4 * backbone.stride, 6 * backbone.stride) * 255
    maps = class_maps.maps(images)
    assert maps.shape == (2, 3, 4, 6)
    assert bool(((maps > 0) & (maps < 1)).all())
    torch.testing.assert_close(class_maps(images), pooled_logits(maps.logit()), atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------- prior


@pytest.mark.parametrize(
    ("evidence", "area", "straddling"),
    [(0.0, 0.0, 0.0), (2.0, 0.0, 0.0), (0.0, 0.5, 0.0), (1.0, 0.9, 0.0), (0.5, -1.0, 2.0), (0.0, 0.0, 1.5)],
)
def test_factors_and_means_are_those_of_the_loop(evidence: float, area: float, straddling: float) -> None:
    scores, found = torch.rand(4, 3) * 0.9 + 0.05, torch.rand(4, 3) * 0.9 + 0.05
    shares, fit = torch.tensor([0.01, 0.3, 0.5, 1.0]), torch.tensor([0.9, 0.0, 0.4, 1.0])
    prior = Prior(evidence=evidence, area=area, straddling=straddling)
    for p in range(4):
        for c in range(3):
            factor = float(found[p, c]) ** evidence * float(shares[p]) ** area * max(float(fit[p]), 1e-3) ** straddling
            assert float(prior.factors(shares, found, 3, fit)[p, c]) == pytest.approx(factor, rel=1e-4)
            mean = (float(scores[p, c]) * factor) ** (1 / (1 + evidence + max(area, 0) + straddling))
            assert float(prior.mean(scores, shares, found, fit)[p, c]) == pytest.approx(mean, rel=1e-4)


def test_a_prior_that_is_off_changes_nothing_and_needs_no_evidence() -> None:
    scores = torch.rand(2, 2)
    assert Prior().mean(scores, torch.ones(2), None) is scores
    assert Prior().factors(torch.ones(0), None, 2).shape == (0, 2)


@given(st.floats(0.01, 0.99), st.floats(0.01, 0.99), st.floats(0.01, 1), st.floats(0, 3), st.floats(0, 3))
def test_a_mean_stays_between_its_parts(score: float, found: float, share: float, e: float, a: float) -> None:
    mean = Prior(evidence=e, area=a).mean(torch.tensor([[score]]), torch.tensor([share]), torch.tensor([[found]]))
    assert min(score, found, share) - 1e-4 <= float(mean) <= max(score, found, share) + 1e-4


@pytest.mark.parametrize("sizes", [(), (0,), (1,), (3, 0, 4)])
@pytest.mark.parametrize("columns", [2, 3])
def test_the_prior_inside_mil_is_that_of_the_loop_for_proposals_and_copies(
    sizes: tuple[int, ...], columns: int
) -> None:
    """x = softmax(cls) f_r exp(d_r) / sum_i f_i exp(d_i); a copy has logits of its own, and the sum of proposals."""
    g, rows = torch.Generator().manual_seed(1), sum(sizes)
    cls, det, other = torch.randn(3, rows, columns, generator=g)
    factors = torch.rand(rows, 2, generator=g)
    logs, images = factors.log(), torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes).long())
    found = with_prior_in_mil(StageScores(cls, det, (), (), (cls, other), (cls, other)), logs)
    gain = prior_gain(det, logs, sizes)
    assert gain.shape == (rows, 2) and torch.equal(found.mil_more[0], cls) and torch.equal(found.region[0], cls)
    for name, own, logits in (("first", det, found.mil_det), ("second", other, found.mil_more[1])):
        scores = mil_scores(cls, logits, sizes)
        for r in range(rows):
            mates = [i for i in range(rows) if images[i] == images[r]]
            for c in range(columns):
                f = [float(factors[i, c]) if c < 2 else 1.0 for i in mates]
                total = sum(w * math.exp(own[i, c]) for w, i in zip(f, mates, strict=True))
                share = f[mates.index(r)] * math.exp(own[r, c]) / total
                assert float(scores[r, c]) == pytest.approx(float(cls[r].softmax(0)[c]) * share, rel=1e-4)
                if name == "first" and c < 2:
                    plain = sum(math.exp(det[i, c]) for i in mates)
                    copy = math.exp(other[r, c]) / plain * float(gain[r, c])
                    assert copy == pytest.approx(f[mates.index(r)] * math.exp(other[r, c]) / total, rel=1e-4)
    assert torch.equal(found.region[1], found.mil_more[1])


def test_a_prior_inside_mil_gives_no_box_a_score_of_zero() -> None:
    evidence = torch.tensor([[1.0], [0.0]])
    meta = BatchMeta(
        Proposals(torch.tensor([[0.0, 0, 9, 9], [0, 0, 1, 1]]), (2,), ((10, 10),)),
        torch.ones(1, 1, dtype=torch.bool),
        side_info=SideInfo(class_evidence=evidence),
    )
    logs = log_factors(Prior(evidence=10.0, area=10.0), meta)
    assert logs[0].item() == 0 and logs[1].isfinite().all() and logs[1].item() < -50


def test_area_shares_are_relative_to_each_photo() -> None:
    boxes = torch.tensor([[0.0, 0, 5, 4], [0, 0, 10, 10]])
    assert area_shares(Proposals(boxes, (1, 0, 1), ((10, 4), (1, 1), (20, 10)))).tolist() == [0.5, 0.5]


def peak_box_with_loops(cells: list[list[float]]) -> list[float]:
    """The box of the cells of at least half the peak that a walk from the peak reaches."""
    places = [(y, x) for y in range(len(cells)) for x in range(len(cells[0]))]
    peak = max(places, key=lambda at: cells[at[0]][at[1]])
    reached, border = {peak}, [peak]
    while border:
        y, x = border.pop()
        for near in ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)):
            if near in places and near not in reached and cells[near[0]][near[1]] >= 0.5 * cells[peak[0]][peak[1]]:
                reached.add(near)
                border.append(near)
    rows, columns = zip(*reached, strict=True)
    return [min(columns), min(rows), max(columns) + 1, max(rows) + 1]


levels = st.sampled_from([0.0, 0.25, 0.5, 1.0])


@given(st.lists(st.lists(levels, min_size=4, max_size=4), min_size=1, max_size=4))
def test_peak_boxes_are_those_of_a_walk_from_the_peak(cells: list[list[float]]) -> None:
    found = peak_boxes(torch.tensor([cells]), (40.0, 10.0 * len(cells)))
    assert found.tolist() == [[10.0 * side for side in peak_box_with_loops(cells)]]


def test_no_maps_have_no_peak_boxes() -> None:
    assert peak_boxes(torch.zeros(0, 3, 3), (9.0, 9.0)).shape == (0, 4)


def test_a_map_is_scaled_to_its_photo() -> None:
    maps = torch.tensor([[[0.1, 0.9, 0.5], [0.1, 0.2, 0.1]]])
    assert peak_boxes(maps, (300.0, 100.0)).tolist() == [[100.0, 0.0, 300.0, 50.0]]


# ---------------------------------------------------------------- maps of cells


class TwoLevels(TinyBackbone):
    """Two maps, of which the second is half as fine."""

    def pyramid(self, images: Tensor) -> tuple[Tensor, ...]:
        fine = self.trunk(images)
        return fine, torch.nn.functional.avg_pool2d(fine, 2), torch.nn.functional.avg_pool2d(fine, 4)

    @property
    def pyramid_levels(self) -> tuple[tuple[int, int], ...]:
        return (4, self.channels), (8, self.channels), (16, self.channels)


def cell_logits_by_loop(net: CellMaps, levels: tuple[Tensor, ...], y: int, x: int) -> Tensor:
    """Logits of one cell: the mean over its neighbours of both levels, standardized, then two layers."""
    fine, coarse = levels[0][0], torch.nn.functional.interpolate(levels[1], levels[0].shape[2:], mode="bilinear")[0]
    both = torch.cat([fine, coarse])
    near = [
        both[:, row, column]
        for row in range(max(0, y - 1), min(both.shape[1], y + 2))
        for column in range(max(0, x - 1), min(both.shape[2], x + 2))
    ]
    vector = (sum(near) / len(near) - net.mean) / net.deviation
    first, _, _, last = net.classifier  # type: ignore[misc]
    hidden = torch.relu(first.weight[:, :, 0, 0] @ vector.clamp(-8, 8) + first.bias)  # type: ignore[has-type]
    logits: Tensor = last.weight[:, :, 0, 0] @ hidden + last.bias  # type: ignore[has-type]
    return logits


def test_logits_of_cells_are_those_of_the_loop() -> None:
    torch.manual_seed(0)
    net = CellMaps(TwoLevels(), 3, 32).eval()
    images = torch.rand(1, 3, 32, 48) * 255
    with torch.no_grad():
        net.standardize(net.cells(images))
        found, levels = net.cell_logits(net.cells(images)), net.backbone.pyramid(images)
        assert found.shape == (1, 3, 8, 12)
        for y, x in ((0, 0), (3, 5), (7, 11)):
            torch.testing.assert_close(found[0, :, y, x], cell_logits_by_loop(net, levels, y, x), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(net(images), pooled_logits(found, CELL_SHARPNESS))
        torch.testing.assert_close(net.maps(images), found.sigmoid())
    assert net.multiple == 16


def test_standardized_features_have_mean_zero_and_deviation_one() -> None:
    net = CellMaps(TwoLevels(), 2, 32)
    cells = torch.rand(2, 10, 5, 6, generator=torch.Generator().manual_seed(1)) * 7 + 3
    net.standardize(cells)
    rows = ((cells - net.mean[:, None, None]) / net.deviation[:, None, None]).transpose(0, 1).flatten(1)
    torch.testing.assert_close(rows.mean(dim=1), torch.zeros(10), atol=1e-5, rtol=0)
    torch.testing.assert_close(rows.std(dim=1, correction=0), torch.ones(10), atol=1e-4, rtol=0)
