from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from tag2box.errors import UserError
from tag2box.extend import PROPOSAL_METHODS
from tag2box.proposals.base import FoundBoxes, ProposalMethod, default_method, method_from_source
from tag2box.proposals.combined import Combined
from tag2box.proposals.early_responses import Wsrpn
from tag2box.proposals.edge_boxes import EdgeBoxes
from tag2box.proposals.importers.proposal_files import Imported
from tag2box.proposals.selective_search import SelectiveSearch

BLANK = torch.zeros(3, 40, 60, dtype=torch.uint8)  # 60 wide, 40 high


@dataclass(frozen=True, kw_only=True)
class Fixed(ProposalMethod):
    """A method for tests: it always finds the same boxes, whatever the photo, and records the photos."""

    kind: Literal["fixed"] = "fixed"
    min_side: int = 0
    rows: tuple[tuple[float, ...], ...] = ()  # x1, y1, x2, y2, score
    model: Path | None = None

    def search(self, bgr: np.ndarray, min_side: float) -> FoundBoxes:
        SEEN.append((bgr.shape[:2], min_side))
        rows = np.array(self.rows, np.float64).reshape(-1, 5)
        return FoundBoxes(rows[:, :4], rows[:, 4])


SEEN: list[tuple[tuple[int, ...], float]] = []


@pytest.mark.parametrize(
    ("rows", "settings", "expected"),
    [
        pytest.param([], {}, [], id="nothing found"),
        pytest.param([(1, 2, 3, 4, 0.5)], {}, [(1, 2, 3, 4, 0.5)], id="one box"),
        pytest.param([(-5, -5, 70, 50, 1)], {}, [(0, 0, 60, 40, 1)], id="clipped"),
        pytest.param([(70, 3, 80, 9, 1), (5, 5, 5, 9, 1)], {}, [], id="nothing left of it"),
        pytest.param([(1, 1, 9, 9, 1), (1, 1, 9, 9, 3), (1, 1, 9, 9, 2)], {}, [(1, 1, 9, 9, 3)], id="repeated"),
        pytest.param([(-1, 0, 9, 9, 1), (-2, 0, 9, 9, 2)], {}, [(0, 0, 9, 9, 2)], id="equal once clipped"),
        pytest.param([(0, 0, 7, 9, 1), (0, 0, 8, 8, 2)], {"min_side": 8}, [(0, 0, 8, 8, 2)], id="too small"),
        pytest.param([(0, 0, 5, 5, 1), (0, 0, 6, 6, 3), (0, 0, 7, 7, 2)], {"max_boxes": 2},
                     [(0, 0, 6, 6, 3), (0, 0, 7, 7, 2)], id="the best of many"),
        pytest.param([(3, 0, 5, 5, 1), (1, 0, 5, 5, 1), (2, 0, 5, 5, 1)], {"max_boxes": None},
                     [(1, 0, 5, 5, 1), (2, 0, 5, 5, 1), (3, 0, 5, 5, 1)], id="equal scores from left to right"),
    ],
)  # fmt: skip
def test_the_policy_by_hand(rows: list, settings: dict, expected: list) -> None:
    found = Fixed(rows=tuple(rows), **settings)(BLANK)
    assert found.boxes.dtype == found.scores.dtype == torch.float32
    assert [(*box, score) for box, score in zip(found.boxes.tolist(), found.scores.tolist(), strict=True)] == expected


def _twin(rows: list[tuple[float, ...]], size: tuple[int, int], min_side: int, cap: int) -> list[tuple[float, ...]]:
    best: dict[tuple[float, ...], float] = {}
    for *corners, score in rows:
        x1, x2 = (min(max(x, 0), size[0]) for x in corners[::2])
        y1, y2 = (min(max(y, 0), size[1]) for y in corners[1::2])
        if x2 - x1 > 0 and y2 - y1 > 0 and x2 - x1 >= min_side and y2 - y1 >= min_side:
            best[x1, y1, x2, y2] = max(score, best.get((x1, y1, x2, y2), score))
    ranked = sorted(best, key=lambda box: (-best[box], box))
    return [(*box, best[box]) for box in ranked[:cap]]


@given(
    st.lists(st.tuples(*[st.integers(-5, 65)] * 4, st.integers(0, 3)), max_size=12),
    st.integers(0, 10),
    st.integers(1, 6),
)
def test_the_policy_matches_one_written_with_loops(rows: list, min_side: int, cap: int) -> None:
    found = Fixed(rows=tuple(rows), min_side=min_side, max_boxes=cap)(BLANK)
    got = [(*box, score) for box, score in zip(found.boxes.tolist(), found.scores.tolist(), strict=True)]
    assert got == _twin(rows, (60, 40), min_side, cap)


