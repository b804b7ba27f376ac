"""Precision and engine: lite0 and the student in fp32, in bf16 and by OpenVINO, alternating on one thread.

    python benchmarks/frozen_network.py --out docs/results/frozen-network.json

Figures are CPU seconds; a row has how many times as fast as torch in fp32 each way is, and how far its result is from
that: the relative difference of all values. Weights are pretrained ones, photos are noise.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from bench_parts import provenance
from measuring import Row, arguments, machine, set_threads, spread_of
from tag2box.io import write_json
from tag2box.models.backbone import Backbone, set_runtime
from tag2box.models.class_maps import ClassMaps
from tag2box.models.lite0 import Lite0
from tag2box.models.runtime import Runtime, autocast, has_bf16, has_openvino
from tag2box.student.student_training import StudentConfig, build_student
from tag2box.types import Proposals

FIRST = "torch, fp32"
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Work:
    """A job, run inside a context that sets its precision and engine."""

    name: str
    ways: dict[str, tuple[Callable[[], AbstractContextManager[object]], Callable[[], Tensor]]]


def runtimes() -> dict[str, Runtime]:
    """All that this machine can do."""
    found = {FIRST: Runtime()}
    if has_bf16():
        found["torch, bf16"] = Runtime(precision="bf16")
    if has_openvino():
        found["OpenVINO, fp32"] = Runtime(engine="openvino")
        if has_bf16():
            found["OpenVINO, bf16"] = Runtime(precision="bf16", engine="openvino")
    return found


def frozen_works(*, small: bool) -> Iterator[Work]:
    """Trunk, RoI maps and class maps, in every runtime."""
    height, width, count, pool = (64, 96, 8, 4) if small else (480, 640, 256, 14)
    pixels, side = torch.rand(1, 3, height, width) * 255, torch.linspace(32, height / 2, count)
    boxes = Proposals(torch.stack([side, side / 2, 2 * side, 1.5 * side], dim=1), (count,), ((width, height),))
    backbone = Lite0(pool_size=pool).build().requires_grad_(False)
    nets: dict[str, ClassMaps] = {}
    for name, runtime in runtimes().items():
        nets[name] = ClassMaps(copy.deepcopy(backbone), 20).requires_grad_(False)
        set_runtime(nets[name], runtime)
    with torch.no_grad():
        trunk = backbone.trunk(pixels)

    def work(title: str, job: Callable[[ClassMaps], Tensor]) -> Work:
        return Work(title, {name: (net.backbone.frozen, partial(job, net)) for name, net in nets.items()})

    yield work("lite0, trunk", lambda net: net.backbone.trunk(pixels))
    yield work(f"lite0, {count} RoI maps", lambda net: net.backbone.roi_maps(trunk, boxes))
    yield work("lite0, features of class maps", lambda net: net.backbone.photo_features(trunk, dense=True))


def trained_works(*, small: bool) -> Iterator[Work]:
    """The neck of the light recipe and the student, by torch."""
    maps = 2 * torch.randn(8 if small else 512, 320, 4, 4)
    backbone = Lite0(pool_size=8).build()
    yield Work("neck, forward + backward", _by_precision(lambda: _gradient(backbone, backbone.neck(maps))))
    side = 64 if small else 320
    student, pixels = build_student(StudentConfig(), 20, pretrained=True), torch.rand(2, 3, side, side) * 255

    def detect() -> Tensor:
        with torch.no_grad():
            return torch.cat([level.flatten() for level in student(pixels[:1])])

    yield Work("student, detection", _by_precision(detect))
    yield Work(
        "student, forward + backward",
        _by_precision(lambda: _gradient(student, torch.cat([level.flatten() for level in student(pixels)]))),
    )


def _by_precision(
    job: Callable[[], Tensor],
) -> dict[str, tuple[Callable[[], AbstractContextManager[object]], Callable[[], Tensor]]]:
    kinds = {FIRST: "fp32"} | ({"torch, bf16": "bf16"} if has_bf16() else {})
    return {name: (partial(autocast, CPU, kind), job) for name, kind in kinds.items()}


def _gradient(network: nn.Module | Backbone, made: Tensor) -> Tensor:
    network.zero_grad(set_to_none=True)
    made.float().square().mean().backward()
    return torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])


def run(work: Work, rounds: int) -> list[Row]:
    """Each way against the first, alternating."""
    results: dict[str, Tensor] = {}
    seconds: dict[str, list[float]] = {name: [] for name in work.ways}
    for number in range(rounds + 1):  # the first compiles and warms up
        for name, (context, job) in work.ways.items():
            begin = time.process_time()
            with context():
                results[name] = job()
            if number:
                seconds[name].append(time.process_time() - begin)
    first, rows = results[FIRST].float(), []
    for name in work.ways:
        if name == FIRST:
            continue
        ratios = [a / max(b, 1e-7) for a, b in zip(seconds[FIRST], seconds[name], strict=True)]
        apart = float((results[name].float() - first).norm() / first.norm())
        rows.append(
            {
                "name": f"{work.name}: {name}",
                "target": 1.0,
                "times_as_fast": spread_of(ratios),
                "difference": apart,
                "seconds": {way: spread_of(seconds[way]) for way in (FIRST, name)},
            }
        )
        print(f"{rows[-1]['name']}: {rows[-1]['times_as_fast']}, apart {apart:.2g}", flush=True)
    return rows


def main() -> None:
    args = arguments(__doc__, "frozen-network", repeats=3).parse_args()
    set_threads(args.threads or 1)
    torch.manual_seed(0)
    works = [*frozen_works(small=args.small), *trained_works(small=args.small)]
    rows = [row for work in works for row in run(work, args.repeats)]
    write_json(args.out, {**provenance(__file__), "machine": machine(), "rounds": args.repeats, "rows": rows})


if __name__ == "__main__":
    main()
