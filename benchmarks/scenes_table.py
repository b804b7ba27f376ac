"""Table 3a of the paper on the generated scenes: OICR+, + OD, + WSCL, + both, over several seeds.

    python benchmarks/scenes_table.py --seeds 0 1 2 --out runs/table

As in ``tag2box demo --seed N``, a seed determines the scenes (training and test photos) and the training on them.
Resumable: rerun the same command; finished cells are cached. The figures are written to OUT/table.json and, as
Markdown, to standard output.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from tag2box.cli.demo import TABLE_3A, open_scenes
from tag2box.data.scenes import Scenes
from tag2box.io import write_json
from tag2box.progress import TerminalProgress

NAMES = {"oicr-plus": "OICR+", "od": "+ OD", "wscl": "+ WSCL", "od-wscl": "+ both (OD-WSCL)"}
COLUMNS = {
    "mAP50": ("test", "voc12", "mAP"),
    "mAP50 (11 points)": ("test", "voc07", "mAP"),
    "CorLoc": ("train", "corloc", "mean"),
    "found": ("test", "challenges", "found"),
    "part": ("test", "challenges", "part"),
    "grouped": ("test", "challenges", "grouped"),
    "missed": ("test", "challenges", "missed"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/table"))
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="a.b=c")
    args = parser.parse_args()
    progress = TerminalProgress()
    cells: dict[str, dict[str, Any]] = {method: {} for method in TABLE_3A}
    for seed in args.seeds:
        home = args.out / f"seed{seed}"
        studio = open_scenes(home, Scenes(seed=seed), args.overrides, progress=progress)
        for method in TABLE_3A:
            cells[method][str(seed)] = studio.measure(home / method, method, seed, progress=progress)
            write_json(args.out / "table.json", {"set": args.overrides, "cells": cells})
    print(markdown(cells))


def markdown(cells: dict[str, dict[str, Any]]) -> str:
    """Mean and range (min to max) of each column, in per cent."""
    lines = ["| | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for method, by_seed in cells.items():
        figures = [[100 * metrics[a][b][c] for metrics in by_seed.values()] for a, b, c in COLUMNS.values()]
        row = [f"{statistics.mean(f):.1f} ({min(f):.1f} to {max(f):.1f})" for f in figures]
        lines.append(f"| {NAMES[method]} | " + " | ".join(row) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
