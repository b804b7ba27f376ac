"""``tag2box evaluate``: metrics of detection files, and of trained runs, against ground truth."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from tag2box import annotations, errors, extend, io, run_inputs, runs
from tag2box.cli import options
from tag2box.formats import coco_boxes, datasets, detection_files, listing
from tag2box.inference.predict import Scored, run_detector
from tag2box.metrics import bootstrap, challenges, error_analysis, evaluation, voc_ap
from tag2box.metrics.baselines import Baseline, best_verdict, scored_baselines, trivial_baselines
from tag2box.models.class_maps import ClassMaps, peak_boxes, pooled_logits
from tag2box.progress import Progress, silent
from tag2box.reporting import formatting as fmt
from tag2box.reporting.error_figures import EXTENTS, SPLIT_NAMES
from tag2box.reporting.records import Measured, read_run
from tag2box.training import proposal_cache
from tag2box.training.class_evidence import photo_maps
from tag2box.training.feature_cache import RoiMaps

METRICS_FILE = "metrics.json"
DETECTIONS_FILE = "detections.json"
TOP_BOXES_FILE = "train-top-boxes.json"
"""The best box of every tag of the training photos: all that CorLoc depends on."""
DetectionReader = Callable[[Path], Mapping[str, annotations.Detections]]


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
    ious: Sequence[float] = (voc_ap.MATCH_IOU,),
    against: Path | None = None,
    resamples: int = bootstrap.RESAMPLES,
    seed: int = 0,
) -> evaluation.EvaluationResult:
    """Evaluate a COCO results file or a folder of VOC result files against the boxes of a dataset.

    Args:
        baselines: also evaluate trivial boxes, with which the detections are compared.
        metrics: names in ``extend.METRICS``, or ``package.module:Name``; at an IoU of its own: ``voc07@0.3``.
        truth: a COCO file, a VOC folder, or another dataset with boxes.
        detections: also the folder of a run that was evaluated, whose ``detections.json`` is read.
        split: for formats with named splits, such as a VOC folder.
        min_score: ``challenges`` ignores detections below this score.
        json: where to write the numbers, in full precision.
        ious: of VOC AP, CorLoc and their breakdown; an IoU other than 0.5 becomes part of the name: ``voc07@0.3``.
        against: other detections in the same photos, with which these are compared (paired bootstrap over photos).
        resamples: of the bootstrap; 0 for no intervals.
        seed: of the resamples.

    Example:
        tag2box.evaluate(Path("VOC2007"), Path("boxes.json"), metrics=["voc07"], ious=[0.3, 0.5]).to_json()
    """
    options.check_score(min_score, -1e9, 1e9)  # other tools write scores of any range
    if not metrics:
        raise errors.UserError(f"--metrics: names none; expected some of {', '.join(extend.METRICS)}")
    if json is not None:
        io.check_writable(json)
    if resamples < 0 or (against is not None and not resamples):
        raise errors.UserError("--resamples: expected a whole number from 0 on; --against needs at least 1")
    names = evaluation.metrics_at(metrics, [evaluation.checked_iou(f"{level:g}") for level in ious])
    known, read, areas = _read_truth(truth_source(truth, split=split, classes=classes))
    found, others = read(_of_run(detections)), None if against is None else read(_of_run(against))
    scored = evaluation.evaluate_with_baselines if baselines else evaluation.evaluate_detections
    result = scored(known, found, names, min_score=min_score, areas=areas)
    if resamples:
        result = evaluation.with_intervals(result, known, found, against=others, resamples=resamples, seed=seed)
    if json is not None:
        io.write_json(json, result.to_json())
    return result


def _of_run(detections: Path) -> Path:
    """The detections of a run, if the path is the folder of one."""
    return detections / DETECTIONS_FILE if (detections / DETECTIONS_FILE).is_file() else detections


def extents_lines(run: Path) -> list[str]:
    """What the proposals of an evaluated run allowed, and what their scores prefer; empty if it is no such run."""
    metrics = read_run(run).metrics if (run / METRICS_FILE).is_file() and (run / DETECTIONS_FILE).is_file() else None
    if metrics is None:
        return []
    parts: dict[str, Measured | None] = {"test": metrics.test, "train": metrics.train}
    return [
        f"{SPLIT_NAMES[split]} of the run, {words}: {fmt.percent(part.extents.get(name))} %"
        for split, part in parts.items()
        if part is not None and part.extents
        for name, words in EXTENTS.items()
    ]


def _read_truth(source: listing.DataSource) -> tuple[annotations.Truth, DetectionReader, voc_ap.ObjectAreas | None]:
    """The ground truth, a function that reads detections in its photos, and the areas of its objects, if given."""
    if not isinstance(datasets.dataset_format(source), coco_boxes.Coco):
        known = datasets.read_truth(source)
        return known, lambda path: detection_files.read_detections(path, known), None
    own = coco_boxes.read_coco(source.path, source.classes)

    def read(path: Path) -> dict[str, annotations.Detections]:
        return detection_files.read_detections(path, own.truth, images=own.images, categories=own.categories)

    return own.truth, read, own.areas


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
        """The metrics of detections in these photos, with intervals, and those of the baselines."""
        result = evaluation.evaluate_with_baselines(self.truth, found, metrics, further=self.baselines)
        return evaluation.with_intervals(result, self.truth, found).to_json()


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


TEST_METRICS = ("voc07", "voc12", "coco", "challenges", "errors", "breakdown")
TRAIN_METRICS = ("corloc", "errors")
"""Of a run: CorLoc is that of the training photos."""


def class_map_rows(class_maps: ClassMaps, data: EvalSet) -> tuple[Baseline, ...]:
    """Trivial rows of a classifier that was trained on tags alone: its scores in both boxes, and in its maps' boxes.

    The last row has, per class, the component of the class map around its peak.
    """
    scores, components = {}, {}
    for photo in data.photos:
        maps = photo_maps(class_maps, photo)
        scores[photo.id] = pooled_logits(maps.logit(eps=1e-6)[None])[0].sigmoid()
        boxes = peak_boxes(maps, (photo.width, photo.height))
        components[photo.id] = annotations.Detections(boxes, scores[photo.id], torch.arange(len(boxes)))
    return (*scored_baselines(data.truth, scores, "probe"), Baseline("component of the class map", components))


def _with_class_maps(trained: runs.AnyRun, data: EvalSet) -> EvalSet:
    """Photos with the rows of a run's class maps, if it has any."""
    maps = None if isinstance(trained, runs.StudentRun) else trained.detector.class_maps
    return data if maps is None else replace(data, baselines=(*data.baselines, *class_map_rows(maps, data)))


