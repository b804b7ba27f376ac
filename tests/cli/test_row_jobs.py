"""``--format parquet``: the boxes and scores of `detect` and `propose`, from and to object storage, here and on Ray."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import torch

from pages import ROOT, blocks, load
from storage_server import s3_server
from tag2box import runs
from tag2box.cli import row_jobs
from tag2box.cli.detect import detect
from tag2box.cli.inputs import find_photos
from tag2box.cli.student import train_student
from tag2box.cli.train import train
from tag2box.errors import UserError
from tag2box.formats import rows
from tag2box.images import read_photo
from tag2box.inference.predict import PhotoTask
from tag2box.proposals.build import build_proposals
from tag2box.proposals.selective_search import SelectiveSearch
from tag2box.run_detect import detect_task
from tiny_student import SMALL, tiny_labels
from tiny_world import call, small_config, small_data, small_network

pytest.importorskip("pyarrow")
METHOD = SelectiveSearch(short_side=64, min_side=4, max_boxes=20)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run, and six photos."""
    small_network(monkeypatch)
    small_data(tmp_path, 6)
    train(small_config(tmp_path), tmp_path / "run")
    return tmp_path


@pytest.fixture
def bucket() -> Iterator[str]:
    patch = pytest.MonkeyPatch()
    with s3_server(patch) as address:
        yield address
    patch.undo()


def found(place: object) -> dict[str, dict]:
    content = list(rows.RowFolder.open(str(place)).rows())
    assert len({row["address"] for row in content}) == len(content)
    return {Path(row["address"]).stem: row for row in content}


def read_by_part(place: Path) -> list[dict]:
    """Rows in the order of the names of their parts, as other programs read them."""
    folder = rows.StorageFolder(str(place))
    parts = [name for name in folder.names() if name.startswith("part-")]
    return [row for part in parts for row in rows.read_part(folder, part)]


def test_rows_have_the_boxes_and_scores_of_detect(world: Path) -> None:
    wanted = detect(world / "run", [world / "photos"], min_score=0)
    done = row_jobs.detect_rows(world / "run", [str(world / "photos")], str(world / "rows"), min_score=0)
    assert (done.rows, done.bad) == (6, 0) and sum(map(len, wanted.values())) > 0
    for name, row in found(world / "rows").items():
        own, classes = rows.detections_of(row), rows.RowFolder.open(str(world / "rows")).about["classes"]
        assert torch.equal(own.boxes, wanted[name].boxes) and torch.equal(own.scores, wanted[name].scores)
        assert torch.equal(own.labels, wanted[name].labels)
        assert row["names"] == [classes[label] for label in row["labels"]]
    [shown] = blocks(ROOT / "docs" / "clusters.md", "python")
    scope = {"rows": str(world / "rows")}
    exec(shown, scope)
    assert scope["best"] == [max(row["scores"], default=0.0) for row in read_by_part(world / "rows")]
    assert scope["unreadable"] == []


def test_rows_of_a_student_have_the_boxes_of_detect_in_its_precision(tmp_path: Path) -> None:
    train_student(tiny_labels(tmp_path), tmp_path / "run", overrides=(*SMALL, "plan.iterations=1"))
    wanted = detect(tmp_path / "run", [tmp_path / "photos"], min_score=0)
    row_jobs.detect_rows(tmp_path / "run", [str(tmp_path / "photos")], str(tmp_path / "rows"), min_score=0)
    assert sum(map(len, wanted.values())) > 0
    for name, row in found(tmp_path / "rows").items():
        own = rows.detections_of(row)
        assert torch.equal(own.boxes, wanted[name].boxes) and torch.equal(own.scores, wanted[name].scores)
    single = runs.open_run(tmp_path / "run")
    assert isinstance(single, runs.StudentRun)
    half = replace(single, config=replace(single.config, precision="bf16"))
    photos = find_photos([tmp_path / "photos"])
    task = PhotoTask(photos[0], *(each.numpy() for each in row_jobs._nothing()))
    (low,), (high,) = half.predict(photos[:1]), single.predict(photos[:1])
    assert torch.equal(detect_task(half)(task).outcome().scores, low.scores)
    assert not torch.equal(low.scores, high.scores)


