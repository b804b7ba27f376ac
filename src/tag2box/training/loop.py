"""The training loop: ``fit`` reads from top to bottom."""

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

from tag2box import errors, extend
from tag2box.models.rng import StepRng
from tag2box.progress import Progress, silent
from tag2box.training import checkpoint, criterion, events, optim
from tag2box.training.batches import BatchSource
from tag2box.training.dist import is_torchrun
from tag2box.training.step import Step
from tag2box.types import Batch

GALLERY_MOMENTS = (0.02, 0.15, 0.5, 1.0)
"""Fractions of the run at which the pseudo ground truth of a few photos is logged for the report."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning-rate schedule: linear warm-up, then steps."""

    warmup: Annotated[int, Field(ge=0)] = 200
    """Iterations of linear warm-up."""
    warmup_from: Annotated[float, Field(gt=0, le=1)] = 1 / 3
    """Factor of the learning rate at iteration 0."""
    steps: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = (2 / 3, 0.89)
    """When the learning rate is cut, as fractions of the run."""
    gamma: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Factor of each cut."""

    def cuts(self, iteration: int, iterations: int) -> int:
        """The number of cuts up to ``iteration``."""
        return sum(iteration >= round(share * iterations) for share in self.steps)

    def factor(self, iteration: int, iterations: int) -> float:
        """The factor of the base learning rate at ``iteration``."""
        cut = self.gamma ** self.cuts(iteration, iterations)
        if iteration >= self.warmup:
            return cut
        return cut * (self.warmup_from + (1 - self.warmup_from) * iteration / self.warmup)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Length of training, optimizer, and what is written on the way."""

    iterations: Annotated[int, Field(ge=1)] = 30_000
    seed: Annotated[int, Field(ge=0)] = 0
    optimizer: Annotated[optim.OptimizerSettings, extend.Plugin("optimizer")] = optim.Sgd()
    schedule: Schedule = Schedule()
    log_every: Annotated[int, Field(ge=1)] = 10
    """Iterations between two logged steps."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 500
    gallery: Annotated[int, Field(ge=0)] = 8
    """Training photos whose pseudo ground truth is logged for the report."""


def fit(step: Step, source: BatchSource, plan: Plan, *, run: Path, progress: Progress = silent) -> None:
    """Train from the last checkpoint to the end of the plan; a resumed run gets the weights of an uninterrupted one.

    Of several ranks only the main one writes.
    """
    dist = step.dist
    log = events.EventLog(run) if dist.is_main else events.NullEventLog()
    adversary = optim.AdversaryOptimizer.of(step.adversary) if step.adversary else None
    optimizers = Optimizers(plan.optimizer.build(step.detector), adversary)
    first, seconds = _restore(run, step, optimizers)
    if first >= plan.iterations and _has_ended(run):
        return
    if first:
        log.write("resume", {"iteration": first})
    began = time.monotonic() - seconds
    left = range(first, plan.iterations)
    with _graceful_stop() as stop, source.batches(left) as batches, progress("training", left.stop, first) as bar:
        for iteration, batch in zip(left, batches, strict=True):
            loss = train_batch(step, batch.to(step.device), optimizers, plan=plan, iteration=iteration, run=run)
            done = iteration + 1
            bar.advance(f"loss {loss.total.item():.3f}")
            stops = stop() if dist.world_size == 1 else dist.any(stop())
            if done % plan.log_every == 0 or done == plan.iterations:
                lr = plan.optimizer.lr * plan.schedule.factor(iteration, plan.iterations)
                log.write("step", events.step_event(done, loss, lr, time.monotonic() - began))
                log.write("pseudo", events.pseudo_event(done, loss, source.classes))
            if done in _gallery_iterations(plan.iterations) and plan.gallery and dist.is_main:
                rng, fraction = StepRng(plan.seed, iteration), done / plan.iterations
                log.write("gallery", events.gallery_event(done, step, source, rng, plan.gallery, fraction=fraction))
            if done % plan.checkpoint_every == 0 or done == plan.iterations or stops:
                _save(run, step, optimizers, source, done, time.monotonic() - began)
            if stops and done < plan.iterations:
                raise errors.Interrupted(
                    f"{run}: stopped after {done} of {plan.iterations} iterations and saved; continue with --resume"
                )
    seconds = time.monotonic() - began
    log.write("end", {"iteration": plan.iterations, "seconds": seconds, "peak_memory_mb": _peak_memory_mb()})


@dataclass(frozen=True)
class Optimizers:
    """The optimizers of the detector and of its adversary."""

    detector: Optimizer
    adversary: optim.AdversaryOptimizer | None


def train_batch(
    step: Step, batch: Batch, optimizers: Optimizers, *, plan: Plan, iteration: int, run: Path
) -> criterion.LossOutput:
    """One batch: a step of the detector, then, if there is one, of its adversary on the same batch."""
    rng, fraction = StepRng(plan.seed, iteration), iteration / plan.iterations
    _schedule_lr(optimizers.detector, plan, iteration)
    loss = step(batch, rng, fraction)
    total = loss.total.item()
    if not math.isfinite(total):
        raise errors.UserError(f"{run}: the loss is {total} at iteration {iteration}; lower plan.optimizer.lr")
    optimizers.detector.step()
    if optimizers.adversary is not None:
        step.adversarial_step(batch, rng, fraction)
        optimizers.adversary.step(plan.schedule.cuts(iteration, plan.iterations))
    return loss


def _schedule_lr(optimizer: Optimizer, plan: Plan, iteration: int) -> None:
    optim.set_lr(optimizer, plan.optimizer.lr * plan.schedule.factor(iteration, plan.iterations))
    cuts = plan.schedule.cuts(iteration, plan.iterations) - plan.schedule.cuts(iteration - 1, plan.iterations)
    if cuts and iteration and isinstance(plan.optimizer, optim.Sgd) and plan.optimizer.rescale_momentum:
        optim.scale_momentum(optimizer, plan.schedule.gamma**cuts)


def _gallery_iterations(iterations: int) -> set[int]:
    return {max(1, round(share * iterations)) for share in GALLERY_MOMENTS}


def _restore(run: Path, step: Step, optimizers: Optimizers) -> tuple[int, float]:
    """Load the last checkpoint, if there is one: iterations done and seconds spent."""
    if not checkpoint.has_checkpoint(run):
        return 0, 0.0
    state = checkpoint.read_state(run)
    checkpoint.load_model(run, state, step.detector)
    checkpoint.load_optimizer(run, state, optimizers.detector)
    if optimizers.adversary is not None:
        checkpoint.load_adversary(run, state, optimizers.adversary)
    return state.iteration, state.seconds


def _has_ended(run: Path) -> bool:
    """Whether the last event is "end": a finished run that is resumed adds nothing."""
    return [event["event"] for event in events.read_events(run)][-1:] == ["end"]


def _save(run: Path, step: Step, optimizers: Optimizers, source: BatchSource, done: int, seconds: float) -> None:
    if step.dist.is_main:
        checkpoint.save(
            run,
            step.detector,
            optimizers.detector,
            iteration=done,
            classes=source.classes,
            seconds=seconds,
            adversary=optimizers.adversary,
        )


@contextmanager
def _graceful_stop() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C stops after the current iteration; the second stops at once.

    torchrun forwards the signal that the terminal has already sent, so under it the second one is ignored.
    """
    requested = False

    def request(signum: int, frame: object) -> None:
        nonlocal requested
        requested = True
        if not is_torchrun():
            signal.signal(signal.SIGINT, signal.default_int_handler)

    try:
        before = signal.signal(signal.SIGINT, request)
    except ValueError:  # not the main thread: signals are handled elsewhere
        yield lambda: False
        return
    try:
        yield lambda: requested
    finally:
        signal.signal(signal.SIGINT, before)


def _peak_memory_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
