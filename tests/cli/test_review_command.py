"""``tag2box review`` and what follows from it: exports with the boxes of a review, one line about what is missing."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from review_world import scene_labels
from tag2box.cli.label_export import convert, export
from tag2box.formats.coco_boxes import read_coco_truth
from tag2box.labels.journal import JOURNAL_FILE, Journal
from tag2box.labels.label_set import LabelSet
from tag2box.labels.reviews import Action, BoxState
from tiny_world import call


@pytest.fixture
def reviewed(tmp_path: Path) -> tuple[Path, LabelSet]:
    """A label set of three photos, of which the second is done, with its first box rejected and a drawn one."""
    labels = scene_labels(tmp_path, 3)
    photo = labels.content.photos[1]
    first = BoxState(photo.boxes[0].box, photo.boxes[0].name, "rejected")
    drawn = BoxState((2.0, 3.0, 20.0, 30.0), "clock", "accepted")
    with Journal(tmp_path / "labels", labels) as journal:
        journal.append(photo.id, Action("reject", {0: first}), based_on=0, key="1")
        journal.append(photo.id, Action("draw", {len(photo.boxes): drawn}), based_on=1, key="2")
        journal.append(photo.id, Action("done"), based_on=2, key="3")
    return tmp_path / "labels", labels


def test_exports_have_the_boxes_of_the_review(reviewed: tuple[Path, LabelSet], tmp_path: Path) -> None:
    folder, labels = reviewed
    content = export(folder, tmp_path / "all.json")
    before = labels.content.photos
    assert content.photos[0] == before[0] and content.photos[2] == before[2]
    assert content.photos[1].boxes[-1].box == (2.0, 3.0, 20.0, 30.0)
    assert len(content.photos[1].boxes) == len(before[1].labels) and not content.photos[1].doubtful
    assert convert(folder, tmp_path / "converted.json", export="coco").photos == content.photos
    assert export(labels, tmp_path / "labelled.json").photos == before, "a set in memory has no reviews"


def test_only_reviewed_photos_are_true_boxes_for_training(reviewed: tuple[Path, LabelSet], tmp_path: Path) -> None:
    folder, _ = reviewed
    content = export(folder, tmp_path / "reviewed.json", only_reviewed=True)
    truth = read_coco_truth(tmp_path / "reviewed.json")
    assert [own.id for own in content.photos] == list(truth.ids) == ["scene_0001"]
    assert len(truth.objects[0]) == len(content.photos[0].boxes) and not bool(truth.objects[0].crowd.any())
    rows = json.loads((tmp_path / "reviewed.json").read_text())["annotations"]
    assert all("score" not in row and row["tag2box"]["source"] == "review" for row in rows)


def test_the_export_command(reviewed: tuple[Path, LabelSet], tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    folder, _ = reviewed
    done = call(["export", str(folder), "--only-reviewed", "--out", str(tmp_path / "x.json")], monkeypatch, capsys)
    assert done.code == 0 and "of 1 photos (1 with boxes of a review)" in done.out
    (folder / JOURNAL_FILE).unlink()
    done = call(["export", str(folder), "--only-reviewed", "--out", str(tmp_path / "y.json")], monkeypatch, capsys)
    assert done.code == 2 and "no photo is reviewed; review some first" in done.err
    assert not (tmp_path / "y.json").exists()


def test_without_the_extra_one_line_names_it(
    reviewed: tuple[Path, LabelSet], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "uvicorn":
            raise ModuleNotFoundError("No module named 'uvicorn'", name="uvicorn")
        return real(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.startswith("tag2box.review") or name == "uvicorn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("tag2box.review", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    done = call(["review", str(reviewed[0])], monkeypatch, capsys)
    assert done.code == 2 and "pip install tag2box[review]" in done.err and done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["{nowhere}"], "no label set here"),
        (["{labels}", "--photos", "{nowhere}"], "no such folder; name the folder of the labelled photos"),
        (["{labels}", "--port", "70000"], "--port 70000: cannot be used"),
        (["{labels}", "--order", "best"], "best"),
    ],
)
def test_bad_input_is_one_line(
    reviewed: tuple[Path, LabelSet], tmp_path: Path, monkeypatch: Any, capsys: Any, options: list[str], message: str
) -> None:
    argv = [own.format(labels=reviewed[0], nowhere=tmp_path / "nowhere") for own in options]
    done = call(["review", *argv, "--no-browser"], monkeypatch, capsys)
    assert done.code == 2 and message in done.err


def test_a_damaged_journal_is_refused_at_the_start(
    reviewed: tuple[Path, LabelSet], monkeypatch: Any, capsys: Any
) -> None:
    place = reviewed[0] / JOURNAL_FILE
    place.write_bytes(place.read_bytes().replace(b"reject", b"accept", 1))
    done = call(["review", str(reviewed[0]), "--no-browser"], monkeypatch, capsys)
    assert done.code == 2 and "line 2 is damaged" in done.err and "restore the file" in done.err


def test_the_server_starts_without_torch() -> None:
    script = "import sys, tag2box.cli.review, tag2box.review.server; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False", "it would take 200 MB and seconds, for pages that need none of it"
