"""Error analysis: what the top box of every (photo, tag) pair is, and whether scores prefer parts or enlargements.

``breakdown`` has AP, CorLoc and recall by the size of objects and by their number in a photo.

A pair is a photo and a class that it shows, as in CorLoc: difficult objects count, crowds do not. The top box is the
best-scored box of the class. Any boxes can be analysed: detections, or the pseudo boxes of a stage at an iteration.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float

from tag2box.annotations import Detections, Objects, Truth
from tag2box.metrics import voc_ap
from tag2box.metrics.challenges import INSIDE, MISSED_IOU
from tag2box.metrics.voc_ap import CORLOC_IOU, MATCH_IOU, ClassScores, JsonNumbers, PhotoShares, share
from tag2box.ops import areas, intersections, iou

CONTAINED = INSIDE
"""A box contains an object if it covers four fifths of the object's area."""

ERROR_KINDS = ("correct", "other_class", "part", "too_large", "surroundings", "nowhere")
"""Every kind, in the order of the rules: the first that holds decides."""

SIZE_BINS = (
    ("under 3 % of the photo", 0.03),
    ("3 to 10 % of the photo", 0.1),
    ("10 to 30 % of the photo", 0.3),
    ("30 % of the photo or more", float("inf")),
)
"""Bins of an object's area as a fraction of its photo's, with their upper ends (excluded)."""

COUNT_BINS = (("1 object", 1), ("2 or 3 objects", 3), ("4 objects or more", None))
"""Bins of the number of objects of a class in a photo, with the largest number of each."""


@dataclass(frozen=True, slots=True)
class TopBox:
    """The top box of a (photo, tag) pair."""

    photo: str
    label: int
    kind: str
    box: tuple[float, ...] | None  # xyxy; None if there is no box of the class
    score: float | None
    size: float  # of the largest object of the class, as a fraction of the photo's area
    count: int  # objects of the class in the photo


def box_kind(box: Float[torch.Tensor, " 4"], own: Float[torch.Tensor, "G 4"], other: Float[torch.Tensor, "H 4"]) -> str:
    """Kind of a box b, given the objects g of its class and the objects h of other classes.

    The first rule that holds decides, so every box has exactly one kind:

    * correct: IoU(b, g) >= 0.5 for some g;
    * other_class: IoU(b, h) >= 0.5 for some h;
    * part: |b and g| / |b| >= 0.8 for some g: the box lies inside an object;
    * too_large: |b and g| / |g| >= 0.8 for some g: the box contains an object;
    * surroundings: IoU(b, g) >= 0.1 for some g: it overlaps an object partly;
    * nowhere: none of these.

    A box cannot be both part and too large for one object: if both fractions are >= 0.8, IoU >= 2/3.
    """
    row, own, other = box[None].double(), own.double(), other.double()
    overlap, shared = iou(row, own), intersections(row, own)
    if _reaches(overlap, CORLOC_IOU):
        return "correct"
    if _reaches(iou(row, other), CORLOC_IOU):
        return "other_class"
    if bool(areas(row) > 0) and _reaches(shared / areas(row), INSIDE):
        return "part"
    if _reaches(shared / areas(own).clamp(min=torch.finfo(torch.float64).tiny), CONTAINED):
        return "too_large"
    return "surroundings" if _reaches(overlap, MISSED_IOU) else "nowhere"


def _reaches(values: torch.Tensor, least: float) -> bool:
    return bool((values >= least).any())


def top_boxes(truth: Truth, detections: Mapping[str, Detections]) -> tuple[TopBox, ...]:
    """The top box of every pair, photo after photo, class after class; on equal scores the first box."""
    return tuple(
        _top_box(photo, label, objects, found=detections.get(photo, Detections.empty()), size=size)
        for photo, size, objects in zip(truth.ids, truth.sizes, truth.objects, strict=True)
        for label in objects.labels[~objects.crowd].unique().tolist()
    )


def _top_box(photo: str, label: int, objects: Objects, *, found: Detections, size: tuple[int, int]) -> TopBox:
    is_own = objects.labels == label
    own, other = objects.boxes[is_own & ~objects.crowd], objects.boxes[~is_own & ~objects.crowd]
    largest = float(areas(own.double()).max()) / max(size[0] * size[1], 1)
    rows = torch.nonzero(found.labels == label)[:, 0]
    if not len(rows):
        return TopBox(photo, label, "nowhere", None, None, largest, len(own))
    top = rows[int(found.scores[rows].double().numpy().argmax())]  # numpy's argmax returns the first on ties
    box, score = found.boxes[top], float(found.scores[top])
    return TopBox(photo, label, box_kind(box, own, other), tuple(box.tolist()), score, largest, len(own))


# ---------------------------------------------------------------- shares


