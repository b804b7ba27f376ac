"""Export formats: what is written is what other tools read, and no name leads out of the folder."""

from __future__ import annotations

import io
import json
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
import yaml
from hypothesis import assume, given, settings, strategies as st
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from tag2box.annotations import Detections, Objects, Photo, Truth
from tag2box.errors import UserError
from tag2box.extend import EXPORT_FORMATS
from tag2box.formats.datasets import read_tagged, read_truth
from tag2box.formats.detection_files import read_detections
from tag2box.formats.export import export_detections, export_format
from tag2box.formats.listing import DataSource
from tag2box.storage import distinct_file_names, marked_file_name, safe_file_name

CLASSES = ("cat", "traffic light")
SIZE = (40, 30)


def photos_in(folder: Path, *names: str) -> list[Photo]:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", SIZE).save(folder / f"{name}.png")
    return [Photo(name, folder / f"{name}.png", *SIZE) for name in names]


def detected(*rows: tuple[float, ...]) -> Detections:
    """Rows of (x1, y1, x2, y2, score, label)."""
    table = torch.tensor(rows, dtype=torch.float64).reshape(-1, 6)
    return Detections(table[:, :4], table[:, 4], table[:, 5].long())


FOUND = {"one": detected((1, 2, 11, 22.5, 0.9, 1), (0, 0, 40, 30, 0.25, 0)), "two": Detections.empty()}


def tree(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()}


# ---------------------------------------------------------------- names


@given(st.text(), st.text())
def test_names_of_files_stay_distinct_and_inside(a, b):
    names = [safe_file_name(text) for text in (a, b)]
    for name in names:
        assert name not in {"", ".", ".."} and not set(name) & set('/\\:*?"<>|\0') and len(name.encode()) <= 255
        assert Path("folder", name).parent == Path("folder")
    assert (names[0] == names[1]) == (a == b)


def folded(name: str, how: str) -> str:
    """A name as a file system compares it that ignores case, or the form in which accents are encoded."""
    form, _, case = how.partition(" ")
    plain = unicodedata.normalize(form, name)
    return unicodedata.normalize(form, getattr(plain, case)()) if case else plain


ALIKE = st.lists(st.text(st.sampled_from("aAäÄßsSIiİ\u0131\u0308\u0307/%.~"), max_size=4), max_size=6)


@given(st.lists(st.text(), max_size=6) | ALIKE)
def test_names_stay_distinct_where_the_file_system_ignores_case_and_accents(names):
    files = distinct_file_names(names)
    assert [*files] == [*dict.fromkeys(names)]
    for how in ("NFC", "NFD", "NFC lower", "NFD upper", "NFD casefold"):
        assert len({folded(file, how) for file in files.values()}) == len(set(names))
    for name, file in files.items():
        assert file in {safe_file_name(name), marked_file_name(name)} and len(file.encode()) <= 200


def test_only_the_second_of_two_names_that_differ_in_case_is_marked():
    assert distinct_file_names([]) == {}
    files = distinct_file_names(["Cat", "dog", "cat"])
    assert (files["Cat"], files["dog"]) == ("Cat", "dog") and files["cat"].startswith("cat%~")
    assert files["cat"] == marked_file_name("cat")


def test_names_that_a_terminal_obeys_or_hides_are_encoded():
    for name in ("\x1b[31m", "a\u202eb", "a\u200bb", "a\u200db", "\x9b", "\ufeffa", "a\udcff"):
        assert safe_file_name(name).isprintable() and "%" in safe_file_name(name)


def test_ordinary_names_are_not_changed():
    for name in ("cat", "traffic light", "IMG_0001", "größe-2.1", "a(1)"):
        assert safe_file_name(name) == name
    assert safe_file_name("a/b") == "a%2Fb" and safe_file_name("../../x") == "%2E.%2F..%2Fx"
    assert safe_file_name("x" * 300) != safe_file_name("x" * 301)
    assert safe_file_name("NUL.a") == "%4EUL.a" and safe_file_name("null") == "null"


