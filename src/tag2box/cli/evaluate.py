"""``tag2box evaluate``: metrics of detection files, and of trained runs, against ground truth."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from tag2box import annotations, errors, extend, io, runs
from tag2box.cli import options
from tag2box.formats import coco_boxes, datasets, detection_files, listing
from tag2box.inference.predict import run_detector
from tag2box.metrics import challenges, evaluation
from tag2box.progress import Progress, silent
from tag2box.training.feature_cache import RoiMaps

METRICS_FILE = "metrics.json"
DETECTIONS_FILE = "detections.json"


def evaluate(
    truth: Path,
    detections: Path,
    *,
    metrics: Sequence[str] = tuple(extend.METRICS),
    split: str = "test",
    classes: Sequence[str] | None = None,
    min_score: float = challenges.MIN_SCORE,
    json: Path | None = None,
) -> evaluation.EvaluationResult:
    """Evaluate a COCO results file or a folder of VOC result files against the boxes of a dataset.

    Args:
        metrics: names in ``extend.METRICS``, or ``package.module:Name``.
        truth: a COCO file, a VOC folder, or another dataset with boxes.
        split: for formats with named splits, such as a VOC folder.
        min_score: ``challenges`` ignores detections below this score.
        json: where to write the numbers, in full precision.

    Example:
        tag2box.evaluate(Path("VOC2007"), Path("boxes.json"), metrics=["voc07"]).to_json()
    """
    source = truth_source(truth, split=split, classes=classes)
    if not isinstance(datasets.dataset_format(source), coco_boxes.Coco):
        known = datasets.read_truth(source)
        found = detection_files.read_detections(detections, known)
        result = evaluation.evaluate_detections(known, found, metrics, min_score=min_score)
    else:
        own = coco_boxes.read_coco(truth, classes)
        found = detection_files.read_detections(detections, own.truth, images=own.images, categories=own.categories)
        result = evaluation.evaluate_detections(own.truth, found, metrics, min_score=min_score, areas=own.areas)
    if json is not None:
        io.write_json(json, result.to_json())
    return result


def truth_source(
    path: Path, *, photos: Path | None = None, split: str | None = None, classes: Sequence[str] | None = None
) -> listing.DataSource:
    """A dataset with ground truth; ``split`` is dropped for formats without named splits."""
    source = listing.DataSource(path=path, photos=photos, classes=tuple(classes) if classes is not None else None)
    return replace(source, split=split) if datasets.dataset_format(source).names_splits else source


# ---------------------------------------------------------------- a run


@dataclass(frozen=True)
class EvalSet:
    """Photos with ground truth, and the folder of their proposals."""

    photos: tuple[annotations.Photo, ...]
    truth: annotations.Truth
    proposals: Path


def eval_set(source: listing.DataSource, proposals: Path) -> EvalSet:
    """The photos and the ground truth of a dataset."""
    photos = datasets.read_photos(source)
    return EvalSet(photos, truth_in_order(datasets.read_truth(source), photos, source.path), proposals)


def truth_in_order(truth: annotations.Truth, photos: Sequence[annotations.Photo], path: Path) -> annotations.Truth:
    """The ground truth of some photos, in their order; ``path`` is named in errors."""
    index = {name: i for i, name in enumerate(truth.ids)}
    missing = [photo.id for photo in photos if photo.id not in index]
    if missing:
        raise errors.UserError(f"{path}: no ground truth of photo {missing[0]} ({len(missing)} missing)")
    rows = [index[photo.id] for photo in photos]
    return annotations.Truth(
        truth.classes,
        tuple(truth.ids[i] for i in rows),
        tuple(truth.sizes[i] for i in rows),
        tuple(truth.objects[i] for i in rows),
    )


def evaluate_run(run: Path, *, test: EvalSet, train: EvalSet | None = None, progress: Progress = silent) -> None:
    """Write ``detections.json`` (test) and ``metrics.json`` into a run; CorLoc is that of the training photos."""
    trained = runs.load_run(run)
    found = _detect(trained, test, progress)
    scores = evaluation.evaluate_detections(test.truth, found, ["voc07", "voc12", "coco", "challenges"])
    report: dict[str, object] = {"test": scores.to_json()}
    if train is not None:
        located = _detect(trained, train, progress)
        report["train"] = evaluation.evaluate_detections(train.truth, located, ["corloc"]).to_json()
        report["truth_boxes_per_class"] = boxes_per_class(train.truth)
    names = {photo.id: photo.path.name for photo in test.photos}
    coco_boxes.write_coco_results(run / DETECTIONS_FILE, found, trained.classes, file_names=names)
    io.write_json(run / METRICS_FILE, report)


def _detect(trained: runs.TrainedRun, data: EvalSet, progress: Progress) -> dict[str, annotations.Detections]:
    if trained.classes != data.truth.classes:
        other = next((c for c in data.truth.classes if c not in trained.classes), "another order of classes")
        raise errors.UserError(
            f"{trained.folder}: the ground truth has {other!r}, which the model was not trained on; leave it out"
        )
    config = trained.config
    store = runs.proposals_of(data.photos, config, data.proposals, progress)
    maps = runs.cached_features(
        RoiMaps(trained.detector.backbone, data.photos, store), config, config.inference.views(), progress
    )
    return run_detector(
        trained.detector,
        data.photos,
        store,
        maps=maps,
        inference=config.inference,
        rescore=config.criterion.rescore,
        progress=progress,
    )


def boxes_per_class(truth: annotations.Truth) -> float | None:
    """Mean number of objects per present image-class pair: one-box-per-tag labelers assume it is 1."""
    pairs = sum(len(objects.labels.unique()) for objects in truth.objects)
    return sum(len(objects) for objects in truth.objects) / pairs if pairs else None


# ---------------------------------------------------------------- the command


def evaluate_command(
    truth: Annotated[Path, typer.Option(help="COCO JSON, VOC folder, or another dataset with boxes.")],
    detections: Annotated[Path, typer.Option(help="COCO results JSON, or a folder of comp4_det_*_CLASS.txt files.")],
    metrics: Annotated[
        str, typer.Option(help="Comma-separated; `package.module:Name` is a metric of your own.")
    ] = ",".join(extend.METRICS),
    split: Annotated[str, typer.Option(help="Split of the ground truth, if its format has named splits.")] = "test",
    classes: Annotated[str | None, typer.Option(help="Comma-separated; default: all in the ground truth.")] = None,
    min_score: Annotated[
        float, typer.Option(help="`challenges` ignores detections below this score.")
    ] = challenges.MIN_SCORE,
    json: Annotated[Path | None, typer.Option(help="Also write the numbers, in full precision.")] = None,
) -> None:
    """Evaluate detections: VOC AP, CorLoc, the COCO metrics, the three challenges of the paper.

    Example: `tag2box evaluate --truth VOC2007 --split test --detections results/ --metrics voc07`
    """
    result = evaluate(
        truth,
        detections,
        metrics=[name.strip() for name in metrics.split(",") if name.strip()],
        split=split,
        classes=[name.strip() for name in classes.split(",")] if classes else None,
        min_score=min_score,
        json=json,
    )
    options.print_rich(evaluation.metrics_table(result))
