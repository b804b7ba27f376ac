"""Profile of a training step: torch's profiler events, summed by group.

Events are grouped by their enclosing region (RoIPool, criterion, optimizer) and by operation (convolutions, matrix
products). Backward events belong to the region of their forward event.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

REGION = "region: "
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::matmul", "aten::linear", "aten::_addmm_activation"}
GROUPS = ("convolution", "linear", "RoIPool", "criterion", "optimizer", "other")


def marked(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a callable in a named region of the profile."""

    @wraps(work, updated=())
    def inside(*args: Any, **others: Any) -> Any:
        with record_function(REGION + name):
            return work(*args, **others)

    return inside


def profiled(work: Callable[[], object]) -> tuple[float, dict[str, float]]:
    """Seconds of a call, in total and by group; time outside torch's operations counts as ``other``."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        begin = time.perf_counter()
        work()
        seconds = time.perf_counter() - begin
    groups = grouped(profiler.events() or [])
    groups["other"] = round(groups["other"] + max(seconds - sum(groups.values()), 0.0), 7)
    return seconds, groups


def grouped(events: Iterable[FunctionEvent]) -> dict[str, float]:
    """Self time of events in seconds, by group."""
    events = list(events)
    forward = {e.sequence_nr: region(e) for e in events if e.sequence_nr >= 0 and not is_backward(e)}
    seconds = dict.fromkeys(GROUPS, 0.0)
    for event in events:
        seconds[group(event, region(event) or forward_region(event, forward))] += event.self_cpu_time_total / 1e6
    return {name: round(value, 7) for name, value in seconds.items()}


def group(event: FunctionEvent, where: str) -> str:
    """Group of an event inside region ``where``."""
    if where in {"RoIPool", "criterion", "optimizer"}:
        return where
    name = event.name.lower()
    if "conv" in name:
        return "convolution"
    return "linear" if name in PRODUCTS or "mkldnn_linear" in name else "other"


def region(event: FunctionEvent) -> str:
    """Innermost named region around an event; empty if there is none."""
    around: FunctionEvent | None = event
    while around is not None:
        if around.name.startswith(REGION):
            return around.name.removeprefix(REGION)
        if around.name.startswith("Optimizer.step"):
            return "optimizer"
        around = around.cpu_parent
    return ""


def forward_region(event: FunctionEvent, forward: dict[int, str]) -> str:
    """Region of the forward event of a backward event; empty if unknown."""
    around: FunctionEvent | None = event
    while around is not None:
        if is_backward(around) and around.sequence_nr in forward:
            return forward[around.sequence_nr]
        around = around.cpu_parent
    return ""


def is_backward(event: FunctionEvent) -> bool:
    """Whether an event belongs to the backward pass."""
    return event.scope == 1 or event.name.startswith("autograd::engine")
