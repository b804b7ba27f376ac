"""Export formats: detections written to files that other tools read.

An export format is a class that is called without arguments; its instances are called with the place to write to, the
photos, the class names and the detections by photo id. Built-in formats are listed in
``tag2box.extend.EXPORT_FORMATS``; those of other packages are named ``package.module:Name``. Every file is written
whole or not at all.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tag2box import extend, io
from tag2box.annotations import Detections, Photo
from tag2box.errors import UserError
from tag2box.metrics.voc_ap import to_voc_pixels

_Entry = dict[str, int | float | str | list[float]]

_RESERVED = r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\.|$)"  # devices on Windows
_UNSAFE = re.compile(rf'[\x00-\x1f\x7f\ud800-\udfff%/\\:*?"<>|]|^\.|[. ]$|^(?={_RESERVED}).', re.IGNORECASE)
_LONGEST_NAME = 200  # bytes; file systems take 255, with suffix


class ExportFormat(Protocol):
    """Writes detections; its class is called without arguments. A base class, too, for the defaults of its fields."""

    what: str = "a file"
    """Its name in messages, such as "a COCO file"."""
    is_folder: bool = False
    """Whether ``out`` is a folder (else a file)."""
    all_scores: bool = False
    """Whether boxes of all scores belong in it: evaluators rank by score, other tools expect the confident boxes."""

    def __call__(
        self, out: Path, photos: Sequence[Photo], classes: Sequence[str], detections: Mapping[str, Detections]
    ) -> None:
        """Write the detections (by photo id, labels indexing ``classes``) of some photos; none if an id is missing."""
        ...


def export_format(kind: str) -> ExportFormat:
    """The export format of a built-in name or of ``package.module:Name``."""
    try:
        made: ExportFormat = extend.find_part("export format", kind)()
    except UserError as error:
        raise UserError(f"export format {kind}: {error}") from None
    return made


def export_detections(
    kind: str | ExportFormat,
    out: Path,
    photos: Sequence[Photo],
    classes: Sequence[str],
    detections: Mapping[str, Detections],
) -> None:
    """Write detections in a format: ``export_detections("yolo", Path("out"), photos, classes, found)``.

    Args:
        kind: a built-in name, ``package.module:Name``, or an export format.
        out: file or folder to write.
        classes: class names, indexed by the labels of the detections.
        detections: by photo id.
    """
    made = export_format(kind) if isinstance(kind, str) else kind
    if out.exists() and out.is_dir() is not made.is_folder:
        other, wanted = ("file", "folder") if made.is_folder else ("folder", "file")
        raise UserError(f"{out}: is a {other}; expected a {wanted} for {made.what}, name another")
    made(out, photos, classes, detections)


def safe_file_name(name: str) -> str:
    """A file name for any text, such as a photo id or a class: different texts give different names.

    Separators and other characters that a file system may not accept are percent-encoded (``a/b`` becomes ``a%2Fb``),
    so no name can lead to another folder. The end of a very long name is replaced by a hash.
    """
    safe = _UNSAFE.sub(lambda c: "".join(f"%{b:02X}" for b in c[0].encode(errors="surrogatepass")), name) or "%"
    raw = safe.encode()
    if len(raw) <= _LONGEST_NAME:
        return safe
    digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    return f"{raw[: _LONGEST_NAME - 20].decode(errors='ignore')}%{digest}"


# ---------------------------------------------------------------- COCO


class CocoExport:
    """One COCO annotation file: photos, categories, and detections as annotations with a score.

    pycocotools loads it as ground truth; ``tag2box evaluate`` reads it as detections.
    """

    what = "a COCO file"
    is_folder = False
    all_scores = False

    def __call__(
        self, out: Path, photos: Sequence[Photo], classes: Sequence[str], detections: Mapping[str, Detections]
    ) -> None:
        """Write the file."""
        write_coco_detections(out, detections, classes, photos)


class CocoResultsExport:
    """A COCO results list. Images and categories are numbered from 1, as in ``CocoExport``, and named as well."""

    what = "a COCO results file"
    is_folder = False
    all_scores = True

    def __call__(
        self, out: Path, photos: Sequence[Photo], classes: Sequence[str], detections: Mapping[str, Detections]
    ) -> None:
        """Write the file."""
        found = {photo.id: detections.get(photo.id, Detections.empty()) for photo in photos}
        write_coco_results(out, found, classes, file_names={photo.id: _file_name(photo) for photo in photos})


def write_coco_results(
    path: Path,
    detections: Mapping[str, Detections],
    classes: Sequence[str],
    *,
    file_names: Mapping[str, str] | None = None,
    image_ids: Mapping[str, int] | None = None,
    category_ids: Mapping[str, int] | None = None,
) -> None:
    """Write a COCO results list; every entry has file and category names beside the numbers that official tools read.

    Args:
        file_names: file of each photo; default: its id.
        image_ids: COCO id of each photo; default: 1, 2, ... in the order of ``detections``.
        category_ids: COCO id of each class; default: 1, 2, ...
    """
    numbers = image_ids or {image_id: number for number, image_id in enumerate(detections, start=1)}
    categories = category_ids or {name: number for number, name in enumerate(classes, start=1)}
    rows: list[_Entry] = []
    for image_id, found in detections.items():
        file_name = file_names[image_id] if file_names else image_id
        for entry in _entries(found, classes, categories):
            rows.append({"image_id": numbers[image_id], "file_name": file_name, **entry})
    io.write_text(path, f"[{_lines(rows)}]\n")


def write_coco_detections(
    path: Path, detections: Mapping[str, Detections], classes: Sequence[str], photos: Sequence[Photo]
) -> None:
    """Write one self-contained COCO file: photos, categories, and detections as scored annotations."""
    categories = {name: number for number, name in enumerate(classes, start=1)}
    annotations: list[_Entry] = []
    for number, photo in enumerate(photos, start=1):
        for entry in _entries(detections.get(photo.id, Detections.empty()), classes, categories):
            annotations.append({"id": len(annotations) + 1, "image_id": number, **entry, "iscrowd": 0})
    images: list[_Entry] = [
        {"id": number, "file_name": _file_name(photo), "width": photo.width, "height": photo.height}
        for number, photo in enumerate(photos, start=1)
    ]
    named: list[_Entry] = [{"id": number, "name": name} for name, number in categories.items()]
    head = f'{{"images": [{_lines(images)}],\n"categories": [{_lines(named)}],\n"annotations": '
    io.write_text(path, f"{head}[{_lines(annotations)}]}}\n")


def _entries(found: Detections, classes: Sequence[str], categories: Mapping[str, int]) -> Iterator[_Entry]:
    columns = (found.boxes.double().tolist(), found.scores.double().tolist(), found.labels.tolist())
    for (x1, y1, x2, y2), score, label in zip(*columns, strict=True):
        width, height = x2 - x1, y2 - y1
        yield {
            "category_id": categories[classes[label]],
            "category_name": classes[label],
            "bbox": [x1, y1, width, height],
            "area": width * height,
            "score": score,
        }


def _file_name(photo: Photo) -> str:
    """The photo's file, with its folder if the id has one, so that photos of the same name stay distinct."""
    return photo.id if photo.id.endswith(photo.path.suffix) else photo.id + photo.path.suffix


