from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tag2box.annotations import Photo
from tag2box.data.check import ADVICE
from tag2box.images import read_photo
from tag2box.proposals.base import Candidates, FoundBoxes, ProposalMethod
from tag2box.proposals.combined import Combined
from tag2box.proposals.selective_search import SelectiveSearch
from tag2box.proposals.store import ProposalStore, write_store
from tag2box.proposals.suitability import (
    MIN_PHOTOS,
    SAMPLE,
    SearchedPhoto,
    find_concerns,
    sample_concerns,
    sample_evenly,
    store_concerns,
)
from tag2box.recipes import scenes

DEFAULT = SelectiveSearch(short_side=200).source()


BOX = (10.0, 10.0, 60.0, 60.0)


def searched(count: int, box: tuple[float, ...] = BOX, size: tuple[int, int] = (500, 400)) -> SearchedPhoto:
    return SearchedPhoto(size, torch.tensor([box]).float().repeat(count, 1))


@pytest.mark.parametrize(
    ("photos", "source", "kinds"),
    [
        pytest.param([], DEFAULT, [], id="no photos"),
        pytest.param([searched(300)], DEFAULT, [], id="as usual"),
        pytest.param([searched(0)], DEFAULT, ["few proposals"], id="none"),
        pytest.param([searched(150), searched(80), searched(999)], DEFAULT, ["few proposals"], id="few"),
        pytest.param([searched(60)], {**DEFAULT, "max_boxes": 60}, [], id="as many as the cap allows"),
        pytest.param([searched(30)], {**DEFAULT, "max_boxes": 60}, [], id="half of what the cap allows"),
        pytest.param([searched(29)], {**DEFAULT, "max_boxes": 60}, ["few proposals"], id="less than that"),
        pytest.param([searched(183, size=(224, 192))], scenes().proposals.source(), [], id="the demo's scenes"),
        pytest.param([searched(300, (0, 0, 490, 390))], DEFAULT, ["proposals as large as the photo"], id="large"),
        pytest.param([searched(300, size=(240, 250))], DEFAULT, ["small objects without proposals"], id="min_side"),
        pytest.param([searched(300, size=(240, 250))], Combined().source(), [], id="a relative minimum"),
        pytest.param([searched(300, size=(90, 99))], {**DEFAULT, "min_side": 0}, ["photos enlarged for the search"],
                     id="tiny photos"),
        pytest.param([searched(300, size=(4000, 3000))], DEFAULT, ["photos much reduced for the search"], id="huge"),
        pytest.param([searched(300, size=(4000, 3000))], {"kind": "imported"}, [], id="settings unknown"),
        pytest.param([searched(300, size=(4000, 3000))], {**DEFAULT, "short_side": None}, [], id="full size"),
    ],
)  # fmt: skip
def test_concerns_by_hand(photos: list[SearchedPhoto], source: dict[str, object], kinds: list[str]) -> None:
    found = find_concerns(photos, source)
    assert [concern.kind for concern in found] == kinds
    for concern in found:
        assert "\n" not in str(concern) and str(concern) == f"{concern.kind}: {concern.line}; {concern.advice}"
        assert ADVICE[concern.kind][0] == "warning"


def test_the_advice_is_another_method_unless_that_was_used() -> None:
    assert "--method combined" in find_concerns([searched(3)], DEFAULT)[0].advice
    assert "--method" not in find_concerns([searched(3)], Combined().source())[0].advice


@pytest.mark.parametrize(("count", "wanted"), [(0, []), (1, [0]), (3, [0, 1, 2]), (9, [0, 2, 4, 6, 8])])
def test_photos_are_evenly_spaced(count: int, wanted: list[int]) -> None:
    photos = [Photo(str(i), Path(f"{i}.jpg"), 8, 6) for i in range(count)]
    assert sample_evenly(photos, 5) == [photos[i] for i in wanted]


@pytest.mark.parametrize(("count", "kinds"), [(MIN_PHOTOS - 1, []), (MIN_PHOTOS, ["few proposals"])])
def test_of_a_store_with_few_photos_nothing_is_said(count: int, kinds: list[str], tmp_path: Path) -> None:
    photos = [Photo(str(i), tmp_path / f"{i}.jpg", 500, 400) for i in range(count)]
    write_store(tmp_path / "s", DEFAULT, photos, [Candidates.unranked(searched(5).boxes)] * count)
    other = Photo("other", tmp_path / "other.jpg", 500, 400)  # not in the store
    found = store_concerns(ProposalStore.open(tmp_path / "s"), [*photos, other])
    assert [concern.kind for concern in found] == kinds


class Nothing(ProposalMethod):
    """Finds no boxes, and counts its calls."""

    def search(self, bgr: np.ndarray, min_side: float) -> FoundBoxes:
        CALLS.append(bgr.shape)
        return FoundBoxes(np.zeros((0, 4)), np.zeros(0))


CALLS: list[tuple[int, ...]] = []


def test_a_sample_is_searched_and_bad_photos_are_skipped(tmp_path: Path) -> None:
    for number in range(MIN_PHOTOS):
        Image.new("L", (50, 40)).save(tmp_path / f"{number}.png")
    photos = [Photo(str(i), tmp_path / f"{i}.png", 50, 40) for i in range(MIN_PHOTOS)]
    (tmp_path / "0.png").write_bytes(b"no photo")
    CALLS.clear()
    assert [c.kind for c in sample_concerns(photos, Nothing(min_side=0), read_photo)] == ["few proposals"]
    assert CALLS == [(40, 50, 3)] * (SAMPLE - 1)
    CALLS.clear()
    assert sample_concerns(photos[1:], Nothing(), read_photo) == () and not CALLS
