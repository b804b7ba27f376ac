"""The figures of ``make bench`` as a page of Markdown: machine, targets, and every part with its spread."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_verdicts import Figures, Verdict, verdicts
from measuring import in_words
from tag2box.errors import UserError
from tag2box.reporting.charts import plural

Found = dict[str, Any]  # by part: key, commit, seconds, when, figures

_BEGIN, _END = "<!-- bench: begin -->", "<!-- bench: end -->"
_ANSWERS = {True: "yes", False: "**no**", None: "–"}  # noqa: RUF001 - the dash of an open answer


def page(found: Found, images: Mapping[str, Path], folder: Path, *, is_trial: bool) -> str:
    """The whole page, to lie in ``folder``."""
    figures = {name: kept["figures"] for name, kept in found.items()}
    lines = ["# What `make bench` measured", ""]
    if is_trial:
        lines += ["**A trial at tiny sizes: it shows that everything runs. The targets are for other sizes.**", ""]
    lines += ["Made by `benchmarks/run.py`; do not edit. Spreads are smallest / median / largest.", ""]
    lines += [*machines(found), "", "## Targets", "", *targets(figures, is_trial=is_trial), ""]
    for name, (title, table) in PARTS.items():
        if name in figures:
            lines += [f"## {title}", "", *table(figures[name]), ""]
    if images:
        lines += ["## Growth", ""]
    for name, path in images.items():
        words, place = name.removesuffix(".svg").replace("-", " "), Path(os.path.relpath(path, folder)).as_posix()
        lines += [f"![{words}]({place})", ""]
    return "\n".join(lines)


def filled(text: str, found: Found, *, is_trial: bool) -> str:
    """A page with the table of targets between its two marks."""
    if _BEGIN not in text:
        return text
    if _END not in text:
        raise UserError(f"docs/speed.md: {_BEGIN} has no {_END} after it; add it where the table is to end")
    table = "\n".join(targets({name: kept["figures"] for name, kept in found.items()}, is_trial=is_trial))
    return re.sub(f"{_BEGIN}.*?{_END}", lambda _: f"{_BEGIN}\n{table}\n{_END}", text, flags=re.DOTALL)


def table_of(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in cells)]


def spread(figure: Mapping[str, float]) -> str:
    """Smallest, median and largest, with digits that mean something."""
    digits = 1 if figure["median"] >= 100 else 2 if figure["median"] >= 1 else 4
    return " / ".join(f"{figure[name]:,.{digits}f}" for name in ("min", "median", "max"))


def targets(figures: dict[str, Figures], *, is_trial: bool) -> list[str]:
    """What was asked, what was measured, and whether it holds."""
    found: list[Verdict] = verdicts(figures)
    answers = ["(trial)" if is_trial and v.holds is not None else _ANSWERS[v.holds] for v in found]
    rows = [(v.what, v.measured, v.target, answer) for v, answer in zip(found, answers, strict=True)]
    return table_of(("", "measured", "asked", "holds"), rows)


def machines(found: Found) -> list[str]:
    """Where, when and on what the parts ran; the GEMM's speed tells how quiet the machine was."""
    lines = []
    for name, kept in found.items():
        m = kept["figures"]["machine"]
        threads = f"{m['threads']} of {m['cores']} cores"
        gemm, took = f"{m['gemm_gflops']:.0f} GFLOPS", in_words(kept["seconds"])
        lines.append((name, kept["when"], kept["commit"], threads, gemm, f"{m['load']:.1f}", took))
    known = [kept["figures"]["machine"] for kept in found.values()]
    words = {
        f"{m['cpu']} ({m['capability']}), {m['memory_gb']} GB; Python {m['python']}, torch {m['torch']}, "
        f"numpy {m['numpy']}"
        for m in known
    }
    head = ("part", "when", "commit", "threads", "2,048 GEMM, fp32", "load before", "took")
    return [*sorted(words), "", *table_of(head, lines)]


# ---------------------------------------------------------------- the parts


def kernels(found: Figures) -> list[str]:
    """Kernels beside their slow twins."""
    rows = [
        (
            row["name"],
            spread(row["ours"]["cpu"]),
            spread(row["ours"]["wall"]),
            str(row["ours"]["repeats"]),
            f"{row['twin']['name']}: {row['twin']['cpu']['min']:,.3g} CPU s",
            f"{row['twin']['cpu']['min'] / row['ours']['cpu']['median']:,.3g} x",
            f"{row['ours']['peak_mb']:,.0f}; twin {row['twin']['peak_mb']:,.0f}" if "peak_mb" in row["ours"] else "",
        )
        for row in found["rows"]
    ]
    head = ("kernel", "CPU s", "s by the clock", "repeats", "slow twin", "faster by", "most MB at once")
    return table_of(head, rows)


