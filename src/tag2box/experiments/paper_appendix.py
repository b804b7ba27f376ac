"""The paper's figures of each VOC class (appendix A, selective search, VGG16)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from tag2box.commands.runs import proposals_of
from tag2box.experiments.experiment import (
    CORLOC,
    MAP,
    OD_WSCL,
    OICR_PLUS,
    Drawn,
    Experiment,
    Findings,
    StudyColumn,
    StudyVariant,
)
from tag2box.experiments.paper_tables import reported
from tag2box.progress import silent
from tag2box.proposals.base import ProposalMethod
from tag2box.proposals.edge_boxes import EdgeBoxes
from tag2box.proposals.importers.proposal_files import Imported
from tag2box.proposals.recall import THRESHOLDS, measure_recall
from tag2box.proposals.selective_search import SelectiveSearch
from tag2box.recipes import Config
from tag2box.reporting.charts import UNKNOWN, format_number, percent
from tag2box.reporting.gallery import Album
from tag2box.reporting.sections import Section
from tag2box.reporting.study_page import SeedFigures
from tag2box.reporting.tables import Table
from tag2box.reporting.tables import TableRow as Line

VOC_CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog",
    "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor", "mean",
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
    "OICR, VOC12": {"mean": 62.1},
    "OD-WSCL, VOC12": _paper_by_class(
        88.2, 88.3, 75.0, 59.7, 58.9, 89.3, 73.2, 57.8, 53.4, 88.0, 48.7, 67.5, 78.3, 94.0, 34.8, 61.6, 91.7, 59.4,
        70.9, 84.4, 71.2,
    ),
}  # fmt: skip


MEAN = "mean"


def draw_class_tables(findings: Findings, base: Config, album: Album) -> Drawn:
    """A table of AP and one of CorLoc, the paper's figures beside classes of the same name."""
    classes = findings.first[1].test.classes
    tables, numbers = [], {}
    for column, paper in ((MAP, VOC_AP), (CORLOC, VOC_CORLOC)):
        ours = {label: _by_class(column, label, findings) for label in findings.results}
        tables.append(_table(column.name, classes, ours, paper))
        numbers[column.name] = {
            label: {name: dict(figures.by_seed) for name, figures in rows.items()} for label, rows in ours.items()
        }
    words = (
        "Means over the seeds, in per cent, with the smallest and the largest. The paper's columns are filled for "
        "classes that VOC has too."
    )
    return Drawn((Section("classes", "Class by class", words, tables=tuple(tables)),), {"per_class": numbers})


def _by_class(column: StudyColumn, label: str, findings: Findings) -> dict[str, SeedFigures]:
    classes = findings.first[1].test.classes
    paths = {name: (*column.path[:-1], "per_class", name) for name in classes} | {MEAN: column.path}
    results = findings.results[label]
    out = {}
    for name, path in paths.items():
        found = {seed: result.figure(path) for seed, result in results.items()}
        out[name] = SeedFigures({seed: 100 * value for seed, value in found.items() if value is not None})
    return out


def _table(
    what: str,
    classes: tuple[str, ...],
    ours: Mapping[str, Mapping[str, SeedFigures]],
    paper: Mapping[str, Mapping[str, float]],
) -> Table:
    shown = {name: figures for name, figures in paper.items() if set(classes) & set(figures)}
    heads = (*ours, *("paper:\n" + name.replace(", ", "\n") for name in shown))
    lines = []
    for name in (*classes, MEAN):
        theirs = (f"{figures[name]:.1f}" if name in figures else UNKNOWN for figures in shown.values())
        lines.append(Line(name, (*(figures[name].words() for figures in ours.values()), *theirs)))
    return Table(f"{what} of each class", heads, tuple(lines))


APPENDIX_A = Experiment(
    name="appendix-a",
    title="Class by class (appendix A)",
    shows="OD-WSCL gains most on classes that come in numbers, as cow, sheep and person.",
    origin="appendix A; VGG16, selective search",
    rows=(
        StudyVariant(label="OICR+", settings=OICR_PLUS),
        StudyVariant(label="OD-WSCL", settings=OD_WSCL, paper={"mAP50, VOC07": 56.1, "CorLoc, VOC07": 69.8}),
    ),
    notes=("The paper's baseline in these tables is OICR as published, not OICR+.",),
    draw=draw_class_tables,
)


Method = TypeVar("Method", SelectiveSearch, EdgeBoxes)
SHORT_SIDE = 200  # of the photos' search, as in the recipe for photos
ELSEWHERE = "needs proposals made elsewhere; tag2box proposals import reads them, tag2box train --proposals uses them"


