"""What a study consists of: rows that change settings, columns that are measured, the paper's figures beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tag2box import settings
from tag2box.experiments.grid import GridRun, RunResult
from tag2box.experiments.study_data import StudyData
from tag2box.models.weights.weight_cache import stored_names
from tag2box.recipes import Config
from tag2box.reporting.gallery import Album
from tag2box.reporting.sections import Section

OICR_PLUS = ("criterion.labeler.kind=oicr", "criterion.contrast.enabled=false")
OD = ("criterion.labeler.kind=discovery", "criterion.contrast.enabled=false")
WSCL = ("criterion.labeler.kind=oicr", "criterion.contrast.enabled=true")
OD_WSCL = ("criterion.labeler.kind=discovery", "criterion.contrast.enabled=true")
"""The four rows of table 3a, which most experiments start from."""


def unchanged(config: Config) -> Config:
    """The settings as they are."""
    return config


@dataclass(frozen=True, kw_only=True)
class StudyVariant:
    """One line of a table: what it changes, and what the paper found, in the paper's own columns."""

    label: str
    settings: tuple[str, ...] = ()
    """Changes as ``--set`` takes them."""
    change: Callable[[Config], Config] = unchanged
    """Changes that depend on the settings before them."""
    paper: Mapping[str, float] = field(default_factory=dict)
    weights: str | None = None
    """Stored weights without which the row is left out."""
    absent: str = ""
    """Why there is nothing to run for it; its figures are the paper's alone."""

    def config(self, base: Config, seed: int) -> Config:
        """The settings of the row under a seed."""
        changed = self.change(settings.load(Config, [], self.settings, base=base))
        return replace(changed, name=self.label, plan=replace(changed.plan, seed=seed))

    def obstacle(self) -> str:
        """Why the row cannot be run here; empty where it can."""
        if self.absent or self.weights is None or self.weights in stored_names():
            return self.absent
        return f"needs the weights {self.weights}, which are not stored here: tag2box weights get {self.weights}"


@dataclass(frozen=True)
class StudyColumn:
    """A figure of every run, by its path among a cell's figures; shares are shown in per cent."""

    name: str
    path: tuple[str, ...]
    scale: float = 100.0


MAP = StudyColumn("mAP50", ("test", "voc12", "mAP"))
MAP_11 = StudyColumn("mAP50,\n11 points", ("test", "voc07", "mAP"))
CORLOC = StudyColumn("CorLoc", ("train", "corloc", "mean"))
FATES = tuple(StudyColumn(fate, ("test", "challenges", fate)) for fate in ("found", "part", "grouped", "missed"))
LABELS = tuple(StudyColumn(f"labels'\n{what}", ("pseudo", what, "0.5")) for what in ("precision", "recall"))
STANDARD = (MAP, MAP_11, CORLOC, *FATES, *LABELS)
"""What is measured unless an experiment says otherwise."""


@dataclass(frozen=True)
class Drawn:
    """What an experiment adds to its page and to its numbers."""

    sections: tuple[Section, ...] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Findings:
    """An experiment that was run: the dataset of each seed, and the result of each row under it."""

    experiment: Experiment
    data: Mapping[int, StudyData]
    results: Mapping[str, Mapping[int, RunResult]]
    left_out: Mapping[str, str]  # rows that could not be run, and why

    @property
    def first(self) -> tuple[int, StudyData]:
        """The first seed and its dataset: what pictures are of."""
        return next(iter(self.data.items()))


def nothing(findings: Findings, base: Config, album: Album) -> Drawn:
    """Draws nothing beyond the table."""
    return Drawn()


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A table or figure of the paper as something to run."""

    name: str
    title: str
    shows: str
    """What the paper shows with it."""
    origin: str = ""
    """Where the paper's figures come from: its table, dataset, backbone and proposals."""
    rows: tuple[StudyVariant, ...] = ()
    columns: tuple[StudyColumn, ...] = STANDARD
    against: str = "OICR+"
    """The row that others are compared with, where there is one of this name."""
    notes: tuple[str, ...] = ()
    """What is different here, or not possible."""
    seeds: tuple[int, ...] = (0, 1, 2)
    light: tuple[str, ...] = ("loader.max_proposals=128",)
    """Settings under which it is affordable on the generated scenes; where they are equal, experiments share runs."""
    watched: tuple[str, ...] = ()
    """Rows whose pseudo labels are followed through training."""
    draw: Callable[[Findings, Config, Album], Drawn] = nothing

    def cells(self, base: Config, data: Mapping[int, StudyData]) -> dict[tuple[str, int], GridRun]:
        """A cell for each row that can be run, under each seed."""
        able = [row for row in self.rows if not row.obstacle()]
        return {(row.label, seed): GridRun(row.config(base, seed), own) for seed, own in data.items() for row in able}
