from __future__ import annotations

import hashlib
import json
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner

from tag2box.annotations import Photo, TaggedPhotos
from tag2box.cli import app
from tag2box.cli.data import check_exit_code, data_check, findings_view
from tag2box.data.check import (
    check_dataset,
    check_photos,
    lacks_negatives,
    odd_size,
    quick_findings,
    same_content,
    survey,
)
from tag2box.errors import UserError
from tag2box.formats.datasets import list_dataset
from tag2box.formats.listing import DataSource

BOXED = ("<annotation><size><width>{}</width><height>{}</height></size><object><name>dog</name><bndbox><xmin>{}</xmin>"
         "<ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox></object></annotation>")  # fmt: skip


def noise(path: Path, size: tuple[int, int] = (48, 40), seed: int | None = None) -> None:
    """A photo like no other, unless of the same seed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(sum(map(ord, str(path))) * 7919 + len(str(path)) if seed is None else seed)
    Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(path)


class Desk:
    """Twelve good photos with a table of tags, to spoil."""

    def __init__(self, folder: Path) -> None:
        self.photos = folder / "photos"
        self.rows = [(f"{n:02d}.jpg", "dog" if n % 2 else "cat") for n in range(12)]
        for number, (name, _) in enumerate(self.rows):
            noise(self.photos / name, seed=number)
        self.table = folder / "tags.csv"
        self.header = "image,tags"

    def source(self, **wanted: object) -> DataSource:
        self.table.write_text("\n".join([self.header, *(",".join(row) for row in self.rows)]))
        return DataSource(path=self.table, **wanted)  # type: ignore[arg-type]

    def add(self, name: str, tags: str, size: tuple[int, int] = (48, 40), seed: int | None = 99) -> None:
        noise(self.photos / name, size, seed)
        self.rows.append((name, tags))


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def found(source: DataSource) -> dict[str, tuple[str, int, tuple[str, ...]]]:
    return {finding.kind: (finding.severity, finding.count, finding.names) for finding in check_dataset(source)}


def test_nothing_is_wrong_with_a_good_dataset(desk):
    result = survey(desk.source())
    assert (result.what, result.photos, result.classes, result.findings) == ("a CSV of tags", 12, ("cat", "dog"), ())
    assert check_exit_code(result) == 0


def missing(desk: Desk) -> None:
    (desk.photos / "03.jpg").unlink()


def zero(desk: Desk) -> None:
    (desk.photos / "03.jpg").write_bytes(b"")


def text(desk: Desk) -> None:
    (desk.photos / "03.jpg").write_text("no photo")


def cut_short(desk: Desk) -> None:
    (desk.photos / "03.jpg").write_bytes((desk.photos / "03.jpg").read_bytes()[:1200])


def twice(desk: Desk) -> None:
    desk.rows.append(desk.rows[3])


def outside(desk: Desk) -> None:
    desk.rows.append(("../x.jpg", "dog"))


def bad_row(desk: Desk) -> None:
    desk.rows.append(("03.jpg", "dog", "cat"))  # type: ignore[arg-type]


def untagged(desk: Desk) -> None:
    desk.add("new.jpg", "")


def no_tags(desk: Desk) -> None:
    desk.rows = [(name, "") for name, _ in desk.rows]


def copy(desk: Desk) -> None:
    desk.add("new.jpg", "dog", seed=3)


def copy_with_other_tags(desk: Desk) -> None:
    desk.add("new.jpg", "cat", seed=3)


def small(desk: Desk) -> None:
    desk.add("new.png", "dog", (31, 80))


def long(desk: Desk) -> None:
    desk.add("new.png", "dog", (201, 40))


def rare(desk: Desk) -> None:
    desk.add("new.png", "cow;dog")


def all_gather_object(desk: Desk) -> None:
    desk.rows = [(name, f"{tags};animal") for name, tags in desk.rows]


def together(desk: Desk) -> None:
    desk.rows = [(name, "cat;kitten" if tags == "cat" else tags) for name, tags in desk.rows]


def alike(desk: Desk) -> None:
    desk.rows[3:9] = [(name, tags.replace("dog", "Dog ")) for name, tags in desk.rows[3:9]]


def comma(desk: Desk) -> None:
    desk.rows = [(name, '"dog, wet"' if tags == "dog" else tags) for name, tags in desk.rows]


def stray(desk: Desk) -> None:
    noise(desk.photos / "deep" / "stray.png")


FINDINGS: dict[Callable[[Desk], None], dict[str, tuple[str, int, tuple[str, ...]]]] = {
    missing: {"missing photo": ("error", 1, ("03.jpg",))},
    zero: {"empty photo": ("error", 1, ("03.jpg",))},
    text: {"unreadable photo": ("error", 1, ("03.jpg",))},
    cut_short: {"unreadable photo": ("error", 1, ("03.jpg",))},
    twice: {"listed twice": ("error", 1, ("03.jpg",))},
    outside: {"outside the folder": ("error", 1, ("../x.jpg",))},
    bad_row: {"bad row": ("error", 1, ("tags.csv:14",))},
    untagged: {"photo without tags": ("note", 1, ("new.jpg",))},
    no_tags: {
        "no tags at all": ("error", 1, ("photos",)),
        "photo without tags": ("note", 12, ("00.jpg", "01.jpg", "02.jpg", "03.jpg")),
    },
    copy: {"same photo twice": ("warning", 1, ("03.jpg = new.jpg",))},
    copy_with_other_tags: {"same photo, other tags": ("error", 1, ("03.jpg = new.jpg",))},
    small: {"very small photo": ("warning", 1, ("new.png (31x80)",))},
    long: {"very long photo": ("warning", 1, ("new.png (201x40)",))},
    rare: {"class with few photos": ("warning", 1, ("cow (1)",))},
    all_gather_object: {"class in every photo": ("warning", 1, ("animal",))},
    together: {"classes always together": ("warning", 1, ("cat = kitten",))},
    alike: {
        "class with few photos": ("warning", 2, ("Dog (3)", "dog (3)")),
        "classes spelled alike": ("warning", 1, ("Dog = dog",)),
    },
    comma: {"class name with a comma": ("warning", 1, ("dog, wet",))},
    stray: {"photo no row names": ("note", 1, ("deep/stray.png",))},
}


@pytest.mark.parametrize("spoil", FINDINGS, ids=lambda spoil: spoil.__name__)
def test_each_trouble_is_found_and_nothing_else(spoil, desk):
    spoil(desk)
    seen = found(desk.source())
    if spoil is no_tags:  # its name is the whole path of the folder
        severity, count, names = seen["no tags at all"]
        seen["no tags at all"] = (severity, count, tuple(Path(name).name for name in names))
    assert seen == FINDINGS[spoil]


def test_chosen_classes_show_strangers_and_classes_without_photos(desk):
    seen = found(desk.source(classes=("cat", "cow")))
    assert seen["unknown class"] == ("error", 6, ("dog",))
    assert seen["class without a photo"] == ("warning", 1, ("cow",))


def test_of_a_part_the_rest_is_not_called_unused(desk, tmp_path):
    (tmp_path / "part.txt").write_text("\n".join(f"{n:02d}" for n in range(10)))
    assert found(desk.source(split=str(tmp_path / "part.txt"))) == {}


def test_a_plain_folder_is_checked_for_its_photos(desk):
    zero(desk)
    seen = found(DataSource(path=desk.photos))
    assert set(seen) == {"empty photo", "photos without tags only"}


def test_boxes_are_held_against_the_photos_as_they_are(tmp_path):
    boxes = {
        "good": (48, 40, 1, 1, 48, 40),
        "rounded": (48, 40, 0, 0, 49, 41),
        "out": (48, 40, 10, 10, 90, 20),
        "turned": (40, 48, 1, 1, 20, 48),
        "nosize": (0, 0, 1, 1, 48, 40),
        "mad": (48, 40, 9, 9, 3, 3),
    }
    for name, numbers in boxes.items():
        noise(tmp_path / "JPEGImages" / f"{name}.jpg")
        (tmp_path / "Annotations").mkdir(exist_ok=True)
        (tmp_path / "Annotations" / f"{name}.xml").write_text(BOXED.format(*numbers))
    (tmp_path / "Annotations" / "broken.xml").write_text("<")
    seen = found(DataSource(path=tmp_path))
    assert seen.pop("class in every photo")[1] == 1
    assert seen == {
        "unreadable annotation": ("error", 1, ("broken",)),
        "bad box": ("error", 1, ("mad",)),
        "box outside the photo": ("warning", 2, ("out (9 9 90 20)", "turned (0 0 20 48)")),
        "size differs from the photo's": ("warning", 1, ("turned (40x48, photo 48x40)",)),
    }


def test_flat_boxes_of_coco_are_named(tmp_path):
    noise(tmp_path / "a.png")
    content = {
        "images": [{"id": 1, "file_name": "a.png", "width": 48, "height": 40}],
        "categories": [{"id": 1, "name": "dog"}],
        "annotations": [{"image_id": 1, "category_id": 1, "bbox": [5, 5, 10, 0]}],
    }
    (tmp_path / "t.json").write_text(json.dumps(content))
    assert found(DataSource(path=tmp_path / "t.json"))["box without area"] == ("warning", 1, ("a (5 5 15 5)",))


@pytest.mark.parametrize(
    ("size", "kind"),
    [((32, 160), None), ((31, 31), "very small photo"), ((32, 161), "very long photo"), ((10_000, 10_000), None),
     ((10_001, 10_000), "very large photo")],
)  # fmt: skip
def test_odd_sizes(size, kind):
    assert odd_size(size) == odd_size(size[::-1]) == kind


def test_copies_are_those_of_equal_bytes(desk):
    """The twin hashes every file whole. Some files agree in length and tail alone."""
    head, tail = b"\x89PNG\r\n\x1a\n", bytes(5000)
    listing = list_dataset(desk.source())
    for number, start in enumerate((b"a", b"b", b"a", b"c", b"b", b"a")):
        (desk.photos / f"{number:02d}.jpg").write_bytes(head + start + tail)
    views_per_image = [look for look in check_photos(listing) if look.bytes]
    groups = {frozenset(look.entry.file for look in group) for group in same_content(desk.photos, views_per_image)}
    slow: defaultdict[bytes, set[str]] = defaultdict(set)
    for file in desk.photos.iterdir():
        slow[hashlib.sha256(file.read_bytes()).digest()].add(file.name)
    assert groups == {frozenset(names) for names in slow.values() if len(names) > 1}
    assert len(groups) == 2


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(("spoil", "code"), [(None, 0), (stray, 0), (small, 1), (missing, 2)])
def test_the_exit_code_depends_on_the_severity(spoil, code, desk, tmp_path):
    if spoil:
        spoil(desk)
    out = tmp_path / "found.json"
    done = CliRunner().invoke(app, ["data", "check", str(desk.source().path), "--json", str(out)])
    assert done.exit_code == code
    written = json.loads(out.read_text())
    assert (written["exit_code"], written["photos"], written["classes"]) == (code, len(desk.rows), ["cat", "dog"])
    assert len(written["findings"]) == (spoil is not None)
    words = {None: "no faults found", stray: "1 note", small: "1 warning", missing: "1 error"}[spoil]
    assert words in done.stdout


def test_a_dataset_that_cannot_be_read_is_an_error_and_writes_nothing(tmp_path):
    with pytest.raises(UserError, match="no such file or folder"):
        data_check(DataSource(path=tmp_path / "none"), json=tmp_path / "found.json")
    assert not list(tmp_path.iterdir())


def test_the_page_prints_names_as_they_are(desk, capsys):
    """Names are strangers' text: neither markup of the table nor codes of the terminal."""
    desk.rows += [("[red]gone[/red].jpg", "dog"), ("\x1b[31mlost.jpg", "cat")]
    Console(width=200).print(findings_view(survey(desk.source())))
    said = capsys.readouterr().out
    assert "[red]gone[/red].jpg" in said and "\x1b[31mlost" not in said
    assert "no photo [red]gone[/red].jpg in" in said and "kinds of faults: 1 error" in said


