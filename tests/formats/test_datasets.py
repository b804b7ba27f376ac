from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from PIL import Image

import tag2box
from tag2box.errors import UserError
from tag2box.extend import DATASET_FORMATS, load_part
from tag2box.formats.coco_file import each_row
from tag2box.formats.datasets import (
    class_names,
    dataset_format,
    everything,
    has_boxes,
    read_photos,
    read_tagged,
    read_truth,
)
from tag2box.formats.listing import DataSource, Fault

XML = (
    "<annotation><size><width>8</width><height>6</height></size><object><name>{}</name><bndbox><xmin>1</xmin>"
    "<ymin>1</ymin><xmax>4</xmax><ymax>4</ymax></bndbox></object></annotation>"
)
ROWS = {"one": "dog", "two": "cat"}
"""The same two photos in every format below."""


def photo(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 6)).save(path)


def as_voc(folder: Path) -> Path:
    for name, tag in ROWS.items():
        photo(folder / "VOCdevkit" / "VOC2007" / "JPEGImages" / f"{name}.jpg")
        (folder / "VOCdevkit" / "VOC2007" / "Annotations").mkdir(exist_ok=True)
        (folder / "VOCdevkit" / "VOC2007" / "Annotations" / f"{name}.xml").write_text(XML.format(tag))
    return folder / "VOCdevkit"


def as_coco(folder: Path, box: bool = True) -> Path:
    for name in ROWS:
        photo(folder / "photos" / f"{name}.jpg")
    numbers = {"cat": 1, "dog": 2}
    bbox = {"bbox": [0, 0, 4, 4]} if box else {}
    content = {
        "images": [{"id": i, "file_name": f"{n}.jpg", "width": 8, "height": 6} for i, n in enumerate(ROWS)],
        "categories": [{"id": number, "name": name} for name, number in numbers.items()],
        "annotations": [{"image_id": i, "category_id": numbers[t]} | bbox for i, t in enumerate(ROWS.values())],
    }
    (folder / "t.json").write_text(json.dumps(content))
    return folder / "t.json"


def as_yolo(folder: Path) -> Path:
    (folder / "labels").mkdir(parents=True)
    for name, tag in ROWS.items():
        photo(folder / "images" / f"{name}.jpg")
        (folder / "labels" / f"{name}.txt").write_text(f"{['cat', 'dog'].index(tag)} 0.25 {1 / 3} 0.5 {2 / 3}\n")
    (folder / "data.yaml").write_text("train: images\nval: images\nnames: [cat, dog]\n")
    return folder


def as_tags_alone(folder: Path) -> Path:
    return as_coco(folder, box=False)


def as_csv(folder: Path, text: str = "image,tags\none.jpg,dog\ntwo.jpg,cat\n") -> Path:
    for name in ROWS:
        photo(folder / "images" / f"{name}.jpg")
    (folder / "t.csv").write_text(text)
    return folder / "t.csv"


def as_columns(folder: Path) -> Path:
    return as_csv(folder, "file\tcat\tdog\none.jpg\t0\t1\ntwo.jpg\tx\t\n")


def as_pairs(folder: Path) -> Path:
    return as_csv(folder, "Photo;Label\none.jpg;dog\ntwo.jpg;cat\n")


def as_tree(folder: Path) -> Path:
    for name, tag in ROWS.items():
        photo(folder / tag / f"{name}.jpg")
    return folder


def as_folder(folder: Path) -> Path:
    for name in ROWS:
        photo(folder / f"{name}.jpg")
    return folder


KINDS = {
    as_voc: "voc", as_coco: "coco", as_tags_alone: "coco", as_csv: "csv", as_columns: "csv", as_pairs: "csv",
    as_tree: "class-folders", as_folder: "photos", as_yolo: "yolo",
}  # fmt: skip
TAGGED = [make for make, kind in KINDS.items() if kind != "photos"]


@pytest.mark.parametrize("make", KINDS)
def test_every_format_is_recognised_and_lists_its_photos(make, tmp_path):
    source = DataSource(path=make(tmp_path))
    assert type(dataset_format(source)) is load_part(DATASET_FORMATS[KINDS[make]])
    photos = read_photos(source)
    assert {p.id for p in photos} == {"one", "two"} and {(p.width, p.height) for p in photos} == {(8, 6)}
    assert all(p.path.is_file() for p in photos)


@pytest.mark.parametrize("make", TAGGED)
def test_every_format_gives_the_same_tags(make, tmp_path):
    data = read_tagged(DataSource(path=make(tmp_path)))
    assert data.classes == ("cat", "dog") and data.unsure is None
    by_id = {photo.id: tags for photo, tags in zip(data.photos, data.tags.tolist(), strict=True)}
    assert by_id == {"one": [False, True], "two": [True, False]}


