"""The experiments as a list for the terminal."""

from __future__ import annotations

from rich.table import Table

from tag2box.studies.experiments import EXPERIMENTS


def table() -> Table:
    """Every experiment: its name, its title, how many runs a seed takes, its seeds."""
    grid = Table("NAME", "what it is", "rows to run", "seeds")
    for experiment in EXPERIMENTS.values():
        able = [row for row in experiment.rows if not row.obstacle()]
        seeds = ",".join(str(seed) for seed in experiment.seeds)
        grid.add_row(experiment.name, experiment.title, str(len(able)), seeds)
    return grid
