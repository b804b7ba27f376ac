"""Figure 4: how much the settings that the paper introduces matter."""

from __future__ import annotations

from dataclasses import dataclass

from tag2box.recipes import Config
from tag2box.reporting.gallery import Album
from tag2box.reporting.sections import Section
from tag2box.reporting.study_page import SeedFigures
from tag2box.reporting.sweep_figures import Sweep, sweep_figure
from tag2box.studies.experiment import MAP, OD_WSCL, Drawn, Experiment, Findings, Row


@dataclass(frozen=True)
class Swept:
    """A setting under the paper's name, and the values it is given; ``chosen`` is the paper's."""

    name: str
    key: str
    values: tuple[float, ...]
    chosen: float

    def label(self, value: float) -> str:
        """The row of a value."""
        return f"{self.name} = {value:g}"

    def rows(self) -> tuple[Row, ...]:
        """A row for each value."""
        return tuple(Row(label=self.label(v), settings=(*OD_WSCL, f"{self.key}={v}")) for v in self.values)


SWEEPS = (
    Swept("τ_nms", "objective.labeler.nms_iou", (0.05, 0.1, 0.3, 0.5), 0.1),
    Swept("τ_drop", "augment.drop", (0.1, 0.3, 0.5, 0.7), 0.3),
    Swept("τ_IoU", "objective.sampling.iou_threshold", (0.3, 0.5, 0.7, 0.9), 0.5),
    Swept("λ", "objective.contrast.weight", (0.01, 0.03, 0.1, 0.3), 0.03),
    Swept("ε", "objective.contrast.temperature", (0.07, 0.1, 0.2, 0.5), 0.2),
)


def draw(findings: Findings, base: Config, album: Album) -> Drawn:
    """A panel for each setting."""
    panels = [_sweep(swept, findings) for swept in SWEEPS]
    spans = {panel.name: _span(panel) for panel in panels}
    words = (
        "One setting at a time, the others as they are. In the paper the best and the worst value of a setting lie at "
        "most 2.6 mAP50 apart (for τ_nms)."
    )
    figures = tuple(sweep_figure(panel, MAP.name) for panel in panels)
    return Drawn((Section("sweeps", "One setting at a time", words, figures=figures),), {"spans": spans})


def _sweep(swept: Swept, findings: Findings) -> Sweep:
    figures = []
    for value in swept.values:
        results = findings.results.get(swept.label(value), {})
        found = {seed: result.figure(MAP.path) for seed, result in results.items()}
        figures.append(SeedFigures({seed: 100 * figure for seed, figure in found.items() if figure is not None}))
    return Sweep(swept.name, swept.key, swept.values, tuple(figures), swept.chosen)


def _span(sweep: Sweep) -> float | None:
    """Points between the means of the best and the worst value."""
    means = [figure.mean for figure in sweep.figures if figure.mean is not None]
    return max(means) - min(means) if means else None


FIG4 = Experiment(
    name="fig4",
    title="Sensitivity to settings (figure 4)",
    shows="Around the values the paper chose, performance hardly depends on any of its five settings.",
    origin="figure 4",
    rows=tuple(row for swept in SWEEPS for row in swept.rows()),
    notes=(
        "The paper prints figure 4 without numbers; its values of each setting are ours, the paper's choice among "
        "them. Rows with the same settings are one run.",
    ),
    seeds=(0, 1),
    light=("plan.iterations=80", "feed.batch=6", "feed.max_proposals=96"),
    draw=draw,
)
