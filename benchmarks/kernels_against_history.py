"""Kernels of today, those of an earlier commit and plain torch, alternating in one process on one thread.

    python benchmarks/kernels_against_history.py --out docs/results/kernels-history.json    # and docs/speed.md

The earlier package is read from git history into a temporary folder and imported under another name. Figures are CPU
seconds, since they depend less on other work on the machine than wall seconds; results are compared in the same run.
"""

from __future__ import annotations

import importlib
import io
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import criterion
from bench_parts import provenance
from bench_tables import fill_speed
from kernels import class_boxes, photo_boxes
from measuring import Row, arguments, machine, set_threads, spread_of
from tag2box.io import write_json
from tag2box.methods.discovery import Discovery
from tag2box.ops import boxes as box_ops, roi
from tag2box.training.criterion import Criterion

COMMIT = "600c397"
OLD = f"tag2box_{COMMIT}"
OLD_CRITERION = "objective"  # the name that benchmarks/criterion.py had there
OLD_RULE = Criterion(labeler=Discovery(rule="exclusive"))  # of discovery, the default there
DOCS = Path(__file__).resolve().parents[1] / "docs"
MOST_APART = 1e-4
"""Relative difference of results that need not be equal to the bit."""

Results = tuple[Tensor, ...]
Work = Callable[[], Results]


@dataclass(frozen=True)
class Case:
    """The same job by three implementations; each returns tensors, of which ``exact`` ones must be equal."""

    name: str
    target: float  # how many times as fast as the earlier commit
    old: Work
    new: Work
    plain: Work | None
    exact: bool


def history(folder: Path) -> bool:
    """Extract the package and benchmarks of the earlier commit, renamed; False if git does not have it."""
    root = Path(__file__).resolve().parents[1]
    command = ["git", "-C", str(root), "archive", COMMIT, "src/tag2box", "benchmarks"]
    found = subprocess.run(command, capture_output=True, check=False)
    if found.returncode:
        return False
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        archive.extractall(folder, filter="data")
    (folder / "src" / "tag2box").rename(folder / OLD)
    for path in (folder / "benchmarks").glob(f"{OLD_CRITERION}*.py"):
        path.rename(folder / path.name)
    for path in (*(folder / OLD).rglob("*.py"), *folder.glob("*.py")):
        path.write_text(re.sub(r"\btag2box\b", OLD, path.read_text(encoding="utf-8")), encoding="utf-8")
    sys.path.append(str(folder))
    return True


@contextmanager
def plain_torch() -> Iterator[None]:
    """No compiled kernels inside the block."""
    names = [(roi, "_MIN_COMPILED_WINDOWS"), (roi, "_MIN_COMPILED_CELLS"), (box_ops, "_MIN_COMPILED_BOXES")]
    before = [getattr(module, name) for module, name in names]
    for module, name in names:
        setattr(module, name, 1 << 62)
    try:
        yield
    finally:
        for (module, name), value in zip(names, before, strict=True):
            setattr(module, name, value)


def in_plain_torch(work: Work) -> Work:
    def run() -> Results:
        with plain_torch():
            return work()

    return run


# ---------------------------------------------------------------- cases


def suppressed(module: Any, inputs: tuple[Tensor, Tensor, Tensor], threshold: float) -> Results:
    return (module.class_nms(*inputs, threshold),)


def pooled(pool: Callable[..., Tensor], features: Tensor, boxes: Tensor, grad: Tensor, scale: float) -> Results:
    """Pooled features and, unless ``grad`` is empty, the gradient of the feature map."""
    leaf = features.detach().requires_grad_(grad.numel() > 0)
    image_ids = torch.zeros(len(boxes), dtype=torch.long)
    out = pool(leaf, boxes, image_ids, size=14 if scale < 1 / 8 else 7, scale=scale)
    return (out, torch.autograd.grad(out, leaf, grad)[0]) if grad.numel() else (out,)