def criterion(found: Figures) -> list[str]:
    """The objective, and how it grows."""
    points = [{"against": "the target's size", **found["ours"]}, *found["curves"]]
    rows = [
        (
            point["against"],
            f"{point['images']} x {point['proposals']:,}, {point['classes']} classes",
            f"{point['rows']:,}",
            spread(point["cpu"]),
            spread(point["wall"]),
            f"{point['peak_mb']:,.0f}",
        )
        for point in points
    ]
    head = ("against", "size", "contrastive rows", "CPU s", "s by the clock", "most MB at once")
    twin = found.get("twin")
    words = [] if twin is None else ["", f"The twin written with loops: {twin['cpu']['min']:,.1f} CPU s, run once."]
    return [f"{plural(found['ours']['repeats'], 'repetition')}.", "", *table_of(head, rows), *words]


def steps(found: Figures) -> list[str]:
    """Every case of the exact step."""
    rows = []
    for row in found["rows"]:
        fits = row.get("fits", True)
        size = f"{row['images']} x {row['proposals']:,}, photos of {row['height']} x {row['width']:,}"
        if not fits:
            rows.append((row["memory"], size, "needs more memory than is free", "", "", "", ""))
            continue
        peak, held = f"{row['peak_mb']:,.0f}", f"{row['held_mb']:,.0f}"
        seconds = (spread(row["wall"]), spread(row["cpu"]))
        rows.append((row["memory"], size, *seconds, peak, held, f"{row['sampled']:,}"))
    head = ("step", "size", "s by the clock", "CPU s", "peak, MB", "before the step, MB", "proposals copied for S")
    repeats = plural(next((row["repeats"] for row in found["rows"] if "repeats" in row), 0), "repetition")
    return [f"VGG16 with random weights, SGD with momentum; {repeats}.", "", *table_of(head, rows)]


def dist(found: Figures) -> list[str]:
    """Two processes beside one."""
    ranks = [found["one"], *found["two"]]
    names = [f"1 process x {found['images']} photos"]
    names += [f"{len(found['two'])} processes, rank {row['rank']}" for row in found["two"]]
    rows = [
        (name, str(row["threads"]), spread(row["wall"]), spread(row["cpu"]), f"{row['peak_mb']:,.0f}")
        for name, row in zip(names, ranks, strict=True)
    ]
    size = f"VGG16, {found['proposals']:,} proposals a photo"
    words = f"{size}, exact steps, fp32, gloo; {plural(ranks[0]['repeats'], 'repetition')}."
    return [words, "", *table_of(("", "threads", "s by the clock", "CPU s", "peak, MB"), rows)]


def precision(found: Figures) -> list[str]:
    """Whole steps, and where their time goes."""
    lines: list[str] = []
    for row in (row for row in found["rows"] if row.get("fits", True)):
        lines += [
            f"{row['precision']}, {row['memory']} step of {row['images']} x {row['proposals']:,}: "
            f"{spread(row['wall'])} s by the clock ({plural(row['repeats'], 'repetition')}), "
            f"{row['step_tflop']:.2f} TFLOP, {100 * row['share_of_peak']:.0f} % of the peak "
            f"(GEMM {row['gemm_gflops']:.0f}, convolution {row['convolution_gflops']:.0f} GFLOPS).",
            "",
            *table_of(("where the time goes", "s", "share"), _shares(row["profile"])),
            "",
        ]
    if not found["bf16"]["can"]:
        lines.append("bf16: not measurable here, this processor does not compute in it.")
    return lines


def _shares(profile: Mapping[str, float]) -> list[tuple[str, str, str]]:
    total = sum(profile.values()) or 1.0
    return [(name, f"{seconds:.2f}", f"{100 * seconds / total:.1f} %") for name, seconds in profile.items()]


def memory_growth(found: Figures) -> list[str]:
    """Where a long run began and ended."""
    points, seen = found["points"], found["verdict"]
    quarter = points[len(points) // 4]
    rows = [
        (f"step {point['step']:,}", f"{point['rss_mb']:.1f}", str(point["files"]))
        for point in (points[0], quarter, points[-1])
    ]
    slope = f"Slope after the first quarter: {seen['rss_mb_per_1000_steps']:+.2f} MB in 1,000 steps."
    return [*table_of(("", "memory, MB", "open files"), rows), "", slope]


PARTS: dict[str, tuple[str, Callable[[Figures], list[str]]]] = {
    "kernels": ("Kernels", kernels),
    "objective": ("The objective", criterion),
    "steps": ("The exact step", steps),
    "processes": ("Many processes", dist),
    "precision": ("Share of the machine's peak", precision),
    "memory_growth": ("A long run", memory_growth),
}
