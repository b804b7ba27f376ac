"""Tags of COCO annotation files. Boxes are not parsed here.

Tags come from annotations, with boxes or without, and from lists in the image itself: ``category_ids``, ``categories``
or ``tags``, of category ids or names. A class that an image has only in crowds, ignored or difficult objects is unsure:
neither present nor absent. ``counts`` of an image, like ``{"dog": 2}``, are numbers of objects.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from tag2box.errors import UserError
from tag2box.formats import coco_file, listing, listing as listings

T = TypeVar("T")
_MAX_DIGITS = 18  # anything longer is a name, not an id


@dataclass(frozen=True, slots=True)
class _Mention:
    """The fields of an annotation that make a tag."""

    image_id: int
    category_id: int
    iscrowd: bool = False
    ignore: bool = False
    difficult: bool = False

    @property
    def is_sure(self) -> bool:
        return not (self.iscrowd or self.ignore or self.difficult)


@dataclass(frozen=True, slots=True)
class _Tagging:
    """The selected classes with their numbers, and by image id the classes present (True if sure) and their counts."""

    order: Mapping[str, int]
    by_image: Mapping[int, dict[str, bool]]
    counts: Mapping[int, listing.ObjectCounts] = field(default_factory=dict)

    def of(self, number: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Tags and unsure tags of an image, in the order of the classes."""
        found = self.by_image.get(number, {})
        names = sorted((name for name in found if name in self.order), key=self.order.__getitem__)
        there, unsure = (tuple(name for name in names if found[name] is sure) for sure in (True, False))
        return there, unsure


_MENTION = TypeAdapter(_Mention)


def list_coco(source: listing.DataSource, on_fault: listing.OnFault = listing.refuse) -> listing.Listing:
    """The images of a COCO file and their tags; if classes are chosen, others are left out."""
    content = coco_file.parse_coco(source.path, _MENTION, on_fault)
    if content.annotations is None and not any(_own_tags(row.value) for row in content.images.values()):
        raise UserError(f"{source.path}: annotations: field required; expected them, or a list of tags in each image")
    classes = listings.select_classes(tuple(content.categories.values()), source.classes, f"{source.path}: categories")
    tagging = _Tagging({name: number for number, name in enumerate(classes)}, _tags(content, on_fault))
    return _list(source, content, replace(tagging, counts=_counts(content, tagging, on_fault)), on_fault)


def list_coco_photos(source: listing.DataSource, on_fault: listing.OnFault = listing.refuse) -> listing.Listing:
    """The images of a COCO file, without tags."""
    content: coco_file.CocoFile[object] = coco_file.parse_coco(source.path, None, on_fault)
    return _list(source, content, _Tagging({}, {}), on_fault)


# ---------------------------------------------------------------- tags


def _tags(content: coco_file.CocoFile[_Mention], on_fault: listing.OnFault) -> dict[int, dict[str, bool]]:
    """The classes of each image by id: True if sure."""
    tags: defaultdict[int, dict[str, bool]] = defaultdict(dict)
    for row in content.annotations or ():
        mention = row.value
        if coco_file.refers(content, row.number, mention.image_id, mention.category_id, on_fault):
            found, name = tags[mention.image_id], content.categories[mention.category_id]
            found[name] = found.get(name, False) or mention.is_sure
    names = frozenset(content.categories.values())
    for number, image in content.images.items():
        for name in _resolved(content, names, image, on_fault):
            tags[number][name] = True
    return tags


def _own_tags(image: coco_file.CocoImage) -> tuple[int | str, ...]:
    return (*image.category_ids, *image.categories, *image.tags)


def _resolved(
    content: coco_file.CocoFile[_Mention],
    names: frozenset[str],
    row: coco_file.CocoRow[coco_file.CocoImage],
    on_fault: listing.OnFault,
) -> Iterator[str]:
    """The class names of an image's own list of names, ids, or ids in quotes."""
    for tag in _own_tags(row.value):
        name = _name(content, names, tag)
        if name is not None:
            yield name
        else:
            line = f"{content.path}: images[{row.number}]: no category has the name or id {tag!r}; add the category"
            on_fault(listing.Fault("unknown class", str(tag), line))


def _name(content: coco_file.CocoFile[T], names: frozenset[str], tag: int | str) -> str | None:
    """The category of a name, an id, or an id in quotes."""
    if tag in names:
        return str(tag)
    is_number = isinstance(tag, int) or (tag.isdecimal() and len(tag) <= _MAX_DIGITS)
    return content.categories.get(int(tag)) if is_number else None


def _counts(
    content: coco_file.CocoFile[T], tagging: _Tagging, on_fault: listing.OnFault
) -> dict[int, listing.ObjectCounts]:
    """The counts of each image by id; those of classes that are not selected are skipped."""
    counts: dict[int, listing.ObjectCounts] = {}
    names = frozenset(content.categories.values())
    for number, row in content.images.items():
        named = tuple((_name(content, names, key) or key, count) for key, count in (row.value.counts or {}).items())
        tags = [name for name, is_sure in tagging.by_image.get(number, {}).items() if is_sure]
        own = listings.counts_of_tags(named, tags, f"{content.path}: images[{row.number}]", on_fault)
        counts[number] = tuple(pair for pair in own if pair[0] in tagging.order)
    return counts


# ---------------------------------------------------------------- photos


def _list(
    source: listing.DataSource, content: coco_file.CocoFile[T], tagging: _Tagging, on_fault: listing.OnFault
) -> listing.Listing:
    """The images whose names lead to a file in the photos folder, whether it exists or not."""
    files = [row.value.file_name for row in content.images.values() if row.value.file_name is not None]
    folder = listings.photos_folder(source.photos, _places(source.path), files, source.path)
    entries = []
    for number, row in content.images.items():
        where = f"{source.path}: images[{row.number}]"
        name = row.value.file_name
        file = None if name is None else listings.path_below(folder, name)
        if name is None:
            on_fault(listing.Fault("bad row", where, f"{where}.file_name: field required; correct the file"))
        elif file is None:
            on_fault(
                listing.Fault(
                    "outside the folder", name, f"{where}.file_name: {listings.outside_message(name, folder)}"
                )
            )
        else:
            counts = tagging.counts.get(number, ())
            entries.append(listing.PhotoEntry(content.names[number], file, *tagging.of(number), where, counts))
    return listing.Listing(folder, tuple(tagging.order), tuple(entries))


def _places(path: Path) -> list[Path]:
    """Folders in which the photos of a COCO file may be: beside it, or as in COCO's own tree.

    There the photos of ``annotations/instances_train2017.json`` are in ``train2017``, or in ``images/train2017``.
    """
    beside, above, part = path.parent, path.absolute().parent.parent, path.stem.rsplit("_", 1)[-1]
    return [
        beside,
        beside / "photos",
        beside / "images",
        beside / "data",
        above / part,
        above / "images" / part,
        above / "images",
    ]
