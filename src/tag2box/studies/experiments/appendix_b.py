"""Appendix B: where proposals come from."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from tag2box.commands.runs import proposals_of
from tag2box.engine.progress import silent
from tag2box.proposals.edge_boxes import EdgeBoxes
from tag2box.proposals.imported import Imported
from tag2box.proposals.policy import ProposalMethod
from tag2box.proposals.recall import THRESHOLDS, recall
from tag2box.proposals.selective_search import SelectiveSearch
from tag2box.recipes import Config
from tag2box.reporting.gallery import Album
from tag2box.reporting.sections import Section
from tag2box.reporting.tables import Row as Line
from tag2box.reporting.tables import Table
from tag2box.reporting.text import number, percent
from tag2box.studies.experiment import OD_WSCL, Drawn, Experiment, Findings, Row
from tag2box.studies.experiments.shared import reported

Method = TypeVar("Method", SelectiveSearch, EdgeBoxes)
SHORT_SIDE = 200  # of the photos' search, as in the recipe for photos
ELSEWHERE = "needs proposals made elsewhere; tag2box proposals import reads them, tag2box train --proposals uses them"


def selective_search(config: Config) -> Config:
    """Selective search, as it is set or with the budget of what is."""
    own = config.proposals
    return config if isinstance(own, SelectiveSearch) else replace(config, proposals=_budget(SelectiveSearch(), own))


def edge_boxes(config: Config) -> Config:
    """Edge boxes, as they are set or with the budget of what is."""
    own = config.proposals
    return config if isinstance(own, EdgeBoxes) else replace(config, proposals=_budget(EdgeBoxes(), own))


def _budget(method: Method, own: ProposalMethod) -> Method:
    """A method with the resolution and number of boxes of another; of boxes made elsewhere none are known."""
    if isinstance(own, Imported):
        return replace(method, short_side=SHORT_SIDE)
    return replace(method, short_side=own.short_side, max_boxes=own.max_boxes, min_side=own.min_side)


def draw(findings: Findings, base: Config, album: Album) -> Drawn:
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
            got = recall([store.boxes(name) for name in truth.ids], truth)
            shares = (*got.recall, got.mean_best_overlap)
            lines.append(Line(f"{row.label}, {part}", (number(got.boxes_per_image), *(percent(s) for s in shares))))
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
        Row(label="selective search", settings=OD_WSCL, change=selective_search, paper={"mAP50": 56.1}),
        Row(label="edge boxes", settings=OD_WSCL, change=edge_boxes),
        Row(label="MCG", paper=reported("voc07-mcg-vgg16"), absent=ELSEWHERE),
        Row(label="COB", paper=reported("voc07-cob-vgg16"), absent=ELSEWHERE),
    ),
    against="selective search",
    notes=("Edge boxes are not among the paper's figures; both sources have the same resolution and most boxes.",),
    watched=("selective search", "edge boxes"),
    draw=draw,
)