@pytest.mark.parametrize(
    ("short_side", "size", "expected"),
    [
        (None, (60, 40), (60, 40)),
        (32, (32, 32), (32, 32)),
        (32, (1, 1), (32, 32)),
        (200, (500, 375), (267, 200)),
        (200, (375, 500), (200, 267)),
        (200, (160, 100), (320, 200)),
        (200, (30000, 10), (1600, 1)),  # a strip is kept affordable
        (200, (20000, 30000), (200, 300)),
    ],
)
def test_the_working_resolution(short_side: int | None, size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert Fixed(short_side=short_side).working_size(size) == expected


def test_boxes_are_in_pixels_of_the_photo_whatever_was_searched() -> None:
    method = Fixed(short_side=80, min_side=10, rows=((0, 0, 60, 40, 1), (60, 40, 120, 80, 1)))
    SEEN.clear()
    assert method(BLANK).boxes.tolist() == [[0, 0, 30, 20], [30, 20, 60, 40]]
    reduced = method(BLANK, size=(600, 400))  # a copy of a photo ten times as large
    assert reduced.boxes.tolist() == [[0, 0, 300, 200], [300, 200, 600, 400]]
    assert SEEN == [((80, 120), 20.0), ((80, 120), 2.0)]  # small boxes are small in pixels of the photo


def test_a_store_records_files_by_name_and_content(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for file in (tmp_path / "m.yml", tmp_path / "a" / "m.yml", tmp_path / "n.yml"):
        file.write_text("same")
    sources = [Fixed(model=file).source() for file in (tmp_path / "m.yml", tmp_path / "a" / "m.yml")]
    assert sources[0] == sources[1]
    assert str(sources[0]["model"]).startswith("m.yml sha256:0967115f")
    assert Fixed(model=tmp_path / "n.yml").source() != sources[0]
    (tmp_path / "m.yml").write_text("other")
    assert Fixed(model=tmp_path / "m.yml").source() != sources[0]
    with pytest.raises(UserError, match=r"none\.yml: not readable"):
        Fixed(model=tmp_path / "none.yml").source()


def test_settings_are_flat_and_the_kind_comes_first() -> None:
    source = replace(Fixed(), short_side=99).source()
    assert [*source][:4] == ["kind", "short_side", "max_boxes", "min_side"]
    assert source["short_side"] == 99


# ---------------------------------------------------------------- methods by name and by record


def test_every_method_has_a_default_for_ones_own_photos() -> None:
    methods = {kind: default_method(kind) for kind in PROPOSAL_METHODS}
    assert {kind: method.short_side for kind, method in methods.items()} == {
        "selective_search": 200, "edge_boxes": 200, "combined": 200, "wsrpn": 200, "sam": None, "imported": None,
    }  # fmt: skip
    assert replace(methods["selective_search"], short_side=None) == SelectiveSearch()
    assert default_method("test_base:Fixed") == Fixed(short_side=200)


@pytest.mark.parametrize(
    "method",
    [
        SelectiveSearch(),
        SelectiveSearch(short_side=99, mode="quality", seed=3, max_boxes=None),
        EdgeBoxes(alpha=0.5, min_side=0),
        Wsrpn(layers=1, min_share=0.02),
        Combined(sources=("blobs", "windows"), min_share=0.05),
        Combined(short_sides=(96, 400)),
        EdgeBoxes(min_share=0.02),
        Imported(method="cob"),
        Fixed(rows=((1.0, 2.0, 3.0, 4.0, 0.5),), short_side=64),
    ],
)
def test_a_method_comes_back_from_what_a_store_records(method: ProposalMethod) -> None:
    assert method_from_source(json.loads(json.dumps(method.source()))) == method


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kind": "egde_boxes"}, "did you mean edge_boxes"),
        ({"kind": "no_such_package:Grid"}, "cannot be imported"),
        ({"kind": "test_base:BLANK"}, "is a dataclass whose fields are its settings"),
        ({"kind": "tag2box.annotations:Photo"}, "expected a subclass of tag2box.proposals.base.ProposalMethod"),
        ({"depth": 3}, "made with depth 3, which edge_boxes does not have"),
        ({"alpha": 3.5}, r"made with alpha 3\.5, which edge_boxes does not accept"),
        ({"alpha": "high"}, 'made with alpha "high", which edge_boxes does not accept'),
    ],
)
def test_a_record_that_fits_no_method_is_refused_in_one_line(change: dict[str, object], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        method_from_source({**EdgeBoxes().source(), **change})
    assert "\n" not in str(caught.value)


def test_a_method_with_a_file_requires_the_file(tmp_path: Path) -> None:
    (tmp_path / "m.yml").write_text("same")
    with pytest.raises(
        UserError, match=r"^made with m\.yml sha256:0967115f.+; name this file with --set proposals\.model"
    ):
        method_from_source(EdgeBoxes(model=tmp_path / "m.yml").source())


def test_a_method_without_a_search_is_not_implemented() -> None:
    with pytest.raises(NotImplementedError):
        ProposalMethod(kind="none")(BLANK)
