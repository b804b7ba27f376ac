"""Growth of memory and open files over 2,000 steps of a tiny recipe in the training loop.

    python benchmarks/memory_growth.py --out runs/memory_growth.json

Generated scenes, lite0 with a feature cache, logs and checkpoints as in any run. The verdict uses the slope after the
first quarter, during which caches fill.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from measuring import Row, arguments, in_fresh_process, machine, set_threads, status_mb
from tag2box import settings
from tag2box.cli.train import train
from tag2box.data.scenes import Scenes
from tag2box.formats.csv_tags import read_tags
from tag2box.images import read_photo
from tag2box.io import write_json
from tag2box.progress import Bar
from tag2box.proposals.build import build_proposals
from tag2box.recipes import Config, scenes

SCENES = Scenes(train=16, test=1, width=96, height=96, classes=("balloon", "car", "clock"), smallest=24, largest=48)
TINY = (
    "proposals.short_side=96", "proposals.max_boxes=24", "backbone.pool_size=4", "loader.batch_size=4",
    "loader.resize.scales=[96]", "plan.log_every=10", "plan.checkpoint_every=100", "plan.gallery=2",
)  # fmt: skip
WARM_UP = 0.25  # share of the run that the verdict ignores
MAX_MB = 5.0  # tolerated growth per 1,000 steps: noise of the allocator


class MemoryBar:
    """A progress bar that records memory and open files every few steps."""

    def __init__(self, every: int) -> None:
        self.points: list[Row] = []
        self._every = every
        self._step = 0

    def advance(self, note: str = "") -> None:
        """Count one step."""
        self._step += 1
        if self._step % self._every == 0:
            self.points.append({"step": self._step, "rss_mb": round(status_mb("VmRSS"), 2), "files": open_files()})


def open_files() -> int:
    """Open file descriptors of this process, without the one used to count."""
    return len(list(Path("/proc/self/fd").iterdir())) - 1


def recorded_run(steps: int, every: int, threads: int) -> list[Row]:
    """Memory and open files during a run."""
    set_threads(threads)
    recorder = MemoryBar(every)

    class Ignored:
        def advance(self, note: str = "") -> None:
            """Proposals and the feature cache are not recorded."""

    @contextmanager
    def progress(title: str, total: int, done: int = 0) -> Iterator[Bar]:
        yield recorder if title == "training" else Ignored()

    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        SCENES.write(home / "scenes")
        photos, tags, store = home / "scenes/train/photos", home / "scenes/train/tags.csv", home / "proposals"
        where = (f"data.photos={photos}", f"data.tags={tags}", f"data.proposals={store}")
        config = settings.load(Config, [], [*where, *TINY, f"plan.iterations={steps}"], base=scenes())
        build_proposals(read_tags(tags, photos).photos, config.proposals, store, read=read_photo, workers=1)
        train(config, home / "run", progress=progress)
    return recorder.points


def verdict(points: list[Row]) -> Row:
    """Least-squares slopes after the warm-up, and whether they are within the limits."""
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
        "holds": slopes["rss_mb"] < MAX_MB and more_files <= 0,
    }


def main() -> None:
    parser = arguments(__doc__, "memory_growth", repeats=1)
    args = parser.parse_args()
    threads = set_threads(args.threads)
    steps, every = (20, 1) if args.small else (2000, 20)
    points = in_fresh_process(recorded_run, steps, every, threads)
    found = verdict(points)
    slopes = f"{found['rss_mb_per_1000_steps']:+.2f} MB and {found['files_per_1000_steps']:+.2f} files"
    print(f"{steps} steps: {slopes} per 1,000 steps")
    write_json(args.out, {"machine": machine(), "steps": steps, "every": every, "points": points, "verdict": found})


if __name__ == "__main__":
    main()
