"""Where the time of a training step goes: torch's profile, cut into the parts a reader knows.

Work is told apart by what encloses it (RoIPool, the objective, the optimiser) and by what it is (convolutions, matrix
products). What runs on the way back belongs to where its forward half ran.
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
GROUPS = ("convolution", "linear", "RoIPool", "objective", "optimiser", "other")


def marked(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """The work under a name that the profile shows."""

    @wraps(work, updated=())
    def inside(*args: Any, **others: Any) -> Any:
        with record_function(REGION + name):
            return work(*args, **others)

    return inside


def profiled(work: Callable[[], object]) -> tuple[float, dict[str, float]]:
    """Seconds of a call, and the same by group; what lies between torch's calls is ``other``."""
    with profile(activities=[ProfilerActivity.CPU]) as watch:
        begin = time.perf_counter()
        work()
        seconds = time.perf_counter() - begin
    groups = grouped(watch.events() or [])
    groups["other"] = round(groups["other"] + max(seconds - sum(groups.values()), 0.0), 4)
    return seconds, groups


def grouped(events: Iterable[FunctionEvent]) -> dict[str, float]:
    """Seconds of some events by group, each event counted without those inside it."""
    events = list(events)
    forward = {e.sequence_nr: region(e) for e in events if e.sequence_nr >= 0 and not is_backward(e)}
    seconds = dict.fromkeys(GROUPS, 0.0)
    for event in events:
        seconds[group(event, region(event) or came_from(event, forward))] += event.self_cpu_time_total / 1e6
    return {name: round(value, 4) for name, value in seconds.items()}


def group(event: FunctionEvent, where: str) -> str:
    """The group of one event that ran ``where``."""
    if where in {"RoIPool", "objective", "optimiser"}:
        return where
    name = event.name.lower()
    if "conv" in name:
        return "convolution"
    return "linear" if name in PRODUCTS or "mkldnn_linear" in name else "other"


def region(event: FunctionEvent) -> str:
    """The nearest named thing around an event, or nothing."""
    around: FunctionEvent | None = event
    while around is not None:
        if around.name.startswith(REGION):
            return around.name.removeprefix(REGION)
        if around.name.startswith("Optimizer.step"):
            return "optimiser"
        around = around.cpu_parent
    return ""


def came_from(event: FunctionEvent, forward: dict[int, str]) -> str:
    """Where the forward half of an event on the way back ran."""
    around: FunctionEvent | None = event
    while around is not None:
        if is_backward(around) and around.sequence_nr in forward:
            return forward[around.sequence_nr]
        around = around.cpu_parent
    return ""


def is_backward(event: FunctionEvent) -> bool:
    """Whether an event belongs to the way back."""
    return event.scope == 1 or event.name.startswith("autograd::engine")