@pytest.mark.parametrize("make", TAGGED)
def test_chosen_classes_set_the_columns(make, tmp_path):
    data = read_tagged(DataSource(path=make(tmp_path), classes=("dog", "cat")))
    by_id = {photo.id: tags for photo, tags in zip(data.photos, data.tags.tolist(), strict=True)}
    assert (data.classes, by_id) == (("dog", "cat"), {"one": [True, False], "two": [False, True]})


@pytest.mark.parametrize("make", KINDS)
def test_boxes_are_for_evaluation_where_there_are_any(make, tmp_path):
    source = DataSource(path=make(tmp_path))
    assert has_boxes(source) == (make in {as_voc, as_coco, as_yolo})
    if has_boxes(source):
        truth = read_truth(source)
        assert truth.ids == ("one", "two")
        assert [objects.boxes.tolist() for objects in truth.objects] == [[[0, 0, 4, 4]]] * 2
    else:
        with pytest.raises(UserError, match=r"no boxes|bbox: field required") as caught:
            read_truth(source)
        assert str(source.path) in str(caught.value)


def test_a_plain_folder_has_no_tags(tmp_path):
    with pytest.raises(UserError, match="a plain folder of photos has no tags; expected a CSV"):
        read_tagged(DataSource(path=as_folder(tmp_path)))


@pytest.mark.parametrize("make", KINDS)
def test_a_list_of_ids_chooses_photos(make, tmp_path):
    path = make(tmp_path / "data")
    part = tmp_path / "part.txt"
    for line in ("two", "two.jpg"):
        part.write_text(f"\n{line}\n")
        source = DataSource(path=path, split=str(part))
        assert [p.id for p in read_photos(source)] == ["two"]
        if make is not as_folder:
            data = read_tagged(source)
            assert [p.id for p in data.photos] == ["two"] and data.tags.sum() == 1
        if has_boxes(source):
            assert read_truth(source).ids == ("two",)


@pytest.mark.parametrize("make", TAGGED)
def test_a_list_of_other_ids_is_refused_or_complained_of(make, tmp_path):
    path = make(tmp_path / "data")
    part = tmp_path / "part.txt"
    part.write_text("two\nthree\n/\n")
    source = DataSource(path=path, split=str(part))
    with pytest.raises(UserError, match=r"three|line 3"):
        read_tagged(source)
    faults: list[Fault] = []
    assert len(read_tagged(source, faults.append)) == 1 and len(faults) == 2


def test_a_split_that_is_no_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"train: no such file; expected a text file of image ids"):
        read_tagged(DataSource(path=as_csv(tmp_path), split="train"))


def test_everything_of_a_voc_folder_needs_no_list(tmp_path):
    folder = as_voc(tmp_path)
    main = folder / "VOC2007" / "ImageSets" / "Main"
    main.mkdir(parents=True)
    for name in ROWS:
        (main / f"{name}.txt").write_text(name)
    with pytest.raises(UserError, match="name one with --split: one, two, all"):
        read_tagged(DataSource(path=folder))
    whole = everything(DataSource(path=folder))
    assert len(read_tagged(whole)) == len(read_truth(whole)) == len(read_photos(DataSource(path=folder))) == 2
    assert everything(DataSource(path=folder, split="one")).split == "one"


# ---------------------------------------------------------------- class names


@pytest.mark.parametrize(
    ("text", "names"), [("dog", ("dog",)), (" dog , red fox,", ("dog", "red fox")), ("a.b,c", ("a.b", "c"))]
)
def test_class_names_are_separated_by_commas(text, names):
    assert class_names(text) == names


def test_class_names_come_from_a_file(tmp_path):
    (tmp_path / "names").write_text("dog\n\n red, white fox \n")
    assert class_names(str(tmp_path / "names")) == ("dog", "red, white fox")


@pytest.mark.parametrize("text", ["", ",", "dog,dog", "none.txt", "x\0y.txt"])
def test_bad_class_names_are_refused(text):
    with pytest.raises(UserError) as caught:
        class_names(text)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- broken and hostile files

DEEP = "[" * 200_000
PATHS = {"none": "no such file or folder", "one.jpg": "this is no dataset", "empty": "no photos in this folder"}


@pytest.mark.parametrize("name", PATHS)
def test_paths_that_are_no_dataset_are_named(name, tmp_path):
    photo(tmp_path / "one.jpg")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=PATHS[name]):
        read_photos(DataSource(path=tmp_path / name))


