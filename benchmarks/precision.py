"""Whole steps of VGG16 compared with the machine's peak, in fp32 and, if the processor supports it, bf16.

    python benchmarks/precision.py --out runs/precision.json

A step has 2 photos: time grows with the number of photos, the share of the peak does not. The peak is the faster of a
2,048 GEMM and a convolution of VGG16's fourth block, in the same process as the step. The step's share of the peak
counts all its multiplications. On a processor without bf16 instructions a step would take hours: bf16 is then skipped.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace

import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from measuring import Row, arguments, gflops, if_it_fits, in_words, machine, measure, set_threads
from step_profile import marked, profiled
from tag2box.io import write_json
from tag2box.models.runtime import has_bf16
from vgg_world import SMALL, WARM, Shape, expected_seconds, make_batch, make_training


def bf16_ability() -> Row:
    """Whether the processor has bf16 instructions, and the time of a small matrix product in both types."""
    seconds = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        a = torch.randn(256, 256).to(dtype)
        a @ a
        begin = time.perf_counter()
        a @ a
        seconds[name] = time.perf_counter() - begin
    return {"can": has_bf16(), **{f"gemm_256_{name}_ms": round(1e3 * x, 3) for name, x in seconds.items()}}


def peaks(dtype: torch.dtype, *, small: bool) -> Row:
    """GFLOPS of a large matrix product and of a large convolution."""
    side, width, height = (256, 16, 16) if small else (2048, 125, 86)
    a = torch.randn(side, side).to(dtype)
    x, w = torch.randn(1, 512, height, width).to(dtype), torch.randn(512, 512, 3, 3).to(dtype)
    gemm = measure(lambda: a @ a, 3)["wall"]["min"]
    convolution = measure(lambda: functional.conv2d(x, w, padding=1), 3)["wall"]["min"]
    return {
        "gemm_gflops": gflops(2 * side**3, gemm),
        "convolution_gflops": gflops(2 * width * height * 512 * 512 * 9, convolution),
    }


def case(shape: Shape, memory: str, precision: str, repeats: int, threads: int) -> Row:
    """Time, FLOPs, share of the peak and profile of a step."""
    set_threads(threads)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    peak = peaks(dtype, small=shape.width < 500)
    training = make_training(shape, range(shape.images), around=marked, memory=memory, precision=precision)
    training.iterate(make_batch(replace(WARM, classes=shape.classes), [0]))
    seconds = measure(training.iterate, repeats, warm=False)
    with FlopCounterMode(display=False) as counter:
        profiled_seconds, groups = profiled(training.iterate)
    flops = counter.get_total_flops()
    speed = flops / seconds["wall"]["median"] / 1e9
    return {
        "precision": precision,
        "memory": memory,
        **asdict(shape),
        "sampled": training.criterion.sampled,
        **seconds,
        **peak,
        "step_tflop": round(flops / 1e12, 4),
        "step_gflops": round(speed, 2),
        "share_of_peak": round(speed / max(peak.values()), 6),
        "profiled_seconds": round(profiled_seconds, 3),
        "profile": groups,
    }


def fitting(shape: Shape, precision: str, repeats: int, threads: int, gemm_gflops: float) -> Row:
    """The plain step, or the exact one if plain does not fit in memory."""
    for memory in ("plain", "exact"):
        guess = (repeats + 1) * expected_seconds(shape, memory, gemm_gflops)
        print(f"{precision}, {memory}: about {in_words(guess)}", flush=True)
        row: Row | None = if_it_fits(case, shape, memory, precision, repeats, threads)
        if row is not None:
            print(f"{precision}: {row['wall']['median']:.1f} s, {100 * row['share_of_peak']:.0f} % of the peak")
            return row
    return {"precision": precision, **asdict(shape), "fits": False}


def main() -> None:
    args = arguments(__doc__, "precision", repeats=1).parse_args()
    threads = set_threads(args.threads)
    facts = machine()
    shape, repeats = (SMALL, 1) if args.small else (Shape(images=2), args.repeats)
    ability = bf16_ability()
    kinds = ("fp32", "bf16") if ability["can"] else ("fp32",)
    rows = [fitting(shape, kind, repeats, threads, facts["gemm_gflops"]) for kind in kinds]
    write_json(args.out, {"machine": facts, "bf16": ability, "rows": rows})


if __name__ == "__main__":
    main()
