"""Whether today's code is as fast as the committed table says, by ratios: ``make bench-check``, some minutes.

    python benchmarks/bench_check.py                        # exit code 1 if a ratio has fallen
    python benchmarks/bench_check.py --only frozen_network

Each part measures how many times as fast one way is as another, alternating in one process in CPU seconds, so that a
ratio depends little on other work on the machine. It is compared with the one in docs/results. A row has fallen if the
best of its rounds is below ``KEPT`` of the committed median. Ratios also depend on the processor: of another one than
the committed table's (AVX2 for AVX-512, say) they are shown, but fail nothing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tag2box.io import read_json

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "docs" / "results"
PARTS = {"kernels_against_history": "kernels-history.json", "frozen_network": "frozen-network.json"}
"""Scripts that measure ratios, and their committed figures."""
KEPT = 0.75
"""Share of a committed ratio that must be reached."""


@dataclass(frozen=True)
class Compared:
    """A ratio: of the committed table, and of today."""

    name: str
    before: float
    median: float
    best: float

    @property
    def has_fallen(self) -> bool:
        """Whether it is slower than the spread explains."""
        return self.best < KEPT * self.before


def compared(before: dict[str, Any], now: dict[str, Any]) -> list[Compared]:
    """The rows that both tables have."""
    known = {row["name"]: row["times_as_fast"]["median"] for row in before["rows"]}
    rows = [row for row in now["rows"] if row["name"] in known]
    return [
        Compared(row["name"], known[row["name"]], row["times_as_fast"]["median"], row["times_as_fast"]["max"])
        for row in rows
    ]


def is_same_processor(before: dict[str, Any], now: dict[str, Any]) -> bool:
    """Whether ratios of two tables can be compared."""
    return all(before["machine"][key] == now["machine"][key] for key in ("cpu", "capability"))


def lines(rows: Iterable[Compared]) -> list[str]:
    """One line per row."""
    return [
        f"{'SLOWER' if row.has_fallen else 'ok':>6}  {row.median:5.2f} (best {row.best:.2f}; table {row.before:.2f})  "
        f"{row.name}"
        for row in rows
    ]


def measured(script: str, rounds: int) -> dict[str, Any]:
    """The figures of a part, measured now."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        options = ["--repeats", str(rounds), "--threads", "1", "--out", str(out)]
        subprocess.run([sys.executable, str(HERE / f"{script}.py"), *options], check=True, stdout=subprocess.DEVNULL)
        found: dict[str, Any] = read_json(out, f"the figures of {script}")
        return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=PARTS, default=[])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    has_fallen = False
    for script, name in PARTS.items():
        if args.only and script not in args.only:
            continue
        before, now = read_json(RESULTS / name, "committed figures"), measured(script, args.rounds)
        rows, is_same = compared(before, now), is_same_processor(before, now)
        note = "" if is_same else f"; another processor ({now['machine']['capability']}): shown only"
        print(f"{script}, against docs/results/{name}{note}", *lines(rows), sep="\n", flush=True)
        has_fallen |= is_same and any(row.has_fallen for row in rows)
    return int(has_fallen)


if __name__ == "__main__":
    sys.exit(main())