HOSTILE_JSON = {
    "nothing": "", "cut short": '{"images": [', "not JSON": "<xml/>", "no object": "[]", "a number": "3",
    "deep": DEEP, "deep inside": '{"images": ' + DEEP, "deep elsewhere": '{"info": ' + DEEP,
    "no images": "{}", "a huge number": '{"images": [{"id": ' + "9" * 10_000 + "}]}",
    "NUL": '{"images": [\0]}', "not UTF-8": b'{"images": ["\xff\xfe"]}', "UTF-16": '{"images": []}'.encode("utf-16"),
    "wrong type": '{"images": "x", "categories": []}', "null": '{"images": null, "categories": []}',
    "rows of nulls": '{"images": [null], "categories": [], "annotations": []}',
    "ids of lists": '{"images": [{"id": [1]}], "categories": [], "annotations": []}',
    "infinite": '{"images": [{"id": 1e400}], "categories": [], "annotations": []}',
    "not a number": '{"images": [{"id": NaN}], "categories": [], "annotations": []}',
    "surrogate": '{"images": [{"id": 1, "file_name": "\\ud800.jpg"}], "categories": [], "annotations": []}',
    "trailing comma": '{"images": [],}', "trailing comma in list": '{"images": [1,]}', "extra": '{"images": []} x',
    "no key": '{3: 4}', "no colon": '{"images" []}', "no comma": '{"images": [] "categories": []}',
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_JSON)
@pytest.mark.parametrize("read", [read_tagged, read_photos, read_truth])
def test_hostile_json_is_refused_in_one_line(name, read, tmp_path):
    text = HOSTILE_JSON[name]
    (tmp_path / "t.json").write_bytes(text if isinstance(text, bytes) else text.encode(errors="surrogatepass"))
    with pytest.raises(UserError) as caught:
        read(DataSource(path=tmp_path / "t.json"))
    said = str(caught.value)
    assert said.startswith(str(tmp_path / "t.json")) and said.isprintable() and len(said) < 1000
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


HOSTILE_TABLES = {
    "nothing": b"", "NUL": b"image,tags\na\0,b\n", "not UTF-8": b"image,tags\n\xff,b\n", "binary": bytes(range(256)),
    "UTF-16": "image,tags\na.jpg,b\n".encode("utf-16"), "header only": b"image,tags\n", "no header": b"a.jpg,dog\n",
    "endless quote": b'image,tags\n"a.jpg,dog\n' + b"x,y\n" * 50_000, "endless name": b"image,tags\n" + b"x" * 70_000,
    "many columns": b"image" + b",x" * 100_000, "escape": b"image,tags\n../../../../etc/passwd,dog\n",
    "absolute": b"image,tags\n/etc/passwd,dog\n", "a folder": b"image,tags\n.,dog\n",
    "terminal": b"image,tags\n\x1b[2J,d\n",
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE_TABLES)
@pytest.mark.parametrize("suffix", ["csv", "dat"])
def test_hostile_tables_are_refused_in_one_line(name, suffix, tmp_path):
    path = tmp_path / f"t.{suffix}"
    path.write_bytes(HOSTILE_TABLES[name])
    for read in (read_tagged, read_photos, read_truth):
        with pytest.raises(UserError) as caught:
            read(DataSource(path=path))
        assert str(caught.value).startswith(str(path)) and str(caught.value).isprintable()
        assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("tags", "warned"),
    [
        ([], []),
        (["apple", "banana"], []),
        (["c", "\u2660", "+"], []),
        (["Apple", "apple"], ["classes 'Apple' and 'apple' are spelled alike"]),
        (
            ["traffic light", "traffic-light", "Traffic_Light", "trafficlight"],
            ["classes 'Traffic_Light' and 'traffic li"],
        ),
        (["apple, banana"], ["class 'apple, banana' has a comma; separate tags with ; or |"]),
        ([f"{i},{i}" for i in range(9)], ["class '0,0' has a comma", "class '1,1'", "class '2,2'"]),
    ],
)
def test_class_names_that_look_like_mistakes_are_warned_about(tags, warned, tmp_path, recwarn):
    photo(tmp_path / "one.jpg")
    (tmp_path / "t.csv").write_text(f'image,tags\none.jpg,"{";".join(tags)}"\n')
    assert set(read_tagged(DataSource(path=tmp_path / "t.csv")).classes) == set(tags)
    lines = [str(warning.message) for warning in recwarn.list if warning.category is UserWarning]
    assert len(lines) == len(warned) and all(line.startswith(f"{tmp_path / 't.csv'}: ") for line in lines)
    assert all(part in line for line, part in zip(lines, warned, strict=True))


