"""``tag2box evaluate``: score detections, ours or anybody's, against truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tag2box.formats.coco_boxes import read_coco
from tag2box.formats.datasets import dataset_format, read_truth
from tag2box.formats.detection_files import read_detections
from tag2box.formats.listing import DataSource
from tag2box.io import write_json
from tag2box.metrics.challenges import MIN_SCORE
from tag2box.metrics.evaluation import EvaluationResult
from tag2box.metrics.evaluation import evaluate_detections as score


def evaluate(
    truth: Path,
    detections: Path,
    *,
    metrics: Sequence[str] = ("voc07", "voc12", "corloc", "coco", "challenges"),
    split: str = "test",
    classes: Sequence[str] | None = None,
    min_score: float = MIN_SCORE,
    json: Path | None = None,
) -> EvaluationResult:
    """Score a COCO results file or a folder of VOC result files against a COCO file or a VOC folder.

    Args:
        split: image list of a VOC folder, in ``ImageSets/Main``.
        min_score: detections below it do not count for ``challenges``.
        json: where to write the numbers, in full precision.
    """
    if truth.is_dir():
        known = read_truth(dataset(truth, split=split, classes=classes))
        result = score(known, read_detections(detections, known), metrics, min_score=min_score)
    else:
        own = read_coco(truth, classes)
        found = read_detections(detections, own.truth, images=own.images, categories=own.categories)
        result = score(own.truth, found, metrics, min_score=min_score, areas=own.areas)
    if json is not None:
        write_json(json, result.to_json())
    return result


def dataset(
    path: Path, *, photos: Path | None = None, split: str | None = None, classes: Sequence[str] | None = None
) -> DataSource:
    """A dataset with truth; ``split`` matters to formats that name their parts only."""
    source = DataSource(path=path, photos=photos, classes=tuple(classes) if classes is not None else None)
    return replace(source, split=split) if dataset_format(source).names_splits else source
