"""``data stats`` and ``proposals recall`` as a user types them, on a VOC folder, a table of tags, and mistakes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from tag2box.annotations import Photo, TaggedPhotos
from tag2box.cli import app
from tag2box.errors import UserError
from tag2box.formats.csv_tags import write_tags
from tag2box.proposals.base import Candidates
from tag2box.proposals.store import write_store
from tiny import tiny_photos

OBJECT = (
    "<object><name>{name}</name><difficult>{difficult}</difficult><bndbox><xmin>{0}</xmin><ymin>{1}</ymin>"
    "<xmax>{2}</xmax><ymax>{3}</ymax></bndbox></object>"
)
BOXES = ((1, 1, 20, 20), (22, 5, 40, 30))  # as XML counts: from 1, the last one included
GROUP = {"stats": "data", "recall": "proposals"}


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [GROUP[str(words[0])], *map(str, words)], env={"COLUMNS": "200"})


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> TaggedPhotos:
    return tiny_photos(tmp_path_factory.mktemp("pages"), 4)


@pytest.fixture(scope="module")
def voc(photos: TaggedPhotos) -> Path:
    """Two objects for every tag of four photos, and one difficult ``bar`` on the first photo."""
    root = photos.photos[0].path.parent.parent / "voc"
    (root / "JPEGImages").parent.mkdir()
    (root / "JPEGImages").symlink_to(photos.photos[0].path.parent)
    (root / "Annotations").mkdir()
    (root / "ImageSets" / "Main").mkdir(parents=True)
    (root / "ImageSets" / "Main" / "train.txt").write_text("".join(f"{p.id}\n" for p in photos.photos))
    for i, (photo, row) in enumerate(zip(photos.photos, photos.tags.tolist(), strict=True)):
        names = [name for name, on in zip(photos.classes, row, strict=True) if on]
        found = [OBJECT.format(*box, name=name, difficult=0) for name in names for box in BOXES]
        found += [OBJECT.format(1, 1, 9, 9, name="bar", difficult=1)] if i == 0 else []
        size = f"<size><width>{photo.width}</width><height>{photo.height}</height></size>"
        (root / "Annotations" / f"{photo.id}.xml").write_text(f"<annotation>{size}{''.join(found)}</annotation>")
    return root


def store(path: Path, photos: tuple[Photo, ...], boxes: list[list[float]], scores: list[float], kind: str) -> Path:
    candidates = Candidates(torch.tensor(boxes).reshape(-1, 4), torch.tensor(scores))
    write_store(path, {"kind": kind, "seed": 0}, photos, [candidates] * len(photos))
    return path


# ---------------------------------------------------------------- data stats


def test_stats_of_a_voc_folder(voc: Path, photos: TaggedPhotos, tmp_path: Path) -> None:
    done = run("stats", voc, "--split", "train", "--out", tmp_path / "s.html", "--json", tmp_path / "s.json")
    assert done.exit_code == 0, done.output
    tags = int(photos.tags.sum())
    assert f"4 photos, 0 without tags; {tags} tags of 3 classes; {2 * tags} objects, 50.0 % missed" in done.output
    report = json.loads((tmp_path / "s.json").read_text())
    assert report["objects"]["total"] == {"objects": 2 * tags, "pairs": tags, "missed": tags, "missed_share": 0.5}
    assert sum(report["tags"]["unsure"]) == 1 and sum(report["objects"]["difficult"]) == 1
    assert report["left_out"] == []
    assert "<h1>voc, train</h1>" in (tmp_path / "s.html").read_text()


def test_stats_of_a_class_whose_only_box_is_bad(voc: Path, tmp_path: Path) -> None:
    """Its tag counts, its object is left out: tags and objects still have the same classes."""
    shutil.copytree(voc, tmp_path / "voc", symlinks=True)
    spoilt = sorted((tmp_path / "voc" / "Annotations").iterdir())[0]
    bad = OBJECT.format("x", 1, 9, 9, name="zebra", difficult=0)
    spoilt.write_text(spoilt.read_text().replace("</annotation>", f"{bad}</annotation>"))
    report = tmp_path / "s.json"
    done = run("stats", tmp_path / "voc", "--split", "train", "--out", tmp_path / "s.html", "--json", report)
    assert done.exit_code == 1, done.output
    assert "zebra" in done.output and len(json.loads(report.read_text())["left_out"]) == 1


def test_stats_of_chosen_classes(voc: Path, tmp_path: Path) -> None:
    done = run("stats", voc, "--split", "train", "--classes", "disc", "--out", tmp_path / "s.html")
    assert done.exit_code == 0, done.output
    assert "disc" in done.output and "bar" not in done.output


def test_stats_of_a_table_of_tags_have_no_objects(photos: TaggedPhotos, tmp_path: Path) -> None:
    names = [(p.path.name, ["disc"] if i else []) for i, p in enumerate(photos.photos)]
    write_tags(tmp_path / "tags.csv", names)
    done = run("stats", tmp_path / "tags.csv", "--photos", photos.photos[0].path.parent, "--out", tmp_path / "s.html")
    assert done.exit_code == 0, done.output
    assert "4 photos, 1 without tags; 3 tags of 1 classes" in done.output
    assert "objects" not in done.output


def test_stats_skip_faulty_photos_and_report_them(photos: TaggedPhotos, tmp_path: Path) -> None:
    write_tags(tmp_path / "tags.csv", [(photos.photos[0].path.name, ["disc"]), ("nowhere.jpg", ["disc"])])
    json_file = tmp_path / "s.json"
    done = run("stats", tmp_path / "tags.csv", "--photos", photos.photos[0].path.parent,
               "--out", tmp_path / "s.html", "--json", json_file)  # fmt: skip
    assert done.exit_code == 1, done.output
    assert "left out, 1 faults" in done.output and "nowhere.jpg" in done.output
    assert len(json.loads(json_file.read_text())["left_out"]) == 1
    assert "Left out, 1 fault" in (tmp_path / "s.html").read_text()


# ---------------------------------------------------------------- proposals recall


def test_recall_of_two_stores(voc: Path, photos: TaggedPhotos, tmp_path: Path) -> None:
    right = [[0.0, 0, 20, 20], [21, 4, 40, 30]]
    good = store(tmp_path / "good", photos.photos, [*right, [0, 0, 4, 4]], [0.2, 0.3, 0.1], "edge_boxes")
    poor = store(tmp_path / "poor", photos.photos[:3], [[0, 0, 20, 20]], [0.0], "selective_search")
    done = run(
        "recall", voc, good, poor, "--split", "train", "--out", tmp_path / "r.html", "--json", tmp_path / "r.json"
    )
    assert done.exit_code == 0, done.output
    assert "selective search: no boxes for 1 photos: photo3" in done.output
    first, second = json.loads((tmp_path / "r.json").read_text())["sources"]
    assert (first["name"], first["ranked"], first["photos"]) == ("edge boxes", True, 3)
    assert first["recall"][0][:2] == [0.5, 1.0] and first["recall"][2][-1] == 1.0
    assert second["missing"] == ["photo3"] and second["recall"][0][-1] == 0.5
    html = (tmp_path / "r.html").read_text()
    assert 'id="worst"' in html and "<h1>Proposals for voc, train</h1>" in html


def test_stores_of_one_kind_are_distinguished_by_folder(voc: Path, photos: TaggedPhotos, tmp_path: Path) -> None:
    stores = [store(tmp_path / name, photos.photos, [[0, 0, 20, 20]], [0.0], "ss") for name in ("one", "two")]
    done = run("recall", voc, *stores, "--split", "train", "--out", tmp_path / "r.html")
    assert done.exit_code == 0, done.output
    assert "one" in done.output and "two" in done.output


def mistake(*words: object) -> str:
    done = run(*words)
    assert isinstance(done.exception, UserError), done.output
    line = str(done.exception)
    assert "\n" not in line
    return line


def test_mistakes_are_one_line_and_nothing_is_written(voc: Path, photos: TaggedPhotos, tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    good = store(tmp_path / "good", photos.photos, [[0, 0, 20, 20]], [0.0], "ss")
    others = tuple(Photo(f"other{i}", p.path, p.width, p.height) for i, p in enumerate(photos.photos))
    strange = store(tmp_path / "strange", others, [[0, 0, 20, 20]], [0.0], "ss")
    stale = store(
        tmp_path / "stale", tuple(Photo(p.id, p.path, 99, 99) for p in photos.photos), [[0, 0, 9, 9]], [0.0], "ss"
    )
    common = ("--split", "train", "--out", out)
    assert "no such file" in mistake("recall", voc, tmp_path / "nowhere", *common)
    assert "named twice" in mistake("recall", voc, good, good, *common)
    assert f"{strange}: no proposals for the photos of" in mistake("recall", voc, good, strange, *common)
    assert "99x99" in mistake("recall", voc, stale, *common)
    assert "no object of these classes" in mistake("recall", voc, good, "--classes", "zebra", *common)
    write_tags(tmp_path / "tags.csv", [(photos.photos[0].path.name, ["disc"])])
    mistake("recall", tmp_path / "tags.csv", good, "--photos", photos.photos[0].path.parent, "--out", out)
    mistake("stats", tmp_path / "nothing.csv", "--out", out)
    assert not out.exists()
