"""Growth curves of ``make bench`` as self-contained SVG files: time and memory against problem size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench_verdicts import Figures
from tag2box.reporting.charts import HEIGHT, WIDTH, Line, escape, line_chart, svg_tag

GAP, HEAD = 24.0, 34.0  # between panels, and above them for their titles
STYLE = """
svg{font-family:system-ui,"Segoe UI",Roboto,"Helvetica Neue",Arial,"DejaVu Sans",sans-serif}
text{fill:#59636e;font-size:11px}.title{fill:#1d2329;font-size:13px;font-weight:600}.paper{fill:#fbfaf7}
.tick{font-size:10.5px}.name{fill:currentColor;font-weight:600}.grid{stroke:#e2dfd8}.axis{stroke:#8a939c}
.line{fill:none;stroke:currentColor;stroke-width:2;stroke-linejoin:round}.dot{fill:currentColor}
svg svg{overflow:visible}.run-0{color:#0b62ad}.run-1{color:#c2570c}.run-2{color:#0b7a5c}
"""


@dataclass(frozen=True)
class Panel:
    """One chart with its title."""

    title: str
    x_label: str
    lines: tuple[Line, ...]


def plots(figures: dict[str, Figures]) -> dict[str, str]:
    """Plots of the measured parts, by file name."""
    drawn: dict[str, str] = {}
    criterion, kernels = figures.get("criterion", {}), figures.get("kernels", {})
    for variable in ("proposals", "images", "classes"):
        points = [row for row in criterion.get("curves", ()) if row["against"] == variable]
        if points:
            drawn[f"bench-{variable}.svg"] = side_by_side(time_and_memory("Criterion", points, variable, variable))
    rows = kernels.get("curves", ())
    exemplars = [row for row in rows if row["kernel"] == "WSCL"]
    if exemplars:
        drawn["bench-exemplars.svg"] = side_by_side(time_and_memory("WSCL", exemplars, "x", "exemplars"))
        others = [[row for row in rows if row["kernel"] == name] for name in ("RoIPool", "NMS")]
        panels = [time_panel(f"{p[0]['kernel']}: seconds", p, "x", p[0]["against"]) for p in others]
        drawn["bench-kernels.svg"] = side_by_side(panels)
    if "memory_growth" in figures:
        drawn["bench-growth.svg"] = side_by_side(long_run(figures["memory_growth"]["points"]))
    return drawn


def time_and_memory(name: str, points: Sequence[dict[str, Any]], x: str, x_label: str) -> list[Panel]:
    """Panels of seconds and of peak megabytes."""
    peak = Line("peak", "run-2", tuple((p[x], p["peak_mb"]) for p in points))
    return [time_panel(f"{name}: seconds", points, x, x_label), Panel(f"{name}: peak MB", x_label, (peak,))]


def time_panel(title: str, points: Sequence[dict[str, Any]], x: str, x_label: str) -> Panel:
    """Medians of CPU seconds and wall seconds."""
    cpu = Line("CPU", "run-0", tuple((p[x], p["cpu"]["median"]) for p in points))
    wall = Line("wall", "run-1", tuple((p[x], p["wall"]["median"]) for p in points))
    return Panel(title, x_label, (cpu, wall))


def long_run(points: Sequence[dict[str, Any]]) -> list[Panel]:
    """Memory and open files during a run."""
    rss = Line("memory", "run-2", tuple((p["step"], p["rss_mb"]) for p in points))
    files = Line("files", "run-0", tuple((p["step"], p["files"]) for p in points))
    return [Panel("Long run: resident memory, MB", "step", (rss,)), Panel("Long run: open files", "step", (files,))]


def side_by_side(panels: Sequence[Panel]) -> str:
    """One SVG document with panels in a row."""
    body = svg_tag("style", STYLE) + svg_tag("rect", class_="paper", width="100%", height="100%")
    for index, panel in enumerate(panels):
        left = GAP / 2 + index * (WIDTH + GAP)
        body += svg_tag("text", escape(panel.title), class_="title", x=left + 4, y=22)
        chart = line_chart(panel.lines, label=panel.title, x_label=panel.x_label)
        place = f'<svg x="{left:g}" y="{HEAD:g}" width="{WIDTH:g}" height="{HEIGHT:g}" '
        body += chart.replace("<svg ", place, 1)
    width, height = len(panels) * (WIDTH + GAP), HEAD + HEIGHT + 8
    label = "; ".join(panel.title for panel in panels)
    outer = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {width:g} {height:g}", "role": "img"}
    return svg_tag("svg", body, **outer, width=width, height=height, aria_label=label) + "\n"
