"""The exact step: batch 8 in the memory of 1. VGG16, photos of 688 x 1,000, 2,000 proposals each, 20 classes.

    python benchmarks/steps.py --out runs/steps.json

Every case runs in a fresh process; its peak is Linux's high-water mark, which includes weights, gradients, momentum,
the batch's pixels and the libraries. Time is that of a whole iteration with the optimizer. Exact and plain step are
compared, in time and gradients, at the largest number of proposals for which the plain step fits in memory.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from measuring import (
    Row,
    arguments,
    gradient,
    if_it_fits,
    in_words,
    machine,
    measure,
    relative_difference,
    save_vector,
    set_threads,
    status_mb,
)
from tag2box.io import write_json
from vgg_world import SMALL, WARM, Shape, expected_seconds, make_batch, make_training

SHARES = (1.0, 0.5, 0.25, 0.125)  # of the proposals: sizes at which the plain step is tried


def case(shape: Shape, memory: str, repeats: int, threads: int, gradient_file: Path | None) -> Row:
    """Peak and time of a step in a fresh process; writes the gradient to ``gradient_file``."""
    set_threads(threads)
    training = make_training(shape, range(shape.images), memory=memory)
    held = status_mb("VmRSS")
    training.iterate(make_batch(replace(WARM, classes=shape.classes), [0]))
    seconds = measure(training.iterate, repeats, warm=False)
    if gradient_file is not None:
        save_vector(gradient_file, gradient(training.detector))
    return {
        "name": f"{memory}, {shape.images} x {shape.proposals:,}",
        "memory": memory,
        **asdict(shape),
        "sampled": training.criterion.sampled,
        "held_mb": round(held, 1),
        "peak_mb": round(status_mb("VmHWM"), 1),
        **seconds,
    }


def print_result(row: Row | None, name: str) -> None:
    if row is None:
        print(f"{name}: out of memory", flush=True)
    else:
        print(f"{name}: {row['wall']['median']:.1f} s, peak {row['peak_mb']:,.0f} MB", flush=True)


def run(shape: Shape, repeats: int, threads: int, gflops: float) -> Row:
    """All cases, the smallest first."""
    rows = []

    def tried(size: Shape, memory: str, times: int, gradient_file: Path | None = None) -> Row | None:
        name = f"{memory}, {size.images} x {size.proposals:,}"
        print(f"{name}: about {in_words(times * expected_seconds(size, memory, gflops))}", flush=True)
        row: Row | None = if_it_fits(case, size, memory, times, threads, gradient_file)
        print_result(row, name)
        rows.append(row or {"name": name, "memory": memory, **asdict(size), "fits": False})
        return row

    with tempfile.TemporaryDirectory() as folder:
        plain_file, exact_file = Path(folder) / "plain.npy", Path(folder) / "exact.npy"
        tried(replace(shape, images=1), "plain", repeats)
        same = None
        for share in SHARES:
            same = replace(shape, proposals=int(share * shape.proposals))
            if tried(same, "plain", repeats, plain_file) is not None:
                break
        tried(shape, "exact", repeats, exact_file)
        if same is not None and same != shape:
            tried(same, "exact", repeats, exact_file)
        both = plain_file.exists() and exact_file.exists()
        difference = relative_difference(exact_file, plain_file) if both else None
    return {"rows": rows, "compared_at": asdict(same) if same and both else None, "relative_difference": difference}


def main() -> None:
    parser = arguments(__doc__, "steps", repeats=1)
    args = parser.parse_args()
    threads = set_threads(args.threads)
    facts = machine()
    shape = SMALL if args.small else Shape()
    result = run(shape, 1 if args.small else args.repeats, threads, facts["gemm_gflops"])
    write_json(args.out, {"machine": facts, **result})


if __name__ == "__main__":
    main()