def test_every_photo_moves_the_bar(desk):
    class Bar:
        def __init__(self) -> None:
            self.count = 0

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            self.count += 1000

        def advance(self, note: str = "") -> None:
            self.count += 1

    bar = Bar()
    totals = []

    def watch(title: str, total: int, done: int = 0) -> Bar:
        totals.append(total)
        return bar

    data_check(desk.source(), progress=watch)
    assert (bar.count, totals) == (1012, [12])


@pytest.mark.parametrize(
    ("counts", "classes", "expected"),
    [
        ([], 3, False),
        ([1] * 16, 3, True),
        ([1] * 15, 3, False),  # too few photos to say so
        ([1] * 20, 1, False),  # one class: another finding
        ([*[1] * 20, 0], 3, False),  # a photo without any object
        ([*[1] * 20, 2], 3, False),
    ],
)
def test_photos_of_exactly_one_class_each_lack_negatives(counts, classes, expected):
    assert lacks_negatives(counts, classes) is expected


def test_photos_without_negatives_are_found(tmp_path):
    rows = ["image,tags"]
    for number in range(16):
        noise(tmp_path / "photos" / f"{number:02d}.png", seed=number)
        rows.append(f"{number:02d}.png,{'cat' if number % 2 else 'dog'}")
    (tmp_path / "tags.csv").write_text("\n".join(rows))
    seen = found(DataSource(path=tmp_path / "tags.csv", photos=tmp_path / "photos"))
    assert seen["one class in every photo"][:2] == ("warning", 1)


