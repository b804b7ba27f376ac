"""The training loop: ``fit`` reads from top to bottom."""

import math
import signal
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field
from torch.nn.utils import get_total_norm
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

_SPIKE, _FIRST_LOSSES = 10, 20
_LOWER_LR = "train a new run with a lower plan.optimizer.lr"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning-rate schedule: linear warm-up, then steps."""

    warmup: Annotated[int, Field(ge=0, le=10**9)] = 200
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

    iterations: Annotated[int, Field(ge=1, le=10**9)] = 30_000
    epochs: Annotated[float, Field(gt=0, le=10**6)] | None = None
    """Length in rounds through the photos, from which `iterations` follow when training starts. None: `iterations` as
    they are; setting `iterations` alone has the same effect."""
    least_iterations: Annotated[int, Field(ge=1, le=10**9)] = 1
    """With `epochs`: few photos are trained on for so many iterations."""
    most_iterations: Annotated[int, Field(ge=1, le=10**9)] = 10**9
    """With `epochs`: many photos are trained on for no more iterations."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    optimizer: Annotated[optim.OptimizerSettings, extend.Plugin("optimizer")] = optim.Sgd()
    schedule: Schedule = Schedule()
    log_every: Annotated[int, Field(ge=1, le=10**9)] = 10
    """Iterations between two logged steps."""
    checkpoint_every: Annotated[int, Field(ge=1, le=10**9)] = 500
    """Iterations between two checkpoints."""
    keep_checkpoints: Annotated[int, Field(ge=1, le=1000)] = checkpoint.KEEP
    """Checkpoints that are kept: the newest, and those before it, to go back to if the newest is damaged."""
    gallery: Annotated[int, Field(ge=0, le=1000)] = 8
    """Training photos whose pseudo ground truth is logged for the report."""

    def for_photos(self, count: int, batch_size: int) -> "Plan":
        """The plan with the iterations of ``epochs`` rounds through so many photos, above 100 a multiple of 25."""
        if self.epochs is None:
            return self
        exact = math.ceil(self.epochs * count / batch_size)
        even = 25 * round(exact / 25) if exact > 100 else exact
        return replace(self, iterations=max(1, self.least_iterations, min(even, self.most_iterations)))


def fit(step: Step, source: BatchSource, plan: Plan, *, run: Path, progress: Progress = silent) -> None:
    """Train from the last checkpoint to the end of the plan; a resumed run gets the weights of an uninterrupted one.

    Of several ranks only the main one writes.
    """
    if not math.isfinite(plan.optimizer.lr):
        raise errors.UserError(f"plan.optimizer.lr: is {plan.optimizer.lr}, expected a positive number")
    dist = step.dist
    log = events.EventLog(run) if dist.is_main else events.NullEventLog()
    adversary = optim.AdversaryOptimizer.of(step.adversary) if step.adversary else None
    optimizers = Optimizers(plan.optimizer.build(step.detector), adversary)
    first, seconds = _restore(run, step, optimizers)
    if first >= plan.iterations and has_ended(run):
        return
    if first:
        log.write("resume", {"iteration": first})
    began, spikes = time.monotonic() - seconds, SpikeWatch()
    left = range(first, plan.iterations)
    with graceful_stop() as stop, source.batches(left) as batches, progress("training", left.stop, first) as bar:
        for iteration, batch in zip(left, batches, strict=True):
            done, own = iteration + 1, batch.to(step.device)
            logs = done % plan.log_every == 0 or done == plan.iterations
            loss = train_batch(step, own, optimizers, plan=plan, iteration=iteration, run=run, measure=logs)
            total = loss.total.item()
            bar.advance(f"loss {total:.3f}")
            stops = bool(stop()) if dist.world_size == 1 else dist.any(bool(stop()))
            spikes.new.append(total)
            if logs:
                if (ratio := spikes.highest_ratio()) is not None:
                    events.warn(
                        log, run, done, f"the loss was {ratio:.0f} times its median; {_LOWER_LR} if it stays high"
                    )
                lr = plan.optimizer.lr * plan.schedule.factor(iteration, plan.iterations)
                log.write("step", events.step_event(done, loss, lr, time.monotonic() - began))
                log.write("pseudo", events.pseudo_event(done, loss, source.classes))
            if done in _gallery_iterations(plan.iterations) and plan.gallery and dist.is_main:
                _log_gallery(log, run, step, source, plan, done)
            if done % plan.checkpoint_every == 0 or done == plan.iterations or stops:
                _save(run, step, optimizers, source, plan, done, time.monotonic() - began)
            if stops and done < plan.iterations:
                raise errors.Interrupted(
                    f"{run}: stopped after {done} of {plan.iterations} iterations and saved; continue with --resume"
                ) from (errors.Terminated() if stop() == signal.SIGTERM else None)
    end = {"iteration": plan.iterations, "seconds": time.monotonic() - began, "peak_memory_mb": peak_memory_mb()}
    log.write("end", end)


