"""``tag2box data check``: what is wrong with a dataset, before training finds out."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tag2box.data.check import FIRST, SEVERITIES, Finding, Survey, survey
from tag2box.formats.listing import DataSource, some
from tag2box.io import write_json
from tag2box.progress import Progress, silent

_STYLE = {"error": "bold red", "warning": "yellow", "note": "dim"}
_CODE = {"error": 2, "warning": 1, "note": 0}


def data_check(source: DataSource, *, json: Path | None = None, progress: Progress = silent) -> Survey:
    """Look at everything a dataset names, and write what is found to ``json`` where given."""
    found = survey(source, progress)
    if json is not None:
        write_json(json, {**asdict(found), "exit_code": exit_code(found)})
    return found


def exit_code(found: Survey) -> int:
    """0 for a dataset without fault, or with notes only; 1 with warnings; 2 with errors."""
    return max((_CODE[finding.severity] for finding in found.findings), default=0)


def page(found: Survey) -> RenderableType:
    """A table of the findings under a line about the dataset, and the first error of each kind in full."""
    parts: list[RenderableType] = [Text(_headline(found), style="bold")]
    if found.classes:
        parts.append(Text(f"classes: {some(found.classes)}"))
    if found.findings:
        parts += [Text(), _table(found.findings)]
    full = [finding.lines[0] for finding in found.findings if finding.lines]
    if full:
        parts += [Text("\nthe first of each, in full:"), *(Text(f"  {line}") for line in full)]
    parts.append(Text(f"\n{_verdict(found)}", style="bold"))
    return Group(*parts)


def _headline(found: Survey) -> str:
    classes = f", {_count(len(found.classes), 'class', 'classes')}" if found.classes else ""
    return f"{found.what}: {_count(found.photos, 'photo', 'photos')}{classes}"


def _table(findings: tuple[Finding, ...]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("what", no_wrap=True)
    table.add_column("count", justify="right", no_wrap=True)
    table.add_column("first", overflow="fold", ratio=3)
    table.add_column("what to do", ratio=2)
    for finding in findings:
        more = ", ..." if finding.count > len(finding.names) == FIRST else ""
        table.add_row(
            Text(finding.severity, style=_STYLE[finding.severity]),
            finding.kind,
            f"{finding.count:,}",
            Text(", ".join(finding.names) + more),
            finding.advice,
        )
    return table


def _verdict(found: Survey) -> str:
    counts = [
        _count(count, severity, f"{severity}s")
        for severity in SEVERITIES
        if (count := sum(finding.severity == severity for finding in found.findings))
    ]
    return f"kinds of trouble: {', '.join(counts)}" if counts else "nothing wrong"


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"
