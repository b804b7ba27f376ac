"""Source files and functions of the package that one training batch, or one photo of ``detect``, passes through.

A tiny world on disk (generated photos and tags), a short run of the recipe photos-frozen with its feature cache, one on
live pixels, and ``sys.setprofile`` between two steps of the optimizer. Threads read ahead: several batches are traced.
"""

from __future__ import annotations

import csv
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import CodeType, FrameType
from unittest.mock import patch

import numpy as np
from PIL import Image, ImageDraw
from torch.optim.optimizer import register_optimizer_step_post_hook

import tag2box
from tag2box import settings

SIDE, PHOTOS = 96, 8
COLORS = {"blue": (30, 60, 200), "red": (200, 40, 30)}
TINY = (
    "proposals.short_side=96", "proposals.min_side=8", "proposals.max_boxes=16", "backbone.pool_size=4",
    "loader.batch_size=2", "loader.workers=0", "loader.resize.scales=[96]", "inference.scales=[96]",
    "plan.iterations=8", "plan.log_every=1000", "plan.checkpoint_every=1000", "plan.gallery=0",
)  # fmt: skip
LIVE = ("backbone.train_tail=true",)  # the trunk runs in every step
FIRST, LAST = 3, 6  # steps of the optimizer between which calls are recorded
STEP = "training/step.py"  # the file whose functions make up the step


@dataclass(frozen=True)
class Passed:
    """Source files and functions that were called, named relative to the package."""

    files: tuple[str, ...]
    functions: tuple[str, ...]

    @classmethod
    def of(cls, codes: Iterable[CodeType], root: Path) -> Passed:
        """Names of code objects below ``root``; a comprehension counts as part of its function."""
        own = [(Path(code.co_filename).relative_to(root).as_posix(), code) for code in codes]
        functions = {f"{file}:{code.co_qualname}" for file, code in own if _is_function(code)}
        return cls(tuple(sorted({file for file, _ in own})), tuple(sorted(functions)))


@dataclass
class Recorder:
    """Calls of functions below ``root`` while it is open, in all threads."""

    root: Path
    is_open: bool = False
    codes: Counter[CodeType] = field(default_factory=Counter)  # calls of each function
    in_step: set[CodeType] = field(default_factory=set)  # called by the step, directly or not

    def close(self) -> None:
        """Stop recording, and add the innermost running function that was not called since: the loop itself."""
        self.is_open = False
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and (not self._is_own(frame.f_code) or frame.f_code in self.codes):
            frame = frame.f_back
        self.codes.update([] if frame is None else [frame.f_code])

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Install the profile function; threads that start inside the block have it too."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or not self.is_open or not self._is_own(frame.f_code):
            return
        self.codes[frame.f_code] += 1
        caller: FrameType | None = frame
        while caller is not None and caller.f_code.co_filename != f"{self.root}/{STEP}":
            caller = caller.f_back
        if caller is not None:
            self.in_step.add(frame.f_code)

    def _is_own(self, code: CodeType) -> bool:
        return code.co_filename.startswith(f"{self.root}/")


def _is_function(code: CodeType) -> bool:
    return not code.co_name.startswith("<") or code.co_name == "<lambda>"


# ---------------------------------------------------------------- the tiny world


def write_world(folder: Path) -> None:
    """Photos with one or two colored boxes and noise, and a CSV of their tags."""
    rng = np.random.default_rng(0)
    (folder / "photos").mkdir(parents=True)
    with (folder / "tags.csv").open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["image", "tags"])
        for number in range(PHOTOS):
            image = Image.fromarray(rng.integers(100, 156, (SIDE, SIDE, 3), dtype=np.uint8))
            present = [name for bit, name in enumerate(COLORS) if (number % 3 + 1) >> bit & 1]
            for name in present:
                x, y = rng.integers(4, SIDE // 2, 2).tolist()
                ImageDraw.Draw(image).rectangle((x, y, x + 36, y + 28), fill=COLORS[name])
            image.save(folder / "photos" / f"{number}.png")
            rows.writerow([f"{number}.png", ";".join(present)])


def trace_batch(world: Path, run: Path, *overrides: str) -> tuple[Passed, Passed]:
    """One batch in the training loop (creation, step, optimizer, progress; no logs, no checkpoint), and its step."""
    paths = (f"data.photos={world / 'photos'}", f"data.tags={world / 'tags.csv'}")
    base = tag2box.RECIPES["photos-frozen"]()  # with RoI maps, on which all parts of the paper act
    config = settings.load(tag2box.Config, [], [*paths, *TINY, *overrides], base=base)
    recorder, steps = Recorder(package_folder()), count(1)

    def after_step(*_: object) -> None:
        step = next(steps)
        if step == FIRST:
            recorder.is_open = True
        elif step == LAST:
            recorder.close()

    hook = register_optimizer_step_post_hook(after_step)
    try:
        with recorder.recording():
            tag2box.train(config, run)
    finally:
        hook.remove()
    return Passed.of(recorder.codes, recorder.root), Passed.of(recorder.in_step, recorder.root)


def trace_photo(world: Path, run: Path) -> Passed:
    """One photo of ``tag2box.detect`` (proposals, network, NMS): functions with more calls if there are more photos."""
    calls: dict[int, Counter[CodeType]] = {}
    photos = sorted((world / "photos").iterdir())
    for number in (1, 2, PHOTOS):  # the first is a warm-up, which imports modules
        recorder = Recorder(package_folder(), is_open=True)
        with recorder.recording():
            tag2box.detect(run, photos[:number])
        calls[number] = recorder.codes
    more = [code for code, called in calls[PHOTOS].items() if called > calls[2][code]]
    return Passed.of(more, package_folder())


def package_folder() -> Path:
    """Folder of the installed package."""
    return Path(tag2box.__file__).resolve().parent


def trace_all(folder: Path) -> dict[str, Passed]:
    """A batch of the default recipe, its step alone, a batch on live pixels, and a photo of ``detect``."""
    write_world(folder / "world")
    with patch("os.cpu_count", return_value=1):  # no worker processes: their calls could not be seen
        batch, step = trace_batch(folder / "world", folder / "default")
        live, _ = trace_batch(folder / "world", folder / "live", *LIVE)
        return {"batch": batch, "step": step, "live": live, "photo": trace_photo(folder / "world", folder / "default")}
