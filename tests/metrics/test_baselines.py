"""Trivial baselines: their boxes, the class scores they are given, and the words of a comparison with them."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings

from tag2box.annotations import Detections
from tag2box.metrics.baselines import (
    CENTRED_SIDE,
    Baseline,
    Verdict,
    best_scores,
    best_verdict,
    centred_boxes,
    scored_baselines,
    tag_scores,
    trivial_baselines,
)
from tag2box.metrics.evaluation import baselines_table, evaluate_detections, evaluate_with_baselines, verdict_lines
from tag2box.metrics.voc_ap import corloc, voc12
from tag2box.ops import areas, iou
from worlds import detections, truth_of, worlds

WHOLE, MIDDLE = (0, 0, 100, 100), (12.5, 12.5, 87.5, 87.5)  # of photos of 100 x 100
BOX = (10, 10, 30, 30)
NAMES = [
    "centred box, same class scores",
    "whole photo, same class scores",
    "centred box, tags known",
    "whole photo, tags known",
]


@pytest.mark.parametrize(
    ("sizes", "side", "expected"),
    [
        ([], 0.75, []),
        ([(100, 100)], 0.75, [MIDDLE]),
        ([(100, 40), (8, 16)], 0.5, [(25, 10, 75, 30), (2, 4, 6, 12)]),
        ([(100, 40)], 1.0, [(0, 0, 100, 40)]),
    ],
)
def test_the_centred_box_of(sizes, side, expected):
    assert centred_boxes(sizes, side).tolist() == [list(map(float, box)) for box in expected]


def test_the_side_is_the_one_its_derivation_gives():
    def matched(side: float) -> float:
        """Share of concentric objects, of areas uniform in [0, 1], that a centred box of this side matches."""
        shares = [(i + 0.5) / 2000 for i in range(2000)]
        return sum(min(side**2, a) / max(side**2, a) >= 0.5 for a in shares) / len(shares)

    best = max((side / 100 for side in range(5, 101)), key=matched)
    assert best == pytest.approx(math.sqrt(0.5), abs=0.01)
    assert best < CENTRED_SIDE < best + 0.05
    assert matched(CENTRED_SIDE) > 0.95 * matched(best)
    assert float(iou(torch.tensor([MIDDLE]), torch.tensor([WHOLE], dtype=torch.float32))) > 0.5


def test_class_scores_of_tags_and_of_detections():
    truth = truth_of([], [(*BOX, 1, 1, 0)], [(*BOX, 0, 0, 1)])  # nothing; a difficult dog; a crowd of cats
    assert {k: v.tolist() for k, v in tag_scores(truth).items()} == {
        "im0": [-math.inf, -math.inf],
        "im1": [-math.inf, 1.0],
        "im2": [-math.inf, -math.inf],
    }
    found = {"im0": Detections.empty(), "im1": detections([(*BOX, -2.5, 0), (*BOX, -3, 0), (*WHOLE, 0.25, 0)])}
    best = best_scores(found, 2)
    assert {k: v.tolist() for k, v in best.items()} == {"im0": [-math.inf] * 2, "im1": [0.25, -math.inf]}


def test_every_photo_and_tag_gets_the_box_if_tags_are_known():
    truth = truth_of([], [(*BOX, 0, 0, 0), (*BOX, 1, 0, 0)])
    centred, whole = trivial_baselines(truth)
    assert [centred.name, whole.name] == NAMES[2:]
    assert centred.knows_tags and whole.knows_tags
    assert len(centred.detections["im0"]) == 0
    assert centred.detections["im1"].boxes.tolist() == [list(MIDDLE)] * 2
    assert whole.detections["im1"].boxes.tolist() == [list(WHOLE)] * 2
    assert whole.detections["im1"].labels.tolist() == [0, 1]


def test_the_same_class_scores_leave_localisation_as_the_only_difference():
    truth = truth_of([(*MIDDLE, 0, 0, 0)], [(*WHOLE, 0, 0, 0)], [])
    found = {
        "im0": detections([(*BOX, 0.9, 0), (*BOX, 0.1, 0)]),
        "im1": detections([(*WHOLE, 0.5, 0)]),
        "im2": detections([(*BOX, 0.7, 0), (*BOX, 0.2, 1)]),
    }
    centred, whole, *_ = trivial_baselines(truth, found)
    assert not centred.knows_tags
    assert {k: v.scores.tolist() for k, v in whole.detections.items()} == {
        "im0": [0.9],
        "im1": [0.5],
        "im2": [0.7, 0.2],
    }
    result = evaluate_with_baselines(truth, found, ["voc12", "corloc"])
    assert result.scores["voc12"].mean < result.baselines[centred.name].scores["voc12"].mean
    assert result.verdicts()["corloc"] == Verdict(0.5, "centred box, same class scores", 1.0)


@settings(max_examples=25, deadline=None)
@given(worlds)
def test_rows_are_the_definition_written_with_loops(world):
    truth, found = world
    for row in trivial_baselines(truth, found):
        for photo, (width, height), own in zip(truth.ids, truth.sizes, truth.objects, strict=True):
            expected = {}
            if row.knows_tags:
                for label, is_crowd in zip(own.labels.tolist(), own.crowd.tolist(), strict=True):
                    if not is_crowd:
                        expected[label] = 1.0
            else:
                for label, score in zip(found[photo].labels.tolist(), found[photo].scores.tolist(), strict=True):
                    expected[label] = max(score, expected.get(label, -1.0))
            got = row.detections[photo]
            assert dict(zip(got.labels.tolist(), got.scores.tolist(), strict=True)) == expected
            share = 1.0 if "whole" in row.name else CENTRED_SIDE**2
            assert areas(got.boxes).tolist() == pytest.approx([share * width * height] * len(got))


@settings(max_examples=25, deadline=None)
@given(worlds)
def test_known_tags_are_never_below_the_same_scores_in_corloc(world):
    truth, found = world
    centred, whole, centred_tags, whole_tags = trivial_baselines(truth, found)
    for same, tags in ((centred, centred_tags), (whole, whole_tags)):
        pairs = zip(corloc(truth, same.detections).values, corloc(truth, tags.detections).values, strict=True)
        assert all(low is None or low <= high for low, high in pairs)


# ---------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("value", "rows", "words"),
    [
        (0.5, [], None),
        (None, [("whole photo, tags known", 0.5)], None),
        (0.5, [("whole photo, tags known", None)], None),
        (0.391, [("whole photo, x", 0.2), ("centred box, tags known", 0.4622)], "not above a centred box (46.2)"),
        (0.5, [("whole photo, x", 0.5)], "not above the whole photo (50.0)"),
        (0.51, [("whole photo, x", 0.5), ("centred box, x", 0.5)], "above the whole photo (50.0)"),
        (0.2, [("class map", 0.3)], "not above class map (30.0)"),
    ],
)
def test_the_verdict_of(value, rows, words):
    verdict = best_verdict(value, rows)
    assert (None if verdict is None else verdict.words()) == words


def test_rows_that_know_the_tags_are_no_bar_for_ap():
    truth = truth_of([(*MIDDLE, 0, 0, 0)], [(*MIDDLE, 1, 0, 0)])
    found = {"im0": detections([(*MIDDLE, 0.9, 1), (*MIDDLE, 0.8, 0)]), "im1": detections([(*MIDDLE, 0.1, 0)])}
    result = evaluate_with_baselines(truth, found, ["voc12", "corloc", "challenges"])
    assert result.baselines["centred box, tags known"].scores["voc12"].mean == 1
    verdicts = result.verdicts()
    assert verdicts["voc12"].best_row == "centred box, same class scores"
    assert (verdicts["corloc"].best_row, verdicts["corloc"].best) == ("centred box, tags known", 1.0)
    assert verdicts["challenges found"].words() == "not above a centred box (50.0)"


def test_further_rows_come_from_outside():
    truth = truth_of([(*BOX, 0, 0, 0)])
    found = {"im0": detections([(*WHOLE, 0.9, 0)])}
    probe = scored_baselines(truth, {"im0": torch.tensor([0.4, -math.inf])}, "linear probe")
    maps = Baseline("class map", {"im0": detections([(*BOX, 0.3, 0)])})
    result = evaluate_with_baselines(truth, found, ["voc12", "coco"], further=[*probe, maps])
    assert list(result.baselines) == [*NAMES, "centred box, linear probe", "whole photo, linear probe", "class map"]
    assert result.verdicts()["voc12"].words() == "not above class map (100.0)"
    assert set(result.verdicts()) == {"voc12", "coco AP", "coco AP50"}


def test_json_keeps_its_keys_and_gains_two():
    truth = truth_of([(*BOX, 0, 0, 0)])
    found = {"im0": detections([(*BOX, 0.9, 0)])}
    plain = evaluate_detections(truth, found, ["voc07", "corloc"]).to_json()
    content = evaluate_with_baselines(truth, found, ["voc07", "corloc"]).to_json()
    assert {key: content[key] for key in plain} == plain
    assert set(content) - set(plain) == {"baselines", "verdicts"}
    assert list(content["baselines"]) == NAMES
    assert set(content["baselines"][NAMES[0]]) == {"voc07", "corloc"}
    assert content["verdicts"]["corloc"] == {"value": 1.0, "best_row": NAMES[0], "best": 0.0, "is_above": True}
    json.dumps(content, allow_nan=False)


def test_the_table_has_the_detections_first():
    truth = truth_of([(*BOX, 0, 0, 0)])
    result = evaluate_with_baselines(truth, {"im0": detections([(*BOX, 0.9, 0)])}, ["voc07", "errors"])
    table = baselines_table(result)
    assert list(table.columns[0].cells) == ["these detections", *NAMES]
    assert [column.header for column in table.columns] == ["", "voc07", "errors correct"]
    assert list(table.columns[1].cells) == ["100.0", "0.0", "0.0", "0.0", "0.0"]
    assert verdict_lines(result) == ["All figures are above the trivial boxes."]
    empty = evaluate_with_baselines(truth_of([]), {}, ["voc07"])
    assert list(baselines_table(empty).columns[1].cells) == ["-"] * 5
    assert verdict_lines(empty) == []


def test_detections_that_are_a_row_are_not_above_it():
    truth = truth_of([(*MIDDLE, 0, 0, 0)])
    rows = trivial_baselines(truth)
    result = evaluate_with_baselines(truth, rows[0].detections, ["voc07", "voc12", "corloc", "errors"])
    assert {v.words() for v in result.verdicts().values()} == {"not above a centred box (100.0)"}
    assert (
        verdict_lines(result)[0] == "voc07: 100.0 is not above a centred box (100.0) [centred box, same class scores]"
    )
    assert voc12(truth, rows[0].detections).mean == 1
