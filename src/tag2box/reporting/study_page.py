"""The page of a study: what was measured here, over seeds, beside what the paper reports."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from markupsafe import Markup

from tag2box.reporting.charts import UNKNOWN, plural
from tag2box.reporting.gallery import Album
from tag2box.reporting.sections import Fact, Leaf, Section, write_leaf
from tag2box.reporting.tables import Table, TableRow

STYLE = (
    ".shelf{--tall:300px}.tiles{gap:14px}td small{display:block;color:var(--soft);font-size:11.5px}"
    ".stack+.scroll,.pair+.scroll{margin-top:24px}"
)
HERE = "Here and in the paper"


@dataclass(frozen=True, slots=True)
class SeedFigures:
    """One figure under each seed for which it is known."""

    by_seed: Mapping[int, float]

    @property
    def mean(self) -> float | None:
        """Over the seeds."""
        return statistics.mean(self.by_seed.values()) if self.by_seed else None

    @property
    def ends(self) -> tuple[float, float] | None:
        """The smallest and the largest."""
        return (min(self.by_seed.values()), max(self.by_seed.values())) if self.by_seed else None

    def words(self) -> str:
        """Mean and spread: 41.3 (40.9 to 42.0); the figure alone where there is one."""
        if self.mean is None or self.ends is None:
            return UNKNOWN
        spread = f" ({self.ends[0]:.1f} to {self.ends[1]:.1f})" if len(self.by_seed) > 1 else ""
        return f"{self.mean:.1f}{spread}"


@dataclass(frozen=True, slots=True)
class StudyRow:
    """A row: its figures here, a column each, and the paper's; where its runs are, by seed."""

    name: str
    figures: tuple[SeedFigures, ...]
    paper: tuple[float | None, ...] = ()
    runs: Mapping[int, str] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    missing: str = ""


@dataclass(frozen=True, slots=True)
class StudyTable:
    """What was measured, row by row; ``against`` names the row that others are compared with, if any is."""

    columns: tuple[str, ...]
    paper: tuple[str, ...]
    rows: tuple[StudyRow, ...]
    against: str = ""

    def run(self) -> tuple[StudyRow, ...]:
        """The rows that were run here."""
        return tuple(row for row in self.rows if row.runs)

    def base(self) -> StudyRow | None:
        """The row that others are compared with, where it was run and there are others."""
        rows = self.run()
        return next((row for row in rows if row.name == self.against), None) if len(rows) > 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyInputs:
    """All that the page shows."""

    kicker: str
    title: str
    shows: str
    setting: str  # where and how often it was run, in a sentence
    origin: str
    table: StudyTable | None
    facts: tuple[Fact, ...] = ()
    notes: tuple[str, ...] = ()
    sections: tuple[Section, ...] = ()
    about: tuple[Table, ...] = ()
    album: Album = field(default_factory=Album)


def write_study_page(inputs: StudyInputs, out: Path) -> None:
    """Write the page of a study as one self-contained HTML file."""
    write_leaf(build_study_page(inputs), out)


def build_study_page(inputs: StudyInputs) -> Leaf:
    """The table, what an experiment drew, and how it was all made."""
    table = inputs.table
    sections = [*([] if table is None else _table_sections(table, inputs)), *inputs.sections]
    if table is None and inputs.notes:
        sections.append(Section("notes", "To be known", "What is different here.", warnings=inputs.notes))
    about = [*settings_table(table), *inputs.about]
    sections.append(Section("about", "How it was made", inputs.setting, tables=tuple(about), prose=True))
    return Leaf(
        kicker=inputs.kicker,
        title=inputs.title,
        lede=inputs.shows,
        facts=inputs.facts,
        sections=tuple(sections),
        style=Markup(f"{STYLE}\n{inputs.album.style}"),
        unreadable=inputs.album.unreadable,
    )


# ---------------------------------------------------------------- tables


def _table_sections(table: StudyTable, inputs: StudyInputs) -> list[Section]:
    words = (
        f"{inputs.setting} Each figure is the mean over the seeds, in per cent, with the smallest and the largest "
        "behind it: a difference within these says nothing."
    )
    if any(table.paper):
        words += f" The paper's figures ({inputs.origin}) were obtained on other data and at another size: compare "
        words += "the order of the rows and the differences between them, not the figures."
    return [table_section(table, words, notes=inputs.notes)]


def table_section(
    table: StudyTable, words: str, *, notes: tuple[str, ...] = (), name: str = "table", title: str = HERE
) -> Section:
    """What was measured beside what is reported, the differences seed by seed, and what was not run."""
    tables = (_main_table(table), *_difference_table(table), *_absent_table(table))
    return Section(name, title, words, tables=tables, warnings=(*notes, *_reasons(table)))


def _main_table(table: StudyTable) -> Table:
    order = _order(table)
    heads = tuple(table.columns[at] if is_ours else f"paper:\n{table.paper[at]}" for is_ours, at in order)
    rows = tuple(TableRow(row.name, (*(_cell(row, *place) for place in order), _links(row))) for row in table.run())
    return Table("Measured here, and reported", (*heads, "runs,\nby seed"), rows)


