"""Appendix A: AP and CorLoc of each class."""

from __future__ import annotations

from collections.abc import Mapping

from tag2box.recipes import Config
from tag2box.reporting.gallery import Album
from tag2box.reporting.sections import Section
from tag2box.reporting.study_page import SeedFigures
from tag2box.reporting.tables import Row as Line
from tag2box.reporting.tables import Table
from tag2box.reporting.text import UNKNOWN
from tag2box.studies.experiment import CORLOC, MAP, OD_WSCL, OICR_PLUS, Column, Drawn, Experiment, Findings, Row
from tag2box.studies.experiments import voc_figures

MEAN = "mean"


def draw(findings: Findings, base: Config, album: Album) -> Drawn:
    """A table of AP and one of CorLoc, the paper's figures beside classes of the same name."""
    classes = findings.first[1].test.classes
    tables, numbers = [], {}
    for column, paper in ((MAP, voc_figures.AP), (CORLOC, voc_figures.CORLOC)):
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


def _by_class(column: Column, label: str, findings: Findings) -> dict[str, SeedFigures]:
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
        Row(label="OICR+", settings=OICR_PLUS),
        Row(label="OD-WSCL", settings=OD_WSCL, paper={"mAP50, VOC07": 56.1, "CorLoc, VOC07": 69.8}),
    ),
    notes=("The paper's baseline in these tables is OICR as published, not OICR+.",),
    draw=draw,
)
