"""``tag2box proposals import``: from other people's files to a store, or nothing at all."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.io
from typer.testing import CliRunner

from tag2box import io
from tag2box.cli import app
from tag2box.cli.import_proposals import import_proposals
from tag2box.errors import UserError
from tag2box.extend import PROPOSAL_FILE_FORMATS
from tag2box.formats.datasets import read_photos
from tag2box.formats.listing import DataSource
from tag2box.proposals.importers.validate import ORDERS, BoxFilter, ConventionOverride
from tag2box.proposals.store import ProposalStore
from tiny import tiny_photos

COUNT = 5
IDS = [f"photo{number}" for number in range(COUNT)]
BOXES = [np.array([[0, 0, 20, 10], [15.5, 16, 40, 39]][: 1 + number % 2], np.float64) for number in range(COUNT)]


@pytest.fixture
def data(tmp_path: Path) -> DataSource:
    tiny_photos(tmp_path / "data", COUNT)
    return DataSource(path=tmp_path / "data" / "photos")


def save(path: Path, boxes: list[np.ndarray] = BOXES, ids: list[object] = IDS, **more: object) -> Path:  # type: ignore[assignment]
    path.write_bytes(pickle.dumps({"boxes": [b - [0, 0, 1, 1] for b in boxes], "ids": ids, **more}, 2))
    return path


def contents(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))


def test_boxes_arrive_as_they_were(tmp_path: Path, data: DataSource) -> None:
    imported = import_proposals(save(tmp_path / "a.pkl"), data, tmp_path / "deep" / "store")
    store = ProposalStore.open(tmp_path / "deep" / "store")
    for name, boxes in zip(IDS, BOXES, strict=True):
        assert store.boxes(name).tolist() == boxes.tolist()
        assert not store.scores(name).any()
    assert len(store) == COUNT
    assert imported.counts.kept == sum(map(len, BOXES))
    assert imported.matching.unused == imported.matching.missing == ()


def test_imported_boxes_belong_to_the_content_of_their_photos(tmp_path: Path, data: DataSource) -> None:
    import_proposals(save(tmp_path / "a.pkl"), data, tmp_path / "store")
    photos = read_photos(data)
    ProposalStore.open(tmp_path / "store").check(photos)
    shutil.copy(photos[2].path, photos[0].path)
    with pytest.raises(UserError, match="made for another photo photo0 than"):
        ProposalStore.open(tmp_path / "store").check([replace(photos[0], width=48, height=40)])


def test_what_a_killed_import_left_is_removed(tmp_path: Path, data: DataSource) -> None:
    child = os.fork()
    if child == 0:
        io.temporary_path(tmp_path / "store").mkdir()
        os._exit(9)
    os.waitpid(child, 0)
    assert len([*tmp_path.glob(".store.*")]) == 1
    import_proposals(save(tmp_path / "a.pkl"), data, tmp_path / "store")
    assert not [*tmp_path.glob(".*")] and len(ProposalStore.open(tmp_path / "store")) == COUNT


def test_the_store_records_the_source_of_its_boxes(tmp_path: Path, data: DataSource) -> None:
    file = save(tmp_path / "a.pkl")
    import_proposals(file, data, tmp_path / "store", keep=BoxFilter(min_side=3, max_boxes=7))
    source = dict(ProposalStore.open(tmp_path / "store").source)
    assert len(source.pop("sha256")) == 64
    assert source == {
        "kind": "imported", "format": "pkl", "file": "a.pkl", "boxes_are": "xyxy", "first_pixel": 0,
        "last_pixel": "included", "min_side": 3, "max_boxes": 7,
    }  # fmt: skip


def test_a_folder_of_one_file_an_image(tmp_path: Path, data: DataSource) -> None:
    for name, boxes in zip(IDS, BOXES, strict=True):
        x1, y1, x2, y2 = boxes.T
        rows = {"boxes": np.stack([y1 + 1, x1 + 1, y2, x2], axis=1), "scores": np.arange(len(boxes)) / 4}
        (tmp_path / "mcg").mkdir(exist_ok=True)
        scipy.io.savemat(tmp_path / "mcg" / f"{name}.mat", rows)
    import_proposals(tmp_path / "mcg", data, tmp_path / "store")
    store = ProposalStore.open(tmp_path / "store")
    assert store.boxes("photo1").tolist() == BOXES[1][::-1].tolist()  # the best first
    assert store.scores("photo1").tolist() == [0.25, 0]
    assert store.source["format"] == "mcg"


def test_what_does_not_match_is_reported(tmp_path: Path, data: DataSource) -> None:
    file = save(tmp_path / "a.pkl", [*BOXES[:3], BOXES[0]], [0, 1, "photo2.jpg", "elsewhere"])
    with pytest.raises(UserError, match=r"no proposals for 2 of 5 photos \(photo3, photo4\); --allow-missing"):
        import_proposals(file, data, tmp_path / "store")
    imported = import_proposals(file, data, tmp_path / "store", allow_missing=True)
    assert imported.matching.unused == ("elsewhere",)
    assert imported.matching.missing == ("photo3", "photo4")
    assert len(ProposalStore.open(tmp_path / "store").boxes("photo3")) == 0
    assert "1 images of the file are not in the dataset (elsewhere)" in imported.lines()


WRONG: list[tuple[str, dict[str, object], dict[str, object], str]] = [
    ("other photos", {"ids": [f"dog_{n}" for n in "abcde"]}, {}, "none of its 5 images (dog_a, dog_b, dog_c, ...)"),
    ("a photo twice", {"ids": [*IDS[:4], "photo0"]}, {}, "image photo0 is in it twice"),
    ("beyond the photos", {"boxes": [b * 9 for b in BOXES]}, {}, "do not lie on their photos"),
    ("negative sizes", {"boxes": [b[:, [2, 3, 0, 1]] for b in BOXES]}, {}, "do not lie on their photos"),
    ("not a number", {"boxes": [*BOXES[:4], BOXES[4] * np.nan]}, {}, "image photo4: boxes: row 0"),
    ("scores of some", {"scores": [np.ones(n) for n in (1, 2, 1, 2, 3)]}, {}, "image photo4: 1 boxes but 3 scores"),
    ("the wrong order", {}, {"convention": ConventionOverride(boxes_are="xywh")}, "with --boxes-are xyxy it is 0.0%"),
    ("the wrong format", {}, {"form": "npz"}, "not readable as .npz"),
    ("a format that is none", {}, {"form": "abc"}, '--format abc: must be "selective-search" or "mcg"'),
]


@pytest.mark.parametrize(("content", "options", "reason"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_nothing_is_written_when_a_file_is_refused(
    content: dict[str, object], options: dict[str, object], reason: str, tmp_path: Path, data: DataSource
) -> None:
    file = save(tmp_path / "a.pkl", **content)
    before = contents(tmp_path)
    with pytest.raises(UserError) as caught:
        import_proposals(file, data, tmp_path / "deep" / "store", **options)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert contents(tmp_path) == before


def test_an_image_without_scores_among_others_is_refused(tmp_path: Path, data: DataSource) -> None:
    tables = {name: [[*row, 0.5] for row in b.tolist()] for name, b in zip(IDS, BOXES, strict=True)}
    tables["photo3"] = BOXES[3].tolist()
    (tmp_path / "a.json").write_text(json.dumps(tables))
    with pytest.raises(UserError, match="photo photo3 has no scores, others have"):
        import_proposals(tmp_path / "a.json", data, tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_what_is_there_is_never_replaced(tmp_path: Path, data: DataSource) -> None:
    file = save(tmp_path / "a.pkl")
    import_proposals(file, data, tmp_path / "store")
    before = {name: (tmp_path / "store" / name).read_bytes() for name in contents(tmp_path / "store")}
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "store", tmp_path / "file"):
        with pytest.raises(UserError, match="exists already and is never replaced"):
            import_proposals(file, data, out)
    assert before == {name: (tmp_path / "store" / name).read_bytes() for name in contents(tmp_path / "store")}
    (tmp_path / "empty").mkdir()
    import_proposals(file, data, tmp_path / "empty")
    assert len(ProposalStore.open(tmp_path / "empty")) == COUNT


# ---------------------------------------------------------------- the command line


def run(*args: object) -> object:
    return CliRunner().invoke(app, ["proposals", "import", *map(str, args)])


def test_the_command_prints_what_it_did(tmp_path: Path, data: DataSource) -> None:
    file = save(tmp_path / "a.pkl", scores=[np.ones(len(b)) for b in BOXES])
    done = run(file, data.path, "--out", tmp_path / "store", "--max-boxes", 1, "--min-side", 2)
    assert done.exit_code == 0, done.output
    assert "read as pkl: boxes xyxy, first pixel 0, last pixel included" in done.output
    assert "5 photos matched, 5 boxes, 1 per photo" in done.output
    assert "2 boxes beyond --max-boxes left out" in done.output
    assert f"store: {tmp_path / 'store'}" in done.output


def test_every_option_reaches_the_store(tmp_path: Path, data: DataSource) -> None:
    rows = [{"image_id": name, "bbox": b.tolist()[0]} for name, b in zip(IDS, BOXES, strict=True)]
    (tmp_path / "boxes.txt").write_text(json.dumps(rows[:4]))
    done = run(
        tmp_path / "boxes.txt", data.path, "--out", tmp_path / "store", "--format", "coco", "--boxes-are", "xyxy",
        "--first-pixel", 0, "--last-pixel", "included", "--allow-missing",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    store = ProposalStore.open(tmp_path / "store")
    assert store.boxes("photo0").tolist() == [[0, 0, 21, 11]]
    assert store.source["last_pixel"] == "included"
    assert len(store.boxes("photo4")) == 0


def test_help_lists_every_format_and_box_order() -> None:
    shown = run("--help").output
    assert all(word in shown for word in (*PROPOSAL_FILE_FORMATS, *ORDERS))


def test_a_mistake_is_one_line(tmp_path: Path, data: DataSource) -> None:
    done = run(tmp_path / "none.pkl", data.path, "--out", tmp_path / "store")
    assert isinstance(done.exception, UserError)
    assert str(done.exception).startswith(f"{tmp_path / 'none.pkl'}: no such file or folder")
