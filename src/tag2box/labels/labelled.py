"""Labelled photos: the boxes and tags of photos with their provenance, as they pass between commands and formats.

A photo's boxes are of two kinds: labels, and ignore regions (``is_doubtful``), in which a detector that is trained or
evaluated on the labels is neither right nor wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tag2box.annotations import Detections, Objects, Photo, TaggedPhotos, Truth
from tag2box.errors import UserError, printable
from tag2box.storage import FileStamp

Box = tuple[float, float, float, float]
"""Left, top, right, bottom in pixels of the upright photo; the last two are exclusive."""
Why = Literal["best of its tag", "further instance", "doubtful", "unsure tag", "untagged class", "reviewed", "imported"]
"""Reason for which a box is in a label set."""
Source = Literal["label", "review", "import"]
"""Origin of a box: ``tag2box label``, a reviewer, or a file of another tool."""


@dataclass(frozen=True, slots=True)
class LabelBox:
    """A box of a label set."""

    box: Box
    name: str  # its class
    score: float | None = None  # None: no detector gave it one
    is_doubtful: bool = False  # an ignore region, not a label
    is_tag: bool = True  # whether its class is a tag of the photo
    why: Why = "imported"
    rank: int = 0  # among the candidates of its class in the photo, from 1; 0 if unknown
    margin: float | None = None  # score minus that of the next candidate of its class
    alternative: Box | None = None  # best candidate of its class that was dropped: it lies inside this box or around it
    source: Source = "import"

    def __post_init__(self) -> None:
        x1, y1, x2, y2 = self.box
        if not (all(map(math.isfinite, self.box)) and x1 <= x2 and y1 <= y2):
            raise ValueError(f"box {self.box}: expected finite left <= right and top <= bottom")

    @property
    def area(self) -> float:
        """Width times height."""
        return (self.box[2] - self.box[0]) * (self.box[3] - self.box[1])


@dataclass(frozen=True, slots=True)
class LabelledPhoto:
    """A photo, its tags and its boxes."""

    id: str
    file: str  # relative to the root of the photos, with forward slashes
    width: int
    height: int
    tags: tuple[str, ...] = ()
    boxes: tuple[LabelBox, ...] = ()
    unsure: tuple[str, ...] = ()  # classes that are neither present nor absent
    split: str = ""  # "train", "val", ...; empty if the photos are not split
    stamp: FileStamp | None = None  # content of the photo when it was labelled
    is_reviewed: bool = False  # a person finished it: its labels are complete, a tag without one has no object to box

    def __post_init__(self) -> None:
        if self.width < 1 or self.height < 1:
            raise ValueError(f"photo {self.id!r:.100}: expected a width and a height of 1 or more")

    @property
    def labels(self) -> tuple[LabelBox, ...]:
        """The boxes that are labels, not ignore regions."""
        return tuple(box for box in self.boxes if not box.is_doubtful)

    @property
    def doubtful(self) -> tuple[LabelBox, ...]:
        """The ignore regions."""
        return tuple(box for box in self.boxes if box.is_doubtful)

    @property
    def unboxed_tags(self) -> tuple[str, ...]:
        """The tags without a label."""
        boxed = {box.name for box in self.labels}
        return tuple(tag for tag in self.tags if tag not in boxed)


@dataclass(frozen=True, slots=True)
class LabelledPhotos:
    """Photos below one root with tags and boxes of some classes."""

    root: Path
    classes: tuple[str, ...]
    photos: tuple[LabelledPhoto, ...]

    def __post_init__(self) -> None:
        known = frozenset(self.classes)
        for photo in self.photos:
            for name in (*photo.tags, *photo.unsure, *(box.name for box in photo.boxes)):
                if name not in known:
                    raise UserError(printable(f"photo {photo.id}: {name!r} is not one of the classes; add it to them"))

    def __len__(self) -> int:
        return len(self.photos)

    def path(self, photo: LabelledPhoto) -> Path:
        """The file of a photo."""
        return self.root / photo.file

    def files(self) -> tuple[Photo, ...]:
        """The photos without tags and boxes."""
        return tuple(Photo(photo.id, self.path(photo), photo.width, photo.height) for photo in self.photos)

    def tagged(self) -> TaggedPhotos:
        """The photos with their tags, without boxes."""
        import torch

        rows = [[[name in names for name in self.classes] for names in (p.tags, p.unsure)] for p in self.photos]
        tags, unsure = torch.tensor(rows, dtype=torch.bool).reshape(-1, 2, len(self.classes)).unbind(1)
        return TaggedPhotos(self.classes, self.files(), tags, (unsure & ~tags) if bool(unsure.any()) else None)

    def counts(self) -> dict[str, LabelCounts]:
        """Per class: photos, labels, ignore regions, and tags without a label."""
        found = {name: LabelCounts() for name in self.classes}
        for photo in self.photos:
            for name in photo.tags:
                found[name] = replace(found[name], photos=found[name].photos + 1)
            for name in photo.unboxed_tags:
                found[name] = replace(found[name], unboxed=found[name].unboxed + 1)
            for box in photo.boxes:
                own = found[box.name]
                is_label = not box.is_doubtful
                found[box.name] = replace(own, boxes=own.boxes + is_label, doubtful=own.doubtful + (not is_label))
        return found

    def best_scores(self) -> dict[str, float | None]:
        """Per class: mean score of the best labels of its tags, reviewed photos apart; None without any.

        Of runs of one recipe on the same photos, one with a higher mean has more often found the object: a sign of
        quality that needs no true boxes.
        """
        found: dict[str, list[float]] = {name: [] for name in self.classes}
        for photo in self.photos:
            scored = [(box.name, box.score) for box in photo.labels if box.score is not None]
            for name in () if photo.is_reviewed else photo.tags:
                if own := [score for label, score in scored if label == name]:
                    found[name].append(max(own))
        return {name: sum(own) / len(own) if own else None for name, own in found.items()}

    def detections(self) -> dict[str, Detections]:
        """The labels by photo id as detections, for formats that hold nothing else; without a score it is 1."""
        index = {name: number for number, name in enumerate(self.classes)}
        return {photo.id: _to_detections(photo.labels, index) for photo in self.photos}

    def truth(self) -> Truth:
        """The labels as true objects, ignore regions as crowds, to evaluate against."""
        index = {name: number for number, name in enumerate(self.classes)}
        objects = tuple(boxes_to_objects(photo.boxes, index) for photo in self.photos)
        sizes = tuple((photo.width, photo.height) for photo in self.photos)
        return Truth(self.classes, tuple(photo.id for photo in self.photos), sizes, objects)


@dataclass(frozen=True, slots=True)
class LabelCounts:
    """What a label set has of a class."""

    photos: int = 0  # with this tag
    boxes: int = 0
    doubtful: int = 0
    unboxed: int = 0  # tags without a box


def from_detections(
    photos: Sequence[Photo], classes: Sequence[str], detections: Mapping[str, Detections], root: Path | None = None
) -> LabelledPhotos:
    """Detections as labelled photos without tags; default root: that of their files, or the folder they are below."""
    root = _named_root(photos) if root is None else root
    found = []
    for photo in photos:
        own = detections.get(photo.id, Detections.empty())
        columns = (own.boxes.double().tolist(), own.scores.double().tolist(), own.labels.tolist())
        boxes = tuple(
            LabelBox(_corners(box), classes[label], score, is_tag=False, why="untagged class", source="label")
            for box, score, label in zip(*columns, strict=True)
        )
        found.append(LabelledPhoto(photo.id, _below(root, photo.path), photo.width, photo.height, boxes=boxes))
    return LabelledPhotos(root, tuple(classes), tuple(found))


def from_truth(truth: Truth, photos: TaggedPhotos, root: Path) -> LabelledPhotos:
    """Boxes of another tool or a reviewer, with the tags of their photos; crowds and difficult ones are doubtful.

    Photos of ``photos`` that ``truth`` does not have keep their tags and get no boxes.
    """
    objects = dict(zip(truth.ids, truth.objects, strict=True))
    classes = tuple(dict.fromkeys((*photos.classes, *truth.classes)))
    found = []
    for photo, tags in zip(tagged_entries(photos, root), photos.tags.tolist(), strict=True):
        own = objects.get(photo.id)
        tagged = {name for name, is_there in zip(photos.classes, tags, strict=True) if is_there}
        boxes = _from_objects(own, truth.classes, tagged) if own is not None else ()
        found.append(replace(photo, boxes=boxes))
    return LabelledPhotos(root, classes, tuple(found))


def tagged_entries(photos: TaggedPhotos, root: Path) -> tuple[LabelledPhoto, ...]:
    """Tagged photos as labelled photos without boxes."""
    unsure = photos.unsure.tolist() if photos.unsure is not None else [[False] * len(photos.classes)] * len(photos)
    found = []
    for photo, tags, doubts in zip(photos.photos, photos.tags.tolist(), unsure, strict=True):
        there, open_tags = (
            tuple(name for name, is_there in zip(photos.classes, row, strict=True) if is_there)
            for row in (tags, doubts)
        )
        file = _below(root, photo.path)
        found.append(LabelledPhoto(photo.id, file, photo.width, photo.height, there, (), open_tags))
    return tuple(found)


def _named_root(photos: Sequence[Photo]) -> Path:
    """The folder that the files of all photos are relative to; else the deepest that has all of them below it."""
    roots = {photo.path.absolute().parents[photo.file.count("/")] if photo.file else None for photo in photos}
    (root,) = roots if len(roots) == 1 else (None,)
    return root or common_root(photo.path for photo in photos)


def common_root(paths: Iterable[Path]) -> Path:
    """The deepest folder that has all the files below it."""
    folders = [path.absolute().parent for path in paths]
    if not folders:
        return Path.cwd()
    parts = [folder.parts for folder in folders]
    shared = 0
    while all(len(own) > shared and own[shared] == parts[0][shared] for own in parts):
        shared += 1
    return Path(*parts[0][:shared])


def _below(root: Path, path: Path) -> str:
    """A photo's path relative to the root."""
    try:
        return path.absolute().relative_to(root.absolute()).as_posix()
    except ValueError:
        raise UserError(f"{path}: is not below {root}, the root of the photos; name another root") from None


