"""The label rule: which detections of a tagged photo become its labels.

The tags say which classes are there, so that no score threshold has to be guessed: the best box of each tag is a label
whatever its score, and further instances are compared with it. ``choose_relative`` picks the one constant that matters
from the photos themselves, without any box.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from tag2box.annotations import Detections
from tag2box.labels.labelled import LabelBox, Why
from tag2box.ops.boxes import areas, containment, greedy_match, iou

_Share = Annotated[float, Field(ge=0, le=1)]
RELATIVES = tuple(round(0.05 * step, 2) for step in range(4, 20))
"""Values of ``LabelRule.relative`` that ``choose_relative`` compares: 0.2 to 0.95."""
_MATCH_IOU = 0.5
_TOLERANCE = 0.01  # of F1: values that are this close count as equally stable


@dataclass(frozen=True, kw_only=True)
class LabelRule:
    """Settings of the label rule; ``label_photo`` applies it."""

    relative: _Share = 0.5
    """A further instance has at least this share of the score of the best box of its tag."""
    doubtful: _Share = 0.25
    """Boxes with less than ``relative`` and at least this share of that score become ignore regions."""
    floor: _Share = 0.05
    """Least score of a further instance or an ignore region; the best box of a tag needs none."""
    nms_iou: Annotated[float, Field(gt=0, le=1)] = 0.4
    """Boxes of a class that overlap a better one by more are dropped."""
    nested: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Two boxes of a class are nested if at least this share of the smaller one lies in the other; one is dropped."""
    keep_nested: Literal["best", "outer"] = "best"
    """Which of two nested boxes stays: the one with the higher score, or the outer one if it could be an instance."""
    other_classes: bool = False
    """Whether classes that are not tags of a photo are labelled too."""
    other_min_score: _Share = 0.5
    """Least score of a box of such a class."""

    def rescaled(self, power: float) -> LabelRule:
        """The rule for scores raised to a power: shares of the best score are, too, so that it chooses the same boxes.

        >>> LabelRule(relative=0.25, doubtful=0.09).rescaled(0.5).relative
        0.5
        """
        return replace(self, relative=self.relative**power, doubtful=self.doubtful**power)


@dataclass(frozen=True, slots=True)
class PhotoTags:
    """The tags of one photo: class numbers."""

    present: frozenset[int]
    unsure: frozenset[int] = frozenset()
    counts: Mapping[int, int] | None = None  # objects per class, as far as they were counted


def tags_digest(tags: Mapping[str, PhotoTags]) -> str:
    """SHA-256 of the tags of some photos."""
    rows = [[name, sorted(own.present), sorted(own.unsure)] for name, own in tags.items()]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class _Candidates:
    """The boxes of one class in one photo, best first, after NMS."""

    boxes: Float[Tensor, "A 4"]
    scores: tuple[float, ...]


def label_photo(rule: LabelRule, found: Detections, tags: PhotoTags, classes: Sequence[str]) -> tuple[LabelBox, ...]:
    """The labels and ignore regions of a photo, in the order of the classes, best first.

    * Per tag: the best box, and further instances of at least ``relative`` times its score, at most as many as were
      counted. Boxes between ``doubtful`` and ``relative`` become ignore regions.
    * Per unsure tag: the best box becomes an ignore region.
    * Other classes: nothing, or with ``other_classes`` all boxes of at least ``other_min_score``.

    Nested boxes of a class are resolved first. Equal scores are ordered by area (larger first), then by corners, so
    that the order of the detections does not matter.
    """
    labels: list[LabelBox] = []
    for number, name in enumerate(classes):
        is_tag, is_unsure = number in tags.present, number in tags.unsure
        if not (is_tag or is_unsure or rule.other_classes):
            continue
        own = _candidates(found, number, rule.nms_iou)
        limit = (tags.counts or {}).get(number)
        boxes = _resolved(own, rule) if len(own.scores) else []
        if is_tag:
            labels += _of_tag(rule, boxes, name, limit)
        elif is_unsure:
            labels += [_made(box, name, "unsure tag", is_tag=False) for box in boxes[:1] if box.score >= rule.floor]
        else:
            sure = [box for box in boxes if box.score >= rule.other_min_score]
            labels += [_made(box, name, "untagged class", is_tag=False) for box in sure]
    return tuple(labels)


