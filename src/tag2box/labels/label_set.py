"""Label sets: folders with the boxes of tagged photos, as ``tag2box label`` writes them.

``labels.json``
    A COCO annotation file with one row per line. Images have ``file_name`` (relative to the root of the photos),
    ``width``, ``height``, ``tags`` (class names), ``sha256`` (of the photo) and a ``tag2box`` object: ``id``,
    ``unsure`` tags, ``split``, ``reviewed`` (true if its review was finished), and size and time of the file.
    Annotations have ``bbox``, ``area``, ``iscrowd``, ``score`` and a ``tag2box`` object: ``tag`` (whether the class is
    a tag of the photo), ``why``, ``rank``, ``margin``, ``alternative`` (a nested box that was dropped, as
    ``bbox``), ``source``.
``manifest.json``
    Format version, digest of labels.json, run, rule, root of the photos, classes, counts, versions; and its own digest.

Doubtful boxes are annotations with ``iscrowd`` 1 and ``ignore`` 1: pycocotools, and all that follow it, count a
detection in such a region neither as right nor as wrong, and trainers skip them.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from tag2box import io, storage
from tag2box.errors import UserError, printable
from tag2box.labels.labelled import Box, LabelBox, LabelledPhoto, LabelledPhotos
from tag2box.progress import Progress, silent
from tag2box.storage import FileStamp

LABELS_FILE = "labels.json"
FORMAT = 1
_KIND = "label set"
_ON_WINDOWS = os.name == "nt"  # where a backslash separates folders; elsewhere file names may have one
_REMEDY = "restore it, or label the photos again"


@dataclass(frozen=True)
class LabelSet:
    """A label set: photos with tags and boxes, and where they come from.

    Example:
        labels = LabelSet.open(Path("labels"))
        labels.verify()
        for photo in labels.content.photos:
            print(photo.file, [(box.name, box.score) for box in photo.labels])
    """

    content: LabelledPhotos
    run: Mapping[str, object] = field(default_factory=dict)  # folder, digest of its weights and settings
    rule: Mapping[str, object] = field(default_factory=dict)  # settings of the label rule
    versions: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""  # of labels.json; empty if the set was not read from a folder

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes in order; category k of labels.json is the k-th, from 1."""
        return self.content.classes

    @classmethod
    def open(cls, folder: Path, photos: Path | None = None) -> LabelSet:
        """Read a label set; raises if it is damaged. No photo is opened: see ``verify``.

        Args:
            photos: root of the photos, if they were moved since.
        """
        if not is_label_set(folder):
            raise UserError(f"{folder}: no label set here; expected a folder that `tag2box label` wrote")
        manifest = storage.read_checked_json(folder / storage.MANIFEST, "the manifest of a label set", _REMEDY)
        if manifest.get("kind") != _KIND or type(manifest.get("format")) is not int or manifest["format"] > FORMAT:
            raise UserError(
                f"{folder / storage.MANIFEST}: expected a {_KIND} of format {FORMAT}, got {manifest.get('kind')!r:.40} "
                f"of format {manifest.get('format')!r:.20}; update tag2box, or label the photos again"
            )
        path = folder / LABELS_FILE
        storage.verify_file(path, _REMEDY)
        try:
            classes = tuple(str(name) for name in manifest["classes"])
            root = photos or _root(folder, str(manifest["photos"]))
            content = LabelledPhotos(root, classes, tuple(_read_photos(path, classes)))
            return cls(
                content, dict(manifest["run"]), dict(manifest["rule"]), dict(manifest["versions"]),
                str(manifest["files"][LABELS_FILE]["sha256"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
            raise UserError(
                printable(f"{folder}: {error} is missing or of the wrong type in the label set; {_REMEDY}")
            ) from None

    def verify(self, progress: Progress = silent, missing: list[str] | None = None) -> None:
        """Raise unless every photo is there and is the one that was labelled; unchanged files are not read again.

        Args:
            missing: if given, the files of photos that are gone are added to it, instead of raising.
        """
        if not self.content.root.is_dir():
            raise UserError(
                f"{self.content.root}: no such folder; name the folder of the labelled photos with --photos"
            )
        with progress("photos", len(self.content)) as bar:
            for photo in self.content.photos:
                path = self.content.path(photo)
                if not path.is_file():
                    if missing is None:
                        raise UserError(
                            f"{path}: this photo of the label set is gone; restore it, or name another --photos"
                        )
                    missing.append(photo.file)
                elif photo.stamp is not None and FileStamp.of(path, photo.stamp).sha256 != photo.stamp.sha256:
                    raise UserError(
                        f"{path}: is not the photo that was labelled; restore it, or label the photos again"
                    )
                bar.advance()

    def check_classes(self, classes: Sequence[str], where: str) -> None:
        """Raise unless the classes, in order, are those of the set; ``where`` names them in the message."""
        for number, (own, other) in enumerate(zip(self.classes, classes, strict=False), start=1):
            if own != other:
                raise UserError(printable(f"{where}: class {number} is {other!r}, {own!r} in the label set; rename it"))
        if len(self.classes) != len(classes):
            raise UserError(f"{where}: {len(classes)} classes, the label set has {len(self.classes)}; use the same")

    def write(self, folder: Path) -> None:
        """Write the set as a new folder, whole or not at all."""
        check_new(folder)
        if folder.is_dir():
            folder.rmdir()  # empty
        with io.replacing_folder(folder) as temporary:
            (temporary / LABELS_FILE).write_text(labels_text(self.content), encoding="utf-8", newline="\n")
            storage.write_manifest(temporary, self._manifest(folder))

    def _manifest(self, folder: Path) -> dict[str, object]:
        counts = self.content.counts()
        return {
            "format": FORMAT,
            "kind": _KIND,
            "photos": str(self.content.root.absolute()),
            "classes": list(self.classes),
            "run": dict(self.run),
            "rule": dict(self.rule),
            "versions": dict(self.versions),
            "counts": {"photos": len(self.content), "classes": {name: asdict(own) for name, own in counts.items()}},
        }


def is_label_set(folder: Path) -> bool:
    """Whether a folder has the two files of a label set."""
    return (folder / LABELS_FILE).is_file() and (folder / storage.MANIFEST).is_file()


def check_new(folder: Path) -> None:
    """Raise unless a new label set can be written to a folder: nothing there is overwritten."""
    if folder.is_dir() and any(folder.iterdir()):
        what = "already holds a label set" if is_label_set(folder) else "is not empty"
        raise UserError(f"{folder}: {what}; name another --out, or remove it")
    io.check_writable(folder, is_folder=True)


def match_classes(names: Sequence[str], known: Sequence[str], where: str, whose: str) -> None:
    """Raise unless all class names are known: one may have been renamed since."""
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name[:100], known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "leave it out with --classes, or train on it"
            raise UserError(printable(f"{where}: class {name!r} is not one of {whose}; {hint}"))


def verified_root(folder: Path) -> Path:
    """The root of the photos of a label set, whose labels.json is verified."""
    manifest = storage.read_checked_json(folder / storage.MANIFEST, "the manifest of a label set", _REMEDY)
    storage.verify_file(folder / LABELS_FILE, _REMEDY)
    return _root(folder, str(manifest.get("photos")))


def _root(folder: Path, recorded: str) -> Path:
    """The root of the photos as recorded; a folder of that name beside the set if both were moved together."""
    root = Path(recorded)
    beside = folder.absolute().parent / root.name
    return beside if not root.is_dir() and beside.is_dir() else root


# ---------------------------------------------------------------- labels.json


def labels_text(content: LabelledPhotos) -> str:
    """The text of labels.json."""
    numbers = {name: number for number, name in enumerate(content.classes, start=1)}
    images: list[dict[str, object]] = []
    rows: list[dict[str, object]] = []
    for number, photo in enumerate(content.photos, start=1):
        images.append({"id": number, **_image_row(photo)})
        for box in photo.boxes:
            rows.append({"id": len(rows) + 1, "image_id": number, **_box_row(box, numbers[box.name])})
    categories = [{"id": number, "name": name} for name, number in numbers.items()]
    parts = (("images", images), ("categories", categories), ("annotations", rows))
    return "{" + ",\n".join(f'"{name}": [{_lines(own)}]' for name, own in parts) + "}\n"


def _lines(rows: Sequence[Mapping[str, object]]) -> str:
    return ",\n".join(json.dumps(row, allow_nan=False) for row in rows)


def _image_row(photo: LabelledPhoto) -> dict[str, object]:
    more: dict[str, object] = {"id": photo.id, "unsure": list(photo.unsure), "split": photo.split}
    if photo.is_reviewed:
        more["reviewed"] = True
    if photo.stamp is not None:
        more |= {"bytes": photo.stamp.size, "mtime_ns": photo.stamp.mtime_ns}
    return {
        "file_name": photo.file,
        "width": photo.width,
        "height": photo.height,
        "tags": list(photo.tags),
        "sha256": photo.stamp.sha256 if photo.stamp is not None else None,
        "tag2box": more,
    }


def _box_row(box: LabelBox, category: int) -> dict[str, object]:
    row: dict[str, object] = {"category_id": category, "bbox": _xywh(box.box), "area": box.area}
    row |= {"iscrowd": int(box.is_doubtful), "ignore": int(box.is_doubtful)}
    if box.score is not None:
        row["score"] = box.score
    alternative = None if box.alternative is None else _xywh(box.alternative)
    more = {"tag": box.is_tag, "why": box.why, "rank": box.rank, "margin": box.margin, "alternative": alternative}
    return {**row, "tag2box": {**more, "source": box.source}}


def _xywh(box: Box) -> list[float]:
    return [box[0], box[1], box[2] - box[0], box[3] - box[1]]


def _xyxy(box: Sequence[float]) -> Box:
    x, y, width, height = map(float, box)
    return x, y, x + width, y + height


def _read_photos(path: Path, classes: Sequence[str]) -> Iterator[LabelledPhoto]:
    """The photos of labels.json; its digest was verified, so that wrong types are a bug or another version."""
    content = io.read_json(path, "the labels of a label set")
    boxes: dict[int, list[LabelBox]] = {}
    for row in content["annotations"]:
        boxes.setdefault(row["image_id"], []).append(_read_box(row, classes))
    for row in content["images"]:
        more, file = row["tag2box"], PurePosixPath(row["file_name"])
        if file.is_absolute() or ".." in file.parts or (_ON_WINDOWS and "\\" in str(file)) or not file.name:
            raise ValueError(f"file_name {str(file)!r:.100}, which leads out of the photos,")
        stamp = FileStamp.from_json([more["bytes"], more["mtime_ns"], row["sha256"]]) if "bytes" in more else None
        yield LabelledPhoto(
            str(more["id"]), str(file), int(row["width"]), int(row["height"]), tuple(row["tags"]),
            tuple(boxes.get(row["id"], ())), tuple(more["unsure"]), str(more["split"]), stamp,
            bool(more.get("reviewed", False)),
        )  # fmt: skip


def _read_box(row: Mapping[str, Any], classes: Sequence[str]) -> LabelBox:
    more, score, number = row["tag2box"], row.get("score"), int(row["category_id"])
    if not 1 <= number <= len(classes):
        raise ValueError(f"category_id {number}")
    return LabelBox(
        _xyxy(row["bbox"]),
        classes[number - 1],
        None if score is None else float(score),
        is_doubtful=bool(row["iscrowd"]),
        is_tag=bool(more["tag"]),
        why=more["why"],
        rank=int(more["rank"]),
        margin=None if more["margin"] is None else float(more["margin"]),
        alternative=None if more["alternative"] is None else _xyxy(more["alternative"]),
        source=more["source"],
    )
