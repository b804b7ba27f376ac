"""Appendices A (figures per class), B (proposals) and C (score or similarity) of the paper as experiments."""

from collections.abc import Mapping
from dataclasses import replace

from tag2box import recipes, run_inputs
from tag2box.experiments import experiment, paper_tables
from tag2box.progress import silent
from tag2box.proposals import edge_boxes, recall, selective_search
from tag2box.proposals.importers.proposal_files import Imported
from tag2box.reporting import formatting as fmt, study_tables

# ---------------------------------------------------------------- appendix A (selective search, VGG16)

MEAN = "mean"
VOC_CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog",
    "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor", MEAN,
)  # fmt: skip


def _paper_by_class(*figures: float) -> dict[str, float]:
    return dict(zip(VOC_CLASSES, figures, strict=True))


VOC_AP: dict[str, dict[str, float]] = {
    "OICR, VOC07": _paper_by_class(
        58.0, 62.4, 31.1, 19.4, 13.0, 65.1, 62.2, 28.4, 24.8, 44.7, 30.6, 25.3, 37.8, 65.5, 15.7, 24.1, 41.7, 46.9,
        64.3, 62.6, 41.2,
    ),
    "OD-WSCL, VOC07": _paper_by_class(
        65.8, 79.5, 58.1, 23.7, 28.6, 71.2, 75.0, 71.7, 31.7, 69.8, 45.2, 55.7, 57.2, 75.7, 29.6, 24.3, 61.0, 55.3,
        71.7, 72.0, 56.1,
    ),
    "OICR, VOC12": _paper_by_class(
        67.7, 61.2, 41.5, 25.6, 22.2, 54.6, 49.7, 25.4, 19.9, 47.0, 18.1, 26.0, 38.9, 67.7, 2.0, 22.6, 41.1, 34.3,
        37.9, 55.3, 37.9,
    ),
    "OD-WSCL, VOC12": _paper_by_class(
        73.8, 74.7, 61.3, 32.9, 40.0, 64.6, 59.8, 68.1, 26.3, 67.5, 23.0, 67.1, 62.8, 80.6, 17.3, 34.1, 63.4, 44.4,
        66.2, 64.9, 54.6,
    ),
}  # fmt: skip
VOC_CORLOC: dict[str, dict[str, float]] = {
    "OICR, VOC07": _paper_by_class(
        81.7, 80.4, 48.7, 49.5, 32.8, 81.7, 85.4, 40.1, 40.6, 79.5, 35.7, 33.7, 60.5, 88.8, 21.8, 57.9, 76.3, 59.9,
        75.3, 81.4, 60.6,
    ),
    "OD-WSCL, VOC07": _paper_by_class(
        86.3, 87.8, 74.5, 47.3, 43.9, 85.8, 84.6, 78.2, 49.1, 83.6, 49.4, 61.6, 74.5, 92.4, 42.2, 46.9, 80.4, 62.1,
        82.9, 82.8, 69.8,
    ),
    "OICR, VOC12": {MEAN: 62.1},
    "OD-WSCL, VOC12": _paper_by_class(
        88.2, 88.3, 75.0, 59.7, 58.9, 89.3, 73.2, 57.8, 53.4, 88.0, 48.7, 67.5, 78.3, 94.0, 34.8, 61.6, 91.7, 59.4,
        70.9, 84.4, 71.2,
    ),
}  # fmt: skip


def analyze_classes(results: experiment.StudyResults, base: recipes.Config) -> experiment.Analysis:
    """Tables of AP and CorLoc per class, with the paper's figures for classes of the same name."""
    classes = results.first[1].test.classes
    tables, numbers = [], {}
    for column, paper in ((experiment.MAP, VOC_AP), (experiment.CORLOC, VOC_CORLOC)):
        ours = {label: _by_class(column, label, results) for label in results.results}
        tables.append(_table(column.name, classes, ours, paper))
        numbers[column.name] = {
            label: {name: dict(figures.by_seed) for name, figures in rows.items()} for label, rows in ours.items()
        }
    words = (
        "Means over the seeds, in per cent, with the smallest and the largest. The paper's columns have values for "
        "classes of VOC."
    )
    return experiment.Analysis(
        (study_tables.StudySection("classes", "Class by class", words, tables=tuple(tables)),), {"per_class": numbers}
    )


