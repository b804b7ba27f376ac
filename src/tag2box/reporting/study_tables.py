"""Results of a study as plain data: figures over seeds, tables beside the paper's, and sections of its page.

Experiments return these; ``study_page`` draws them. Tables are also written as Markdown and JSON.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tag2box.annotations import Detections, Objects, Photo
from tag2box.data.stats import ObjectStats
from tag2box.metrics.evaluation import MARK
from tag2box.reporting import formatting as fmt
from tag2box.training.events import GalleryPhoto


@dataclass(frozen=True, slots=True)
class SeedFigures:
    """One figure per seed, for the seeds that have it."""

    by_seed: Mapping[int, float]

    @property
    def mean(self) -> float | None:
        """The mean over the seeds."""
        return statistics.mean(self.by_seed.values()) if self.by_seed else None

    @property
    def ends(self) -> tuple[float, float] | None:
        """The smallest and the largest."""
        return (min(self.by_seed.values()), max(self.by_seed.values())) if self.by_seed else None

    def words(self) -> str:
        """Mean and range: 41.3 (40.9 to 42.0); a single figure without range."""
        if self.mean is None or self.ends is None:
            return fmt.UNKNOWN
        spread = f" ({self.ends[0]:.1f} to {self.ends[1]:.1f})" if len(self.by_seed) > 1 else ""
        return f"{self.mean:.1f}{spread}"


@dataclass(frozen=True, slots=True)
class StudyRow:
    """A row: its measured figures per column, the paper's figures, and the folder of its run per seed."""

    name: str
    figures: tuple[SeedFigures, ...]
    paper: tuple[float | None, ...] = ()
    runs: Mapping[int, str] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    missing: str = ""  # why it was not run
    state: str = ""  # of a system: whole, or reduced with the reason
    below: frozenset[int] = frozenset()  # columns in which it is not above the best trivial box

    def words(self, at: int) -> str:
        """The figures of a column: mean, mark and range."""
        mean, blank, spread = self.figures[at].words().partition(" ")
        return f"{mean}{MARK if at in self.below else ''}{blank}{spread}"


@dataclass(frozen=True, slots=True)
class StudyTable:
    """Measured figures, row by row; ``against`` names the baseline row, if there is one."""

    columns: tuple[str, ...]
    paper: tuple[str, ...]
    rows: tuple[StudyRow, ...]
    against: str = ""
    trivial: tuple[StudyRow, ...] = ()  # boxes that needed no learning about where an object is
    remarks: tuple[str, ...] = ()  # figures that are not above these

    def measured(self) -> tuple[StudyRow, ...]:
        """The rows that were run."""
        return tuple(row for row in self.rows if row.runs)

    def baseline(self) -> StudyRow | None:
        """The baseline row, if it was run and there are others."""
        rows = self.measured()
        return next((row for row in rows if row.name == self.against), None) if len(rows) > 1 else None

    @property
    def has_states(self) -> bool:
        """Whether rows are systems that are whole or reduced."""
        return any(row.state for row in self.rows)

    def column_order(self) -> list[tuple[bool, int]]:
        """Columns in display order, (is ours, index); the paper's follow ours of the same name, or else the first."""
        homes = [self.columns.index(name) if name in self.columns else 0 for name in self.paper]
        order = []
        for at in range(len(self.columns)):
            order += [(True, at), *((False, theirs) for theirs, home in enumerate(homes) if home == at)]
        return order


# ---------------------------------------------------------------- figures


@dataclass(frozen=True, slots=True)
class LabelQuality:
    """Pseudo boxes of the last stage on some training photos at one iteration, compared with the truth."""

    iteration: int
    photos: int
    precision: Mapping[str, float | None]  # by IoU, as "0.5"
    recall: Mapping[str, float | None]
    boxes: Mapping[str, int]  # by class
    objects: Mapping[str, int]  # true ones, by class
    threshold: float | None  # mean tau


@dataclass(frozen=True, slots=True)
class QualityCurve:
    """Label quality of one row of a study over training."""

    name: str
    moments: tuple[LabelQuality, ...]


@dataclass(frozen=True, slots=True)
class Sweep:
    """A setting, its values in order, and the figures of each; ``chosen`` is the paper's value."""

    name: str
    key: str
    values: tuple[float, ...]
    figures: tuple[SeedFigures, ...]
    chosen: float
    measure: str = "mAP50"


@dataclass(frozen=True, slots=True)
class MissedObjects:
    """Objects of a dataset against the image-class pairs that one box per tag can find."""

    stats: ObjectStats


@dataclass(frozen=True, slots=True)
class ObjectsPerPhoto:
    """Numbers of objects of a class on the photos that show it."""

    stats: ObjectStats