def test_class_names_that_no_file_can_hold_are_refused(tmp_path):
    photo(tmp_path / "caf\udce9" / "one.jpg")  # not UTF-8 on disk
    with pytest.raises(UserError, match=r"class 'caf\\udce9': not valid Unicode; rename it$"):
        read_tagged(DataSource(path=tmp_path))


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a\0b\n", b"../../x\n"])
def test_hostile_lists_are_refused_in_one_line(content, tmp_path):
    (tmp_path / "part.txt").write_bytes(content)
    for make in (as_voc, as_csv):
        with pytest.raises(UserError, match=r"part\.txt: (not readable|holds NUL|line 1)"):
            read_tagged(DataSource(path=make(tmp_path / make.__name__), split=str(tmp_path / "part.txt")))


documents = st.dictionaries(
    st.sampled_from(["images", "annotations", "info", 'odd "\\ key']),
    st.lists(st.recursive(st.none() | st.booleans() | st.floats(allow_nan=False) | st.integers() | st.text(),
                          lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=6), max_size=4),
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(documents, st.sampled_from([None, 0, 3]), st.booleans())
def test_rows_are_those_of_the_whole_file(tmp_path_factory, document, indent, ascii_only):
    path = tmp_path_factory.getbasetemp() / "rows.json"
    path.write_text(f" {json.dumps(document, indent=indent, ensure_ascii=ascii_only)}\n", encoding="utf-8")
    rows: dict[str, list[object]] = {"images": [], "annotations": []}
    there = each_row(path, "a file", {name: taken.append for name, taken in rows.items()})
    assert there == document.keys() & rows.keys()
    assert rows == {name: document.get(name, []) for name in rows}


# ---------------------------------------------------------------- the wall between training and boxes


TAG_READERS = ("listing", "csv_tags", "folders", "coco_file", "coco_tags", "voc_tags", "yolo_tags", "tool_tags")
BOX_READERS = (
    "detection_log",
    "annotated", "coco_boxes", "cvat_boxes", "detection_files", "export", "label_studio_boxes", "table_boxes",
    "voc_boxes", "xanylabeling_boxes", "yolo_boxes",
)  # fmt: skip
PHOTO_ROWS = ("addresses", "row_parts", "rows")  # photos of any storage, and what was computed of them
FORMATS = Path(str(tag2box.__file__)).parent / "formats"


def imports_of(module: str) -> set[str]:
    """All that a module of formats/ imports, by dotted names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((FORMATS / f"{module}.py").read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def reached_from(module: str) -> set[str]:
    """The modules of formats/ that a module imports, directly or through others."""
    reached, waiting = set(), [module]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            parts = (one.removeprefix("tag2box.formats.").partition(".")[0] for one in imports_of(name))
            waiting += [part for part in parts if (FORMATS / f"{part}.py").exists()]
    return reached


def test_there_is_a_module_for_every_reader():
    there = {path.stem for path in FORMATS.glob("[a-z]*.py")}
    assert there == {*TAG_READERS, *BOX_READERS, *PHOTO_ROWS, "datasets"}


@pytest.mark.parametrize("name", TAG_READERS)
def test_readers_of_tags_cannot_parse_boxes(name):
    """They import no type of truth, and none of the modules that parse boxes, not even through another."""
    assert not {one for one in imports_of(name) if one.endswith(("annotations.Truth", "annotations.Objects"))}
    assert not [one for one in imports_of(name) if one.startswith("tag2box.metrics")]
    assert not reached_from(name) & set(BOX_READERS)
    assert "voc_tags" in reached_from("voc_boxes")  # the walk follows imports of modules


@pytest.mark.parametrize("make", [as_voc, as_coco, as_yolo])
def test_tags_are_the_same_wherever_the_boxes_are(make, tmp_path):
    path = make(tmp_path)
    before = read_tagged(DataSource(path=path))
    changes = {"<xmax>4": "<xmax>-77", "[0, 0, 4, 4]": '["x", -3]', " 0.25 0.3": " x -3"}
    for file in (*tmp_path.rglob("*.xml"), *tmp_path.rglob("*.json"), *tmp_path.rglob("labels/*.txt")):
        for before_, after_ in changes.items():
            file.write_text(file.read_text().replace(before_, after_))
    after = read_tagged(DataSource(path=path))
    assert torch.equal(before.tags, after.tags)
    with pytest.raises(UserError, match=r"bndbox|bbox|expected x, y, width and height"):
        read_truth(DataSource(path=path))
