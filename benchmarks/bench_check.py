"""Whether today's code is as fast as the committed tables say, by ratios: ``make bench-check``, some minutes.

    python benchmarks/bench_check.py                        # exit code 1 if a ratio has fallen
    python benchmarks/bench_check.py --only frozen_network

Each part measures how many times as fast one way is as another, alternating in one process in CPU seconds, so that a
ratio depends little on other work on the machine. It is compared with a table of docs/results: that of this processor,
or one of another processor with the same vector instructions. A row has fallen if the best of its rounds is below a
share of the committed median: ``KEPT``, or ``KEPT_ELSEWHERE`` of another processor's. Where no table has the
instructions of this processor, or where ratios are those of bf16 on another one, they are shown, but fail nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tag2box.data.scenes import Scenes
from tag2box.io import read_json

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "docs" / "results"
KEPT = 0.75
"""Share of a committed ratio that must be reached."""
KEPT_ELSEWHERE = 0.5
"""The same, if the table is that of another processor."""
SCENES = 16
"""Generated photos in which both engines of selective search search."""

Figures = dict[str, Any]


@dataclass(frozen=True)
class Compared:
    """A ratio: of the committed table, and of today; and the share of the former that must be reached."""

    name: str
    before: float
    median: float
    best: float
    kept: float = KEPT

    @property
    def has_fallen(self) -> bool:
        """Whether it is slower than the spread explains."""
        return self.best < self.kept * self.before


@dataclass(frozen=True)
class Part:
    """A script that measures ratios, and its committed tables."""

    tables: tuple[str, ...]
    ratios: Callable[[Figures], Iterator[tuple[str, Figures]]]
    """The names of the ratios in a table, and their min, median and max."""
    options: tuple[str, ...] = ()
    has_rounds: bool = True

    def arguments(self, folder: Path, rounds: int) -> list[str]:
        """The options of the script."""
        given = ["--repeats", str(rounds), "--threads", "1"] if self.has_rounds else []
        return [*given, *(option.format(folder=folder) for option in self.options)]


def rows_of(figures: Figures) -> Iterator[tuple[str, Figures]]:
    """Of tables with rows."""
    return ((row["name"], row["times_as_fast"]) for row in figures["rows"])


def coco_ratios(figures: Figures) -> Iterator[tuple[str, Figures]]:
    """Of COCO evaluation: reading, evaluating, and both."""
    return ((f"COCO: {part}", figures[f"times_as_fast_{part}"]) for part in ("load", "evaluate", "all"))


def search_ratios(figures: Figures) -> Iterator[tuple[str, Figures]]:
    """Of selective search: the median over photos, which is steadier than a round."""
    row = figures["fast"]["truth.json"]["times_as_fast"]
    yield "selective search, 16 generated scenes", {"min": row["least"], "median": row["median"], "max": row["median"]}


PARTS = {
    "kernels_against_history": Part(("kernels-history.json",), rows_of),
    "frozen_network": Part(("frozen-network.json", "frozen-network-intel.json"), rows_of),
    "coco_evaluation": Part(("coco-evaluation.json",), coco_ratios),
    "selective_search": Part(
        ("selective-search-scenes.json",),
        search_ratios,
        ("{folder}/train/truth.json", "--photos", str(SCENES), "--split", ""),
        has_rounds=False,
    ),
}


def compared(part: Part, before: Figures, now: Figures) -> list[Compared]:
    """The rows that both tables have."""
    known, kept = dict(part.ratios(before)), KEPT if is_same_processor(before, now) else KEPT_ELSEWHERE
    rows = [(name, ratio) for name, ratio in part.ratios(now) if name in known]
    return [Compared(name, known[name]["median"], ratio["median"], ratio["max"], kept) for name, ratio in rows]


def is_same_processor(before: Figures, now: Figures) -> bool:
    """Whether two tables are those of one processor."""
    return all(before["machine"][key] == now["machine"][key] for key in ("cpu", "capability"))


def nearest(tables: Iterable[tuple[str, Figures]], now: Figures) -> tuple[str, Figures, bool]:
    """The table of this processor, else one of the same instructions, else any; and whether it can be compared."""
    ranked = sorted(
        tables,
        key=lambda named: (
            not is_same_processor(named[1], now),
            named[1]["machine"]["capability"] != now["machine"]["capability"],
        ),
    )
    name, figures = ranked[0]
    return name, figures, figures["machine"]["capability"] == now["machine"]["capability"]


def is_judged(row: Compared) -> bool:
    """Whether a row can fail: what bf16 gains differs between processors of the same vector instructions."""
    return row.kept == KEPT or "bf16" not in row.name


def lines(rows: Iterable[Compared]) -> list[str]:
    """One line per row."""
    return [
        f"{_word(row):>6}  {row.median:5.2f} (best {row.best:.2f}; table {row.before:.2f})  {row.name}" for row in rows
    ]


def _word(row: Compared) -> str:
    if not row.has_fallen:
        return "ok"
    return "SLOWER" if is_judged(row) else "shown"


def measured(script: str, rounds: int) -> Figures:
    """The figures of a part, measured now."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        if script == "selective_search":
            Scenes(train=SCENES, test=1).write(Path(folder) / "scenes")
        options = [*PARTS[script].arguments(Path(folder) / "scenes", rounds), "--out", str(out)]
        subprocess.run([sys.executable, str(HERE / f"{script}.py"), *options], check=True, stdout=subprocess.DEVNULL)
        found: Figures = read_json(out, f"the figures of {script}")
        return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=PARTS, default=[])
    parser.add_argument("--rounds", type=int, default=3, help="of each part; COCO evaluation has one")
    args = parser.parse_args(argv)
    has_fallen = False
    for script, part in PARTS.items():
        if args.only and script not in args.only:
            continue
        now = measured(script, 1 if script == "coco_evaluation" else args.rounds)
        tables = ((name, read_json(RESULTS / name, "committed figures")) for name in part.tables)
        name, before, can_compare = nearest(tables, now)
        rows = compared(part, before, now)
        machine = f"{now['machine']['cpu']}, {now['machine']['capability']}"
        other = f"{before['machine']['cpu']}, {before['machine']['capability']}"
        note = "" if is_same_processor(before, now) else f"; here {machine}, there {other}"
        note += "" if can_compare else ": shown only"
        print(f"{script}, against docs/results/{name}{note}", *lines(rows), sep="\n", flush=True)
        has_fallen |= can_compare and any(row.has_fallen and is_judged(row) for row in rows)
    return int(has_fallen)


if __name__ == "__main__":
    sys.exit(main())
