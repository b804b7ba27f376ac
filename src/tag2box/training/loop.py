"""The training loop, to be read from top to bottom."""

from __future__ import annotations

import math
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field
from torch.optim import Optimizer

from tag2box.errors import Interrupted, UserError
from tag2box.extend import Plugin
from tag2box.models.rng import StepRng
from tag2box.progress import Progress, silent
from tag2box.training import checkpoint
from tag2box.training.batches import BatchSource
from tag2box.training.criterion import LossOutput
from tag2box.training.dist import is_torchrun
from tag2box.training.events import EventLog, NullEventLog, gallery_event, pseudo_event, read_events, step_event
from tag2box.training.optim import AdversaryOptimizer, OptimizerSettings, Schedule, Sgd, scale_momentum, set_lr
from tag2box.training.step import Step
from tag2box.types import Batch

GALLERY_MOMENTS = (0.02, 0.15, 0.5, 1.0)
"""Shares of the run at which the pseudo ground truth of a few photos is recorded for the report."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long to train, how, and what to leave on disk on the way."""

    iterations: Annotated[int, Field(ge=1)] = 30_000
    seed: Annotated[int, Field(ge=0)] = 0
    optimizer: Annotated[OptimizerSettings, Plugin("optimizer")] = Sgd()
    schedule: Schedule = Schedule()
    log_every: Annotated[int, Field(ge=1)] = 10
    """Iterations between two lines of the curves."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 500
    gallery: Annotated[int, Field(ge=0)] = 8
    """Training photos whose pseudo ground truth is kept for the report."""


def fit(step: Step, source: BatchSource, plan: Plan, *, run: Path, progress: Progress = silent) -> None:
    """Train from wherever the run stands to the end of the plan; resuming gives the weights of an unbroken run.

    Of processes that train together, the leader alone writes.
    """
    dist = step.dist
    events = EventLog(run) if dist.is_main else NullEventLog()
    optimizers = _Optimizers(
        plan.optimizer.build(step.detector), AdversaryOptimizer.of(step.adversary) if step.adversary else None
    )
    first, seconds = _restore(run, step, optimizers)
    if first >= plan.iterations and _has_ended(run):
        return
    if first:
        events.write("resume", {"iteration": first})
    began = time.monotonic() - seconds
    left = range(first, plan.iterations)
    with _graceful_stop() as stop, source.batches(left) as batches, progress("training", left.stop, first) as bar:
        for iteration, batch in zip(left, batches, strict=True):
            outcome = _learn(step, batch.to(step.device), optimizers, plan=plan, iteration=iteration, run=run)
            done = iteration + 1
            bar.advance(f"loss {outcome.total.item():.3f}")
            stops = dist.any(stop())
            if done % plan.log_every == 0 or done == plan.iterations:
                lr = plan.optimizer.lr * plan.schedule.factor(iteration, plan.iterations)
                events.write("step", step_event(done, outcome, lr, time.monotonic() - began))
                events.write("pseudo", pseudo_event(done, outcome, source.classes))
            if done in _moments(plan.iterations) and plan.gallery and dist.is_main:
                rng, share = StepRng(plan.seed, iteration), done / plan.iterations
                events.write("gallery", gallery_event(done, step, source, rng, plan.gallery, fraction=share))
            if done % plan.checkpoint_every == 0 or done == plan.iterations or stops:
                _save(run, step, optimizers, source, done, time.monotonic() - began)
            if stops and done < plan.iterations:
                raise Interrupted(
                    f"{run}: stopped after {done} of {plan.iterations} iterations and saved; go on with --resume"
                )
    events.write(
        "end", {"iteration": plan.iterations, "seconds": time.monotonic() - began, "peak_memory_mb": _peak_mb()}
    )


@dataclass(frozen=True)
class _Optimizers:
    """Who learns."""

    optimizer: Optimizer  # of the detector
    adversary: AdversaryOptimizer | None


def _learn(step: Step, batch: Batch, optimizers: _Optimizers, *, plan: Plan, iteration: int, run: Path) -> LossOutput:
    """One batch: the detector learns, then, where it has one, its rival, from the same batch seen once more."""
    rng, share = StepRng(plan.seed, iteration), iteration / plan.iterations
    _set_pace(optimizers.optimizer, plan, iteration)
    outcome = step(batch, rng, share)
    total = outcome.total.item()
    if not math.isfinite(total):
        raise UserError(f"{run}: the loss is {total} at iteration {iteration}; lower plan.optimizer.lr")
    optimizers.optimizer.step()
    if optimizers.adversary is not None:
        step.adversarial_step(batch, rng, share)
        optimizers.adversary.learn(plan.schedule.cuts(iteration, plan.iterations))
    return outcome


def _set_pace(optimizer: Optimizer, plan: Plan, iteration: int) -> None:
    set_lr(optimizer, plan.optimizer.lr * plan.schedule.factor(iteration, plan.iterations))
    cuts = plan.schedule.cuts(iteration, plan.iterations) - plan.schedule.cuts(iteration - 1, plan.iterations)
    if cuts and iteration and isinstance(plan.optimizer, Sgd) and plan.optimizer.rescale_momentum:
        scale_momentum(optimizer, plan.schedule.gamma**cuts)


def _moments(iterations: int) -> set[int]:
    return {max(1, round(share * iterations)) for share in GALLERY_MOMENTS}


def _restore(run: Path, step: Step, optimizers: _Optimizers) -> tuple[int, float]:
    """Where to go on from: iterations done and seconds spent."""
    if not checkpoint.has_checkpoint(run):
        return 0, 0.0
    state = checkpoint.read_state(run)
    checkpoint.load_model(run, state, step.detector)
    checkpoint.load_optimizer(run, state, optimizers.optimizer)
    if optimizers.adversary is not None:
        checkpoint.load_adversary(run, state, optimizers.adversary)
    return state.iteration, state.seconds


def _has_ended(run: Path) -> bool:
    """Whether the run has said so: a finished run that is resumed has nothing to add, not even the memory it took."""
    return [event["event"] for event in read_events(run)][-1:] == ["end"]


def _save(run: Path, step: Step, optimizers: _Optimizers, source: BatchSource, done: int, seconds: float) -> None:
    if step.dist.is_main:
        checkpoint.save(
            run,
            step.detector,
            optimizers.optimizer,
            iteration=done,
            classes=source.classes,
            seconds=seconds,
            adversary=optimizers.adversary,
        )


@contextmanager
def _graceful_stop() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C asks the loop to stop after the iteration; the second stops at once.

    torchrun passes on the one that the terminal has already sent, so under it the second counts for nothing.
    """
    asked = False

    def ask(signum: int, frame: object) -> None:
        nonlocal asked
        asked = True
        if not is_torchrun():
            signal.signal(signal.SIGINT, signal.default_int_handler)

    try:
        before = signal.signal(signal.SIGINT, ask)
    except ValueError:  # not the main thread: somebody else handles signals
        yield lambda: False
        return
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