@pytest.mark.parametrize("kind", EXPORT_FORMATS)
def test_no_photo_or_class_leads_out_of_the_folder(kind, tmp_path):
    photos = photos_in(tmp_path / "photos", "a", "b", "c", "d")
    ids = ("../../x", "a/b", "a_b", "/abs/x")
    photos = [Photo(name, photo.path, *SIZE) for name, photo in zip(ids, photos, strict=True)]
    found = {name: detected((n, 0, 9, 9, 0.5, 0)) for n, name in enumerate(ids)}
    made = export_format(kind)
    out = tmp_path / "deep" / "inside" / ("out" if made.is_folder else "out.json")
    made(out, photos, ("../../y", "cat"), found)
    assert all(path.startswith(("deep/inside/out", "photos/")) for path in tree(tmp_path))
    each = {"coco": 1, "coco-results": 1, "voc": 4 + 2, "voc-results": 2, "yolo": 2 * 4 + 1, "cvat": 4 + 2}
    each |= {"labelstudio": 2, "fiftyone": 4 + 2, "xanylabeling": 2 * 4 + 1, "csv": 1}
    assert len(tree(out)) == each[kind] or (not made.is_folder and out.is_file())


@pytest.mark.parametrize("kind", ["voc", "yolo"])
def test_photos_whose_names_differ_in_case_have_files_of_their_own(kind, tmp_path):
    photos = photos_in(tmp_path / "photos", "x/b", "x_b", "X/b")
    found = {photo.id: detected((n, 0, 9, 9, 0.5, 0)) for n, photo in enumerate(photos)}
    export_detections(kind, tmp_path / "out", photos, CLASSES, found)
    folder = tmp_path / "out" / ("Annotations" if kind == "voc" else "labels")
    assert len({path.lower() for path in tree(folder)}) == 3
    truth = read_truth(DataSource(path=tmp_path / "out", photos=tmp_path / "out" if kind == "yolo" else None))
    assert sorted(objects.boxes[0, 0].round().item() for objects in truth.objects) == [0, 1, 2]


@pytest.mark.parametrize("kind", EXPORT_FORMATS)
def test_nothing_to_export(kind, tmp_path):
    out = tmp_path / "out"
    export_detections(kind, out, [], CLASSES, {})
    assert out.exists()
    export_detections(kind, out, photos_in(tmp_path / "photos", "one"), CLASSES, {})  # an id without detections


def test_unknown_formats_are_named_with_the_choices():
    with pytest.raises(UserError, match=r'export format yolov9: must be "coco" or .*"yolo".*did you mean yolo\?'):
        export_format("yolov9")
    with pytest.raises(UserError, match=r'export format none_such:Writer: "none_such:Writer" cannot be imported'):
        export_format("none_such:Writer")


# ---------------------------------------------------------------- COCO


def test_pycocotools_loads_the_coco_file_as_ground_truth(tmp_path):
    photos = photos_in(tmp_path / "photos", "one", "two")
    export_detections("coco", tmp_path / "out.json", photos, CLASSES, FOUND)
    export_detections("coco-results", tmp_path / "results.json", photos, CLASSES, FOUND)
    with redirect_stdout(io.StringIO()):
        truth = COCO(str(tmp_path / "out.json"))
        score = COCOeval(truth, truth.loadRes(str(tmp_path / "results.json")), "bbox")
        score.evaluate()
        score.accumulate()
        score.summarize()
    assert score.stats[0] == pytest.approx(1.0)
    assert [truth.anns[i][key] for i in (1, 2) for key in ("area", "iscrowd")] == [205.0, 0, 1200.0, 0]
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["images"][0] == {"id": 1, "file_name": "one.png", "width": 40, "height": 30}
    assert content["annotations"][0] | {"score": 0.9} == content["annotations"][0]


# ---------------------------------------------------------------- VOC


boxes = st.tuples(st.floats(-5, 45), st.floats(-5, 35), st.floats(0.5, 60), st.floats(0.5, 60), st.integers(0, 1))


