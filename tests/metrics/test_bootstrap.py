"""Bootstrap over photos: figures under weights equal those of a set with copied photos; intervals and differences."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from conftest import GOLDEN, golden_names
from tag2box.annotations import Detections, Truth
from tag2box.metrics import bootstrap, voc_ap
from tag2box.metrics.error_analysis import breakdown
from tag2box.metrics.evaluation import evaluate_detections, with_intervals
from worlds import detections, random_world, truth_of, worlds

METRICS = ["voc07", "voc12", "corloc", "voc12@0.3", "corloc@0.7", "breakdown"]
BOX, FAR = (10, 10, 30, 30), (60, 60, 90, 90)


def copied(truth: Truth, found: dict[str, Detections], counts: list[int]) -> tuple[Truth, dict[str, Detections]]:
    """The set with each photo as often as ``counts`` says, copies beside each other."""
    rows = [row for row, count in enumerate(counts) for _ in range(count)]
    names = tuple(f"{truth.ids[row]}-{at}" for at, row in enumerate(rows))
    own = Truth(
        truth.classes, names, tuple(truth.sizes[row] for row in rows), tuple(truth.objects[row] for row in rows)
    )
    return own, {name: found[truth.ids[row]] for name, row in zip(names, rows, strict=True)}


def without_ties(found: dict[str, Detections]) -> dict[str, Detections]:
    """Detections of which no two have the same score: the order of equal ones in copied photos is arbitrary."""
    out, at = {}, 0
    for name, own in found.items():
        out[name] = Detections(own.boxes, own.scores + 1e-6 * torch.arange(at, at + len(own)), own.labels)
        at += len(own)
    return out


def flat(numbers: object, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], object]:
    if not isinstance(numbers, dict):
        return {path: numbers}
    return {key: value for name, own in numbers.items() for key, value in flat(own, (*path, name)).items()}


@settings(max_examples=30, deadline=None)
@given(worlds, st.data())
def test_figures_under_weights_are_those_of_copied_photos(world, data):
    truth, found = world[0], without_ties(world[1])
    counts = data.draw(st.lists(st.integers(0, 3), min_size=len(truth), max_size=len(truth)))
    weights = np.array([[1] * len(truth), counts], dtype=np.int64).reshape(2, len(truth))
    sampled = bootstrap.resampled_figures(truth, found, METRICS, weights)
    for row, (own, seen) in enumerate([(truth, found), copied(truth, found, counts)]):
        expected = flat(evaluate_detections(own, seen, METRICS).to_json())
        for path, values in sampled.items():
            value = expected.get(path)  # a group without objects is left out
            assert (math.isnan(values[row]) and value is None) or values[row] == pytest.approx(value, abs=1e-12)


def test_the_first_row_is_the_classic_evaluator_on_all_golden_files():
    from test_voc_ap import golden_world

    for file in (GOLDEN / name for name in golden_names("voc_eval_*.json")):
        golden = json.loads(file.read_text())
        truth, found = golden_world(file.with_suffix(".npz"))
        sampled = bootstrap.resampled_figures(
            truth, found, METRICS[:3], bootstrap.photo_weights(len(truth), resamples=2)
        )
        keys = {
            "voc07": "frcnn_plus1_exact_ap_07",
            "voc12": "frcnn_plus1_exact_ap_auc",
            "corloc": "pcl_corloc_exact_offset1",
        }
        for metric, key in keys.items():
            values = [sampled[metric, "per_class", name][0] for name in truth.classes]
            assert values == pytest.approx(golden[key], abs=1e-12)


@pytest.mark.parametrize(("photos", "resamples"), [(0, 0), (0, 3), (1, 2), (7, 0), (7, 50)])
def test_weights_are_draws_with_replacement(photos, resamples):
    weights = bootstrap.photo_weights(photos, resamples=resamples, seed=3)
    assert weights.shape == (resamples + 1, photos)
    assert (weights[0] == 1).all() and (weights.sum(axis=1) == photos).all()
    assert np.array_equal(weights, bootstrap.photo_weights(photos, resamples=resamples, seed=3))


def test_weights_match_the_draws_counted_with_loops_and_differ_by_seed():
    drawn = np.random.default_rng(5).integers(0, 4, size=(6, 4))
    weights = bootstrap.photo_weights(4, resamples=6, seed=5)
    for row in range(6):
        assert weights[row + 1].tolist() == [sum(int(x) == photo for x in drawn[row]) for photo in range(4)]
    assert not np.array_equal(weights, bootstrap.photo_weights(4, resamples=6, seed=6))


CASES = {
    "nothing": ([math.nan], None),
    "no resamples": ([0.5], None),
    "undefined in all resamples": ([0.5, math.nan], None),
    "undefined itself": ([math.nan, 0.5], None),
    "always the same": ([0.5, 0.5, 0.5], (0.5, 0.5)),
    "around another mean": ([0.4, 0.6, 0.7, 0.8], (0.305, 0.495)),  # 0.3, 0.4 and 0.5, after the mean 0.7 is moved
    "undefined in some": ([0.4, 0.6, math.nan, 0.7, 0.8], (0.305, 0.495)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_interval_of(case):
    values, expected = CASES[case]
    got = bootstrap.interval(np.array(values))
    assert (got is None) == (expected is None)
    assert got is None or (got.low, got.high) == pytest.approx(expected)


@settings(max_examples=20, deadline=None)
@given(worlds, st.integers(0, 100))
def test_a_detector_is_not_different_from_itself_and_differences_change_sign(world, seed):
    truth, found = world
    other = random_world(seed, images=len(truth), classes=len(truth.classes))[1]
    weights = bootstrap.photo_weights(len(truth), resamples=40)
    first, second = (bootstrap.resampled_figures(truth, own, ["voc12", "corloc"], weights) for own in (found, other))
    for own in bootstrap.differences(first, first).values():
        assert own == bootstrap.FigureDifference(0, 0, 0, 0.5) and not own.is_significant
    back = bootstrap.differences(second, first)
    for path, own in bootstrap.differences(first, second).items():
        assert own.low <= own.high and 0 <= own.share_above <= 1
        assert (back[path].value, back[path].low, back[path].high) == pytest.approx((-own.value, -own.high, -own.low))
        assert back[path].share_above == pytest.approx(1 - own.share_above)


def test_pairing_finds_a_difference_that_intervals_of_each_do_not():
    """Both detectors fail in the same photos, and the second in one photo of ten more."""
    hits = [at % 2 == 0 for at in range(60)]
    worse = [hit and at % 10 != 0 for at, hit in enumerate(hits)]
    truth = truth_of(*([(*BOX, 0, 0, 0)] for _ in hits))
    first, second = (
        {f"im{at}": detections([(*(BOX if hit else FAR), 0.9, 0)]) for at, hit in enumerate(own)}
        for own in (hits, worse)
    )
    result = with_intervals(evaluate_detections(truth, first, ["corloc"]), truth, first, against=second)
    own = result.differences["corloc", "mean"]
    assert own.value == pytest.approx(0.1) and own.is_significant and own.share_above > 0.99
    alone = with_intervals(evaluate_detections(truth, second, ["corloc"]), truth, second).intervals["corloc", "mean"]
    assert alone.high > result.intervals["corloc", "mean"].low
    assert set(result.to_json()["differences"]["corloc"]) == {"mean", "per_class"}


def test_the_interval_is_as_wide_as_the_binomial_one():
    truth = truth_of(*([(*BOX, 0, 0, 0)] for _ in range(400)))
    found = {f"im{at}": detections([(*(BOX if at % 4 else FAR), 0.9, 0)]) for at in range(400)}
    own = with_intervals(evaluate_detections(truth, found, ["corloc"]), truth, found).intervals["corloc", "mean"]
    assert (own.high - own.low) == pytest.approx(2 * 1.96 * math.sqrt(0.75 * 0.25 / 400), rel=0.1)
    assert own.low < 0.75 < own.high


def _objects_of(truth: Truth, label: int, keep) -> Truth:
    """The truth with the other objects of a class marked as difficult."""
    out = []
    for size, objects in zip(truth.sizes, truth.objects, strict=True):
        number = int(((objects.labels == label) & ~objects.crowd).sum())
        difficult = objects.difficult.clone()
        for at, box in enumerate(objects.boxes.tolist()):
            area = (box[2] - box[0]) * (box[3] - box[1]) / (size[0] * size[1])
            difficult[at] |= not keep(area, number)
        out.append(replace(objects, difficult=difficult))
    return replace(truth, objects=tuple(out))


GROUPS = {
    ("by_size", "under 3 % of the photo"): lambda area, number: area < 0.03,
    ("by_size", "10 to 30 % of the photo"): lambda area, number: 0.1 <= area < 0.3,
    ("by_count", "1 object"): lambda area, number: number == 1,
    ("by_count", "2 or 3 objects"): lambda area, number: number in (2, 3),
    ("by_count", "4 objects or more"): lambda area, number: number >= 4,
}


def _group_with_loops(truth: Truth, found: dict[str, Detections], kind: str, keep) -> tuple[list[float], list[float]]:
    """AP and recall of each class with such objects: objects of other groups are ignored like difficult ones."""
    aps, recalls = [], []
    for label in range(len(truth.classes)):
        marked, kept = _objects_of(truth, label, keep), {}
        for photo, size, objects in zip(truth.ids, truth.sizes, marked.objects, strict=True):
            own = found[photo]
            overlap = voc_ap.same_class_iou(own, objects).numpy()
            number = int(((objects.labels == label) & ~objects.crowd).sum())
            rows = []
            for row in range(len(own)):
                x1, y1, x2, y2 = own.boxes[row].tolist()
                area = (x2 - x1) * (y2 - y1) / (size[0] * size[1])
                is_match = bool(len(objects)) and overlap[row].max() > 0.5
                belongs = keep(area, -1) if kind == "by_size" else number == 0 or keep(-1, number)
                rows.append(is_match or belongs)
            kept[photo] = own[np.flatnonzero(rows)]
        scores = voc_ap.voc12(marked, kept).values[label]
        if scores is not None:
            aps.append(scores)
            recalls.append(float(voc_ap.curves(marked, kept)[label].recall.max(initial=0.0)))
    return aps, recalls


@settings(max_examples=25, deadline=None)
@given(worlds)
def test_groups_match_the_rules_written_with_loops(world):
    truth, found = world
    numbers = breakdown(truth, found)
    assert numbers["ap"] == voc_ap.voc12(truth, found).mean
    assert numbers["corloc"] == voc_ap.corloc(truth, found).mean
    for (kind, name), keep in GROUPS.items():
        aps, recalls = _group_with_loops(truth, found, kind, keep)
        group = numbers[kind].get(name)
        assert (group is None) == (not aps)
        if group is not None:
            assert group["ap"] == pytest.approx(sum(aps) / len(aps))
            assert group["recall"] == pytest.approx(sum(recalls) / len(recalls))


@settings(max_examples=25, deadline=None)
@given(worlds)
def test_groups_contain_every_object_once(world):
    numbers = breakdown(*world)
    for kind in ("by_size", "by_count"):
        assert sum(group["objects"] for group in numbers[kind].values()) == numbers["objects"]


def test_corloc_of_a_group_is_that_of_its_photos():
    truth = truth_of([(*BOX, 0, 0, 0)], [(*BOX, 0, 0, 0), (*FAR, 0, 0, 0)], [(0, 0, 80, 80, 0, 0, 0)], [])
    found = {"im0": detections([(*BOX, 0.9, 0)]), "im1": detections([(0, 60, 20, 90, 0.9, 0)])}
    numbers = breakdown(truth, found)
    assert numbers["corloc"] == pytest.approx(1 / 3)
    assert {name: own["corloc"] for name, own in numbers["by_count"].items()} == {"1 object": 0.5, "2 or 3 objects": 0}
    sizes = {"3 to 10 % of the photo": 0.5, "30 % of the photo or more": 0}
    assert {name: own["corloc"] for name, own in numbers["by_size"].items()} == sizes


def test_no_photos_have_no_numbers():
    numbers = breakdown(truth_of(), {})
    assert numbers == {"ap": None, "corloc": None, "recall": None, "objects": 0, "by_size": {}, "by_count": {}}
