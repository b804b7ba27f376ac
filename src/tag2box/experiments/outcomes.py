"""Results beyond AP: outcomes of objects at equal numbers of boxes, and the quality of pseudo labels over training."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tag2box import annotations, errors
from tag2box.metrics.challenges import PSEUDO_IOUS, pseudo_quality
from tag2box.reporting import records, study_tables
from tag2box.training.events import Gallery

# ---------------------------------------------------------------- detections


def best_of(found: Mapping[str, annotations.Detections], truth: annotations.Truth) -> dict[str, annotations.Detections]:
    """Per class, the top-scoring boxes over all photos, as many as the class has objects; ties go to the first.

    Scores of different systems are not comparable (a softmax over classes, a softmax over proposals); numbers of boxes
    are.
    """
    counted = [objects.labels[~(objects.difficult | objects.crowd)] for objects in truth.objects]
    wanted = torch.bincount(torch.cat([torch.zeros(0, dtype=torch.long), *counted]), minlength=len(truth.classes))
    ids = [photo for photo in truth.ids if photo in found]
    labels = torch.cat([torch.zeros(0, dtype=torch.long), *(found[photo].labels for photo in ids)])
    scores = torch.cat([torch.zeros(0), *(found[photo].scores for photo in ids)])
    is_kept = torch.zeros(len(labels), dtype=torch.bool)
    for label, count in enumerate(wanted.tolist()):
        own = (labels == label).nonzero().flatten()
        order = torch.argsort(scores[own], descending=True, stable=True)
        is_kept[own[order[:count]]] = True
    parts = is_kept.split([len(found[photo]) for photo in ids])
    return {photo: found[photo][part] for photo, part in zip(ids, parts, strict=True)}


# ---------------------------------------------------------------- pseudo labels


def label_quality(record: records.RunRecord, truth: annotations.Truth) -> tuple[study_tables.LabelQuality, ...]:
    """Pseudo boxes of a run's last stage compared with the truth, at each ``gallery`` event; never fed back."""
    return tuple(_quality(gallery, record.pseudo, truth) for gallery in record.galleries)


def _quality(
    gallery: Gallery, counts: Sequence[records.PseudoCount], truth: annotations.Truth
) -> study_tables.LabelQuality:
    pseudo = {photo.id: photo.detections() for photo in gallery.photos}
    got = pseudo_quality(truth, pseudo)
    return study_tables.LabelQuality(
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


def _objects(truth: annotations.Truth, ids: set[str]) -> dict[str, int]:
    """True objects per class on some photos, without difficult objects and crowds."""
    total = torch.zeros(len(truth.classes), dtype=torch.long)
    for photo, objects in zip(truth.ids, truth.objects, strict=True):
        if photo in ids:
            counted = objects.labels[~(objects.difficult | objects.crowd)]
            total += torch.bincount(counted, minlength=len(truth.classes))
    return dict(zip(truth.classes, total.tolist(), strict=True))


def _threshold(counts: Sequence[records.PseudoCount], iteration: int) -> float | None:
    """tau of the last stage: the last value up to an iteration, or the first after it."""
    logged = [(count.iteration, count.threshold[-1]) for count in counts if count.threshold]
    known = [(at, tau) for at, tau in logged if tau is not None]
    before = [tau for at, tau in known if at <= iteration]
    return before[-1] if before else (known[0][1] if known else None)


def quality_json(moments: Sequence[study_tables.LabelQuality]) -> list[dict[str, object]]:
    """Label quality as JSON values."""
    return [asdict(moment) for moment in moments]


def read_quality(values: Sequence[dict[str, Any]], where: Path) -> tuple[study_tables.LabelQuality, ...]:
    """Label quality from JSON values."""
    try:
        return tuple(study_tables.LabelQuality(**value) for value in values)
    except TypeError:
        raise errors.UserError(f"{where}: not written by a study; remove the file, it is made again") from None


def mean_quality(seeds: Sequence[Sequence[study_tables.LabelQuality]]) -> tuple[study_tables.LabelQuality, ...]:
    """Label quality over several seeds, per iteration: shares and tau are averaged, boxes and objects summed."""
    together: dict[int, list[study_tables.LabelQuality]] = {}
    for moments in seeds:
        for moment in moments:
            together.setdefault(moment.iteration, []).append(moment)
    return tuple(_mean_quality(together[iteration]) for iteration in sorted(together))


def _mean_quality(moments: Sequence[study_tables.LabelQuality]) -> study_tables.LabelQuality:
    first = moments[0]
    return study_tables.LabelQuality(
        iteration=first.iteration,
        photos=sum(m.photos for m in moments),
        precision={k: mean_known([m.precision.get(k) for m in moments]) for k in first.precision},
        recall={k: mean_known([m.recall.get(k) for m in moments]) for k in first.recall},
        boxes={k: sum(m.boxes.get(k, 0) for m in moments) for k in first.boxes},
        objects={k: sum(m.objects.get(k, 0) for m in moments) for k in first.objects},
        threshold=mean_known([m.threshold for m in moments]),
    )


def mean_known(values: Sequence[float | None]) -> float | None:
    """The mean of the values that are not None; None without any."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