def _by_class(
    column: experiment.StudyColumn, label: str, results: experiment.StudyResults
) -> dict[str, study_tables.SeedFigures]:
    classes = results.first[1].test.classes
    paths = {name: (*column.path[:-1], "per_class", name) for name in classes} | {MEAN: column.path}
    own = results.results[label]
    return {name: experiment.StudyColumn(name, path).over_seeds(own) for name, path in paths.items()}


def _table(
    what: str,
    classes: tuple[str, ...],
    ours: Mapping[str, Mapping[str, study_tables.SeedFigures]],
    paper: Mapping[str, Mapping[str, float]],
) -> fmt.Table:
    shown = {name: figures for name, figures in paper.items() if set(classes) & set(figures)}
    heads = (*ours, *("paper:\n" + name.replace(", ", "\n") for name in shown))
    rows = []
    for name in (*classes, MEAN):
        theirs = (study_tables.reported(figures.get(name)) for figures in shown.values())
        rows.append(fmt.TableRow(name, (*(figures[name].words() for figures in ours.values()), *theirs)))
    return fmt.Table(f"{what} of each class", heads, tuple(rows))


APPENDIX_A = experiment.Experiment(
    name="appendix-a",
    title="Class by class (appendix A)",
    shows="OD-WSCL gains most on classes with many objects per photo, as cow, sheep and person.",
    origin="appendix A; VGG16, selective search",
    rows=(
        experiment.StudyVariant(label="OICR+", settings=experiment.OICR_PLUS),
        experiment.StudyVariant(
            label="OD-WSCL", settings=experiment.OD_WSCL, paper={"mAP50, VOC07": 56.1, "CorLoc, VOC07": 69.8}
        ),
    ),
    notes=("The paper's baseline in these tables is OICR as published, not OICR+.",),
    analyze=analyze_classes,
)


# ---------------------------------------------------------------- appendix B

Method = edge_boxes.EdgeBoxes | selective_search.SelectiveSearch
SHORT_SIDE = 200  # resolution of the search if the settings have imported proposals, as in the recipe for photos
NEEDS_IMPORT = "needs imported proposals: tag2box proposals import reads them, tag2box train --proposals uses them"


def with_selective_search(config: recipes.Config) -> recipes.Config:
    """Settings with selective search, with the budget of the present method."""
    return _with_method(config, selective_search.SelectiveSearch())


def with_edge_boxes(config: recipes.Config) -> recipes.Config:
    """Settings with edge boxes, with the budget of the present method."""
    return _with_method(config, edge_boxes.EdgeBoxes())


def _with_method(config: recipes.Config, method: Method) -> recipes.Config:
    own = config.proposals
    if isinstance(own, type(method)):
        return config
    if isinstance(own, Imported):  # has neither resolution nor number of boxes
        return replace(config, proposals=replace(method, short_side=SHORT_SIDE))
    budget = replace(method, short_side=own.short_side, max_boxes=own.max_boxes, min_side=own.min_side)
    return replace(config, proposals=budget)


