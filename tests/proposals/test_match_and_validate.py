"""Which image is which photo, and whether its boxes fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from proposal_files import in_convention, photos

from strategies import box_sets
from tag2box.annotations import Photo
from tag2box.errors import UserError
from tag2box.proposals.importers.match_ids import match_ids
from tag2box.proposals.importers.validate import (
    ORDERS,
    BoxConvention,
    BoxFilter,
    ImportCounts,
    RawBoxes,
    check_fit,
    fit_boxes,
    import_notes,
)

FILE = Path("proposals.pkl")

COCO = "COCO_train2014_000000000009"
MATCHES: list[tuple[list[str], list[str], list[int | None]]] = [
    ([], [], []),
    ([], ["a"], [None]),
    (["a"], [], []),
    (["a", "b"], ["b", "a"], [1, 0]),
    (["000009.jpg"], ["000009"], [0]),
    (["000009.PNG"], ["000009"], [0]),
    (["VOC2007/JPEGImages/000009.jpg"], ["000009"], [0]),
    (["C:\\photos\\000009.jpg"], ["000009"], [0]),
    (["../photos/000009.jpg"], ["000009"], [0]),
    (["img.v2"], ["img.v2", "img"], [0, None]),
    (["a/1.jpg", "b/1.jpg"], ["b/1", "a/1"], [1, 0]),
    (["train/a/1.jpg", "train/b/1.jpg"], ["b/1", "a/1"], [1, 0]),
    (["9"], ["000009"], [0]),
    (["000009"], ["9"], [0]),
    (["9"], [COCO], [0]),
    ([COCO], ["000000000009"], [0]),
    (["2008000008", "2008000009"], ["2008_000009", "2008_000008"], [1, 0]),
    (["2008_000008"], ["2008000008"], [0]),
    (["8"], ["2008_000008", "000008"], [None, 0]),
    (["cat_9"], ["dog_9"], [None]),
    (["9"], ["cat_9"], [0]),
    (["12_3"], ["1_23"], [None]),
    (["000009", "9"], ["000009"], [0]),
    (["9" * 40], ["0" + "9" * 40], [None]),
    (["/", "..", ".jpg", "٩"], ["9"], [None]),
]


@pytest.mark.parametrize(("ids", "names", "places"), MATCHES)
def test_images_find_their_photos(ids: list[str], names: list[str], places: list[int | None]) -> None:
    found = match_ids(FILE, ids, photos(names))
    assert list(found.places) == places
    assert found.missing == tuple(name for name, place in zip(names, places, strict=True) if place is None)
    assert found.unused == tuple(name for place, name in enumerate(ids) if place not in places)
    assert found.matched == sum(place is not None for place in places)


AMBIGUOUS: list[tuple[list[str], list[str], str]] = [
    (["a", "a"], ["a"], "image a is in it twice"),
    (["1"], ["a/1", "b/1"], r"image 1 could be 2 photos \(a/1, b/1\)"),
    (["9"], ["cat_9", "dog_9"], r"image 9 could be 2 photos \(cat_9, dog_9\)"),
    (["9", "09"], ["000009"], "images 9 and 09 both mean photo 000009"),
    (["a/1.jpg", "b/1.jpg"], ["1"], r"images a/1\.jpg and b/1\.jpg both mean photo 1"),
]


@pytest.mark.parametrize(("ids", "names", "reason"), AMBIGUOUS)
def test_an_ambiguous_name_is_refused(ids: list[str], names: list[str], reason: str) -> None:
    with pytest.raises(UserError, match=f"^{FILE}: {reason}"):
        match_ids(FILE, ids, photos(names))


@settings(max_examples=50)
@given(numbers=st.lists(st.integers(0, 10**9), unique=True, max_size=20), data=st.data())
def test_ids_written_in_any_way_find_the_same_photos(numbers: list[int], data: st.DataObject) -> None:
    names = [f"{number:012d}" for number in numbers]
    order = data.draw(st.permutations(range(len(names))))
    ways = [str, "{:06d}".format, "{:012d}.jpg".format, "train/{:012d}.jpg".format, "COCO_{:012d}".format]
    way = data.draw(st.sampled_from(ways))
    found = match_ids(FILE, [way(numbers[place]) for place in order], photos(names))
    assert [order[place] for place in found.places] == list(range(len(names)))


# ---------------------------------------------------------------- boxes on photos

OURS = BoxConvention(boxes_are="xyxy", first_pixel=0, last_pixel="excluded")
PHOTO = Photo("a", Path("a.jpg"), 100, 50)


def fitted(boxes: list[list[float]], scores: list[float] | None = None, keep: BoxFilter = BoxFilter()) -> object:  # noqa: B008
    table = np.array(boxes, np.float64).reshape(-1, 4)
    return fit_boxes(RawBoxes(table, None if scores is None else np.array(scores, np.float64)), PHOTO, OURS, keep)


def test_no_boxes() -> None:
    found = fitted([])
    assert len(found.candidates) == 0
    assert found.counts == ImportCounts(photos=1, misfits=dict.fromkeys(ORDERS, 0))
    check_fit(FILE, found.counts, OURS, is_all=True)
    assert import_notes(found.counts, OURS) == ()


def test_boxes_are_cut_ordered_and_counted() -> None:
    boxes = [[0, 0, 10, 10], [-1, 5, 101.5, 20], [0, 0, 10, 10], [30, 30, 30, 40], [5, 5, 8, 9], [20, 0, 60, 40]]
    found = fitted(boxes, [0.1, 0.2, 0.3, 0.9, 0.8, 0.5], BoxFilter(min_side=4, max_boxes=2))
    assert found.candidates.boxes.tolist() == [[20, 0, 60, 40], [0, 0, 10, 10]]
    assert found.candidates.scores.tolist() == pytest.approx([0.5, 0.3])
    counts = found.counts
    assert (counts.boxes, counts.kept, counts.cut, counts.empty) == (6, 2, 1, 1)
    assert (counts.repeats, counts.small, counts.surplus) == (1, 1, 1)
    assert len(import_notes(counts, OURS)) == 5


@settings(max_examples=50)
@given(boxes=box_sets())
def test_by_default_all_but_exact_repeats_are_kept_in_order(boxes: object) -> None:
    rows = boxes.tolist()
    once = [row for place, row in enumerate(rows) if row not in rows[:place]]
    assert fitted(rows).candidates.boxes.tolist() == once


@settings(max_examples=50)
@given(
    boxes=box_sets(low=1),
    said=st.sampled_from(ORDERS),
    true=st.sampled_from(ORDERS),
    width=st.integers(4, 30),
    height=st.integers(4, 30),
)
def test_misfits_are_those_that_loops_find(boxes: object, said: str, true: str, width: int, height: int) -> None:
    photo = Photo("a", Path("a.jpg"), width, height)
    written = in_convention(boxes.double().numpy(), BoxConvention(boxes_are=true, first_pixel=1, last_pixel="included"))
    convention = BoxConvention(boxes_are=said, first_pixel=1, last_pixel="included")
    expected = 0
    for x1, y1, x2, y2 in convention.corners(written).tolist():
        is_over = min(x1, y1) < -2 or x2 > width + 2 or y2 > height + 2 or x1 > width + 2 or y1 > height + 2
        expected += is_over or min(x2, y2) < -2 or x1 - x2 > 2 or y1 - y2 > 2
    assert fit_boxes(RawBoxes(written, None), photo, convention, BoxFilter()).counts.misfits[said] == expected


def refusal(boxes: list[list[float]], convention: BoxConvention, photo: Photo = PHOTO) -> str:
    counts = fit_boxes(RawBoxes(np.array(boxes, np.float64), None), photo, convention, BoxFilter()).counts
    with pytest.raises(UserError) as caught:
        check_fit(FILE, counts, convention, is_all=True)
    return str(caught.value)


def test_the_wrong_order_is_refused_with_the_one_that_fits() -> None:
    tall = Photo("a", Path("a.jpg"), 50, 400)
    yxyx = [[10, 5, 390, 45], [0, 0, 400, 50], [300, 10, 350, 20]]
    assert refusal(yxyx, OURS, tall).endswith("--boxes-are xyxy; with --boxes-are yxyx it is 0.0%")
    xywh = [[60, 10, 30, 20], [10, 20, 5, 5], [70, 40, 20, 10]]
    assert refusal(xywh, OURS).endswith("with --boxes-are xywh it is 0.0%")


def test_boxes_of_other_photos_are_refused() -> None:
    assert refusal([[0, 0, 999, 999]], OURS).endswith("are these boxes of these photos, at their size?")


@pytest.mark.parametrize(("bad", "is_refused"), [(0, False), (10, False), (11, True)])
def test_one_in_a_hundred_may_be_wrong(bad: int, is_refused: bool) -> None:
    share = ImportCounts(photos=1, boxes=1000, misfits={"xyxy": bad, "yxyx": bad, "xywh": bad})
    if is_refused:
        with pytest.raises(UserError, match=r"1\.1% of 1,000 boxes"):
            check_fit(FILE, share, OURS, is_all=True)
    else:
        check_fit(FILE, share, OURS, is_all=True)


def test_a_plain_misfit_is_refused_before_the_end() -> None:
    misfits = {"xyxy": 11, "yxyx": 0, "xywh": 99}
    check_fit(FILE, ImportCounts(photos=49, boxes=100, misfits=misfits), OURS, is_all=False)
    with pytest.raises(UserError, match=r"yxyx it is 0\.0%"):
        check_fit(FILE, ImportCounts(photos=50, boxes=100, misfits=misfits), OURS, is_all=False)


ONE_BASED = BoxConvention(boxes_are="xyxy", first_pixel=1, last_pixel="included")
SIGNS = [
    (OURS, [[1, 1, 101, 51]], ["--first-pixel 1"]),
    (OURS, [[1, 1, 100, 50]], ["--first-pixel 1", "--last-pixel included"]),
    (OURS, [[0, 0, 99, 49]], ["--last-pixel included"]),
    (OURS, [[0, 0, 100, 50]], []),
    (OURS, [[7, 7, 50, 30]], []),
    (ONE_BASED, [[0, 0, 99, 49]], ["--first-pixel 0"]),
    (ONE_BASED, [[0, 0, 100, 50]], ["--first-pixel 0", "--last-pixel excluded"]),
    (ONE_BASED, [[1, 1, 101, 51]], ["--last-pixel excluded"]),
    (ONE_BASED, [[1, 1, 100, 50]], []),
]


@pytest.mark.parametrize(("convention", "boxes", "options"), SIGNS)
def test_signs_of_another_convention_are_reported(
    convention: BoxConvention, boxes: list[list[float]], options: list[str]
) -> None:
    counts = fit_boxes(RawBoxes(np.array(boxes, np.float64), None), PHOTO, convention, BoxFilter()).counts
    told = [line for line in import_notes(counts, convention) if "does the file need" in line]
    assert [line.split("need ")[1].rstrip("?") for line in told] == options
