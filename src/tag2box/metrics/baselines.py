"""Trivial baselines: detections that required no learning about *where* an object is.

A row is a box and the class scores that it is given. The boxes are the whole photo and one centred box; the class
scores are known tags, the best score of each class among the evaluated detections, or any others, e.g. of a linear
probe. Rows are ordinary detections, so every metric evaluates them. A detector has learnt to localise only by what it
adds to them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float

from tag2box.annotations import Detections, Truth

CENTRED_SIDE = 0.75
"""Sides of the centred box, as a fraction of the photo's sides. A constant: no truth is used to choose it.

A centred box of side s has IoU >= 0.5 with a concentric object of the same shape if the object's share a of the photo
is between s^2 / 2 and 2 s^2. For a uniform on [0, 1] the probability, min(1, 2 s^2) - s^2 / 2, is highest at
s = sqrt(1/2) = 0.707. Rounded up to 0.75, so that an object that fills the photo matches with a margin (IoU 0.56):
VOC's AP requires an IoU *above* 0.5.
"""

TRIVIAL_BOXES = {"centred box": CENTRED_SIDE, "whole photo": 1.0}
"""The boxes by name: their sides, as a fraction of the photo's."""

SAME_SCORES = "same class scores"
TAGS_KNOWN = "tags known"

ImageScores = Mapping[str, Float[torch.Tensor, " C"]]
"""Class scores of photos by id; minus infinity: no box of this class. A photo without an entry gets no box."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """A row to compare detections with. Its boxes may come from anywhere, e.g. from class activation maps.

    A row that knows the tags is no bar for a metric that also judges recognition, such as AP.
    """

    name: str
    detections: Mapping[str, Detections]
    knows_tags: bool = False


def centred_boxes(sizes: Sequence[tuple[int, int]], side: float = CENTRED_SIDE) -> Float[torch.Tensor, "N 4"]:
    """The centred box of each photo of a (width, height), with sides ``side`` times the photo's.

    >>> centred_boxes([(100, 40)])
    tensor([[12.5000,  5.0000, 87.5000, 35.0000]])
    """
    far = torch.tensor(sizes, dtype=torch.float32).reshape(-1, 2)
    margin = far * (1 - side) / 2
    return torch.cat([margin, far - margin], dim=1)


def tag_scores(truth: Truth) -> dict[str, Float[torch.Tensor, " C"]]:
    """Score 1 for each class that a photo shows, as CorLoc counts: difficult objects are included, crowds are not."""
    out = {}
    for photo, objects in zip(truth.ids, truth.objects, strict=True):
        out[photo] = torch.full((len(truth.classes),), -math.inf)
        out[photo][objects.labels[~objects.crowd]] = 1.0
    return out


def best_scores(detections: Mapping[str, Detections], num_classes: int) -> dict[str, Float[torch.Tensor, " C"]]:
    """The highest score of each class among a photo's detections; minus infinity without any."""
    out = {}
    for photo, found in detections.items():
        lowest = torch.full((num_classes,), -math.inf, dtype=found.scores.dtype)
        out[photo] = lowest.scatter_reduce(0, found.labels, found.scores, "amax")
    return out


def scored_baselines(truth: Truth, scores: ImageScores, name: str, *, knows_tags: bool = False) -> list[Baseline]:
    """A row per trivial box, with these class scores; ``name`` is that of the scores, e.g. "linear probe"."""
    return [
        Baseline(f"{box}, {name}", _placed(truth, scores, centred_boxes(truth.sizes, side)), knows_tags)
        for box, side in TRIVIAL_BOXES.items()
    ]


def _placed(truth: Truth, scores: ImageScores, boxes: Float[torch.Tensor, "N 4"]) -> dict[str, Detections]:
    """One box per photo, as a detection of each class that has a score."""
    out = {}
    for photo, box in zip(truth.ids, boxes, strict=True):
        if photo in scores:
            labels = torch.nonzero(scores[photo] > -math.inf)[:, 0]
            out[photo] = Detections(box.expand(len(labels), 4), scores[photo][labels], labels)
    return out


def trivial_baselines(truth: Truth, detections: Mapping[str, Detections] | None = None) -> list[Baseline]:
    """Both boxes with the class scores of ``detections``, if given, and both with known tags.

    With the same class scores the difference between detections and a row is localisation alone: the photos of a class
    are ranked by the same scores.
    """
    same = (
        [] if detections is None else scored_baselines(truth, best_scores(detections, len(truth.classes)), SAME_SCORES)
    )
    return [*same, *scored_baselines(truth, tag_scores(truth), TAGS_KNOWN, knows_tags=True)]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A figure and the best trivial row of it."""

    value: float
    best_row: str
    best: float

    @property
    def is_above(self) -> bool:
        """Whether the figure is above every trivial row."""
        return self.value > self.best

    def words(self) -> str:
        """The comparison as a phrase: not above a centred box (46.2)."""
        box = next((box for box in TRIVIAL_BOXES if self.best_row.startswith(box)), None)
        named = self.best_row if box is None else f"a {box}" if box == "centred box" else f"the {box}"
        return f"{'above' if self.is_above else 'not above'} {named} ({100 * self.best:.1f})"

    def to_json(self) -> dict[str, object]:
        """The comparison as JSON values."""
        return {"value": self.value, "best_row": self.best_row, "best": self.best, "is_above": self.is_above}


def best_verdict(value: float | None, rows: Iterable[tuple[str, float | None]]) -> Verdict | None:
    """A figure against the best of some rows; None without any; on ties the first row is named."""
    known = [(figure, name) for name, figure in rows if figure is not None]
    if value is None or not known:
        return None
    best = max(figure for figure, _ in known)
    return Verdict(value, next(name for figure, name in known if figure == best), best)