def _lines(rows: list[_Entry]) -> str:
    """One entry per line: legible, and twice as fast as JSON with every number on its own line."""
    return ",\n".join(json.dumps(row, allow_nan=False) for row in rows)


# ---------------------------------------------------------------- VOC result files


class VocResultsExport:
    """The files that VOC's evaluation server takes, one per class, with boxes of all scores."""

    what = "a folder of VOC result files"
    is_folder = True
    all_scores = True

    def __init__(self, split: str = "test") -> None:
        self.split = split

    def __call__(
        self, out: Path, photos: Sequence[Photo], classes: Sequence[str], detections: Mapping[str, Detections]
    ) -> None:
        """Write the files."""
        found = {photo.id: detections.get(photo.id, Detections.empty()) for photo in photos}
        write_voc_results(out, found, classes, split=self.split)


def write_voc_results(
    folder: Path, detections: Mapping[str, Detections], classes: Sequence[str], *, split: str
) -> None:
    """Write ``comp4_det_SPLIT_CLASS.txt`` for each class, as VOC's evaluation server takes them."""
    lines: list[list[str]] = [[] for _ in classes]
    for image_id, found in detections.items():
        if len(image_id.splitlines()) > 1:
            raise UserError(f"photo {image_id!r}: VOC result files have one line per box; rename the photo")
        columns = (to_voc_pixels(found.boxes.double()).tolist(), found.scores.double().tolist(), found.labels.tolist())
        for box, score, label in zip(*columns, strict=True):
            lines[label].append(f"{image_id} {score:.9g} " + " ".join(f"{edge:.3f}" for edge in box) + "\n")
    for name, rows in zip(classes, lines, strict=True):
        io.write_text(folder / f"comp4_det_{safe_file_name(split)}_{safe_file_name(name)}.txt", "".join(rows))
