"""A study as data: rows that change settings, columns that are measured, and the paper's figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tag2box import recipes, settings
from tag2box.experiments import grid, study_data
from tag2box.models.weights.weight_cache import stored_names
from tag2box.reporting.study_tables import SeedFigures, StudySection
from tag2box.student.student_training import StudentConfig

OICR_PLUS = ("criterion.labeler.kind=oicr", "criterion.contrast.enabled=false")
OD = ("criterion.labeler.kind=discovery", "criterion.contrast.enabled=false")
WSCL = ("criterion.labeler.kind=oicr", "criterion.contrast.enabled=true")
OD_WSCL = ("criterion.labeler.kind=discovery", "criterion.contrast.enabled=true")
"""Settings of the four rows of table 3a, from which most experiments start."""


def unchanged(config: recipes.Config) -> recipes.Config:
    """The settings as they are."""
    return config


@dataclass(frozen=True, kw_only=True)
class StudyVariant:
    """One row of a table: the settings it changes, and the paper's figures, by the paper's columns."""

    label: str
    settings: tuple[str, ...] = ()
    """Changes in the form of ``--set``."""
    change: Callable[[recipes.Config], recipes.Config] = unchanged
    """Changes that depend on the other settings."""
    paper: Mapping[str, float] = field(default_factory=dict)
    weights: str | None = None
    """Stored weights that the row requires."""
    absent: str = ""
    """Why the row is not run; it has the paper's figures alone."""
    state: str = ""
    """Of a system: whole, or reduced with the reason."""
    student: StudentConfig | None = None
    """Settings of a student: the row has its figures, after training on the labels of a run with the row's settings."""

    def config(self, base: recipes.Config, seed: int) -> recipes.Config:
        """The settings of the row for a seed."""
        changed = self.change(settings.load(recipes.Config, [], self.settings, base=base))
        return replace(changed, name=self.label, plan=replace(changed.plan, seed=seed))

    def student_of(self, seed: int) -> StudentConfig | None:
        """The settings of the row's student for a seed."""
        own = self.student
        return None if own is None else replace(own, name=self.label, plan=replace(own.plan, seed=seed))

    def skip_reason(self) -> str:
        """Why the row cannot be run; empty if it can."""
        if self.absent or self.weights is None or self.weights in stored_names():
            return self.absent
        return f"needs the weights {self.weights}, which are not stored here: tag2box weights get {self.weights}"


@dataclass(frozen=True)
class StudyColumn:
    """A figure of every run, by its path in ``RunResult.figures``; shares are shown in per cent."""

    name: str
    path: tuple[str, ...]
    scale: float = 100.0

    def over_seeds(self, results: Mapping[int, grid.RunResult]) -> SeedFigures:
        """The figure of some results, by seed."""
        found = {seed: result.figure(self.path) for seed, result in results.items()}
        return SeedFigures({seed: self.scale * value for seed, value in found.items() if value is not None})


MAP = StudyColumn("mAP50", ("test", "voc12", "mAP"))
MAP_11 = StudyColumn("mAP50,\n11 points", ("test", "voc07", "mAP"))
CORLOC = StudyColumn("CorLoc", ("train", "corloc", "mean"))
CHALLENGES = tuple(StudyColumn(name, ("test", "challenges", name)) for name in ("found", "part", "grouped", "missed"))
LABELS = tuple(StudyColumn(f"labels'\n{what}", ("pseudo", what, "0.5")) for what in ("precision", "recall"))
STANDARD = (MAP, MAP_11, CORLOC, *CHALLENGES, *LABELS)
"""Default columns."""


@dataclass(frozen=True)
class Analysis:
    """What an experiment adds to its page and to its JSON file."""

    sections: tuple[StudySection, ...] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StudyResults:
    """A finished experiment: the dataset of each seed, and the result of each row and seed."""

    experiment: Experiment
    data: Mapping[int, study_data.StudyData]
    results: Mapping[str, Mapping[int, grid.RunResult]]
    left_out: Mapping[str, str]  # rows that could not be run, and why

    @property
    def first(self) -> tuple[int, study_data.StudyData]:
        """The first seed and its dataset, from which photos are shown."""
        return next(iter(self.data.items()))


def no_analysis(results: StudyResults, base: recipes.Config) -> Analysis:
    """Nothing beyond the table."""
    return Analysis()


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A table or figure of the paper that can be run."""

    name: str
    title: str
    shows: str
    """The paper's claim."""
    backbone: str = ""
    """Name of the backbone, if a comparison has several."""
    origin: str = ""
    """Source of the paper's figures: table, dataset, backbone and proposals."""
    rows: tuple[StudyVariant, ...] = ()
    columns: tuple[StudyColumn, ...] = STANDARD
    against: str = "OICR+"
    """Label of the baseline row, if there is one of this name."""
    notes: tuple[str, ...] = ()
    """Differences from the paper, and limits."""
    seeds: tuple[int, ...] = (0, 1, 2)
    light: tuple[str, ...] = ("loader.max_proposals=128",)
    """Settings that make it affordable on the generated scenes; experiments with equal ones share runs."""
    tracked: tuple[str, ...] = ()
    """Rows whose label quality over training is reported."""
    analyze: Callable[[StudyResults, recipes.Config], Analysis] = no_analysis

    def runs(
        self, base: recipes.Config, data: Mapping[int, study_data.StudyData]
    ) -> dict[tuple[str, int], grid.GridRun]:
        """A run for each row that can be run, and each seed."""
        able = [row for row in self.rows if not row.skip_reason()]
        return {
            (row.label, seed): grid.GridRun(row.config(base, seed), own, row.student_of(seed))
            for seed, own in data.items()
            for row in able
        }
