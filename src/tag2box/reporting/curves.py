"""The charts of a report: which numbers of which runs go into which picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from tag2box.annotations import Truth
from tag2box.reporting.charts import (
    Bars,
    Key,
    Line,
    Points,
    Reference,
    Stack,
    format_number,
    grouped_bars,
    known,
    line_chart,
    stacked_bars,
)
from tag2box.reporting.records import Challenges, ClassRecord, ProposalRecall, RunRecord

LOSSES = {
    "total": "All terms together, weighted as in training",
    "mil": "Are the tags of the whole photo right?",
    "refine": "Does each proposal get its pseudo class?",
    "box": "How far are boxes from their pseudo boxes?",
    "contrast": "Do objects of one class look alike?",
    "spatial": "Do boxes around the best one look like it?",
    "attention": "Is the same seen in every look at a photo?",
}
CHALLENGE_KEYS = tuple(field.name for field in fields(Challenges))
MAX_POINTS = 240  # per line: more than a chart has pixels for


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawn chart with its heading."""

    title: str
    note: str
    svg: str


@dataclass(frozen=True, slots=True)
class NamedRun:
    """A run with the name and colour class it keeps throughout the page."""

    name: str
    css: str
    record: RunRecord


def thin(points: Points, limit: int = MAX_POINTS) -> Points:
    """At most ``limit`` points, each the mean of neighbours."""
    size = -(-len(points) // limit) or 1
    chunks = [points[i : i + size] for i in range(0, len(points), size)]
    return tuple((sum(x for x, _ in c) / len(c), sum(y for _, y in c) / len(c)) for c in chunks)


def smooth(points: Points) -> Points:
    """Each value replaced by the mean of the twentieth part of the points around it."""
    reach = len(points) // 40
    out = []
    for i, (x, _) in enumerate(points):
        r = min(reach, i, len(points) - 1 - i)  # a shrinking, symmetric window does not bend the ends
        around = [y for _, y in points[i - r : i + r + 1]]
        out.append((x, sum(around) / len(around)))
    return tuple(out)


def loss_charts(runs: Sequence[NamedRun]) -> tuple[Chart, ...]:
    """One small chart a loss, the runs over each other."""
    present = {name for run in runs for step in run.record.steps for name, value in step.losses.items() if known(value)}
    ordered = [name for name in LOSSES if name in present] + sorted(present - set(LOSSES))
    charts = []
    for name in ordered:
        lines = []
        for run in runs:
            raw = _points([(s.iteration, s.losses.get(name)) for s in run.record.steps])
            if raw and any(y for _, y in raw):  # a method without this term writes zeros
                lines.append(Line(run.name, run.css, smooth(thin(raw)), thin(raw)))
        if lines:
            charts.append(Chart(name, LOSSES.get(name, ""), line_chart(lines, label=f"Loss {name} over training")))
    return tuple(charts)


def count_charts(runs: Sequence[NamedRun], truth: float | None) -> tuple[Chart, ...]:
    """Pseudo boxes per present image-class pair over training, a chart a stage; the true number is dashed."""
    reference = Reference("true", truth) if truth is not None and math.isfinite(truth) else None
    charts = []
    for stage in range(_stages(runs)):
        lines = _stage_lines(runs, stage, "boxes_per_class")
        if lines:
            svg = line_chart(lines, label=f"Pseudo boxes per class, stage {stage + 1}", reference=reference)
            charts.append(Chart(f"stage {stage + 1}", "pseudo boxes per tagged class of a photo", svg))
    return tuple(charts)


def threshold_charts(runs: Sequence[NamedRun]) -> tuple[Chart, ...]:
    """The similarity threshold tau over training, a chart a stage; labelers without one do not appear."""
    charts = []
    for stage in range(_stages(runs)):
        lines = _stage_lines(runs, stage, "threshold")
        if lines:
            svg = line_chart(lines, label=f"Threshold tau, stage {stage + 1}")
            charts.append(Chart(f"τ, stage {stage + 1}", "cosine similarity a new object must reach", svg))
    return tuple(charts)


def _stages(runs: Sequence[NamedRun]) -> int:
    counts = (max(len(p.boxes_per_class), len(p.threshold)) for run in runs for p in run.record.pseudo)
    return max(counts, default=0)


def _stage_lines(runs: Sequence[NamedRun], stage: int, what: str) -> list[Line]:
    lines = []
    for run in runs:
        series = [
            (p.iteration, values[stage])
            for p in run.record.pseudo
            for values in [p.boxes_per_class if what == "boxes_per_class" else p.threshold]
            if stage < len(values)
        ]
        raw = _points(series)
        if raw:
            lines.append(Line(run.name, run.css, smooth(thin(raw)), thin(raw)))
    return lines


def _points(pairs: Sequence[tuple[int, float | None]]) -> Points:
    return tuple((float(x), y) for x, y in pairs if y is not None and math.isfinite(y))


def true_numbers(truth: Truth | None) -> dict[str, float]:
    """Mean number of objects of each class on the photos that show it, difficult ones and crowds left out."""
    if truth is None:
        return {}
    totals, photos = torch.zeros(len(truth.classes)), torch.zeros(len(truth.classes))
    for objects in truth.objects:
        counted = objects.labels[~(objects.difficult | objects.crowd)]
        per_class = torch.bincount(counted, minlength=len(truth.classes))
        totals += per_class
        photos += per_class > 0
    return {name: float(totals[i] / photos[i]) for i, name in enumerate(truth.classes) if photos[i]}


def class_count_chart(runs: Sequence[NamedRun], truth: Truth | None) -> str:
    """Pseudo boxes of each class at the end of training; empty where no run counted them."""
    last = [run.record.pseudo[-1].per_class if run.record.pseudo else {} for run in runs]
    names = tuple(dict.fromkeys(name for table in last for name in table))
    if not names:
        return ""
    true = true_numbers(truth)
    groups = [Bars(n, tuple(table.get(n) for table in last), true.get(n)) for n in names]
    top = max([v for g in groups for v in (*g.values, g.mark) if v is not None and math.isfinite(v)], default=1.0)
    label = "Pseudo boxes per class at the end of training"
    return grouped_bars(groups, _keys(runs), label=label, limit=top or 1.0, show=format_number)


def class_chart(scores: Sequence[ClassRecord | None], runs: Sequence[NamedRun], label: str) -> str:
    """Bars of a per-class figure, the runs side by side; empty where no run has it."""
    names = tuple(dict.fromkeys(n for s in scores if s for n in s.per_class))
    if not names:
        return ""
    groups = [Bars(n, tuple(s.per_class.get(n) if s else None for s in scores)) for n in names]
    return grouped_bars(groups, _keys(runs), label=label)


def challenge_chart(runs: Sequence[NamedRun]) -> str:
    """Found, part, grouped, missed and other objects as stacked bars; empty where no run was asked."""
    stacks = []
    for run in runs:
        asked = run.record.metrics.challenges
        if asked and known(asked.found):
            shares = (asked.found, asked.part, asked.grouped, asked.missed, asked.other)
            stacks.append(Stack(run.name, tuple(share or 0.0 for share in shares)))
    return stacked_bars(stacks, CHALLENGE_KEYS, label="What became of the objects of the test photos") if stacks else ""


def recall_chart(splits: Sequence[tuple[str, ProposalRecall]]) -> str:
    """Recall of the proposals at each overlap, the splits side by side."""
    overlaps = sorted({overlap for _, split in splits for overlap in split.recall})
    groups = [Bars(f"IoU ≥ {o}", tuple(split.recall.get(o) for _, split in splits)) for o in overlaps]
    keys = [Key(name, f"split-{index}") for index, (name, _) in enumerate(splits)]
    return grouped_bars(groups, keys, label="Recall of the proposals") if groups else ""


def _keys(runs: Sequence[NamedRun]) -> list[Key]:
    return [Key(run.name, run.css) for run in runs]
