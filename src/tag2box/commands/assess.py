"""Figures of a trained run: detections on test and training photos, scored and left in the run folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tag2box.annotations import Detections, Photo, Truth
from tag2box.commands.runs import TrainedRun, load_run, proposals_of, roi_maps
from tag2box.errors import UserError
from tag2box.formats.detection_files import write_coco_results
from tag2box.inference.predict import detect_photos_with as detect_with
from tag2box.io import write_json
from tag2box.metrics.evaluation import evaluate_detections as score
from tag2box.progress import Progress, silent

METRICS = "metrics.json"
DETECTIONS = "detections.json"


@dataclass(frozen=True)
class Exam:
    """Photos with truth, and where their proposals are or shall be kept."""

    photos: tuple[Photo, ...]
    truth: Truth
    proposals: Path


def assess(run: Path, *, test: Exam, train: Exam | None = None, progress: Progress = silent) -> None:
    """Write ``detections.json`` (test) and ``metrics.json`` into a run; CorLoc is of the training photos."""
    trained = load_run(run)
    found = _detect(trained, test, progress)
    report: dict[str, object] = {"test": score(test.truth, found, ["voc07", "voc12", "coco", "challenges"]).to_json()}
    if train is not None:
        located = _detect(trained, train, progress)
        report["train"] = score(train.truth, located, ["corloc"]).to_json()
        report["truth_boxes_per_class"] = boxes_per_class(train.truth)
    names = {photo.id: photo.path.name for photo in test.photos}
    write_coco_results(run / DETECTIONS, found, trained.classes, file_names=names)
    write_json(run / METRICS, report)


def _detect(trained: TrainedRun, exam: Exam, progress: Progress) -> dict[str, Detections]:
    if trained.classes != exam.truth.classes:
        strange = next((c for c in exam.truth.classes if c not in trained.classes), "another order of classes")
        raise UserError(f"{trained.folder}: the truth names {strange!r}, which the model was not taught; leave it out")
    store = proposals_of(exam.photos, trained.config, exam.proposals, progress)
    config = trained.config
    inference, rescore = config.inference, config.criterion.rescore
    maps = roi_maps(trained.detector, exam.photos, store, config=config, views=inference.views(), progress=progress)
    return detect_with(
        trained.detector, exam.photos, store, maps=maps, inference=inference, rescore=rescore, progress=progress
    )


def boxes_per_class(truth: Truth) -> float | None:
    """Mean number of objects per present image-class pair: what argmax labelling takes for one."""
    pairs = sum(len(objects.labels.unique()) for objects in truth.objects)
    return sum(len(objects) for objects in truth.objects) / pairs if pairs else None