def _corners(box: Sequence[float]) -> Box:
    x1, y1, x2, y2 = box
    return x1, y1, x2, y2


def _to_detections(boxes: Sequence[LabelBox], index: Mapping[str, int]) -> Detections:
    import torch  # not needed by those who only read labels

    return Detections(
        torch.tensor([box.box for box in boxes], dtype=torch.float64).reshape(-1, 4),
        torch.tensor([1.0 if box.score is None else box.score for box in boxes], dtype=torch.float64),
        torch.tensor([index[box.name] for box in boxes], dtype=torch.long),
    )


def boxes_to_objects(boxes: Sequence[LabelBox], index: Mapping[str, int]) -> Objects:
    """Labels as true objects, ignore regions as crowds."""
    import torch

    return Objects(
        boxes=torch.tensor([box.box for box in boxes], dtype=torch.float64).reshape(-1, 4),
        labels=torch.tensor([index[box.name] for box in boxes], dtype=torch.long),
        difficult=torch.zeros(len(boxes), dtype=torch.bool),
        crowd=torch.tensor([box.is_doubtful for box in boxes], dtype=torch.bool),
    )


def _from_objects(objects: Objects, classes: Sequence[str], tags: set[str]) -> tuple[LabelBox, ...]:
    doubtful = (objects.difficult | objects.crowd).tolist()
    columns = (objects.boxes.double().tolist(), objects.labels.tolist(), doubtful)
    return tuple(
        LabelBox(_corners(box), classes[label], is_doubtful=doubt, is_tag=classes[label] in tags)
        for box, label, doubt in zip(*columns, strict=True)
    )


def with_review(photo: LabelledPhoto, boxes: tuple[LabelBox, ...]) -> LabelledPhoto:
    """A reviewed photo with its boxes, tagged with their classes, too."""
    boxed = [box.name for box in boxes if not box.is_doubtful]
    tags = tuple(dict.fromkeys((*photo.tags, *boxed)))
    unsure = tuple(name for name in photo.unsure if name not in tags)
    return replace(photo, tags=tags, unsure=unsure, boxes=boxes, is_reviewed=True)