@dataclass
class SpikeWatch:
    """Finds sudden rises of the loss."""

    new: list[float] = field(default_factory=list)  # losses since the last call
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    first_highest: float = 0.0  # of the first losses: one near zero may rise by any factor

    def highest_ratio(self) -> float | None:
        """The largest ratio of a new loss to the median of those before it, if there was a spike."""
        ratios = [ratio for loss in self.new if (ratio := self._ratio(loss)) is not None]
        self.new.clear()
        return max(ratios, default=None)

    def _ratio(self, loss: float) -> float | None:
        """A spike is far above the losses before it, and above all at first; of losses that stay high, the first."""
        before = list(self.recent)
        self.recent.append(loss)
        if len(before) < _FIRST_LOSSES:
            self.first_highest = max(self.first_highest, loss)
            return None
        median = max(statistics.median(before), 1e-12)
        limit = max(_SPIKE * median, self.first_highest)
        return loss / median if loss > limit >= before[-1] else None


@dataclass(frozen=True)
class Optimizers:
    """The optimizers of the detector and of its adversary."""

    detector: Optimizer
    adversary: optim.AdversaryOptimizer | None


def train_batch(
    step: Step, batch: Batch, optimizers: Optimizers, *, plan: Plan, iteration: int, run: Path, measure: bool = False
) -> criterion.LossOutput:
    """One batch: a step of the detector, then, if there is one, of its adversary on the same batch.

    With ``measure``, also the share of WSCL in the gradient at the neck.
    """
    rng, fraction = StepRng(plan.seed, iteration), iteration / plan.iterations
    _schedule_lr(optimizers.detector, plan, iteration)
    loss = step(batch, rng, fraction, measure=measure)
    total = loss.total.item()
    norm = get_total_norm([p.grad for p in step.detector.parameters() if p.grad is not None]).item()
    if not (math.isfinite(total) and math.isfinite(norm)):
        raise _diverged(run, step, f"the loss is {total}, the norm of its gradient {norm}", iteration)
    try:
        optimizers.detector.step()
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise _diverged(run, step, "the learning rate exceeds single precision", iteration) from None
    if optimizers.adversary is not None:
        step.adversarial_step(batch, rng, fraction)
        optimizers.adversary.step(plan.schedule.cuts(iteration, plan.iterations))
    return loss


def _diverged(run: Path, step: Step, problem: str, iteration: int) -> errors.UserError:
    """The error that ends a training whose loss, gradients or learning rate are not finite."""
    name = checkpoint.non_finite({name: p.grad for name, p in step.detector.named_parameters() if p.grad is not None})
    where = f", first in {name}" if name is not None else ""
    return errors.UserError(
        f"{run}: training diverged: {problem} at iteration {iteration + 1}{where}; {_LOWER_LR}; "
        f"{checkpoint.last_checkpoint(run)}"
    )


def _schedule_lr(optimizer: Optimizer, plan: Plan, iteration: int) -> None:
    optim.set_lr(optimizer, plan.optimizer.lr * plan.schedule.factor(iteration, plan.iterations))
    cuts = plan.schedule.cuts(iteration, plan.iterations) - plan.schedule.cuts(iteration - 1, plan.iterations)
    if cuts and iteration and isinstance(plan.optimizer, optim.Sgd) and plan.optimizer.rescale_momentum:
        optim.scale_momentum(optimizer, plan.schedule.gamma**cuts)


def _log_gallery(
    log: events.EventLog | events.NullEventLog, run: Path, step: Step, source: BatchSource, plan: Plan, done: int
) -> None:
    rng, fraction = StepRng(plan.seed, done - 1), done / plan.iterations
    log.write("gallery", events.gallery_event(done, step, source, rng, plan.gallery, fraction=fraction))
    if events.has_constant_scores(step, source):
        events.warn(log, run, done, f"all proposals of a photo have the same scores; {_LOWER_LR}")


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


def has_ended(run: Path) -> bool:
    """Whether the last event is "end": a finished run that is resumed adds nothing."""
    return [event["event"] for event in events.read_events(run)][-1:] == ["end"]


def _save(
    run: Path, step: Step, optimizers: Optimizers, source: BatchSource, plan: Plan, done: int, seconds: float
) -> None:
    if step.dist.is_main:
        checkpoint.save(
            run,
            step.detector,
            optimizers.detector,
            iteration=done,
            classes=source.classes,
            seconds=seconds,
            adversary=optimizers.adversary,
            keep=plan.keep_checkpoints,
        )


@contextmanager
def graceful_stop() -> Iterator[Callable[[], int]]:
    """The first Ctrl-C, or SIGTERM of a batch system, stops after the current iteration; the second stops at once.

    Yields a function that returns the number of the signal, or 0. torchrun forwards the signal that the terminal has
    already sent, so under it the second one is ignored.
    """
    received = 0

    def request(signum: int, frame: object) -> None:
        nonlocal received
        received = signum
        if not is_torchrun():
            signal.signal(signum, errors.stop_at_once)

    try:
        before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: signals are handled elsewhere
        yield lambda: 0
        return
    try:
        yield lambda: received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def peak_memory_mb() -> float | None:
    """Largest memory of this process so far; None on Windows, where Python cannot tell."""
    if sys.platform == "win32":
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
