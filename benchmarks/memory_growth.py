"""Does a long run grow? 2,000 steps of a tiny recipe through the training loop: memory and open files on the way.

    python benchmarks/memory_growth.py --out runs/memory_growth.json

Generated scenes, lite0 with kept maps, logs and checkpoints as in any run. The verdict looks at the slope after the
first quarter, in which caches fill.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from measuring import Row, arguments, in_fresh_process, machine, set_threads, status_mb
from tag2box import settings
from tag2box.commands.train import train
from tag2box.data.images import read_photo
from tag2box.data.scenes import Scenes
from tag2box.formats.csv_tags import read_tags
from tag2box.io import write_json
from tag2box.progress import Bar
from tag2box.proposals.build import build_proposals
from tag2box.recipes import Config, scenes

SCENES = Scenes(train=16, test=1, width=96, height=96, classes=("balloon", "car", "clock"), smallest=24, largest=48)
TINY = (
    "proposals.short_side=96", "proposals.max_boxes=24", "backbone.pool_size=4", "loader.batch_size=4",
    "loader.resize.scales=[96]", "plan.log_every=10", "plan.checkpoint_every=100", "plan.gallery=2",
)  # fmt: skip
WARM_UP = 0.25  # share of the run whose growth is not judged
MOST_MB = 5.0  # growth over 1,000 steps that is still none: the allocator's breathing


class Watch:
    """A progress bar that looks at the process every so many steps."""

    def __init__(self, every: int) -> None:
        self.points: list[Row] = []
        self._every = every
        self._step = 0

    def advance(self, note: str = "") -> None:
        """One more step is done."""
        self._step += 1
        if self._step % self._every == 0:
            self.points.append({"step": self._step, "rss_mb": round(status_mb("VmRSS"), 2), "files": open_files()})


def open_files() -> int:
    """Descriptors this process holds; the one that looks is not counted."""
    return len(list(Path("/proc/self/fd").iterdir())) - 1


def watched_run(steps: int, every: int, threads: int) -> list[Row]:
    """What a run of so many steps held on its way."""
    set_threads(threads)
    watch = Watch(every)

    class Silence:
        def advance(self, note: str = "") -> None:
            """Proposals and maps are not watched."""

    @contextmanager
    def progress(title: str, total: int, done: int = 0) -> Iterator[Bar]:
        yield watch if title == "training" else Silence()

    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        SCENES.write(home / "scenes")
        photos, tags, store = home / "scenes/train/photos", home / "scenes/train/tags.csv", home / "proposals"
        where = (f"data.photos={photos}", f"data.tags={tags}", f"data.proposals={store}")
        config = settings.load(Config, [], [*where, *TINY, f"plan.iterations={steps}"], base=scenes())
        build_proposals(read_tags(tags, photos).photos, config.proposals, store, read=read_photo, workers=1)
        train(config, home / "run", progress=progress)
    return watch.points


def verdict(points: list[Row]) -> Row:
    """Slopes after the warm-up, by least squares, and whether they say that nothing grows."""
    late = points[int(WARM_UP * len(points)) :]
    steps = np.array([p["step"] for p in late], dtype=float)
    slopes = {
        name: round(1000 * float(np.polyfit(steps, [p[name] for p in late], 1)[0]), 3) + 0.0  # no negative zero
        for name in ("rss_mb", "files")
    }
    more_files = late[-1]["files"] - late[0]["files"]
    return {
        "rss_mb_per_1000_steps": slopes["rss_mb"],
        "files_per_1000_steps": slopes["files"],
        "files_more_at_the_end": more_files,
        "holds": slopes["rss_mb"] < MOST_MB and more_files <= 0,
    }


def main() -> None:
    parser = arguments(__doc__, "memory_growth", repeats=1)
    args = parser.parse_args()
    threads = set_threads(args.threads)
    steps, every = (20, 1) if args.small else (2000, 20)
    points = in_fresh_process(watched_run, steps, every, threads)
    found = verdict(points)
    grown = f"{found['rss_mb_per_1000_steps']:+.2f} MB and {found['files_per_1000_steps']:+.2f} files"
    print(f"{steps} steps: {grown} in 1,000 steps")
    write_json(args.out, {"machine": machine(), "steps": steps, "every": every, "points": points, "verdict": found})


if __name__ == "__main__":
    main()
