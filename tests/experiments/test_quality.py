"""Label quality over training: against a count by hand, over seeds, and drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from tag2box.annotations import Objects, Truth
from tag2box.experiments.outcomes import label_quality, mean_known, mean_quality, quality_json
from tag2box.reporting.records import PseudoCount, RunRecord
from tag2box.reporting.study_page import quality_sections
from tag2box.reporting.study_tables import LabelQuality, QualityCurve
from tag2box.training.events import Gallery, GalleryPhoto

TRUTH = Truth(
    ("cat", "dog"),
    ("a", "b", "unseen"),
    ((100, 100),) * 3,
    (
        Objects.of([[0, 0, 10, 10], [50, 50, 60, 60]], [0, 0]),
        Objects.of([[0, 0, 20, 20]], [1]),
        Objects.of([[0, 0, 20, 20]], [1]),
    ),
)


def record(*galleries: Gallery, pseudo: tuple[PseudoCount, ...] = ()) -> RunRecord:
    return RunRecord("run", Path("run"), galleries=galleries, pseudo=pseudo)


def test_a_run_without_galleries_has_no_label_quality() -> None:
    assert label_quality(record(), TRUTH) == ()
    assert quality_json(()) == []
    assert mean_quality([]) == () == mean_quality([[], []])
    assert quality_sections([QualityCurve("without records", ())]) == ()


def test_precision_and_recall_are_those_counted_by_hand() -> None:
    gallery = Gallery(
        3,
        (
            GalleryPhoto("a", ((0, 0, 10, 10), (0, 0, 10, 4), (50, 50, 60, 60)), (0, 0, 1), (0.9, 0.8, 0.7)),
            GalleryPhoto("b", (), (), ()),
        ),
    )
    counts = (PseudoCount(2, threshold=(0.1, 0.4)), PseudoCount(5, threshold=(0.2, 0.6)))
    (moment,) = label_quality(record(gallery, pseudo=counts), TRUTH)
    # right at 0.25: the first two; at 0.5 and 0.75 the first alone. Recalled of three objects on a and b: the first.
    assert moment.precision == {"0.25": 2 / 3, "0.5": 1 / 3, "0.75": 1 / 3}
    assert moment.recall == {"0.25": 1 / 3, "0.5": 1 / 3, "0.75": 1 / 3}
    assert moment.boxes == {"cat": 2, "dog": 1} and moment.objects == {"cat": 2, "dog": 1}
    assert (moment.iteration, moment.photos, moment.threshold) == (3, 2, 0.4)


def test_tau_before_the_first_logged_value_is_the_first_value() -> None:
    moments = label_quality(record(Gallery(1), pseudo=(PseudoCount(5, threshold=(0.6,)),)), TRUTH)
    assert moments[0].threshold == 0.6
    assert label_quality(record(Gallery(1), pseudo=(PseudoCount(5, threshold=(None,)),)), TRUTH)[0].threshold is None


def moment(iteration: int, share: float | None, tau: float | None = None) -> LabelQuality:
    shares = {"0.5": share}
    return LabelQuality(iteration, 2, shares, shares, {"cat": 3}, {"cat": 2}, tau)


def test_seeds_are_taken_together_moment_by_moment() -> None:
    together = mean_quality([[moment(1, 0.2), moment(4, 0.4, 0.5)], [moment(1, None), moment(4, 0.8, None)]])
    assert [(m.iteration, m.threshold) for m in together] == [(1, None), (4, 0.5)]
    assert [m.precision["0.5"] for m in together] == pytest.approx([0.2, 0.6])
    assert [m.boxes for m in together] == [{"cat": 6}, {"cat": 6}]


@given(st.lists(st.none() | st.floats(-1e3, 1e3)))
def test_the_mean_lies_among_what_is_known(values: list[float | None]) -> None:
    known = [value for value in values if value is not None]
    found = mean_known(values)
    assert (found is None) is (not known)
    assert found is None or min(known) - 1e-6 <= found <= max(known) + 1e-6


def test_the_figures_show_every_row_and_overlap() -> None:
    (section,) = quality_sections([QualityCurve("ours", (moment(1, 0.2, 0.3), moment(4, 0.6, 0.5)))])
    titles = [figure.title for figure in section.figures]
    assert titles == [
        "Precision at IoU 0.5",
        "Recall at IoU 0.5",
        "The threshold τ",
        "Pseudo boxes per true object",
    ]
    assert "ours 20.0 to 60.0" in section.figures[0].reading
    assert "ours 3 for 2 objects" in section.figures[-1].reading
    assert all("ours" in str(figure.charts[0]) for figure in section.figures)