# ---------------------------------------------------------------- before training


def tagged(folder: Path, rows: list[tuple[str, str]], classes: tuple[str, ...]) -> TaggedPhotos:
    """Photos of distinct contents; a name with = is a copy of another."""
    photos, tags = [], []
    for number, (name, names) in enumerate(rows):
        file, _, copied = name.partition("=")
        if copied:
            shutil.copy(folder / copied, folder / file)
        else:
            Image.new("RGB", (40, 40), (number, 2 * number, 0)).save(folder / file)
        photos.append(Photo(Path(file).stem, folder / file, 40, 40))
        tags.append([c in names.split(";") for c in classes])
    return TaggedPhotos(classes, tuple(photos), torch.tensor(tags, dtype=torch.bool).reshape(-1, len(classes)))


@pytest.mark.parametrize(
    ("rows", "classes", "kinds"),
    [
        ([("a.png", "cat"), ("b.png", "dog")], ("cat", "dog"), []),
        ([("a.png", "Apple"), ("b.png", "apple")], ("Apple", "apple"), []),  # readers warn
        ([("a.png", "cat"), ("b.png=a.png", "cat")], ("cat",), ["same photo twice"]),
        ([("a.png", "cat"), ("b.png=a.png", "dog")], ("cat", "dog"), ["same photo, other tags"]),
        ([("a.png", "cat"), ("b.png", "")], ("cat", "dog"), ["class without a photo"]),
        ([(f"{n}.png", "cat;dog" if n else "cat") for n in range(16)], ("cat", "dog"), ["class in every photo"]),
        ([(f"{n}.png", "cat;dog" if n else "") for n in range(16)], ("cat", "dog"), ["classes always together"]),
        ([(f"{n}.png", "cat" if n else "dog") for n in range(16)], ("cat", "dog"), ["class with few photos"]),
        ([(f"{n}.png", "cat" if n else "dog") for n in range(15)], ("cat", "dog"), []),
    ],
)
def test_quick_findings_need_no_decoding(rows, classes, kinds, tmp_path, monkeypatch):
    photos = tagged(tmp_path, rows, classes)
    monkeypatch.setattr("tag2box.images.read_photo", None)
    findings = quick_findings(photos)
    assert [finding.kind for finding in findings] == kinds
    assert all("\n" not in str(finding) and finding.advice in str(finding) for finding in findings)


def test_quick_findings_leave_out_photos_that_have_gone(tmp_path):
    photos = tagged(tmp_path, [("a.png", "cat"), ("b.png=a.png", "cat")], ("cat",))
    (tmp_path / "b.png").unlink()
    assert quick_findings(photos) == ()