# ---------------------------------------------------------------- photos


@dataclass(frozen=True, slots=True)
class DetectionPanel:
    """Detections of one run on a test photo, to be matched with its objects."""

    photo: Photo
    run: str
    found: Detections
    objects: Objects
    min_score: float = 0.0


@dataclass(frozen=True, slots=True)
class PseudoPanel:
    """Pseudo labels of one run on a training photo at one iteration, over its true objects."""

    photo: Photo
    run: str  # empty: not named in the caption
    iteration: int
    labels: GalleryPhoto
    objects: Objects


@dataclass(frozen=True, slots=True)
class DifficultPanel:
    """Difficult objects of a training photo, and whether a pseudo box fits each."""

    photo: Photo
    objects: Objects
    is_caught: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class PhotoRow:
    """Photos side by side under a name; panels whose photo cannot be read are left out."""

    name: str
    classes: tuple[str, ...]
    panels: tuple[DetectionPanel | PseudoPanel | DifficultPanel, ...]
    limit: int | None = None  # panels drawn at most


# ---------------------------------------------------------------- page


@dataclass(frozen=True, slots=True)
class StudySection:
    """A section of a study's page, not yet drawn; empty parts are not shown."""

    id: str
    title: str
    words: str
    wide: bool = False  # figures one below the other
    table: StudyTable | None = None
    tables: tuple[fmt.Table, ...] = ()
    figures: tuple[Sweep | MissedObjects | ObjectsPerPhoto, ...] = ()
    warnings: tuple[str, ...] = ()
    legend: tuple[tuple[str, str], ...] = ()  # kinds of boxes on the photos, and their meaning
    photos: tuple[PhotoRow, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyInputs:
    """Everything the page of a study shows."""

    kicker: str
    title: str
    shows: str
    setting: str  # data and seeds, in a sentence
    origin: str  # of the paper's figures
    table: StudyTable | None
    facts: tuple[fmt.Fact, ...] = ()
    notes: tuple[str, ...] = ()
    sections: tuple[StudySection, ...] = ()
    quality: tuple[QualityCurve, ...] = ()
    about: tuple[fmt.Table, ...] = ()


# ---------------------------------------------------------------- text forms


def reported(value: float | None) -> str:
    """A figure of the paper as text."""
    return fmt.UNKNOWN if value is None else f"{value:.1f}"


def markdown(table: StudyTable) -> str:
    """The table as Markdown."""
    order = table.column_order()
    heads = ["", *(table.columns[at] if is_ours else f"paper: {table.paper[at]}" for is_ours, at in order)]
    heads += ["system"] if table.has_states else []
    lines = ["| " + " | ".join(" ".join(head.split()) for head in heads) + " |", "|---" * len(heads) + "|"]
    for row in (*table.rows, *table.trivial):
        cells = [row.words(at) if is_ours else reported(row.paper[at]) for is_ours, at in order]
        cells += [row.state or fmt.UNKNOWN] if table.has_states else []
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in (row.name, *cells)) + " |")
    return "\n".join([*lines, *(["", *table.remarks] if table.remarks else [])]) + "\n"


def table_json(table: StudyTable, rows: Sequence[StudyRow]) -> list[dict[str, object]]:
    """Rows of the table as JSON: figures by column and seed, unrounded."""
    return [
        {
            "row": row.name,
            "settings": list(row.settings),
            "runs": {str(seed): folder for seed, folder in row.runs.items()},
            "figures": {
                " ".join(name.split()): {str(seed): value for seed, value in figure.by_seed.items()}
                for name, figure in zip(table.columns, row.figures, strict=True)
            },
            "paper": {name: value for name, value in zip(table.paper, row.paper, strict=True) if value is not None},
            "state": row.state or None,
            "left_out": row.missing or None,
            "not_above_trivial": [" ".join(table.columns[at].split()) for at in sorted(row.below)],
        }
        for row in rows
    ]


def reading(table: StudyTable) -> str:
    """A sentence that compares the best row of the first column with the baseline; empty without a baseline."""
    base = table.baseline()
    known = [(row, row.figures[0].mean) for row in table.measured()]
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
    return f"{best.name} ends {side}, on {above} of {fmt.plural(len(shared), 'seed')}."


def settings_table(table: StudyTable | None) -> list[fmt.Table]:
    """The settings that each measured row changes, in the form of ``--set``."""
    rows = () if table is None else table.measured()
    shown = tuple(
        fmt.TableRow(row.name, (" ".join(f"--set {c}" for c in row.settings),)) for row in rows if row.settings
    )
    return [fmt.Table("What each row changes", ("settings",), shown)] if shown else []