def with_selective_search(config: Config) -> Config:
    """Selective search, as it is set or with the budget of what is."""
    own = config.proposals
    return config if isinstance(own, SelectiveSearch) else replace(config, proposals=_budget(SelectiveSearch(), own))


def with_edge_boxes(config: Config) -> Config:
    """Edge boxes, as they are set or with the budget of what is."""
    own = config.proposals
    return config if isinstance(own, EdgeBoxes) else replace(config, proposals=_budget(EdgeBoxes(), own))


def _budget(method: Method, own: ProposalMethod) -> Method:
    """A method with the resolution and number of boxes of another; of boxes made elsewhere none are known."""
    if isinstance(own, Imported):
        return replace(method, short_side=SHORT_SIDE)
    return replace(method, short_side=own.short_side, max_boxes=own.max_boxes, min_side=own.min_side)


def draw_proposal_tables(findings: Findings, base: Config, album: Album) -> Drawn:
    """What each source of boxes reaches of the objects, on both parts of the first seed's dataset."""
    _, data = findings.first
    lines, numbers = [], {}
    for row in findings.experiment.rows:
        if row.obstacle():
            continue
        config = row.config(base, 0)
        parts = {"train": (data.train_exam(config), data.train), "test": (data.exam(config), data.test)}
        for part, (exam, truth) in parts.items():
            store = proposals_of(exam.photos, config, exam.proposals, silent)
            got = measure_recall([store.boxes(name) for name in truth.ids], truth)
            shares = (*got.recall, got.mean_best_overlap)
            lines.append(
                Line(f"{row.label}, {part}", (format_number(got.boxes_per_image), *(percent(s) for s in shares)))
            )
            names = (*map(str, THRESHOLDS), "best_overlap")
            told = {name: _finite(share) for name, share in zip(names, shares, strict=True)}
            numbers[f"{row.label}, {part}"] = {"boxes": _finite(got.boxes_per_image)} | told
    heads = ("boxes a photo", *(f"IoU {t:g}" for t in THRESHOLDS), "mean best overlap")
    words = "Objects that a proposal overlaps at all: what no box fits, no detector that learns from tags can find."
    table = Table("Recall of the proposals, in per cent", heads, tuple(lines))
    return Drawn((Section("reach", "What the proposals reach", words, tables=(table,)),), {"recall": numbers})


def _finite(value: float) -> float | None:
    return value if value == value else None


APPENDIX_B = Experiment(
    name="appendix-b",
    title="Where proposals come from (appendix B)",
    shows="Better proposals give better detectors, whatever the method: COB before MCG before selective search.",
    origin="appendix B; VOC07, VGG16",
    rows=(
        StudyVariant(label="selective search", settings=OD_WSCL, change=with_selective_search, paper={"mAP50": 56.1}),
        StudyVariant(label="edge boxes", settings=OD_WSCL, change=with_edge_boxes),
        StudyVariant(label="MCG", paper=reported("voc07-mcg-vgg16"), absent=ELSEWHERE),
        StudyVariant(label="COB", paper=reported("voc07-cob-vgg16"), absent=ELSEWHERE),
    ),
    against="selective search",
    notes=("Edge boxes are not among the paper's figures; both sources have the same resolution and most boxes.",),
    watched=("selective search", "edge boxes"),
    draw=draw_proposal_tables,
)


FIXED = {0.2: 50.3, 0.3: 56.2, 0.4: 57.4, 0.5: 56.2, 0.6: 56.1, 0.7: 55.6, 0.8: 54.4}


def _fixed(threshold: float, figure: float) -> StudyVariant:
    settings = ("criterion.labeler.criterion=score_fixed", f"criterion.labeler.score_threshold={threshold}")
    return StudyVariant(label=f"score above {threshold:g}", settings=(*OD_WSCL, *settings), paper={"mAP50": figure})


APPENDIX_C = Experiment(
    name="appendix-c",
    title="Similarity or score (appendix C)",
    shows="Objects found by their similarity to the top one are better labels than objects found by their score, which "
    "also depends much on its threshold.",
    origin="appendix C; VOC07, VGG16, MCG proposals",
    rows=(
        *(_fixed(threshold, figure) for threshold, figure in FIXED.items()),
        StudyVariant(
            label="score, adaptive",
            settings=(*OD_WSCL, "criterion.labeler.criterion=score_adaptive"),
            paper={"mAP50": 53.2},
        ),
        StudyVariant(
            label="similarity, adaptive",
            settings=(*OD_WSCL, "criterion.labeler.criterion=similarity"),
            paper={"mAP50": 58.7},
        ),
    ),
    against="similarity, adaptive",
    watched=("score above 0.2", "score above 0.4", "score above 0.8", "score, adaptive", "similarity, adaptive"),
)
