"""docs/adding-a-format.md, executed: its dataset format trains a run, its export format writes the run's detections."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tag2box
from pages import DOCS, blocks
from tag2box import extend
from tag2box.errors import UserError
from tag2box.formats.datasets import dataset_format, has_boxes, read_photos, read_tagged, read_truth
from tag2box.formats.export import export_format
from tag2box.formats.listing import DataSource
from tiny_world import call, small_config, small_data, small_network

GUIDE = DOCS / "adding-a-format.md"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The reader's folder: my_formats.py, and tiny photos with a .tags file beside each."""
    code = [text for text in blocks(GUIDE, "python") if text.startswith('"""my_formats.py')]
    assert len(code) == 2
    (tmp_path / "my_formats.py").write_text("\n".join(code), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    small_data(tmp_path)
    with (tmp_path / "tags.csv").open() as table:
        for row in csv.DictReader(table):
            lines = row["tags"].replace(";", "\n")
            (tmp_path / "photos" / row["image"]).with_suffix(".tags").write_text(lines)
    yield tmp_path
    sys.modules.pop("my_formats", None)
    extend.load_part.cache_clear()


def test_tags_are_those_of_the_files(world: Path) -> None:
    source = DataSource(path=world / "photos", format="my_formats:Sidecar")
    ours, table = read_tagged(source), read_tagged(DataSource(path=world / "tags.csv"))
    assert ours.classes == table.classes and ours.tags.tolist() == table.tags.tolist()
    assert [photo.id for photo in ours.photos] == [photo.id for photo in read_photos(source)]
    assert dataset_format(source).recognises(world / "photos") and not has_boxes(source)
    with pytest.raises(UserError, match=r"a folder of photos with \.tags files has no boxes"):
        read_truth(source)
    with pytest.raises(UserError, match="unknown class"):
        read_tagged(DataSource(path=world / "photos", format="my_formats:Sidecar", classes=ours.classes[1:]))


def test_a_run_is_trained_and_its_detections_are_exported(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_network(monkeypatch)
    named = (f"data.tags={world / 'photos'}", "data.format=my_formats:Sidecar")
    config = small_config(world, *named, "plan.iterations=2")
    tag2box.train(config, world / "run")
    assert 'format = "my_formats:Sidecar"' in (world / "run" / "config.toml").read_text()
    found = tag2box.detect(
        world / "run", [world / "photos"], world / "boxes.csv", export="my_formats:BoxTable", min_score=0.0
    )
    with (world / "boxes.csv").open() as table:
        rows = list(csv.DictReader(table))
    assert len(rows) == sum(len(detections) for detections in found.values()) > 0
    assert {row["class"] for row in rows} <= set(read_tagged(DataSource(path=world / "tags.csv")).classes)


def test_the_commands_of_the_guide_take_its_formats(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = call(["data", "check", "photos", "--data-format", "my_formats:Sidecar"], monkeypatch, capsys)
    assert "a folder of photos with .tags files: 4 photos" in done.out
    assert not export_format("my_formats:BoxTable").is_folder


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cocoa", r'dataset format cocoa: must be "label-set" or "voc" .*did you mean coco\?'),
        ("my_formats:Nothing", "my_formats has no attribute Nothing"),
        ("no_such_module:Sidecar", "cannot be imported"),
    ],
)
def test_wrong_names_of_formats_are_answered_in_one_line(name: str, words: str, world: Path) -> None:
    with pytest.raises(UserError, match=words) as caught:
        read_tagged(DataSource(path=world / "photos", format=name))
    assert "\n" not in str(caught.value)


def test_a_built_in_name_overrides_the_recognised_format(world: Path) -> None:
    (world / "tags.csv").rename(world / "tags.json")
    assert len(read_tagged(DataSource(path=world / "tags.json", photos=world / "photos", format="csv"))) == 4
