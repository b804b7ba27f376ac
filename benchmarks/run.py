"""Every figure of docs/speed.md in one run: ``make bench``.

    python benchmarks/run.py                              # hours on an otherwise idle machine
    python benchmarks/run.py --small                      # a trial of two minutes; writes nothing to docs/
    python benchmarks/run.py --only steps --only kernels  # other parts come from an earlier call, or are left out

Resumable: rerun the same command; finished parts are cached. A part is measured again if the code it runs, its
options or the machine change, or with --fresh.
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

from bench_parts import HERE, PARTS, FigureStore, Part, Settings, commit_of, run_part
from bench_plots import plots
from bench_tables import filled, page
from measuring import in_words
from tag2box.io import write_json, write_text

DOCS = HERE.parent / "docs"


def main(argv: Sequence[str] | None = None) -> int:
    args = parsed(argv)
    store = FigureStore.open(args.parts, Settings(args.small, args.threads, args.repeats), PARTS)
    wanted = [part for part in PARTS if not args.only or part.name in args.only]
    try:
        measure_missing(store, wanted, fresh=args.fresh)
    except (KeyboardInterrupt, subprocess.CalledProcessError) as error:
        print(
            f"stopped ({error or 'Ctrl-C'}); finished parts are saved, rerun the same command to resume",
            file=sys.stderr,
        )
        return 1
    found = {part.name: stored for part in PARTS if (stored := store.load(part)) is not None}
    missing = ", ".join(part.name for part in PARTS if part.name not in found)
    if missing:
        print(f"left out (not measured with this code and these settings): {missing}")
    publish(found, args.out, args.images, is_trial=args.small)
    return 0


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; a trial writes nothing to docs/."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    parser.add_argument("--small", action="store_true", help="tiny sizes, a smoke test of every part")
    parser.add_argument("--only", action="append", choices=names, default=[], metavar="NAME", help=", ".join(names))
    parser.add_argument("--fresh", action="store_true", help="measure finished parts again")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's default")
    parser.add_argument("--repeats", type=int, help="default: 5 for short work, 1 for steps of minutes")
    parser.add_argument("--parts", type=Path, default=Path("runs/bench"), help="folder of finished parts")
    parser.add_argument("--out", type=Path, help="default: docs/results/bench.json")
    parser.add_argument("--images", type=Path, help="folder of the plots; default: docs/images")
    args = parser.parse_args(argv)
    trial = args.parts / "small"
    args.out = (args.out or (trial if args.small else DOCS / "results") / "bench.json").resolve()
    args.images = (args.images or (trial if args.small else DOCS / "images")).resolve()
    return args


def measure_missing(store: FigureStore, wanted: Sequence[Part], *, fresh: bool) -> None:
    """Measure the parts that are not stored yet, printing estimates of the remaining time."""
    todo = [part for part in wanted if fresh or store.load(part) is None]
    commit, pace = commit_of(HERE), 0.04 if store.settings.small else 1.0
    spent = guessed = 0.0
    for turn, part in enumerate(todo):
        left = sum(60 * p.minutes for p in todo[turn:]) * pace
        mine = in_words(60 * part.minutes * pace)
        print(f"\n[{turn + 1}/{len(todo)}] {part.name}: about {mine}; remaining: about {in_words(left)}", flush=True)
        begin = time.monotonic()
        scratch = store.folder / f".{part.name}.json"
        figures = run_part(part, store.settings, scratch)
        seconds = time.monotonic() - begin
        store.save(part, figures, commit=commit, seconds=round(seconds, 1), when=now())
        spent, guessed = spent + seconds, guessed + 60 * part.minutes
        pace = spent / guessed


def now() -> str:
    """Current time in UTC, to the minute."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")


def publish(found: dict[str, Any], out: Path, images: Path, *, is_trial: bool) -> None:
    """Write figures, tables and plots; also fill the tables in docs/speed.md that have markers."""
    write_json(out, {"trial": is_trial, "parts": found})
    drawn = plots({name: part["figures"] for name, part in found.items()})
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