def _order(table: StudyTable) -> list[tuple[bool, int]]:
    """Columns as they are shown, ours (True) and the paper's, which stand beside ours of that name, or the first."""
    homes = [table.columns.index(name) if name in table.columns else 0 for name in table.paper]
    order = []
    for at in range(len(table.columns)):
        order += [(True, at), *((False, theirs) for theirs, home in enumerate(homes) if home == at)]
    return order


def _cell(row: StudyRow, is_ours: bool, at: int) -> str:
    if not is_ours:
        return _reported(row.paper[at])
    mean, _, spread = row.figures[at].words().partition(" ")
    return Markup("{}<small>{}</small>").format(mean, spread.strip("()")) if spread else mean


def _reported(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1f}"


def _links(row: StudyRow) -> Markup:
    return Markup(" ").join(Markup('<a href="{}/">{}</a>').format(place, seed) for seed, place in row.runs.items())


def _difference_table(table: StudyTable) -> list[Table]:
    """By how much rows differ from one in the first column, seed by seed: what the spread over seeds hides."""
    base = table.base()
    if base is None:
        return []
    first = base.figures[0].by_seed
    heads = (*(f"seed {seed}" for seed in first), "mean")
    out = []
    for row in table.run():
        own = row.figures[0].by_seed
        differences = {seed: own[seed] - first[seed] for seed in first if seed in own}
        cells = [f"{differences[seed]:+.1f}" if seed in differences else UNKNOWN for seed in first]
        mean = SeedFigures(differences).mean
        out.append(TableRow(row.name, (*cells, UNKNOWN if mean is None else f"{mean:+.1f}")))
    others = tuple(row for row in out if row.name != base.name)
    return [Table(f"{table.columns[0]} above {base.name}, on the same photos", heads, others)]


def _absent_table(table: StudyTable) -> list[Table]:
    """Rows that were not run here, with the paper's figures; those it has none of are left to the notes."""
    rows = [row for row in table.rows if not row.runs and any(value is not None for value in row.paper)]
    shown = tuple(TableRow(row.name, tuple(_reported(value) for value in row.paper)) for row in rows)
    return [Table("Reported in the paper, not run here", table.paper, shown)] if shown else []


def _reasons(table: StudyTable) -> tuple[str, ...]:
    """Why rows were not run, those of the same reason together."""
    why: dict[str, list[str]] = {}
    for row in table.rows:
        if not row.runs and row.missing:
            why.setdefault(row.missing, []).append(row.name)
    return tuple(f"{'; '.join(names)}: {reason}" for reason, names in why.items())


def settings_table(table: StudyTable | None) -> list[Table]:
    """What each row that was run changes, as ``--set`` takes it."""
    rows = () if table is None else table.run()
    shown = tuple(TableRow(row.name, (" ".join(f"--set {c}" for c in row.settings),)) for row in rows if row.settings)
    return [Table("What each row changes", ("settings",), shown)] if shown else []


# ---------------------------------------------------------------- for other readers


def markdown(table: StudyTable) -> str:
    """The main table as Markdown."""
    order = _order(table)
    heads = ["", *(table.columns[at] if is_ours else f"paper: {table.paper[at]}" for is_ours, at in order)]
    lines = ["| " + " | ".join(" ".join(head.split()) for head in heads) + " |", "|---" * len(heads) + "|"]
    for row in table.rows:
        cells = [row.figures[at].words() if is_ours else _reported(row.paper[at]) for is_ours, at in order]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in (row.name, *cells)) + " |")
    return "\n".join(lines) + "\n"


def table_json(table: StudyTable) -> list[dict[str, object]]:
    """The main table for programs: figures by column and seed, as shown, unrounded."""
    return [
        {
            "row": row.name,
            "settings": list(row.settings),
            "runs": {str(seed): place for seed, place in row.runs.items()},
            "figures": {
                " ".join(name.split()): {str(seed): value for seed, value in figure.by_seed.items()}
                for name, figure in zip(table.columns, row.figures, strict=True)
            },
            "paper": {name: value for name, value in zip(table.paper, row.paper, strict=True) if value is not None},
            "left_out": row.missing or None,
        }
        for row in table.rows
    ]


def reading(table: StudyTable) -> str:
    """The best row of the first column against the one all are compared with, in a sentence; or nothing."""
    base = table.base()
    known = [(row, row.figures[0].mean) for row in table.run()]
    ranked = sorted([(mean, row) for row, mean in known if mean is not None], key=lambda pair: pair[0])
    if base is None or base.figures[0].mean is None:
        return ""
    (top, best), what = ranked[-1], " ".join(table.columns[0].split())
    if round(top - base.figures[0].mean, 1) <= 0:
        return f"No row is above {base.name} in {what}."
    ours, theirs = best.figures[0].by_seed, base.figures[0].by_seed
    shared = set(ours) & set(theirs)
    above = sum(ours[seed] > theirs[seed] for seed in shared)
    side = f"{top - base.figures[0].mean:.1f} points of {what} above {base.name}"
    return f"{best.name} ends {side}, on {above} of {plural(len(shared), 'seed')}."
