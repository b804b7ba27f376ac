"""The figures of a study as a table: for the page, for Markdown and for programs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tag2box.reporting.study_page import SeedFigures, StudyRow, StudyTable
from tag2box.studies.cells import Result
from tag2box.studies.experiment import Column, Findings, Row


def study_table(findings: Findings, out: Path) -> StudyTable | None:
    """All rows, those of the paper alone among them; None without rows. Links are relative to ``out``."""
    experiment = findings.experiment
    heads = tuple(dict.fromkeys(name for row in experiment.rows for name in row.paper))
    if not experiment.rows:
        return None
    return StudyTable(
        columns=tuple(column.name for column in experiment.columns),
        paper=heads,
        rows=tuple(_row(row, findings, heads, out) for row in experiment.rows),
        against=experiment.against,
    )


def _row(row: Row, findings: Findings, heads: tuple[str, ...], out: Path) -> StudyRow:
    results = findings.results.get(row.label, {})
    return StudyRow(
        name=row.label,
        figures=tuple(_figures(column, results) for column in findings.experiment.columns),
        paper=tuple(row.paper.get(head) for head in heads),
        runs={seed: Path(os.path.relpath(result.folder, out)).as_posix() for seed, result in results.items()},
        settings=row.settings,
        missing=findings.left_out.get(row.label, ""),
    )


def _figures(column: Column, results: Mapping[int, Result]) -> SeedFigures:
    found = {seed: result.figure(column.path) for seed, result in results.items()}
    return SeedFigures({seed: column.scale * value for seed, value in found.items() if value is not None})