def evaluate_run(run: Path, *, test: EvalSet, train: EvalSet | None = None, progress: Progress = silent) -> None:
    """Write ``detections.json`` (test) and ``metrics.json`` into a run; CorLoc is that of the training photos."""
    trained = runs.open_run(run)
    found, extents = detect_with_extents(trained, test, progress)
    rows = _with_class_maps(trained, test)
    report: dict[str, object] = {"test": {**rows.evaluated(found, TEST_METRICS), "extents": extents}}
    if train is not None:
        located, extents = detect_with_extents(trained, train, progress)
        rows = _with_class_maps(trained, train)
        report["train"] = {**rows.evaluated(located, TRAIN_METRICS), "extents": extents}
        report["truth_boxes_per_class"] = boxes_per_class(train.truth)
        tops, files = top_detections(train.truth, located), {photo.id: photo.path.name for photo in train.photos}
        coco_boxes.write_coco_results(run / TOP_BOXES_FILE, tops, trained.classes, file_names=files)
    names = {photo.id: photo.path.name for photo in test.photos}
    coco_boxes.write_coco_results(run / DETECTIONS_FILE, found, trained.classes, file_names=names)
    io.write_json(run / METRICS_FILE, report)


def top_detections(
    truth: annotations.Truth, found: Mapping[str, annotations.Detections]
) -> dict[str, annotations.Detections]:
    """The best-scored box of every tag of every photo, which has the same CorLoc."""
    out = {}
    for photo, objects in zip(truth.ids, truth.objects, strict=True):
        own = found.get(photo, annotations.Detections.empty())
        tags = objects.labels[~objects.crowd].unique().tolist()
        rows = [(own.labels == label).nonzero().flatten() for label in tags]
        best = [int(r[int(own.scores[r].double().numpy().argmax())]) for r in rows if len(r)]
        out[photo] = own[torch.tensor(best, dtype=torch.long)]
    return out