@settings(max_examples=40)  # each writes files to the disk
@given(st.lists(boxes, max_size=5))
def test_voc_files_are_read_back_as_whole_pixels(tmp_path_factory, rows):
    folder = tmp_path_factory.mktemp("voc")
    found = {"a/one": detected(*((x, y, x + w, y + h, 0.5, label) for x, y, w, h, label in rows))}
    photos = photos_in(folder / "photos", "a/one", "b/one")
    export_detections("voc", folder / "out", photos, CLASSES, found)
    truth = read_truth(DataSource(path=folder / "out", photos=folder / "photos"))
    assert (truth.classes, truth.ids, truth.sizes) == (CLASSES, ("a/one", "b/one"), (SIZE, SIZE))
    assert truth.objects[0].labels.tolist() == found["a/one"].labels.tolist() and not truth.objects[0].difficult.any()
    limit = torch.tensor([*SIZE, *SIZE], dtype=torch.float64)
    inside = torch.minimum(found["a/one"].boxes.clamp(min=0), limit)
    assert ((truth.objects[0].boxes - inside).abs() <= 1).all()
    assert torch.equal(truth.objects[0].boxes, truth.objects[0].boxes.round())
    tags = read_tagged(DataSource(path=folder / "out", photos=folder / "photos"))
    assert tags.tags[0].nonzero().flatten().tolist() == sorted(set(found["a/one"].labels.tolist()))


def test_a_voc_file_has_the_fields_of_voc(tmp_path):
    found = {"one": detected((1, 2, 11, 22, 0.9, 1), (0, 5, 9, 9, 0.25, 0))}
    export_detections("voc", tmp_path / "out", photos_in(tmp_path / "p", "one"), CLASSES, found)
    root = ElementTree.parse(tmp_path / "out" / "Annotations" / "one.xml").getroot()
    assert [root.findtext(f"size/{field}") for field in ("width", "height", "depth")] == ["40", "30", "3"]
    assert root.findtext("filename") == "one.png"
    fields = ("name", "truncated", "difficult", "bndbox/xmin", "bndbox/ymin", "bndbox/xmax", "bndbox/ymax")
    rows = [[node.findtext(field) for field in fields] for node in root.findall("object")]
    assert rows == [["traffic light", "0", "0", "2", "3", "11", "22"], ["cat", "1", "0", "1", "6", "9", "9"]]
    assert tree(tmp_path / "out") == {"Annotations/one.xml", "ImageSets/Main/default.txt", "classes.txt"}


@pytest.mark.parametrize("name", ["", " cat", "a  b", "a\nb", "\x01"])
def test_class_names_that_xml_cannot_hold_are_refused(name, tmp_path):
    with pytest.raises(UserError, match="VOC takes printable names with single spaces; rename the class"):
        export_detections("voc", tmp_path / "out", [], (name,), {})
    assert not (tmp_path / "out").exists()


def test_voc_results_of_any_class_are_read_back(tmp_path):
    classes = ("../../x", "police_car", "a:b")
    found = {"one": detected(*((n, 0, 9, 9, 0.5, n) for n in range(3)))}
    export_detections("voc-results", tmp_path / "out", photos_in(tmp_path / "p", "one"), classes, found)
    truth = read_truth(DataSource(path=yolo_of(tmp_path, classes, found)))
    assert read_detections(tmp_path / "out", truth)["one"].labels.sort().values.tolist() == [0, 1, 2]
    for name in ("a\nb", "", " a", "a\udcff"):
        with pytest.raises(UserError, match="one line per box; rename the photo"):
            export_detections("voc-results", tmp_path / "new", [Photo(name, Path("a"), 1, 1)], classes, {})
    assert not (tmp_path / "new").exists()


def test_voc_results_of_classes_that_differ_in_case_are_read_back(tmp_path):
    classes = ("Cat", "cat", "CAT")
    found = {"one": detected(*((n, 0, 9, 9, 0.5, n) for n in range(3)))}
    export_detections("voc-results", tmp_path / "out", photos_in(tmp_path / "p", "one"), classes, found)
    assert len({path.lower() for path in tree(tmp_path / "out")}) == 3
    for order in (classes, classes[::-1], classes[1:]):
        truth = Truth(order, ("one",), (SIZE,), (Objects.of([], []),))
        if len(order) < 3:
            (tmp_path / "out" / "comp4_det_test_Cat.txt").unlink()
        read = read_detections(tmp_path / "out", truth)["one"]
        assert {order[label]: box[0] for label, box in zip(read.labels.tolist(), read.boxes.tolist(), strict=True)} == {
            name: float(n) for n, name in enumerate(classes) if name in order
        }


