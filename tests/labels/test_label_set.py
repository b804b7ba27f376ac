"""Label sets on disk: a round trip, COCO readers, and one line about everything that is wrong."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import assume, given, settings as hypothesis_settings, strategies as st
from PIL import Image

from tag2box import storage
from tag2box.errors import UserError
from tag2box.formats.coco_boxes import read_coco_truth
from tag2box.formats.datasets import read_tagged
from tag2box.formats.listing import DataSource
from tag2box.labels.label_set import LabelSet
from tag2box.labels.labelled import LabelBox, LabelledPhoto, LabelledPhotos, common_root
from tag2box.storage import FileStamp

CLASSES = ("cat", "dög ☃")


def make(folder: Path) -> LabelSet:
    """A label set of two photos on disk."""
    entries = []
    for number, file in enumerate(("one.png", "more/two.png")):
        path = folder / "photos" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (40, 30), (number * 90, 0, 0)).save(path)
        boxes = (
            LabelBox((1.0, 2.0, 11.0, 12.0), "cat", 0.75, why="best of its tag", rank=1, margin=0.5, source="label"),
            LabelBox((20.0, 2.0, 30.0, 12.0), "cat", 0.25, True, why="doubtful", rank=2, margin=0.2, source="label"),
        )
        entries.append(
            LabelledPhoto(path.stem, file, 40, 30, ("cat",), boxes if number else (), (), "", FileStamp.of(path))
        )
    content = LabelledPhotos(folder / "photos", CLASSES, tuple(entries))
    return LabelSet(content, {"folder": "runs/mine"}, {"relative": 0.5}, {"tag2box": "1"})


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    made = make(tmp_path)
    made.write(tmp_path / "labels")
    found = LabelSet.open(tmp_path / "labels")
    assert replace(found, digest="") == made and len(found.digest) == 64
    found.verify()
    assert sorted(path.name for path in (tmp_path / "labels").iterdir()) == ["labels.json", "manifest.json"]


def test_counts_per_class(tmp_path: Path) -> None:
    counts = make(tmp_path).content.counts()
    assert (counts["cat"].photos, counts["cat"].boxes, counts["cat"].doubtful, counts["cat"].unboxed) == (2, 1, 1, 1)


coordinates = st.floats(0, 4000, width=32)


@st.composite
def label_boxes(draw: st.DrawFn) -> LabelBox:
    xs, ys = (sorted((draw(coordinates), draw(coordinates))) for _ in range(2))
    return LabelBox(
        (xs[0], ys[0], xs[1], ys[1]),
        draw(st.sampled_from(CLASSES)),
        draw(st.none() | st.floats(0, 1)),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from(["best of its tag", "reviewed"])),
        draw(st.integers(0, 100)),
        draw(st.none() | st.floats(0, 1)),
        draw(st.none() | st.just((1.0, 1.0, 2.0, 2.0))),
        draw(st.sampled_from(["label", "review", "import"])),
    )


@hypothesis_settings(max_examples=30, deadline=None)
@given(boxes=st.lists(label_boxes(), max_size=4), name=st.text(min_size=1), split=st.sampled_from(["", "val"]))
def test_any_content_survives_the_round_trip(tmp_path_factory, boxes, name, split) -> None:
    name = name.encode(errors="ignore").decode() or "x"
    folder = tmp_path_factory.mktemp("set") / "labels"
    file = PurePosixPath(f"{name}.jpg")  # as datasets name files: relative, without parents
    assume(not file.is_absolute() and ".." not in file.parts)
    photo = LabelledPhoto(name, str(file), 5000, 4000, CLASSES[:1], tuple(boxes), CLASSES[1:], split)
    made = LabelSet(LabelledPhotos(folder.parent, CLASSES, (photo,)))
    made.write(folder)
    assert replace(LabelSet.open(folder), digest="") == made


def test_coco_tools_read_it(tmp_path: Path) -> None:
    make(tmp_path).write(tmp_path / "labels")
    path = tmp_path / "labels" / "labels.json"
    tagged = read_tagged(DataSource(path=path, photos=tmp_path / "photos"))
    assert tagged.classes == CLASSES and tagged.tags.tolist() == [[True, False], [True, False]]
    truth = read_coco_truth(path)
    assert truth.objects[1].crowd.tolist() == [False, True]
    coco_module = pytest.importorskip("pycocotools.coco")
    evaluation = pytest.importorskip("pycocotools.cocoeval")
    with contextlib.redirect_stdout(io.StringIO()):
        coco = coco_module.COCO(str(path))
        row = {"image_id": 2, "category_id": 1}
        results = coco.loadRes(
            [{**row, "bbox": [1, 2, 10, 10], "score": 0.5}, {**row, "bbox": [20, 2, 10, 10], "score": 0.9}]
        )
        scored = evaluation.COCOeval(coco, results, "bbox")
        scored.evaluate()
        scored.accumulate()
        scored.summarize()
    assert scored.stats[1] == pytest.approx(1)  # the better score lies in the ignore region, and is no false positive


# ---------------------------------------------------------------- what may be wrong


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    made = make(tmp_path)
    made.write(tmp_path / "labels")
    with pytest.raises(UserError, match="labels: already holds a label set; name another --out"):
        made.write(tmp_path / "labels")
    (tmp_path / "mine").mkdir()
    made.write(tmp_path / "mine")  # an empty folder
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").touch()
    with pytest.raises(UserError, match="full: is not empty"):
        made.write(tmp_path / "full")


def test_damage_is_found(tmp_path: Path) -> None:
    make(tmp_path).write(tmp_path / "labels")
    path = tmp_path / "labels" / "labels.json"
    path.write_text(path.read_text().replace("0.75", "0.76"))
    with pytest.raises(UserError, match=r"labels\.json: damaged, its SHA-256 is not that in manifest\.json; restore"):
        LabelSet.open(tmp_path / "labels")
    manifest = tmp_path / "labels" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("cat", "cats"))
    with pytest.raises(UserError, match=r"manifest\.json: damaged"):
        LabelSet.open(tmp_path / "labels")
    with pytest.raises(UserError, match="photos: no label set here"):
        LabelSet.open(tmp_path / "photos")


def test_a_manifest_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "labels.json").write_text("{}")
    for content in ({"kind": "other"}, {"kind": "label set", "format": 99}):
        storage.write_manifest(tmp_path, content)
        with pytest.raises(UserError, match="expected a label set of format 1"):
            LabelSet.open(tmp_path)
    storage.write_manifest(tmp_path, {"kind": "label set"})
    with pytest.raises(UserError, match="'classes' is missing or of the wrong type"):
        LabelSet.open(tmp_path)


def test_other_photos_and_photos_that_are_gone(tmp_path: Path) -> None:
    make(tmp_path).write(tmp_path / "labels")
    Image.new("RGB", (40, 30), "blue").save(tmp_path / "photos" / "one.png")
    with pytest.raises(UserError, match=r"one\.png: is not the photo that was labelled"):
        LabelSet.open(tmp_path / "labels").verify()
    (tmp_path / "photos" / "one.png").unlink()
    with pytest.raises(UserError, match=r"one\.png: this photo of the label set is gone"):
        LabelSet.open(tmp_path / "labels").verify()
    with pytest.raises(UserError, match="elsewhere: no such folder"):
        LabelSet.open(tmp_path / "labels", tmp_path / "elsewhere").verify()


def test_a_renamed_class(tmp_path: Path) -> None:
    labels = make(tmp_path)
    labels.check_classes(CLASSES, "here")
    with pytest.raises(UserError, match="here: class 1 is 'cats', 'cat' in the label set"):
        labels.check_classes(("cats", CLASSES[1]), "here")
    with pytest.raises(UserError, match="here: 1 classes, the label set has 2"):
        labels.check_classes(CLASSES[:1], "here")
    photo = replace(labels.content.photos[0], tags=("cow",))
    with pytest.raises(UserError, match="photo one: 'cow' is not one of the classes"):
        replace(labels.content, photos=(photo,))


def test_set_and_photos_may_be_moved_together(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    make(tmp_path / "old").write(tmp_path / "old" / "labels")
    (tmp_path / "old").rename(tmp_path / "new")
    LabelSet.open(tmp_path / "new" / "labels").verify()


def test_labels_json_has_a_line_per_row(tmp_path: Path) -> None:
    make(tmp_path).write(tmp_path / "labels")
    text = (tmp_path / "labels" / "labels.json").read_text()
    content = json.loads(text)
    assert len(text.splitlines()) == sum(map(len, content.values()))
    assert content["annotations"][1]["iscrowd"] == content["annotations"][1]["ignore"] == 1


def test_the_common_root_of_files() -> None:
    assert common_root([]) == Path.cwd()
    assert common_root([Path("/a/b/c.jpg")]) == Path("/a/b")
    assert common_root([Path("/a/b/c.jpg"), Path("/a/d/c.jpg")]) == Path("/a")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"one.png"', '"../one.png"'),
        ('"one.png"', '"/one.png"'),
        ('"category_id": 1', '"category_id": 0'),
        ('"category_id": 1', '"category_id": 9'),
        ('"width": 40', '"width": 0'),
        ('"width": 40', '"width": Infinity'),
        ('"bbox": [1.0', '"bbox": [NaN'),
        ('"tags": ["cat"]', '"tags": ["cow"]'),
        ('"tag2box"', '"tag3box"'),
    ],
)
def test_a_set_that_was_forged_with_the_right_digests_is_refused(tmp_path: Path, before: str, after: str) -> None:
    make(tmp_path).write(tmp_path / "labels")
    path = tmp_path / "labels" / "labels.json"
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))
    known = json.loads((tmp_path / "labels" / "manifest.json").read_text())
    storage.write_manifest(path.parent, {name: known[name] for name in known.keys() - {"files", "sha256"}})
    with pytest.raises(UserError) as error:
        LabelSet.open(tmp_path / "labels")
    assert len(str(error.value).splitlines()) == 1
