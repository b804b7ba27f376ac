"""How good pseudo labels were while a run learnt: looked up afterwards, never fed back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tag2box.annotations import Detections, Truth
from tag2box.errors import UserError
from tag2box.metrics.challenges import PSEUDO_IOUS, pseudo_quality
from tag2box.reporting.records import Gallery, PseudoCount, RunRecord
from tag2box.reporting.study_figures import Moment


def quality(record: RunRecord, truth: Truth) -> tuple[Moment, ...]:
    """The pseudo boxes of a run's last stage against the truth, at each moment the run looked at its photos."""
    return tuple(_moment(gallery, record.pseudo, truth) for gallery in record.galleries)


def _moment(gallery: Gallery, counts: Sequence[PseudoCount], truth: Truth) -> Moment:
    pseudo = {
        photo.id: Detections(
            torch.tensor(photo.boxes, dtype=torch.float32).reshape(-1, 4),
            torch.tensor(photo.scores, dtype=torch.float32),
            torch.tensor(photo.labels, dtype=torch.long),
        )
        for photo in gallery.photos
    }
    got = pseudo_quality(truth, pseudo)
    return Moment(
        iteration=gallery.iteration,
        photos=len(pseudo),
        precision=_by_overlap(got.precision),
        recall=_by_overlap(got.recall),
        boxes=got.counts,
        objects=_objects(truth, set(pseudo)),
        threshold=_threshold(counts, gallery.iteration),
    )


def _by_overlap(values: Sequence[float | None]) -> dict[str, float | None]:
    return {f"{overlap:g}": value for overlap, value in zip(PSEUDO_IOUS, values, strict=True)}


def _objects(truth: Truth, ids: set[str]) -> dict[str, int]:
    """True objects of each class on some photos, difficult ones and crowds left out."""
    total = torch.zeros(len(truth.classes), dtype=torch.long)
    for photo, objects in zip(truth.ids, truth.objects, strict=True):
        if photo in ids:
            counted = objects.labels[~(objects.difficult | objects.crowd)]
            total += torch.bincount(counted, minlength=len(truth.classes))
    return dict(zip(truth.classes, total.tolist(), strict=True))


def _threshold(counts: Sequence[PseudoCount], iteration: int) -> float | None:
    """tau of the last stage as it was last told before a moment, or first after it."""
    told = [(count.iteration, count.threshold[-1]) for count in counts if count.threshold]
    known = [(at, tau) for at, tau in told if tau is not None]
    before = [tau for at, tau in known if at <= iteration]
    return before[-1] if before else (known[0][1] if known else None)


def quality_json(moments: Sequence[Moment]) -> list[dict[str, object]]:
    """Moments as JSON takes them."""
    return [asdict(moment) for moment in moments]


def moments_of(told: Sequence[dict[str, Any]], where: Path) -> tuple[Moment, ...]:
    """Moments from JSON."""
    try:
        return tuple(Moment(**moment) for moment in told)
    except TypeError:
        raise UserError(f"{where}: not what a study wrote; remove the file, it is made anew") from None


def mean_moments(seeds: Sequence[Sequence[Moment]]) -> tuple[Moment, ...]:
    """Moments of several seeds as one: shares and tau are means, boxes and objects are summed."""
    together: dict[int, list[Moment]] = {}
    for moments in seeds:
        for moment in moments:
            together.setdefault(moment.iteration, []).append(moment)
    return tuple(_mean(together[iteration]) for iteration in sorted(together))


def _mean(moments: Sequence[Moment]) -> Moment:
    first = moments[0]
    return Moment(
        iteration=first.iteration,
        photos=sum(m.photos for m in moments),
        precision={k: mean([m.precision.get(k) for m in moments]) for k in first.precision},
        recall={k: mean([m.recall.get(k) for m in moments]) for k in first.recall},
        boxes={k: sum(m.boxes.get(k, 0) for m in moments) for k in first.boxes},
        objects={k: sum(m.objects.get(k, 0) for m in moments) for k in first.objects},
        threshold=mean([m.threshold for m in moments]),
    )


def mean(values: Sequence[float | None]) -> float | None:
    """The mean of what is known; None of nothing."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
