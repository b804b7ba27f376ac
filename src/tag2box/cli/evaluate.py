"""``tag2box evaluate``: metrics of detection files, and of trained runs, against ground truth."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from tag2box import annotations, errors, extend, io, run_inputs, runs
from tag2box.cli import options
from tag2box.formats import coco_boxes, datasets, detection_files, listing
from tag2box.inference.predict import Scored, run_detector
from tag2box.metrics import challenges, error_analysis, evaluation, voc_ap
from tag2box.metrics.baselines import Baseline, best_verdict, trivial_baselines
from tag2box.progress import Progress, silent
from tag2box.training.class_evidence import preselected
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
    baselines: bool = True,
) -> evaluation.EvaluationResult:
    """Evaluate a COCO results file or a folder of VOC result files against the boxes of a dataset.

    Args:
        baselines: also evaluate trivial boxes, with which the detections are compared.
        metrics: names in ``extend.METRICS``, or ``package.module:Name``.
        truth: a COCO file, a VOC folder, or another dataset with boxes.
        split: for formats with named splits, such as a VOC folder.
        min_score: ``challenges`` ignores detections below this score.
        json: where to write the numbers, in full precision.

    Example:
        tag2box.evaluate(Path("VOC2007"), Path("boxes.json"), metrics=["voc07"]).to_json()
    """
    options.check_score(min_score, -1e9, 1e9)  # other tools write scores of any range
    if not metrics:
        raise errors.UserError(f"--metrics: names none; expected some of {', '.join(extend.METRICS)}")
    if json is not None:
        io.check_writable(json)
    scored = evaluation.evaluate_with_baselines if baselines else evaluation.evaluate_detections
    source = truth_source(truth, split=split, classes=classes)
    if not isinstance(datasets.dataset_format(source), coco_boxes.Coco):
        known = datasets.read_truth(source)
        found = detection_files.read_detections(detections, known)
        result = scored(known, found, metrics, min_score=min_score)
    else:
        own = coco_boxes.read_coco(truth, classes)
        found = detection_files.read_detections(detections, own.truth, images=own.images, categories=own.categories)
        result = scored(own.truth, found, metrics, min_score=min_score, areas=own.areas)
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
    """Photos with ground truth, and the folder of their proposals; ``baselines`` are rows beside the trivial ones."""

    photos: tuple[annotations.Photo, ...]
    truth: annotations.Truth
    proposals: Path
    baselines: tuple[Baseline, ...] = ()

    def evaluated(
        self, found: Mapping[str, annotations.Detections], metrics: Sequence[str]
    ) -> dict[str, voc_ap.JsonNumbers]:
        """The metrics of detections in these photos, and of the baselines."""
        return evaluation.evaluate_with_baselines(self.truth, found, metrics, further=self.baselines).to_json()


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


TEST_METRICS = ("voc07", "voc12", "coco", "challenges", "errors")
TRAIN_METRICS = ("corloc", "errors")
"""Of a run: CorLoc is that of the training photos."""


def evaluate_run(run: Path, *, test: EvalSet, train: EvalSet | None = None, progress: Progress = silent) -> None:
    """Write ``detections.json`` (test) and ``metrics.json`` into a run; CorLoc is that of the training photos."""
    trained = runs.open_run(run)
    found, extents = detect_with_extents(trained, test, progress)
    report: dict[str, object] = {"test": {**test.evaluated(found, TEST_METRICS), "extents": extents}}
    if train is not None:
        located, extents = detect_with_extents(trained, train, progress)
        report["train"] = {**train.evaluated(located, TRAIN_METRICS), "extents": extents}
        report["truth_boxes_per_class"] = boxes_per_class(train.truth)
    names = {photo.id: photo.path.name for photo in test.photos}
    coco_boxes.write_coco_results(run / DETECTIONS_FILE, found, trained.classes, file_names=names)
    io.write_json(run / METRICS_FILE, report)


def measure_run(run: Path, *, test: EvalSet, train: EvalSet | None = None, progress: Progress = silent) -> None:
    """Evaluate a run, unless it was; metrics of older versions gain baselines and error analysis."""
    if not (run / METRICS_FILE).exists():
        evaluate_run(run, test=test, train=train, progress=progress)
    elif lacks_baselines(run):
        _add_baselines(run, test, train)


def lacks_baselines(run: Path) -> bool:
    """Whether the metrics of a run are of a version before baselines."""
    report = io.read_json(run / METRICS_FILE, "the metrics of a run")
    return isinstance(report, dict) and isinstance(report.get("test"), dict) and "baselines" not in report["test"]


def _add_baselines(run: Path, test: EvalSet, train: EvalSet | None) -> None:
    """Add what older metrics lack, from stored detections.

    Detections in the training photos are not stored, so these get the rows that need none: those with known tags.
    """
    report = io.read_json(run / METRICS_FILE, "the metrics of a run")
    if (run / DETECTIONS_FILE).exists():
        found = detection_files.read_detections(run / DETECTIONS_FILE, test.truth)
        report["test"] = {**test.evaluated(found, TEST_METRICS), **report["test"]}
    if train is not None and isinstance(report.get("train"), dict):
        rows = [*trivial_baselines(train.truth), *train.baselines]
        known = {row.name: evaluation.evaluate_detections(train.truth, row.detections, TRAIN_METRICS) for row in rows}
        report["train"] = {**_with_known_rows(report["train"], known), **report["train"]}
    io.write_json(run / METRICS_FILE, report)


def _with_known_rows(
    figures: Mapping[str, Any], rows: Mapping[str, evaluation.EvaluationResult]
) -> dict[str, voc_ap.JsonNumbers]:
    """Baselines of figures that were measured without them, and the verdict on CorLoc."""
    corloc = figures.get("corloc")
    own = corloc.get("mean") if isinstance(corloc, dict) else None
    means = {
        name: next((v for metric, _, v in row.figures() if metric == "corloc"), None) for name, row in rows.items()
    }
    verdict = best_verdict(own if isinstance(own, int | float) else None, means.items())
    return {
        "baselines": {name: row.to_json() for name, row in rows.items()},
        "verdicts": {} if verdict is None else {"corloc": verdict.to_json()},
    }


def detect_with_extents(
    trained: runs.AnyRun, data: EvalSet, progress: Progress
) -> tuple[dict[str, annotations.Detections], dict[str, float | None]]:
    """Detections in some photos, and what the scores of their proposals prefer."""
    if trained.classes != data.truth.classes:
        other = next((c for c in data.truth.classes if c not in trained.classes), "another order of classes")
        raise errors.UserError(
            f"{trained.folder}: the ground truth has {other!r}, which the model was not trained on; leave it out"
        )
    if isinstance(trained, runs.StudentRun):
        return trained.detect(data.photos, progress=progress), {}
    config = trained.config
    store = preselected(
        trained.detector.class_maps,
        data.photos,
        run_inputs.proposals_of(data.photos, config, data.proposals, progress),
        config.adaptation.keep_boxes,
    )
    maps = run_inputs.cached_features(
        RoiMaps(trained.detector.backbone, data.photos, store), config, config.inference.views(), progress
    )
    objects = dict(zip(data.truth.ids, data.truth.objects, strict=True))
    pairs: list[error_analysis.PairExtent] = []

    def analyse(photo: annotations.Photo, scores: Scored) -> None:
        pairs.extend(error_analysis.pair_extents(store.boxes(photo.id), scores.probs.cpu(), objects[photo.id]))

    found = run_detector(
        trained.detector,
        data.photos,
        store,
        maps=maps,
        inference=config.inference,
        rescore=config.criterion.rescore,
        progress=progress,
        on_scores=analyse,
    )
    return found, error_analysis.extent_shares(pairs, data.truth.classes)


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
    baselines: Annotated[
        bool, typer.Option(help="Compare with trivial boxes: the whole photo, and one in its centre.")
    ] = True,
) -> None:
    """Evaluate detections: VOC AP, CorLoc, the COCO metrics, the three challenges of the paper, kinds of errors.

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
        baselines=baselines,
    )
    options.print_rich(evaluation.metrics_table(result))
    for table in evaluation.breakdown_tables(result):
        options.print_rich(table)
    if result.baselines:
        options.print_rich(evaluation.baselines_table(result))
        for line in evaluation.verdict_lines(result):
            options.say(line)
