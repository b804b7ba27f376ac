"""Every figure of docs/speed.md in one run: ``make bench``.

    python benchmarks/run.py                              # hours of nothing else on the machine
    python benchmarks/run.py --small                      # a trial of two minutes; nothing lands in docs/
    python benchmarks/run.py --only steps --only kernels  # the others from an earlier call, or left out

Each part is kept as it ends: broken off, the same command goes on, and a second call is instant. A part is measured
again when the code it runs, its options or the machine change, or with --fresh.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench_parts import HERE, PARTS, Part, Settings, Shelf, commit_of, measured
from bench_plots import plots
from bench_tables import filled, page
from measuring import in_words
from tag2box.io import write_json, write_text

DOCS = HERE.parent / "docs"


def main(argv: Sequence[str] | None = None) -> int:
    args = parsed(argv)
    shelf = Shelf.open(args.parts, Settings(args.small, args.threads, args.repeats), PARTS)
    wanted = [part for part in PARTS if not args.only or part.name in args.only]
    try:
        take_all(shelf, wanted, fresh=args.fresh)
    except (KeyboardInterrupt, subprocess.CalledProcessError) as error:
        print(f"stopped ({error or 'Ctrl-C'}); finished parts are kept, the same command goes on", file=sys.stderr)
        return 1
    found = {part.name: kept for part in PARTS if (kept := shelf.find(part)) is not None}
    missing = ", ".join(part.name for part in PARTS if part.name not in found)
    if missing:
        print(f"left out, as not measured with this code and these settings: {missing}")
    publish(found, args.out, args.images, is_trial=args.small)
    return 0


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; a trial writes nowhere near the docs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--only", action="append", choices=names, default=[], metavar="NAME", help=", ".join(names))
    parser.add_argument("--fresh", action="store_true", help="measure again what is there already")
    parser.add_argument("--threads", type=int, default=0, help="0: as many as torch chooses")
    parser.add_argument("--repeats", type=int, help="default: 5 for short work, 1 for steps of minutes")
    parser.add_argument("--parts", type=Path, default=Path("runs/bench"), help="folder that keeps finished parts")
    parser.add_argument("--out", type=Path, help="default: docs/results/bench.json")
    parser.add_argument("--images", type=Path, help="folder of the plots; default: docs/images")
    args = parser.parse_args(argv)
    trial = args.parts / "small"
    args.out = (args.out or (trial if args.small else DOCS / "results") / "bench.json").resolve()
    args.images = (args.images or (trial if args.small else DOCS / "images")).resolve()
    return args


def take_all(shelf: Shelf, wanted: Sequence[Part], *, fresh: bool) -> None:
    """Measure what is not there yet, telling how long it may still take."""
    todo = [part for part in wanted if fresh or shelf.find(part) is None]
    commit, pace = commit_of(HERE), 0.04 if shelf.settings.small else 1.0
    spent = guessed = 0.0
    for turn, part in enumerate(todo):
        left = sum(60 * p.minutes for p in todo[turn:]) * pace
        mine = in_words(60 * part.minutes * pace)
        print(f"\n[{turn + 1}/{len(todo)}] {part.name}: about {mine}; left in all: about {in_words(left)}", flush=True)
        begin = time.monotonic()
        scratch = shelf.folder / f".{part.name}.json"
        figures = measured(part, shelf.settings, scratch)
        seconds = time.monotonic() - begin
        shelf.keep(part, figures, commit=commit, seconds=round(seconds, 1), when=now())
        spent, guessed = spent + seconds, guessed + 60 * part.minutes
        pace = spent / guessed


def now() -> str:
    """The minute it is, in UTC."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def publish(found: dict[str, Any], out: Path, images: Path, *, is_trial: bool) -> None:
    """Figures, tables and plots; the targets also land in the page on speed, where that has a place for them."""
    write_json(out, {"trial": is_trial, "parts": found})
    drawn = plots({name: kept["figures"] for name, kept in found.items()})
    for name, svg in drawn.items():
        write_text(images / name, svg)
    pictures = {name: images / name for name in drawn}
    write_text(out.with_suffix(".md"), page(found, pictures, out.parent, is_trial=is_trial))
    speed = out.parent.parent / "speed.md"
    if not is_trial and speed.exists():
        write_text(speed, filled(speed.read_text(encoding="utf-8"), found, is_trial=is_trial))
    print(f"{out}, {out.with_suffix('.md')} and {len(drawn)} plots in {images}")


if __name__ == "__main__":
    sys.exit(main())
