"""Tables, examples and file formats in the documentation are those of the code."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import torch
from PIL import Image

from pages import DOCS, ROOT, blocks, load, prose
from tag2box import extend
from tag2box.annotations import Photo
from tag2box.data.check import ADVICE, SEVERITIES
from tag2box.extend import DATASET_FORMATS, load_part
from tag2box.formats.datasets import dataset_format, has_boxes, read_tagged
from tag2box.formats.listing import DataSource
from tag2box.models.weights.weight_cache import Provenance
from tag2box.models.weights.zoo import ZOO
from tag2box.proposals.base import Candidates
from tag2box.proposals.store import ProposalStore, write_store


def rows(page: Path, first: str) -> list[list[str]]:
    """The cells of a table below the header that begins with ``first``."""
    after = prose(page).split(f"| {first} |", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in after.splitlines()[2:]]


def photo(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 6)).save(path)


def tags_of(path: Path) -> dict[str, tuple[set[str], set[str]]]:
    """Tags and unsure tags of each photo."""
    found = read_tagged(DataSource(path=path))
    unsure = found.unsure if found.unsure is not None else torch.zeros_like(found.tags)
    pick = [[{found.classes[c] for c in row.nonzero().flatten().tolist()} for row in x] for x in (found.tags, unsure)]
    return {photo.id: both for photo, both in zip(found.photos, zip(*pick, strict=True), strict=True)}


TAGGED = {"beach": ({"dog", "ball"}, set()), "garden": ({"dog"}, set()), "empty-street": (set(), set())}


@pytest.mark.parametrize(
    ("index", "wanted"),
    [
        (0, TAGGED),
        (1, {key: TAGGED[key] for key in ("beach", "garden")}),
        (2, TAGGED | {"garden": ({"dog"}, {"ball"})}),
    ],
)
def test_tables_of_tags_in_the_docs_are_read(index: int, wanted: dict, tmp_path: Path) -> None:
    (tmp_path / "tags.csv").write_text(blocks(DOCS / "datasets.md", "csv")[index], encoding="utf-8")
    for image in wanted:
        photo(tmp_path / f"{image}.jpg")
    assert tags_of(tmp_path / "tags.csv") == wanted


@pytest.mark.parametrize(("index", "boxed", "photos"), [(0, True, ["beach"]), (1, False, ["beach", "garden"])])
def test_coco_files_in_the_docs_are_read(index: int, boxed: bool, photos: list[str], tmp_path: Path) -> None:
    (tmp_path / "tags.json").write_text(blocks(DOCS / "datasets.md", "json")[index], encoding="utf-8")
    for image in photos:
        photo(tmp_path / f"{image}.jpg")
    assert tags_of(tmp_path / "tags.json") == {image: TAGGED[image] for image in photos}
    assert has_boxes(DataSource(path=tmp_path / "tags.json")) is boxed


@pytest.mark.parametrize(("start", "form"), [("VOC2007/", "voc"), ("photos/dog", "class-folders")])
def test_folders_in_the_docs_are_recognised(start: str, form: str, tmp_path: Path) -> None:
    text = next(text for text in blocks(DOCS / "datasets.md", "text") if text.startswith(start))
    for line in text.splitlines():
        photo((tmp_path / line.split()[0]).with_suffix(".jpg"))
    root = tmp_path / start.partition("/")[0]
    assert type(dataset_format(DataSource(path=root))) is load_part(DATASET_FORMATS[form])
    if form == "class-folders":
        wanted = {"garden": {"dog"}, "park": {"dog"}, "beach": {"ball"}, "empty-street": set()}
        assert {key: sure for key, (sure, _) in tags_of(root).items()} == wanted


def test_every_kind_of_finding_is_in_the_docs() -> None:
    told = [
        row for row in prose(DOCS / "datasets.md").splitlines() if row.startswith(tuple(f"| {s}:" for s in SEVERITIES))
    ]
    assert len(told) == len(SEVERITIES)
    for severity, row, code in zip(SEVERITIES, told, ("2", "1", "0"), strict=True):
        _, _, exit_code, kinds, _ = (cell.strip() for cell in row.split("|"))
        assert exit_code == code
        assert kinds == ", ".join(kind for kind, (grave, _) in ADVICE.items() if grave == severity)


def test_formats_of_proposals_are_those_of_the_docs() -> None:
    numbers = {"xyxy": "x1 y1 x2 y2", "yxyx": "y1 x1 y2 x2", "xywh": "x y w h"}
    wanted = {}
    for key, part in extend.PROPOSAL_FILE_FORMATS.items():
        usual = extend.load_part(part).convention
        last = "" if usual.boxes_are == "xywh" else f", last pixel {usual.last_pixel}"
        wanted[f"`{key}`"] = f"{numbers[usual.boxes_are]} from {usual.first_pixel}{last}"
    assert {row[0]: row[-1] for row in rows(DOCS / "proposals.md", "`--format`")} == wanted


def test_the_store_matches_the_docs(tmp_path: Path) -> None:
    photos = [Photo(key, Path(f"{key}.jpg"), 8, 6) for key in ("none", "one", "two")]
    boxes = [torch.tensor([[0.0, 0, i + 1, 2]]).repeat(i, 1) for i in range(3)]
    code = next(text for text in blocks(DOCS / "proposals.md", "python") if "def read_store" in text)
    (tmp_path / "reader_of_the_docs.py").write_text(code, encoding="utf-8")
    for _ in range(2):  # the second store has other file names
        write_store(
            tmp_path / "store", {"kind": "mine"}, photos, [Candidates(b, torch.arange(len(b)) + 0.5) for b in boxes]
        )
        found = load(tmp_path / "reader_of_the_docs.py").read_store(tmp_path / "store")
        store = ProposalStore.open(tmp_path / "store")
        assert list(found) == ["none", "one", "two"]
        for key, (own_boxes, own_scores) in found.items():
            assert own_boxes.tolist() == store.boxes(key).tolist() and own_scores.tolist() == store.scores(key).tolist()
    fields = {
        field
        for row in rows(DOCS / "proposals.md", "field of `index.json`")
        for field in re.findall(r"`(\w+)`", row[0])
    }
    assert fields == set(json.loads((tmp_path / "store" / "index.json").read_text()))


def test_weights_are_those_of_the_docs() -> None:
    text = next(text for text in blocks(DOCS / "weights.md", "text") if text.startswith("name "))
    listed = [[cell.strip() for cell in line.split("│")] for line in text.splitlines() if "│" in line]
    wanted = [[e.name, e.architecture, e.holds, e.licence, f"{e.megabytes} MB", e.source] for e in ZOO.values()]
    assert [row[:-1] for row in listed] == wanted
    fields = [field for row in rows(DOCS / "weights.md", "field") for field in re.findall(r"`(\w+)`", row[0])]
    assert sorted(fields) == sorted(Provenance.__slots__)


def test_tree_and_layers_are_those_of_the_package() -> None:
    tree, layers = blocks(DOCS / "architecture.md", "")[:2]
    there = {
        p.name + "/" * p.is_dir()
        for p in (ROOT / "src" / "tag2box").iterdir()
        if p.name[0] not in "_." and p.name != "py.typed"
    }
    assert set(re.findall(r"^  (\S+)", tree, re.MULTILINE)) == there
    told = set(re.findall(r"\w+", tree))
    for module in (ROOT / "src" / "tag2box").rglob("[a-z]*.py"):
        assert module.stem in told, module
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]["layers"]
    assert layers.splitlines() == [layer.replace("tag2box.", "") for layer in contract]