@pytest.mark.parametrize(("kind", "place"), [("coco", "folder"), ("voc", "file"), ("yolo", "file"), ("coco", "file/x")])
def test_a_place_that_cannot_be_written_is_refused(kind, place, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"(is a (file|folder); expected a|is no folder; name another)"):
        export_detections(kind, tmp_path / place, [], CLASSES, {})
    assert tree(tmp_path) == {"file"}


# ---------------------------------------------------------------- YOLO


def yolo_of(folder: Path, classes: Sequence[str], found: Mapping[str, Detections]) -> Path:
    export_detections("yolo", folder / "yolo", photos_in(folder / "photos", *found), classes, found)
    return folder / "yolo"


@settings(max_examples=40)
@given(st.lists(boxes, max_size=5), st.lists(st.text(min_size=1), min_size=2, max_size=3, unique=True))
def test_yolo_files_are_read_back(tmp_path_factory, rows, classes):
    assume(not any("\ud800" <= c <= "\udfff" for name in classes for c in name))
    folder = tmp_path_factory.mktemp("yolo")
    found = {"one": detected(*((x, y, x + w, y + h, 0.5, label) for x, y, w, h, label in rows)), "b/one": detected()}
    source = DataSource(path=yolo_of(folder, classes, found))
    truth = read_truth(source)
    assert truth.classes == tuple(classes) and sorted(truth.ids) == ["b%2Fone", "one"]
    limit = torch.tensor([*SIZE, *SIZE], dtype=torch.float64)
    inside = torch.minimum(found["one"].boxes.clamp(min=0), limit)
    kept = (inside[:, 2:] > inside[:, :2]).all(1)
    objects = truth.objects[truth.ids.index("one")]
    assert torch.allclose(objects.boxes, inside[kept], rtol=0, atol=1e-6)
    assert objects.labels.tolist() == found["one"].labels[kept].tolist()
    tags = read_tagged(source)
    assert tags.tags[truth.ids.index("one")].nonzero().flatten().tolist() == sorted(set(objects.labels.tolist()))
    assert yaml.safe_load((folder / "yolo" / "data.yaml").read_text())["names"] == dict(enumerate(classes))


def test_a_yolo_folder_has_labels_links_and_names(tmp_path):
    folder = yolo_of(tmp_path, CLASSES, FOUND)
    assert tree(folder) == {"data.yaml", "images/one.png", "images/two.png", "labels/one.txt", "labels/two.txt"}
    assert (folder / "images" / "one.png").resolve() == tmp_path / "photos" / "one.png"
    first, second = (folder / "labels" / "one.txt").read_text().splitlines()
    assert [float(value) for value in first.split()] == pytest.approx([1, 0.15, 12.25 / 30, 0.25, 20.5 / 30])
    assert second == "0 0.500000000 0.500000000 1.000000000 1.000000000"
    assert (folder / "labels" / "two.txt").read_text() == ""
    assert (folder / "data.yaml").read_text() == (
        'train: images\nval: images\nnames:\n  0: "cat"\n  1: "traffic light"\n'
    )


def test_photos_that_are_in_place_are_not_linked(tmp_path):
    photos = photos_in(tmp_path / "out" / "images", "one")
    before = photos[0].path.read_bytes()
    for _ in range(2):
        export_detections("yolo", tmp_path / "out", photos, CLASSES, FOUND)
    assert not photos[0].path.is_symlink() and photos[0].path.read_bytes() == before


def test_without_links_photos_are_copied(tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    folder = yolo_of(tmp_path, CLASSES, FOUND)
    assert not (folder / "images" / "one.png").is_symlink()
    assert (folder / "images" / "one.png").read_bytes() == (tmp_path / "photos" / "one.png").read_bytes()
