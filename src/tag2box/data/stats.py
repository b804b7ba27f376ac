"""Dataset statistics: counts of tags, photo sizes and, if the dataset has boxes, objects. Not used in training.

Objects are counted as in figure 1c of the paper: neither difficult ones nor crowds. An image-class pair is a photo and
a class it shows; labelling one box per pair (argmax) misses all further objects.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tag2box.annotations import Photo, TaggedPhotos, Truth
from tag2box.ops.boxes import areas

SIZE_EDGES = (0.01, 0.1)
"""Fractions of the photo's area from which an object is medium, and large."""

STATS_CHUNK = 4096  # photos processed together, to bound memory

ClassCounts = tuple[int, ...]
Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class TagStats:
    """Counts of tags by class."""

    classes: tuple[str, ...]
    photos: int
    per_class: ClassCounts  # photos tagged with each class
    unsure: ClassCounts  # photos on which the class is unsure
    alone: ClassCounts  # photos with this tag and no other
    per_photo: ClassCounts  # photos with 0, 1, 2, ... tags
    together: Int[Tensor, "C C"]  # photos tagged with both; the diagonal repeats per_class
    untagged: tuple[str, ...]  # ids of the photos without any tag

    @property
    def unused(self) -> tuple[str, ...]:
        """Classes no photo is tagged with."""
        return tuple(name for name, count in zip(self.classes, self.per_class, strict=True) if not count)

    def inseparable(self) -> Pairs:
        """Pairs of classes on exactly the same photos: no method can distinguish them from tags alone."""
        always = set(self.never_without())
        return tuple(sorted((a, b) for a, b in always if a < b and (b, a) in always))

    def never_without(self) -> Pairs:
        """Pairs (a, b) of classes such that every photo of a also shows b."""
        count = torch.tensor(self.per_class, dtype=torch.long)[:, None]
        always = (self.together == count) & (count > 0)
        return tuple((a, b) for a, b in always.nonzero().tolist() if a != b)


@dataclass(frozen=True, slots=True)
class PhotoSizes:
    """The distinct photo sizes and the number of photos of each, the most frequent first."""

    sizes: tuple[tuple[int, int], ...]  # (width, height)
    counts: ClassCounts

    def shares(self, test: Callable[[int, int], bool]) -> float:
        """Share of the photos whose width and height pass a test; nan without photos."""
        passed = sum(n for (w, h), n in zip(self.sizes, self.counts, strict=True) if test(w, h))
        return passed / sum(self.counts) if self.counts else float("nan")


@dataclass(frozen=True, slots=True)
class ObjectStats:
    """Counts of objects by class."""

    classes: tuple[str, ...]
    objects: ClassCounts
    pairs: ClassCounts  # photos with at least one object: the objects that argmax labelling can find
    difficult: ClassCounts
    crowds: ClassCounts
    per_pair: Int[Tensor, "C most"]  # column k - 1: photos with exactly k objects of the class
    by_size: Int[Tensor, "C 3"]  # small, medium, large, divided at SIZE_EDGES
    by_adjacency: Int[Tensor, "C 3"]  # alone of its class on the photo, apart from the others, touching one

    @property
    def missed(self) -> ClassCounts:
        """Objects of each class that one box per image-class pair misses."""
        return tuple(o - p for o, p in zip(self.objects, self.pairs, strict=True))

    @property
    def missed_share(self) -> float:
        """Share of all objects that argmax labelling must miss; nan without objects."""
        return sum(self.missed) / sum(self.objects) if any(self.objects) else float("nan")


@dataclass(frozen=True, slots=True)
class DataStats:
    """All counts of a dataset; ``objects`` is None if it has no boxes."""

    tags: TagStats
    sizes: PhotoSizes
    objects: ObjectStats | None = None


def count_dataset(tagged: TaggedPhotos, truth: Truth | None = None) -> DataStats:
    """Count tags, sizes and, if a truth is given, objects."""
    objects = None if truth is None else count_objects(truth)
    return DataStats(count_tags(tagged), count_sizes(tagged.photos), objects)


def count_tags(tagged: TaggedPhotos) -> TagStats:
    """Tags by class and by photo, and the co-occurrence of classes."""
    classes = len(tagged.classes)
    together = torch.zeros(classes, classes, dtype=torch.long)
    for rows in tagged.tags.split(STATS_CHUNK):
        shown = rows.double()  # sums of ones are exact
        together += (shown.T @ shown).long()
    numbers = tagged.tags.sum(1)
    unsure = torch.zeros(classes, dtype=torch.long) if tagged.unsure is None else tagged.unsure.sum(0)
    return TagStats(
        classes=tagged.classes,
        photos=len(tagged),
        per_class=tuple(tagged.tags.sum(0).tolist()),
        unsure=tuple(unsure.tolist()),
        alone=tuple(tagged.tags[numbers == 1].sum(0).tolist()),
        per_photo=tuple(torch.bincount(numbers).tolist()),
        together=together,
        untagged=tuple(tagged.photos[i].id for i in (numbers == 0).nonzero().flatten().tolist()),
    )


def count_sizes(photos: Sequence[Photo]) -> PhotoSizes:
    """How many photos have which width and height."""
    ordered = sorted(Counter((p.width, p.height) for p in photos).items(), key=lambda item: (-item[1], item[0]))
    return PhotoSizes(tuple(size for size, _ in ordered), tuple(count for _, count in ordered))


