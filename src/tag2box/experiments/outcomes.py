"""Fates of objects under detectors whose scores mean different things: of each, as many boxes as there are objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace

import torch

from tag2box.annotations import Detections, Truth
from tag2box.experiments.grid import RunResult
from tag2box.experiments.study_data import StudyData
from tag2box.io import read_json, write_json
from tag2box.metrics.challenges import challenges

FATE_NAMES = "fates.json"
KEY = "fates"
"""Where a result has them among its figures."""


def with_fates(result: RunResult, data: StudyData) -> RunResult:
    """A result with the shares of objects found, in part, grouped and missed; kept beside it once they are known.

    The usual shares keep boxes from a score up, and a score of 0.1 means one thing after a softmax over classes and
    another after one over proposals.
    """
    path = result.folder / FATE_NAMES
    if not path.exists():
        found = result.record(data).test_detections or {}
        write_json(path, asdict(challenges(data.test, best_of(found, data.test), min_score=0.0)))
    shares = read_json(path, "the fates of a cell's objects")
    return replace(result, figures={**result.figures, KEY: shares})


def best_of(found: Mapping[str, Detections], truth: Truth) -> dict[str, Detections]:
    """Of each class, the best-scored boxes of all photos, as many as the class has objects; of equals, the first."""
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
