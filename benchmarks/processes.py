"""Two processes with half of the photos each, compared with one process with all of them, on the same cores.

    python benchmarks/processes.py --out runs/processes.json

VGG16, 8 photos of 688 x 1,000, 500 proposals each: 2 processes x 4 photos x 1 thread, started by torchrun (gloo), and
1 process x 8 photos x 2 threads. Both use the exact step to fit in memory. Time is that of a whole iteration, including
the all-gather of outputs and the all-reduce of gradients; the gradients of the two are compared.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import torch

from measuring import (
    Row,
    arguments,
    gradient,
    in_fresh_process,
    in_words,
    machine,
    measure,
    relative_difference,
    save_vector,
    set_threads,
    status_mb,
)
from tag2box.io import read_json, write_json
from tag2box.training.dist import DistContext, init_distributed
from vgg_world import SMALL, WARM, Shape, expected_seconds, make_batch, make_training

WORLD_SIZE = 2


def share_of_step(shape: Shape, dist: DistContext, repeats: int, folder: Path) -> Row:
    """Time this rank's share of some iterations; the main process writes the gradient to ``folder``."""
    training = make_training(shape, dist.shard(shape.images), memory="exact", dist=dist)
    warm = replace(WARM, classes=shape.classes)
    training.iterate(make_batch(warm, [dist.rank]))

    def iteration() -> None:
        dist.barrier()
        training.iterate()
        dist.barrier()

    seconds = measure(iteration, repeats, warm=False)
    if dist.is_main:
        save_vector(folder / f"{dist.world_size}.npy", gradient(training.detector))
    facts = {"rank": dist.rank, "threads": torch.get_num_threads(), "peak_mb": round(status_mb("VmHWM"), 1)}
    return {**facts, **seconds}


def alone(shape: Shape, repeats: int, threads: int, folder: Path) -> Row:
    """A single process with all photos."""
    set_threads(threads)
    return share_of_step(shape, DistContext(), repeats, folder)


def worker(shape: Shape, repeats: int, folder: Path) -> None:
    """Entry point of a rank under torchrun."""
    with init_distributed() as dist:
        set_threads(int(os.environ["OMP_NUM_THREADS"]))
        row = share_of_step(shape, dist, repeats, folder)
        write_json(folder / f"rank{dist.rank}.json", row)


def together(args: list[str], threads: int, folder: Path) -> list[Row]:
    """Run all ranks under torchrun and return their rows."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD_SIZE}"]
    command = [*launch, __file__, *args, "--worker", f"{folder}"]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)})
    return [read_json(folder / f"rank{rank}.json", "figures of a rank") for rank in range(WORLD_SIZE)]


def compared(one: Row, two: list[Row], difference: float) -> Row:
    """Figures of both; the time of two processes is that of the slower one."""
    slowest = max(two, key=lambda row: float(row["wall"]["median"]))
    return {
        "one": one,
        "two": two,
        "time_ratio": round(slowest["wall"]["median"] / one["wall"]["median"], 4),
        "relative_difference": difference,
    }


def main() -> None:
    parser = arguments(__doc__, "processes", repeats=1)
    parser.add_argument("--worker", type=Path, help="output folder of a rank (internal)")
    args = parser.parse_args()
    shape, repeats = (SMALL, 1) if args.small else (Shape(proposals=500), args.repeats)
    if args.worker:
        worker(shape, repeats, args.worker)
        return
    threads = set_threads(args.threads)
    facts = machine()
    guess = 2 * repeats * expected_seconds(shape, "exact", facts["gemm_gflops"])
    print(f"1 and {WORLD_SIZE} processes: about {in_words(guess)}", flush=True)
    small = ["--small"] if args.small else []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        one = in_fresh_process(alone, shape, repeats, threads, folder)
        two = together([*small, "--repeats", str(repeats)], max(1, threads // WORLD_SIZE), folder)
        difference = relative_difference(folder / f"{WORLD_SIZE}.npy", folder / "1.npy")
    result = {**asdict(shape), "memory": "exact", "precision": "fp32", **compared(one, two, difference)}
    print(f"{result['time_ratio']:.2f} x the time, gradients differ by {difference:.1e}")
    write_json(args.out, {"machine": facts, **result})


if __name__ == "__main__":
    main()