def measure_run(run: Path, *, test: EvalSet, train: EvalSet | None = None, progress: Progress = silent) -> None:
    """Evaluate a run, unless it was; metrics of older versions gain baselines, error analysis and intervals."""
    if not (run / METRICS_FILE).exists():
        evaluate_run(run, test=test, train=train, progress=progress)
    elif lacks_figures(run):
        _add_figures(run, test, train)


def lacks_figures(run: Path) -> bool:
    """Whether the metrics of a run are of a version before baselines or intervals."""
    report = io.read_json(run / METRICS_FILE, "the metrics of a run")
    test = report.get("test") if isinstance(report, dict) else None
    has_detections = (run / DETECTIONS_FILE).exists()
    return isinstance(test, dict) and ("baselines" not in test or (has_detections and "intervals" not in test))


def _add_figures(run: Path, test: EvalSet, train: EvalSet | None) -> None:
    """Add what older metrics lack, from stored detections.

    Detections in the training photos are not stored, so these get the rows that need none: those with known tags.
    """
    report = io.read_json(run / METRICS_FILE, "the metrics of a run")
    if (run / DETECTIONS_FILE).exists():
        found = detection_files.read_detections(run / DETECTIONS_FILE, test.truth)
        added = test.evaluated(found, TEST_METRICS)
        report["test"] = {**added, **report["test"], "baselines": added["baselines"], "verdicts": added["verdicts"]}
    if train is not None and isinstance(report.get("train"), dict) and "baselines" not in report["train"]:
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
    store = proposal_cache.seen_boxes(
        data.photos,
        run_inputs.proposals_of(data.photos, config, data.proposals, progress),
        trained.detector.class_maps,
        keep=config.adaptation.keep_boxes,
        folder=runs.required(config.feature_cache),
        progress=progress,
    ).boxes
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
        superpixels=config.superpixels,
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
    detections: Annotated[
        Path, typer.Option(help="COCO results JSON, a folder of comp4_det_*_CLASS.txt files, or an evaluated run.")
    ],
    metrics: Annotated[
        str, typer.Option(help="Comma-separated; `package.module:Name` is a metric of your own.")
    ] = ",".join(extend.METRICS),
    split: Annotated[str, typer.Option(help="Split of the ground truth, if its format has named splits.")] = "test",
    classes: Annotated[
        str | None, typer.Option(help="Comma-separated, or a text file with one per line; default: all in TRUTH.")
    ] = None,
    min_score: Annotated[
        float, typer.Option(help="`challenges` ignores detections below this score.")
    ] = challenges.MIN_SCORE,
    json: Annotated[Path | None, typer.Option(help="Also write the numbers, in full precision.")] = None,
    baselines: Annotated[
        bool, typer.Option(help="Compare with trivial boxes: the whole photo, and one in its centre.")
    ] = True,
    iou: Annotated[str, typer.Option(help="IoU of VOC AP and CorLoc; several: comma-separated.")] = "0.5",
    against: Annotated[
        Path | None, typer.Option(help="Other detections in the same photos: is the difference significant?")
    ] = None,
    resamples: Annotated[
        int, typer.Option(help="Resamples of the photos, for confidence intervals; 0: none.")
    ] = bootstrap.RESAMPLES,
) -> None:
    """Evaluate detections: VOC AP, CorLoc, the COCO metrics, the three challenges of the paper, kinds of errors.

    Example: `tag2box evaluate --truth VOC2007 --split test --detections results/ --metrics voc07`
    """
    result = evaluate(
        truth,
        detections,
        metrics=[name.strip() for name in metrics.split(",") if name.strip()],
        split=split,
        classes=datasets.class_names(classes) if classes else None,
        min_score=min_score,
        json=json,
        baselines=baselines,
        ious=[evaluation.checked_iou(text.strip()) for text in iou.split(",")],
        against=against,
        resamples=resamples,
    )
    options.print_rich(evaluation.metrics_table(result))
    for table in evaluation.breakdown_tables(result):
        options.print_rich(table)
    for line in extents_lines(detections):
        options.say(line)
    if result.baselines:
        options.print_rich(evaluation.baselines_table(result))
        for line in evaluation.verdict_lines(result):
            options.say(line)
    if result.differences:
        options.print_rich(evaluation.differences_table(result))