# ---------------------------------------------------------------- objects


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The objects of some photos, sorted by image-class pair."""

    boxes: Float[Tensor, "B 4"]
    labels: Int[Tensor, " B"]
    pair: Int[Tensor, " B"]  # number of the image-class pair; equal numbers are consecutive
    share: Float[Tensor, " B"]  # of the photo's area
    difficult: Int[Tensor, " C"]  # objects that were left out, by class
    crowds: Int[Tensor, " C"]


def count_objects(truth: Truth) -> ObjectStats:
    """Objects and image-class pairs by class, objects per pair, their sizes and their adjacency."""
    classes = len(truth.classes)
    objects, pairs, difficult, crowds = (torch.zeros(classes, dtype=torch.long) for _ in range(4))
    by_size, by_adjacency = (torch.zeros(classes, 3, dtype=torch.long) for _ in range(2))
    histogram: Counter[tuple[int, int]] = Counter()
    for chunk in _chunks(truth):
        objects += torch.bincount(chunk.labels, minlength=classes)
        difficult += chunk.difficult
        crowds += chunk.crowds
        label, number = _pairs(chunk)
        pairs += torch.bincount(label, minlength=classes)
        histogram.update(zip(label.tolist(), number.tolist(), strict=True))
        size = torch.bucketize(chunk.share, torch.tensor(SIZE_EDGES, dtype=chunk.share.dtype), right=True)
        by_size += _table(chunk.labels, size, classes)
        by_adjacency += _table(chunk.labels, adjacency(chunk.boxes, chunk.pair), classes)
    per_pair = torch.zeros(classes, max((n for _, n in histogram), default=0), dtype=torch.long)
    for (c, n), photos in histogram.items():
        per_pair[c, n - 1] = photos
    return ObjectStats(
        classes=truth.classes,
        objects=tuple(objects.tolist()),
        pairs=tuple(pairs.tolist()),
        difficult=tuple(difficult.tolist()),
        crowds=tuple(crowds.tolist()),
        per_pair=per_pair,
        by_size=by_size,
        by_adjacency=by_adjacency,
    )


def adjacency(boxes: Float[Tensor, "B 4"], pair: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
    """Per object: 0 if it is alone in its image-class pair, 1 if it is apart from the others, 2 if it touches one.

    Boxes that share an edge or a corner touch. Equal pairs must be consecutive.
    """
    kind = torch.zeros(len(boxes), dtype=torch.long)
    first = torch.arange(len(boxes))
    for step in range(1, len(boxes)):
        first = first[first + step < len(boxes)]
        first = first[pair[first] == pair[first + step]]  # pairs are runs: no partner at this step, none at the next
        if not len(first):
            break
        second = first + step
        touching = _touch(boxes[first], boxes[second])
        for side in (first, second):
            kind[side] = torch.maximum(kind[side], 1 + touching.long())
    return kind


def _touch(a: Float[Tensor, "n 4"], b: Float[Tensor, "n 4"]) -> Bool[Tensor, " n"]:
    return ((a[:, :2] <= b[:, 2:]) & (b[:, :2] <= a[:, 2:])).all(1)


def _chunks(truth: Truth) -> Iterator[_Chunk]:
    classes = len(truth.classes)
    for start in range(0, len(truth), STATS_CHUNK):
        objects = truth.objects[start : start + STATS_CHUNK]
        sizes = torch.tensor(truth.sizes[start : start + STATS_CHUNK], dtype=torch.double)
        labels, difficult, crowd = (
            torch.cat([getattr(o, k) for o in objects]) for k in ("labels", "difficult", "crowd")
        )
        image = torch.repeat_interleave(torch.arange(len(objects)), torch.tensor([len(o) for o in objects]))
        kept = (~(difficult | crowd)).nonzero().flatten()
        pair = image[kept] * classes + labels[kept]
        order = torch.argsort(pair, stable=True)
        rows = kept[order]
        boxes = torch.cat([o.boxes for o in objects])[rows].double()
        share = areas(boxes) / sizes.prod(1)[image[rows]]
        marked = [torch.bincount(labels[mark], minlength=classes) for mark in (difficult, crowd)]
        yield _Chunk(boxes, labels[rows], pair[order], share, *marked)


def _pairs(chunk: _Chunk) -> tuple[Int[Tensor, " pairs"], Int[Tensor, " pairs"]]:
    """The class of each image-class pair, and its number of objects."""
    _, number = torch.unique_consecutive(chunk.pair, return_counts=True)
    return chunk.labels[number.cumsum(0) - 1], number


def _table(labels: Int[Tensor, " B"], column: Int[Tensor, " B"], classes: int) -> Int[Tensor, "C 3"]:
    return torch.bincount(labels * 3 + column, minlength=classes * 3).reshape(classes, 3)


# ---------------------------------------------------------------- JSON


def to_json(stats: DataStats) -> dict[str, object]:
    """All counts by name, as JSON values."""
    report: dict[str, object] = {"tags": _plain(stats.tags), "sizes": _plain(stats.sizes), "objects": None}
    if stats.objects is not None:
        share = stats.objects.missed_share
        totals = {"objects": sum(stats.objects.objects), "pairs": sum(stats.objects.pairs)}
        missed = {"missed": sum(stats.objects.missed), "missed_share": share if share == share else None}
        report["objects"] = _plain(stats.objects) | {"total": totals | missed, "size_edges": list(SIZE_EDGES)}
    return report


def _plain(record: TagStats | PhotoSizes | ObjectStats) -> dict[str, object]:
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {name: v.tolist() if isinstance(v, Tensor) else _lists(v) for name, v in values.items()}


def _lists(value: object) -> object:
    return [_lists(v) for v in value] if isinstance(value, tuple) else value
