"""Export formats: detections and labels written to files that other tools read; labels of any format read back.

An export format is a class that is called without arguments; its instances are called with the place to write to, the
photos, the class names and the detections by photo id. A format for labels, too, has a method ``write``, which receives
tags, ignore regions and splits as well. Built-in formats are listed in ``tag2box.extend.EXPORT_FORMATS``; those of
other packages are named ``package.module:Name``. Every file is written whole or not at all.
"""

import hashlib
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from tag2box import extend, io
from tag2box.annotations import Detections, Photo
from tag2box.errors import UserError
from tag2box.formats import datasets, listing
from tag2box.labels.journal import read_reviews
from tag2box.labels.label_set import LabelSet, is_label_set
from tag2box.labels.labelled import LabelledPhotos, from_detections, from_truth, tagged_entries
from tag2box.labels.reviews import apply_reviews

Placing = Literal["link", "copy", "none"]
"""What is done with the photos of an exported folder: linked, copied, or left where they are."""
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 excludes."""
_FIRST_SPLITS = ("train", "val", "valid", "validation", "test")
_SHARES = 1 << 32


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

    def check(self, out: Path, photos: Sequence[Photo], classes: Sequence[str]) -> None:
        """Raise if it cannot write the names of these photos or classes; called before detecting. Optional."""


class LabelExport(ExportFormat):
    """Base class of formats that hold labels: tags, ignore regions and splits beside boxes. Define ``write``."""

    placing: Placing = "link"
    """What is done with the photos, if the format is a folder that has them."""

    def write(self, out: Path, labels: LabelledPhotos) -> None:
        """Write labelled photos."""
        raise NotImplementedError

    def __call__(
        self, out: Path, photos: Sequence[Photo], classes: Sequence[str], detections: Mapping[str, Detections]
    ) -> None:
        """Write detections as labels without tags."""
        self.write(out, from_detections(photos, classes, detections))


@dataclass(frozen=True, slots=True, eq=False)
class DetectionsOf(Mapping[str, Detections]):
    """The detections of some photos in their order, none of those that have none; read on access."""

    photos: Sequence[Photo]
    found: Mapping[str, Detections]

    def __getitem__(self, photo_id: str) -> Detections:
        return self.found.get(photo_id, Detections.empty())

    def __iter__(self) -> Iterator[str]:
        return (photo.id for photo in self.photos)

    def __len__(self) -> int:
        return len(self.photos)


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
    check_export(made, out, photos, classes)
    made(out, photos, classes, detections)


def check_export(form: ExportFormat, out: Path, photos: Sequence[Photo], classes: Sequence[str]) -> None:
    """Raise unless a format can write detections of these photos and classes to ``out``; done before detecting."""
    io.check_writable(out, is_folder=form.is_folder)
    check = getattr(form, "check", None)
    if check is not None:
        check(out, photos, classes)


# ---------------------------------------------------------------- labels out


def export_labels(kind: str | ExportFormat, out: Path, labels: LabelledPhotos, *, placing: Placing = "link") -> None:
    """Write labelled photos in a format, to a place where nothing is; whole or not at all.

    A format without a method ``write`` receives the labels as detections, without tags and ignore regions.

    Args:
        kind: a built-in name, ``package.module:Name``, or an export format.
        placing: photos of a folder format are linked, copied, or left out.
    """
    made = export_format(kind) if isinstance(kind, str) else kind
    if out.exists() and not (made.is_folder and out.is_dir() and not any(out.iterdir())):
        raise UserError(f"{out}: already exists; name another place, or remove it")
    check_export(made, out, labels.files(), labels.classes)
    if not made.is_folder:
        _write(made, out, labels, placing)
        return
    if out.exists():
        out.rmdir()  # empty
    with io.replacing_folder(out) as temporary:
        _write(made, temporary, labels, placing)


def _write(form: ExportFormat, out: Path, labels: LabelledPhotos, placing: Placing) -> None:
    if isinstance(form, LabelExport):
        form.placing = placing
        form.write(out, labels)
    else:
        form(out, labels.files(), labels.classes, labels.detections())


def place_photo(photo: Path, place: Path, placing: Placing = "link") -> None:
    """Link or copy a photo to a place; a photo that is already there stays. Without links it is copied."""
    if placing == "none" or (place.exists() and place.samefile(photo)):
        return
    if not photo.is_file():
        raise UserError(f"{photo}: no such photo; restore it, or export without photos (--copy none)")
    io.make_folder(place.parent)
    if placing == "link":
        temporary = io.temporary_path(place)
        try:
            temporary.symlink_to(photo.resolve())
        except (OSError, NotImplementedError):
            pass
        else:
            temporary.replace(place)
            io.sync(place.parent)
            return
    with io.replacing(place) as copy:
        shutil.copyfile(photo, copy)


def check_xml_names(tool: str, photos: Sequence[Photo], classes: Sequence[str]) -> None:
    """Raise if an XML file cannot hold the name of a class or of a photo."""
    for what, names in (("class", classes), ("photo", [photo.path.as_posix() for photo in photos])):
        for name in names:
            if not name or name != name.strip() or NOT_XML.search(name):
                raise UserError(f"{what} {name!r}: {tool} takes names of printable characters; rename it")


def with_splits(labels: LabelledPhotos, shares: Mapping[str, float]) -> LabelledPhotos:
    """The photos divided at random into splits: ``{"train": 0.8, "val": 0.2}``.

    The split of a photo depends on its file name alone, so that it does not change if photos are added.
    """
    total = sum(shares.values())
    photos = []
    for photo in labels.photos:
        place = int.from_bytes(hashlib.blake2b(photo.file.encode(errors="surrogatepass"), digest_size=4).digest())
        left, chosen = place / _SHARES * total, ""
        for name, share in shares.items():
            chosen = name if left >= 0 and share > 0 else chosen
            left -= share
        photos.append(replace(photo, split=chosen))
    return replace(labels, photos=tuple(photos))


# ---------------------------------------------------------------- labels in


def read_labelled(source: listing.DataSource, on_fault: listing.OnFault = listing.refuse) -> LabelledPhotos:
    """Tags and boxes of any dataset, or a label set with its reviews; the splits that the dataset names are kept.

    Tags and boxes are read by separate classes, and joined only here: nothing that trains calls this.
    """
    if source.format is None and source.path.is_dir() and is_label_set(source.path):
        opened = LabelSet.open(source.path, source.photos)
        return apply_reviews(opened, read_reviews(source.path, opened))
    form, whole = datasets.dataset_format(source), datasets.everything(source)
    listed = datasets.list_dataset(whole, on_fault)
    tagged = listing.to_tagged_photos(listed, on_fault)
    if form.has_boxes(whole):
        labels = from_truth(datasets.read_truth(whole, on_fault), tagged, listed.folder)
    else:
        labels = LabelledPhotos(listed.folder, listed.classes, tagged_entries(tagged, listed.folder))
    splits = {} if source.split is not None else _splits(form, source)
    photos = tuple(replace(photo, split=splits.get(photo.id, "")) for photo in labels.photos)
    return replace(labels, photos=photos)


def _splits(form: datasets.DatasetFormat, source: listing.DataSource) -> dict[str, str]:
    """The split of each photo; of several, the first of train, val and test."""
    names = getattr(form, "splits", None)
    found: dict[str, str] = {}
    known = tuple(names(source)) if names is not None else ()
    if len(known) < 2:
        return found
    ordered = sorted(known, key=lambda name: _FIRST_SPLITS.index(name) if name in _FIRST_SPLITS else len(_FIRST_SPLITS))
    for name in ordered:
        for entry in datasets.list_photos(replace(source, split=name), lambda _: None).entries:
            found.setdefault(entry.id, name)
    return found