def analyze_proposals(results: experiment.StudyResults, base: recipes.Config) -> experiment.Analysis:
    """Recall of each proposal source on both splits of the first seed's dataset."""
    _, data = results.first
    rows, numbers = [], {}
    for row in results.experiment.rows:
        if row.skip_reason():
            continue
        config = row.config(base, 0)
        for split, own in {"train": data.train_set(config), "test": data.test_set(config)}.items():
            store = run_inputs.proposals_of(own.photos, config, own.proposals, silent)
            got = recall.measure_recall([store.boxes(name) for name in own.truth.ids], own.truth)
            shares = dict(
                zip((*map(str, recall.THRESHOLDS), "best_overlap"), (*got.recall, got.mean_best_overlap), strict=True)
            )
            cells = (fmt.format_number(got.boxes_per_image), *map(fmt.percent, shares.values()))
            rows.append(fmt.TableRow(f"{row.label}, {split}", cells))
            figures = {"boxes": got.boxes_per_image, **shares}
            numbers[f"{row.label}, {split}"] = {name: _finite(value) for name, value in figures.items()}
    heads = ("boxes per photo", *(f"IoU {t:g}" for t in recall.THRESHOLDS), "mean best overlap")
    words = "Objects that a proposal fits: a detector trained on tags cannot find an object that no proposal fits."
    table = fmt.Table("Recall of the proposals, in per cent", heads, tuple(rows))
    return experiment.Analysis(
        (study_tables.StudySection("reach", "Recall of the proposals", words, tables=(table,)),), {"recall": numbers}
    )


def _finite(value: float) -> float | None:
    return value if value == value else None


APPENDIX_B = experiment.Experiment(
    name="appendix-b",
    title="Proposal methods (appendix B)",
    shows="Better proposals give better detectors, whatever the method: COB before MCG before selective search.",
    origin="appendix B; VOC07, VGG16",
    rows=(
        experiment.StudyVariant(
            label="selective search", settings=experiment.OD_WSCL, change=with_selective_search, paper={"mAP50": 56.1}
        ),
        experiment.StudyVariant(label="edge boxes", settings=experiment.OD_WSCL, change=with_edge_boxes),
        experiment.StudyVariant(label="MCG", paper=paper_tables.paper_figures("voc07-mcg-vgg16"), absent=NEEDS_IMPORT),
        experiment.StudyVariant(label="COB", paper=paper_tables.paper_figures("voc07-cob-vgg16"), absent=NEEDS_IMPORT),
    ),
    against="selective search",
    notes=("Edge boxes are not in the paper; both methods have the same resolution and maximum number of boxes.",),
    tracked=("selective search", "edge boxes"),
    analyze=analyze_proposals,
)


# ---------------------------------------------------------------- appendix C

FIXED = {0.2: 50.3, 0.3: 56.2, 0.4: 57.4, 0.5: 56.2, 0.6: 56.1, 0.7: 55.6, 0.8: 54.4}


def _fixed(threshold: float, figure: float) -> experiment.StudyVariant:
    settings = ("criterion.labeler.criterion=score_fixed", f"criterion.labeler.score_threshold={threshold}")
    return experiment.StudyVariant(
        label=f"score above {threshold:g}", settings=(*experiment.OD_WSCL, *settings), paper={"mAP50": figure}
    )


APPENDIX_C = experiment.Experiment(
    name="appendix-c",
    title="Similarity or score (appendix C)",
    shows="Objects found by their similarity to the top one are better labels than objects found by their score, which "
    "depends strongly on its threshold.",
    origin="appendix C; VOC07, VGG16, MCG proposals",
    rows=(
        *(_fixed(threshold, figure) for threshold, figure in FIXED.items()),
        experiment.StudyVariant(
            label="score, adaptive",
            settings=(*experiment.OD_WSCL, "criterion.labeler.criterion=score_adaptive"),
            paper={"mAP50": 53.2},
        ),
        experiment.StudyVariant(
            label="similarity, adaptive",
            settings=(*experiment.OD_WSCL, "criterion.labeler.criterion=similarity"),
            paper={"mAP50": 58.7},
        ),
    ),
    against="similarity, adaptive",
    tracked=("score above 0.2", "score above 0.4", "score above 0.8", "score, adaptive", "similarity, adaptive"),
)