def candidates_of_tags(rule: LabelRule, found: Detections, tags: PhotoTags, most: int = 100) -> Detections:
    """The detections that ``label_photo`` can use, at most ``most`` of a class: all that has to be kept of a photo."""
    rows = []
    for label in found.labels.unique().tolist():
        own = (found.labels == label).nonzero().flatten()
        is_confident = rule.other_classes and bool((found.scores[own] >= rule.other_min_score).any())
        if not (label in tags.present or label in tags.unsure or is_confident):
            continue
        rows.append(own[found.scores[own].argsort(descending=True, stable=True)[:most]])
    return found[torch.cat(rows)] if rows else Detections.empty()


# ---------------------------------------------------------------- one class


@dataclass(frozen=True, slots=True)
class _Ranked:
    """A candidate that survives the nested ones."""

    box: tuple[float, float, float, float]
    score: float
    rank: int
    margin: float
    alternative: tuple[float, float, float, float] | None


def _candidates(found: Detections, label: int, nms_iou: float) -> _Candidates:
    """The boxes of a class, best first, after NMS."""
    rows = (found.labels == label).nonzero().flatten()
    boxes, scores = found.boxes[rows].double(), found.scores[rows].double().tolist()
    sizes, corners = areas(boxes).tolist(), boxes.tolist()
    order = sorted(range(len(scores)), key=lambda row: (-scores[row], -sizes[row], corners[row]))
    overlaps = (iou(boxes, boxes) > nms_iou).tolist()
    kept: list[int] = []
    for row in order:
        if not any(overlaps[other][row] for other in kept):
            kept.append(row)
    return _Candidates(boxes[kept], tuple(scores[row] for row in kept))


def _resolved(own: _Candidates, rule: LabelRule) -> list[_Ranked]:
    """The candidates of which none is nested in another, best first; each names the best one dropped for it."""
    inside = (containment(own.boxes, own.boxes) >= rule.nested).tolist()
    sizes, least = areas(own.boxes).tolist(), max(rule.relative * own.scores[0], rule.floor)
    kept: list[int] = []
    shown: dict[int, int] = {}  # kept row -> the row whose box it shows
    dropped: dict[int, int] = {}
    for row, score in enumerate(own.scores):
        owner = next((other for other in kept if inside[row][other]), None)
        if owner is None:
            kept.append(row)
            shown[row] = row
            continue
        if rule.keep_nested == "outer" and score >= least and sizes[row] > sizes[shown[owner]]:
            dropped[owner], shown[owner] = shown[owner], row
        else:
            dropped.setdefault(owner, row)
    corners = [(x1, y1, x2, y2) for x1, y1, x2, y2 in own.boxes.tolist()]
    margins = [a - b for a, b in zip(own.scores, (*own.scores[1:], 0.0), strict=True)]
    return [
        _Ranked(
            corners[shown[row]],
            own.scores[row],
            shown[row] + 1,
            margins[row],
            corners[dropped[row]] if row in dropped else None,
        )
        for row in kept
    ]


def _of_tag(rule: LabelRule, boxes: Sequence[_Ranked], name: str, limit: int | None) -> Iterator[LabelBox]:
    """Labels and ignore regions of a tag."""
    for place, box in enumerate(boxes):
        share = boxes[0].score
        if place == 0:
            yield _made(box, name, "best of its tag")
        elif box.score >= max(rule.relative * share, rule.floor) and (limit is None or place < limit):
            yield _made(box, name, "further instance")
        elif box.score >= max(rule.doubtful * share, rule.floor):
            yield _made(box, name, "doubtful")
        else:
            break