def cases(share: int) -> Iterator[Case]:
    """The jobs, one at a time: their inputs are large."""
    old_nms, old_roi = (importlib.import_module(f"{OLD}.maths.{name}") for name in ("nms", "roi"))
    inputs = class_boxes(20, 2000 // share)
    for threshold, target in ((0.4, 1.6), (0.1, 3.7)):
        new = partial(suppressed, box_ops, inputs, threshold)
        old = partial(suppressed, old_nms, inputs, threshold)
        yield Case(f"NMS at IoU {threshold}", target, old, new, in_plain_torch(new), exact=True)
    rois, channels = 2000 // share, max(16, 512 // share)
    args = (torch.randn(1, channels, 86, 125), photo_boxes(rois), torch.randn(rois, channels, 7, 7), 1 / 8)
    new, old = partial(pooled, roi.roi_pool, *args), partial(pooled, old_roi.roi_pool, *args)
    yield Case("RoIPool, forward + backward", 1.8, old, new, in_plain_torch(new), exact=True)
    features, boxes = torch.randn(1, 112, 43, 63), photo_boxes(rois)
    for name, grad in (("forward", torch.zeros(0)), ("forward + backward", torch.randn(rois, 112, 14, 14))):
        args = (features, boxes, grad, 1 / 16)
        new, old = partial(pooled, roi.roi_align, *args), partial(pooled, old_roi.roi_align, *args)
        yield Case(f"RoIAlign on NCHW maps, {name}", 1.8, old, new, in_plain_torch(new), exact=False)
    old_criterion = importlib.import_module(OLD_CRITERION)
    size = {"images": 8, "proposals": 2000 // share, "classes": 20}
    world, old_world = (
        criterion.make_world(criterion.Size(**size)),
        old_criterion.make_world(old_criterion.Size(**size)),
    )
    yield Case(
        "criterion, forward + backward",
        2.0,
        old=lambda: (old_criterion.our_step(old_world),),
        new=lambda: (criterion.our_step(world, OLD_RULE),),
        plain=None,  # written with loops: minutes, see criterion.py
        exact=False,
    )


def run(case: Case, rounds: int) -> Row:
    """Seconds of each implementation, alternating, and how far the results are apart."""
    ways = {"old": case.old, "new": case.new, "plain_torch": case.plain}
    works = {name: work for name, work in ways.items() if work is not None}
    results = {name: work() for name, work in works.items()}  # also the warm-up
    row: Row = {"name": case.name, "target": case.target, "difference": {}}
    for name in works.keys() - {"new"}:
        row["difference"][name] = max(map(apart, results["new"], results[name]))
    results.clear()
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            before = time.process_time()
            work()
            seconds[name].append(time.process_time() - before)
    row |= {"exact": case.exact, "seconds": {name: spread_of(values) for name, values in seconds.items()}}
    ratios = [old / new for old, new in zip(seconds["old"], seconds["new"], strict=True)]
    row["times_as_fast"] = spread_of(ratios)
    print(f"{case.name}: {row['times_as_fast']} (target {case.target}), apart {row['difference']}", flush=True)
    if row["difference"]["old"] > (0 if case.exact else MOST_APART):
        raise RuntimeError(f"{case.name}: the result is not that of {COMMIT}")
    return row


def apart(a: Tensor, b: Tensor) -> float:
    """Relative difference of two results; infinite if they differ in shape."""
    if a.shape != b.shape:
        return float("inf")
    a, b = a.detach(), b.detach()
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


def main() -> None:
    args = arguments(__doc__, "kernels-history", repeats=3).parse_args()
    set_threads(args.threads or 1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        if not history(Path(folder)):
            sys.exit(f"commit {COMMIT} is not in the git history of this checkout: nothing to compare with")
        rows = [run(case, args.repeats) for case in cases(50 if args.small else 1)]
    about = {**provenance(__file__), "earlier": COMMIT}
    write_json(args.out, {**about, "machine": machine(), "rounds": args.repeats, "rows": rows})
    if args.out.resolve() == DOCS / "results" / "kernels-history.json":
        fill_speed(DOCS)


if __name__ == "__main__":
    main()
