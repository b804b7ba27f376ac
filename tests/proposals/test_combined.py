from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image

from tag2box.data.scenes import Scenes
from tag2box.images import read_photo
from tag2box.proposals.base import FoundBoxes
from tag2box.proposals.combined import (
    SOURCES,
    Channels,
    Combined,
    center_surround,
    center_surround_contrast,
    in_all_resolutions,
    regions_above,
    thin,
    window_levels,
)

SMALL = Combined(short_side=64, max_boxes=200)


def tile(seed: int = 0) -> np.ndarray:
    """A grey surface with grain, a dark spot of 5 x 4 pixels at (70, 30), and a slightly brighter band below."""
    grey = np.random.default_rng(seed).normal(90, 3, (96, 128))
    grey[72:] += 6
    grey[30:34, 70:75] -= 50
    return grey.clip(0, 255).astype(np.uint8)


def as_image(grey: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.stack([grey] * 3))


def overlap(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    """IoU written out."""
    wide, high = (max(0.0, min(a[i + 2], b[i + 2]) - max(a[i], b[i])) for i in (0, 1))
    union = sum((c[2] - c[0]) * (c[3] - c[1]) for c in (a, b)) - wide * high
    return wide * high / union if union else 0.0


def best_overlap(boxes: torch.Tensor, wanted: tuple[float, ...]) -> float:
    return max((overlap(tuple(box), wanted) for box in boxes.tolist()), default=0.0)


# ---------------------------------------------------------------- whole photos


@pytest.mark.parametrize("size", [(1, 1), (1, 30), (30, 1), (2, 2), (7, 5), (40, 25)])
@pytest.mark.parametrize("is_plain", [True, False])
def test_any_photo_gives_boxes_inside_it(size: tuple[int, int], is_plain: bool) -> None:
    height, width = size
    noise = np.random.default_rng(0).integers(0, 256, (3, height, width), np.uint8)
    found = SMALL(torch.full((3, height, width), 90, dtype=torch.uint8) if is_plain else torch.from_numpy(noise))
    boxes = found.boxes
    assert not found.scores.any() and boxes.dtype == torch.float32 and boxes.shape == (len(boxes), 4)
    assert (boxes[:, :2] >= 0).all() and (boxes[:, 2] <= width).all() and (boxes[:, 3] <= height).all()
    assert (boxes[:, 2:] > boxes[:, :2]).all()


def test_the_same_photo_gives_the_same_boxes_in_the_same_order_every_time() -> None:
    first = SMALL(as_image(tile()))
    SMALL(as_image(tile(1)))
    assert torch.equal(first.boxes, SMALL(as_image(tile())).boxes)


def test_a_spot_of_five_pixels_and_a_faint_band_have_boxes() -> None:
    method = Combined(short_side=96, sources=("blobs", "windows"))
    boxes = method(as_image(tile())).boxes
    assert best_overlap(boxes, (70, 30, 75, 34)) >= 0.5
    assert best_overlap(boxes, (0, 72, 128, 96)) >= 0.5


def test_a_deep_photo_of_16_bits_gives_the_boxes_of_its_8_bit_version(tmp_path: Path) -> None:
    Image.fromarray(tile().astype(np.uint16) * 257).save(tmp_path / "deep.png")
    Image.fromarray(tile()).save(tmp_path / "grey.png")
    deep, grey = (SMALL(read_photo(tmp_path / name)).boxes for name in ("deep.png", "grey.png"))
    assert len(grey) and torch.equal(deep, grey)


def test_a_dark_copy_has_a_box_at_the_spot() -> None:
    """A tenth of the brightness, as of a dark 16-bit photo: blobs are measured in units of the photo's own contrast."""
    method = Combined(short_side=96, sources=("blobs",))
    assert best_overlap(method(as_image(tile() // 10)).boxes, (70, 30, 75, 34)) >= 0.5


def test_small_boxes_are_dropped_relative_to_the_photo() -> None:
    for share in (0.0, 0.05, 0.3):
        sides = (found := replace(SMALL, min_share=share)(as_image(tile())).boxes)[:, 2:] - found[:, :2]
        assert len(found) and sides.min() >= share * 96 - 1e-3


def test_sources_take_turns_so_that_none_is_crowded_out() -> None:
    image = as_image(tile())
    alone = {kind: {tuple(b) for b in replace(SMALL, sources=(kind,))(image).boxes.tolist()} for kind in SOURCES}
    for kind, boxes in alone.items():
        kept = {tuple(b) for b in replace(SMALL, max_boxes=50)(image).boxes.tolist()}
        assert len(kept & boxes) >= min(8, len(boxes) // 2), kind


def test_the_cap_takes_the_first_of_a_longer_list() -> None:
    image = as_image(tile())
    everything = replace(SMALL, max_boxes=None)(image).boxes
    assert len(everything) > 60 and torch.equal(everything[:60], replace(SMALL, max_boxes=60)(image).boxes)


OTHER = {
    "short_side": 96, "max_boxes": 5, "min_side": 30, "min_share": 0.2, "sources": ("windows",), "source_boxes": 7,
    "thinning": 0.5, "seed": 1, "short_sides": (40,),
}  # fmt: skip


def test_every_setting_has_an_effect() -> None:
    assert {field.name for field in fields(Combined)} == {*OTHER, "kind", "engine"}
    before = SMALL(as_image(tile())).boxes
    for name, value in OTHER.items():
        assert not torch.equal(before, replace(SMALL, **{name: value})(as_image(tile())).boxes), name


def test_the_engine_of_selective_search_has_an_effect() -> None:
    image = torch.from_numpy(Scenes().draw("train", 3).image).permute(2, 0, 1)
    base = Combined(short_side=112, sources=("selective_search",), source_boxes=1000, thinning=1.0)
    ours, theirs = (set(map(tuple, replace(base, engine=e)(image).boxes.tolist())) for e in ("tag2box", "opencv"))
    assert ours != theirs and len(ours & theirs) > 0.8 * len(theirs)


@pytest.mark.parametrize("given", [(64, (40, 96)), (96, (64, 40)), (None, (64, 40, 900))])
def test_boxes_of_all_resolutions_take_turns(given: tuple[int | None, tuple[int, ...]]) -> None:
    """A source alone has, of the boxes that it finds in each resolution, about as many of one as of another."""
    image, (side, more) = as_image(tile()), given
    method = replace(SMALL, sources=("blobs",), short_side=side, thinning=1.0, max_boxes=60)
    both = {tuple(box) for box in replace(method, short_sides=more)(image).boxes.tolist()}
    for own in (40, 64, 96):
        alone = {tuple(box) for box in replace(method, short_side=own, max_boxes=None)(image).boxes.tolist()}
        assert len(both & alone) >= 15, own
    assert method.working_size((128, 96)) == (128, 96) if side is None else (round(side * 4 / 3), side)
    assert replace(method, short_sides=more).working_size((128, 96)) == (128, 96)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("counts", [(0,), (5,), (0, 0), (6, 0, 9)])
def test_boxes_of_resolutions_are_joined_as_by_loops(counts: tuple[int, ...], seed: int) -> None:
    rng = np.random.default_rng(seed)
    corners = [rng.integers(0, 6, (count, 2)).astype(np.float64) for count in counts]
    levels = [np.concatenate([own, own + rng.integers(1, 6, own.shape)], axis=1) for own in corners]
    expected: list[tuple[float, ...]] = []
    for turn in range(max(counts)):
        for own in levels:
            if turn < len(own) and all(overlap(tuple(own[turn]), kept) <= 0.5 for kept in expected):
                expected.append(tuple(own[turn]))
    found = [tuple(box) for box in in_all_resolutions(levels, 0.5).tolist()]
    assert found == (expected if len(counts) > 1 else [tuple(box) for box in levels[0].tolist()])


# ---------------------------------------------------------------- thinning


def _thin_twin(rows: list[tuple[float, ...]], scores: list[float], threshold: float) -> list[int]:
    kept: list[int] = []
    for row in sorted(range(len(rows)), key=lambda i: -scores[i]):
        if all(overlap(rows[row], rows[other]) <= threshold for other in kept):
            kept.append(row)
    return kept


def corners() -> st.SearchStrategy[tuple[float, ...]]:
    side, start = st.integers(1, 9), st.integers(0, 9)
    return st.builds(lambda x, y, w, h: (float(x), float(y), float(x + w), float(y + h)), start, start, side, side)


@given(st.lists(st.tuples(corners(), st.integers(0, 3)), max_size=15), st.sampled_from([0.33, 0.61, 0.87, 1.0]))
def test_thinning_matches_one_written_with_loops(rows: list, threshold: float) -> None:
    boxes, scores = [box for box, _ in rows], [float(score) for _, score in rows]
    got = thin(np.array(boxes, np.float64).reshape(-1, 4), np.array(scores, np.float64), threshold)
    assert got.tolist() == _thin_twin(boxes, scores, threshold)


# ---------------------------------------------------------------- contrast of windows


def _contrast_twin(cues: np.ndarray, window: tuple[float, ...]) -> float:
    height, width, channels = cues.shape
    x1, y1, x2, y2 = (int(v) for v in window)
    dx, dy = (max(round((b - a) * 0.35), 1) for a, b in ((x1, x2), (y1, y2)))
    inside: list[np.ndarray] = []
    ring: list[np.ndarray] = []
    for y in range(max(y1 - dy, 0), min(y2 + dy, height)):
        for x in range(max(x1 - dx, 0), min(x2 + dx, width)):
            (inside if x1 <= x < x2 and y1 <= y < y2 else ring).append(cues[y, x])
    if not ring:
        return 0.0
    best = 0.0
    for c in range(channels):
        own, other = [float(v[c]) for v in inside], [float(v[c]) for v in ring]
        mean = sum(other) / len(other)
        variance = sum((v - mean) ** 2 for v in other) / len(other)
        best = max(best, abs(sum(own) / len(own) - mean) / (variance + 4) ** 0.5)
    return best


@settings(deadline=None)
@given(st.lists(corners(), max_size=6), st.integers(1, 3), st.integers(0, 99))
def test_contrast_matches_one_written_with_loops(windows: list, channels: int, seed: int) -> None:
    cues = np.random.default_rng(seed).normal(50, 9, (18, 18, channels)).astype(np.float32)
    rows = np.array([*windows, (0, 0, 18, 18)], np.float64)
    got = center_surround_contrast(cues, rows)
    assert got == pytest.approx([_contrast_twin(cues, tuple(row)) for row in rows.tolist()], abs=1e-6)


@pytest.mark.parametrize("size", [(1, 1), (3, 50), (64, 48)])
def test_windows_lie_inside_and_the_largest_level_covers_everything(size: tuple[int, int]) -> None:
    levels = window_levels(*size)
    for rows in levels:
        assert (rows[:, :2] >= 0).all() and (rows[:, 2:] <= size).all() and (rows[:, 2:] > rows[:, :2]).all()
    covered = np.zeros(size[::-1], bool)
    for x1, y1, x2, y2 in levels[0].astype(int):
        covered[y1:y2, x1:x2] = True
    assert covered.all()


# ---------------------------------------------------------------- blobs


def _regions_twin(signed: np.ndarray, level: float, min_area: float) -> dict[tuple[float, ...], float]:
    left = {(int(y), int(x)) for y, x in zip(*np.nonzero(signed > level), strict=True)}
    found = {}
    while left:
        region, front = [], [left.pop()]
        while front:
            y, x = front.pop()
            region.append((y, x))
            near = [(y + i, x + j) for i in (-1, 0, 1) for j in (-1, 0, 1) if (y + i, x + j) in left]
            left.difference_update(near)
            front += near
        if len(region) >= min_area:
            ys, xs = zip(*region, strict=True)
            box = (float(min(xs)), float(min(ys)), float(max(xs) + 1), float(max(ys) + 1))
            value = sum(float(signed[y, x]) for y, x in region) / len(region)
            found[box] = max(value, found.get(box, value))
    return found  # type: ignore[return-value]


@given(st.integers(0, 99), st.sampled_from([0.5, 1.0, 9.0]), st.sampled_from([1, 3]))
def test_regions_match_those_written_with_loops(seed: int, level: float, min_area: int) -> None:
    signed = np.random.default_rng(seed).normal(0, 1, (9, 11)).astype(np.float32)
    got: FoundBoxes = regions_above(signed, level, min_area)
    pairs = sorted(zip(map(tuple, got.corners.tolist()), got.scores.tolist(), strict=True))
    best = dict(pairs)  # the highest score of equal boxes is the last
    assert best == pytest.approx(_regions_twin(signed, level, min_area))


def test_a_flat_image_has_no_blobs_and_a_grey_one_no_color_channels() -> None:
    flat = np.full((20, 20), 70, np.float32)
    assert np.abs(center_surround(flat, 2.0)).max() < 0.1  # rounding only
    grey = np.stack([tile()] * 3, axis=2)
    assert Channels(grey).cues.shape[2] == 2
    assert Channels(np.roll(grey, 40, 1) // np.array([1, 2, 4], np.uint8)).cues.shape[2] == 4