def errors(truth: Truth, detections: Mapping[str, Detections]) -> JsonNumbers:
    """Share of the pairs of each kind, and their number: of all pairs, by class, by object size, by object count.

    A pair's size is that of its largest object. Classes, sizes and counts without pairs are left out.
    """
    return error_shares(top_boxes(truth, detections), truth.classes)


def error_shares(tops: Sequence[TopBox], classes: Sequence[str]) -> JsonNumbers:
    """``errors`` of top boxes that are known already."""
    groups: dict[str, tuple[Sequence[str], Callable[[TopBox], str]]] = {
        "by_class": (classes, lambda top: classes[top.label]),
        "by_size": ([name for name, _ in SIZE_BINS], lambda top: size_bin(top.size)),
        "by_count": ([name for name, _ in COUNT_BINS], lambda top: count_bin(top.count)),
    }
    out: JsonNumbers = {**_shares(tops)}
    for group, (names, name_of) in groups.items():
        members: dict[str, list[TopBox]] = {name: [] for name in names}
        for top in tops:
            members[name_of(top)].append(top)
        out[group] = {name: {**_shares(own)} for name, own in members.items() if own}
    return out


def size_bin(size: float) -> str:
    """The name of the bin of an object's share of its photo."""
    return next(name for name, end in SIZE_BINS if size < end)


def count_bin(count: int) -> str:
    """The name of the bin of a number of objects."""
    return next(name for name, most in COUNT_BINS if most is None or count <= most)


def _shares(tops: Sequence[TopBox]) -> dict[str, float | None]:
    counts = Counter(top.kind for top in tops)
    return {**{kind: share(counts[kind], len(tops)) for kind in ERROR_KINDS}, "pairs": len(tops)}


# ---------------------------------------------------------------- scores of proposals


@dataclass(frozen=True, slots=True)
class PairExtent:
    """The best-fitting proposal of a pair, and the best-scored part and enlargement of the same object.

    With g the object and IoU(q, g) < 0.5, a proposal q is a part if |q and g| / |q| >= 0.8, and an enlargement if
    |q and g| / |g| >= 0.8.
    """

    label: int
    iou: float  # of the best-fitting proposal with the object
    score: float
    part: float | None  # the highest score of a part; None if no proposal is one
    enlargement: float | None

    @property
    def is_reachable(self) -> bool:
        """Whether some proposal would be correct."""
        return self.iou >= CORLOC_IOU


def pair_extents(
    boxes: Float[torch.Tensor, "P 4"], scores: Float[torch.Tensor, "P C"], objects: Objects
) -> Iterator[PairExtent]:
    """The extents of a photo's pairs, from its proposals and their class scores; ties go to the first."""
    candidates = boxes.double()
    for label in objects.labels[~objects.crowd].unique().tolist():
        if not len(boxes):
            yield PairExtent(label, 0.0, 0.0, None, None)
            continue
        own = objects.boxes[(objects.labels == label) & ~objects.crowd].double()
        overlap = iou(candidates, own)
        best, target = np.unravel_index(int(overlap.numpy().argmax()), tuple(overlap.shape))
        shared, fits = intersections(candidates, own[target : target + 1])[:, 0], overlap[:, target] >= CORLOC_IOU
        is_part = (shared >= INSIDE * areas(candidates)) & (shared > 0) & ~fits
        is_larger = (shared >= CONTAINED * areas(own)[target]) & (shared > 0) & ~fits
        column = scores[:, label].double()
        yield PairExtent(
            label,
            float(overlap[best, target]),
            float(column[best]),
            _highest(column[is_part]),
            _highest(column[is_larger]),
        )


def _highest(scores: Float[torch.Tensor, " P"]) -> float | None:
    return float(scores.max()) if len(scores) else None


def extent_shares(pairs: Iterable[PairExtent], classes: Sequence[str]) -> dict[str, float | None]:
    """What proposals allowed, and what scores preferred among them.

    * oracle_corloc: the CorLoc of a perfect choice among the proposals, the mean over classes;
    * above_part, above_enlargement: of the reachable pairs with a part (an enlargement) among the proposals, the share
      whose best-fitting proposal is scored above all of these;
    * above_both: of all reachable pairs, the share whose best-fitting proposal is scored above all of both;
    * pairs: their number.
    """
    known = list(pairs)
    reachable = [pair for pair in known if pair.is_reachable]
    parts = [pair.score > pair.part for pair in reachable if pair.part is not None]
    larger = [pair.score > pair.enlargement for pair in reachable if pair.enlargement is not None]
    both = [all(pair.score > x for x in (pair.part, pair.enlargement) if x is not None) for pair in reachable]
    return {
        "oracle_corloc": _oracle_corloc(known, classes),
        "above_part": share(sum(parts), len(parts)),
        "above_enlargement": share(sum(larger), len(larger)),
        "above_both": share(sum(both), len(both)),
        "pairs": len(known),
    }