def test_proposals_of_a_store_are_used_by_content(world: Path) -> None:
    wanted = detect(world / "run", [world / "photos"], min_score=0, proposals=world / "store")
    other = world / "elsewhere" / "deep"
    other.mkdir(parents=True)
    for path in (world / "photos").iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    (other / "photo0.jpg").write_bytes((other / "photo1.jpg").read_bytes())
    how = {"min_score": 0, "proposals": world / "store"}
    done = row_jobs.detect_rows(world / "run", [str(other)], str(world / "rows"), **how)
    assert (done.rows, done.bad) == (6, 1)
    by_name = found(world / "rows")
    assert "no proposals for this photo" in by_name["photo0"]["error"]
    assert torch.equal(rows.detections_of(by_name["photo2"]).scores, wanted["photo2"].scores)


def test_a_coco_file_of_rows_has_the_annotations_of_detect(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def type_(*words: object) -> int:
        return call(list(map(str, words)), monkeypatch, capsys).code

    (world / "photos" / "zero.jpg").touch()
    shared = [world / "run", world / "photos", "--min-score", 0]
    assert type_("detect", *shared, "--out", world / "here.json", "--skip-bad") == 1
    assert type_("detect", *shared, "--out", world / "rows", "--format", "parquet") == 1
    assert type_("detect", *shared, "--out", world / "rows", "--format", "parquet") == 0  # nothing is left to do
    assert type_("convert", world / "rows", world / "there.json", "--to", "coco") == 0
    here, there = (json.loads((world / f"{name}.json").read_text()) for name in ("here", "there"))
    assert here["annotations"] == there["annotations"] and here["categories"] == there["categories"]
    assert [Path(image["file_name"]).name for image in there["images"]] == [
        Path(image["file_name"]).name for image in here["images"]
    ]


MISTAKES = {
    "another format": (["s3://b/x/"], "photos in storage, shards and lists become rows; add --format parquet"),
    "an option": (["photos", "--format", "parquet", "--draw", "d"], "--draw: has no effect with --format parquet"),
    "no photos": (["photos/*.png", "--format", "parquet"], "no photos here"),
    "a web address": (["photos", "--format", "parquet", "--out", "https://h/x"], "cannot be written to"),
}


@pytest.mark.parametrize(("words", "says"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_and_nothing_is_written(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    monkeypatch.chdir(world)
    before = sorted(world.iterdir())
    done = call(["detect", "run", *words], monkeypatch, capsys)
    assert done.code == 2 and len(done.complaints) == 1 and says in done.complaints[0]
    assert sorted(world.iterdir()) == before


def test_rows_of_proposals_are_those_of_a_store(world: Path, bucket: str) -> None:
    photos = find_photos([world / "photos"])
    store = build_proposals(photos, METHOD, world / "store", read=read_photo, workers=1)
    for photo in photos:
        fsspec.filesystem("s3").pipe_file(f"{bucket}/photos/{photo.path.name}", photo.path.read_bytes())
    row_jobs.propose_rows([f"{bucket}/photos/"], METHOD, f"{bucket}/rows")
    for name, row in found(f"{bucket}/rows").items():
        assert torch.equal(torch.tensor(row["boxes"]).reshape(-1, 4), store.boxes(name))
        assert torch.equal(torch.tensor(row["scores"]), store.scores(name))
        assert row["sha256"] == store.entry(name).stamp.sha256
    with pytest.raises(UserError, match="rows of proposals; expected those of `tag2box detect`"):
        rows.read_rows(f"{bucket}/rows", print)


# ---------------------------------------------------------------- two nodes


def test_with_a_node_killed_every_photo_is_a_row_once(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From and to object storage on two nodes, one of which is killed: the rows of this machine."""
    pytest.importorskip("ray.data")
    from tag2box.parallel.ray_data import RayPool

    small_data(tmp_path, 24)
    for path in (tmp_path / "photos").iterdir():
        fsspec.filesystem("s3").pipe_file(f"{bucket}/photos/{path.name}", path.read_bytes())
    kill = load(ROOT / "benchmarks" / "ray_kill.py")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    with kill.two_nodes() as nodes:
        killed: list[int] = []

        def watch() -> None:
            while not rows.StorageFolder(f"{bucket}/there").names():
                time.sleep(0.01)
            killed.append(nodes.kill())

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        done = row_jobs.propose_rows(
            [f"{bucket}/photos/"], METHOD, f"{bucket}/there", pool=RayPool(nodes.address, chunk=1)
        )
        thread.join()
    assert killed[0] > 1 and done.bad == 0 and 0 < done.rows <= 24
    row_jobs.propose_rows([f"{bucket}/photos/"], METHOD, str(tmp_path / "here"))
    there, here = found(f"{bucket}/there"), found(tmp_path / "here")
    assert len(here) == 24 and there == here