def _made(box: _Ranked, name: str, why: Why, *, is_tag: bool = True) -> LabelBox:
    return LabelBox(
        box.box, name, box.score, is_doubtful=why in {"doubtful", "unsure tag"}, is_tag=is_tag, why=why, rank=box.rank,
        margin=box.margin, alternative=box.alternative, source="label",
    )  # fmt: skip


# ---------------------------------------------------------------- the constant, without boxes


@dataclass(frozen=True, slots=True)
class TwoViews:
    """The detections of one photo from two views of it, in the photo's own pixels, and its tags."""

    first: Detections
    second: Detections
    tags: PhotoTags


@dataclass(frozen=True, slots=True)
class RuleChoice:
    """A rule, and the agreement of the labels of two views for each value of ``relative`` that was compared."""

    rule: LabelRule
    agreement: Mapping[float, float]


def choose_relative(rule: LabelRule, photos: Sequence[TwoViews], classes: Sequence[str]) -> RuleChoice:
    """Choose ``LabelRule.relative`` without true boxes: the labels of a photo and of its flip should agree.

    An object is found in a photo and in its horizontal flip; a box that a threshold cuts off in one of them is neither
    safely in nor safely out. For each value in ``RELATIVES``, both views are labelled, boxes of a class match one to
    one at an IoU of at least 0.5, and F1 is taken over all photos: twice the matches per label of either view. The
    smallest value within 0.01 of the best F1 wins: among equally stable rules, the one with most instances.
    ``doubtful`` keeps its share of ``relative``. Without photos, the rule is returned as it is.
    """
    agreement: dict[float, float] = {}
    ratio = rule.doubtful / rule.relative if rule.relative > 0 else 0.0
    for value in RELATIVES if photos else ():
        changed = replace(rule, relative=value, doubtful=min(ratio * value, value))
        agreement[value] = agreement_of(changed, photos, classes)
    if not agreement:
        return RuleChoice(rule, agreement)
    best = min(value for value, f1 in agreement.items() if f1 >= max(agreement.values()) - _TOLERANCE)
    return RuleChoice(replace(rule, relative=best, doubtful=min(ratio * best, best)), agreement)


def agreement_of(rule: LabelRule, photos: Sequence[TwoViews], classes: Sequence[str]) -> float:
    """F1 of the labels of the first views against those of the second; 1 if there are none."""
    found = total = 0
    for photo in photos:
        first, second = (
            [box for box in label_photo(rule, view, photo.tags, classes) if not box.is_doubtful]
            for view in (photo.first, photo.second)
        )
        found += matches(first, second)
        total += len(first) + len(second)
    return 2 * found / total if total else 1.0


def matches(first: Sequence[LabelBox], second: Sequence[LabelBox]) -> int:
    """Number of boxes matched one to one, greedily from the first's best, each with its nearest of the same class.

    On ties the last of the second's boxes is taken.
    """
    return int((greedy_match(label_overlaps(first, second[::-1]), _MATCH_IOU) >= 0).sum())


def label_overlaps(first: Sequence[LabelBox], second: Sequence[LabelBox]) -> Float[Tensor, "A B"]:
    """IoU of all pairs of labels; -1 for labels of different classes."""
    corners = [torch.tensor([box.box for box in side], dtype=torch.float64).reshape(-1, 4) for side in (first, second)]
    same = torch.tensor([[a.name == b.name for b in second] for a in first], dtype=torch.bool)
    overlaps = iou(corners[0], corners[1])
    return torch.where(same.reshape(overlaps.shape), overlaps, -1.0)


def near_boxes(box: LabelBox, others: Sequence[LabelBox]) -> list[LabelBox]:
    """Those of the same class with an IoU of at least 0.5."""
    overlaps = label_overlaps([box], others)[0].tolist()
    return [other for other, overlap in zip(others, overlaps, strict=True) if overlap >= _MATCH_IOU]