def _oracle_corloc(pairs: Sequence[PairExtent], classes: Sequence[str]) -> float | None:
    hits, totals = Counter(p.label for p in pairs if p.is_reachable), Counter(p.label for p in pairs)
    return ClassScores(tuple(classes), tuple(share(hits[k], totals[k]) for k in range(len(classes)))).mean


# ---------------------------------------------------------------- AP, CorLoc and recall by size and count

BREAKDOWN_FIGURES = ("ap", "corloc", "recall")


@dataclass(frozen=True, slots=True)
class ObjectGroup:
    """What AP, CorLoc and recall of a group of objects are computed from."""

    ranked: tuple[voc_ap.RankedClass, ...]
    located: PhotoShares
    recalled: PhotoShares

    def numbers(self, classes: tuple[str, ...]) -> dict[str, float | None]:
        """The figures, each a mean over the classes that have such objects, and the number of objects."""
        return {
            "ap": voc_ap.average_precision([own.curve() for own in self.ranked], classes).mean,
            "corloc": self.located.scores(classes).mean,
            "recall": self.recalled.scores(classes).mean,
            "objects": int(self.recalled.total.sum()),
        }


def breakdown(truth: Truth, detections: Mapping[str, Detections], *, min_iou: float = MATCH_IOU) -> JsonNumbers:
    """AP (as ``voc12``), CorLoc and recall of all objects, of each size, and of each number of objects in a photo.

    * Size is an object's area as a fraction of its photo's. Objects of other sizes are ignored with their matches, as
      difficult ones are; a detection without a match is wrong in the group of its own size, as in COCO.
    * Count is the number of objects of the class in the photo. Photos with another number are left out; photos without
      the class are in every group: a detection there is wrong.
    * CorLoc: of the photos of a class whose largest object has the size, or which have the number of objects.
    * Recall: the share of objects that some detection matches.

    Groups without objects are left out.
    """
    groups = object_groups(truth, detections, min_iou=min_iou)
    out: JsonNumbers = {**groups["", "all"].numbers(truth.classes)}
    for kind in ("by_size", "by_count"):
        own = {name: group.numbers(truth.classes) for (group_kind, name), group in groups.items() if group_kind == kind}
        out[kind] = {name: numbers for name, numbers in own.items() if numbers["objects"]}
    return out


def object_groups(
    truth: Truth, detections: Mapping[str, Detections], *, min_iou: float = MATCH_IOU
) -> dict[tuple[str, str], ObjectGroup]:
    """All objects, ("", "all"), then each size, ("by_size", name), and each number, ("by_count", name)."""
    matches = voc_ap.match_set(truth, detections, min_iou=min_iou)
    located, objects = voc_ap.localised(truth, detections, min_iou=min_iou), matches.objects
    number, largest = objects.per_photo(~objects.crowd), _largest(objects)  # (N, C)
    everything = np.ones_like(number, dtype=bool)
    groups = {("", "all"): (objects.counts, np.ones(len(matches.scores), dtype=bool), everything)}
    low = 0.0
    for name, high in SIZE_BINS:
        is_own = [(low <= sizes) & (sizes < high) for sizes in (objects.area, matches.area, largest)]
        groups["by_size", name] = (objects.counts & is_own[0], is_own[1], is_own[2])
        low = high
    least = 1
    for name, most in COUNT_BINS:
        is_cell = (number >= least) & (number <= (most or number.max(initial=1)))
        is_own = [is_cell[objects.photos, objects.labels], (is_cell | (number == 0))[matches.photos, matches.labels]]
        groups["by_count", name] = (objects.counts & is_own[0], is_own[1], is_cell)
        least = (most or 0) + 1
    return {key: _group(matches, located, *masks) for key, masks in groups.items()}


def _largest(objects: voc_ap.ObjectTable) -> Float[np.ndarray, "N C"]:
    """The size of the largest object of each class in each photo; minus one without any."""
    out = np.full(objects.size, -1.0)
    kept = ~objects.crowd
    np.maximum.at(out, (objects.photos[kept], objects.labels[kept]), objects.area[kept])
    return out


def _group(
    matches: voc_ap.SetMatches,
    located: PhotoShares,
    counted: Bool[np.ndarray, " G"],
    judged: Bool[np.ndarray, " P"],
    cells: Bool[np.ndarray, "N C"],
) -> ObjectGroup:
    """The objects that are ``counted``, the unmatched detections that are ``judged``, and the pairs of CorLoc."""
    return ObjectGroup(
        voc_ap.ranked_classes(matches, counted, judged),
        PhotoShares(located.right * cells, located.total * cells),
        voc_ap.recalled(matches, counted),
    )
