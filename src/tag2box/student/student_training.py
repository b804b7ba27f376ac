"""Training of a student: settings, rounds, and the loop over batches.

The network that is evaluated is the moving average of the one that is trained. A checkpoint has both, and the state of
the optimizer; what an iteration does depends on nothing else but its number, so that a resumed run gets the weights of
an uninterrupted one.
"""

import math
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer

from tag2box import errors, extend
from tag2box.inference.predict import Inference, Predict
from tag2box.labels.label_set import LabelSet, is_label_set
from tag2box.labels.labelled import LabelledPhotos
from tag2box.models import lite0
from tag2box.models.backbone import BackboneSettings
from tag2box.models.runtime import autocast
from tag2box.progress import Progress, silent
from tag2box.student.network import AnchorFree, StudentDetector, StudentModule, StudentSettings, decode_levels
from tag2box.student.student_data import (
    Augmentation,
    Noise,
    StudentBatches,
    TrainingPicture,
    prepare_labels,
    top_scores,
)
from tag2box.student.targets import (
    DROP_AFTER,
    Rounds,
    StudentLoss,
    relabelled,
    round_agreement,
    student_loss,
    without_worst,
)
from tag2box.training import batches, checkpoint, events, loop, optim
from tag2box.training.dist import SINGLE_PROCESS, Compute, DistContext

TRAINED = "training.safetensors"
"""The network that is trained, in a checkpoint; ``checkpoint.MODEL`` is its moving average."""
_MAX_NORM = 5.0  # of gradients
_LAST_LR = 0.02  # of the cosine schedule, relative to its peak
_LOWER_LR = "train a new student with a lower plan.lr"


@dataclass(frozen=True, kw_only=True)
class StudentPlan:
    """Length of a round, optimizer, and what is written on the way."""

    iterations: Annotated[int, Field(ge=1, le=10**9)] = 900
    """Iterations of a round."""
    batch_size: Annotated[int, Field(ge=1, le=4096)] = 8
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    lr: Annotated[float, Field(gt=0, le=10)] = 5e-4
    """Learning rate of AdamW for the pyramid and the head: linear warm-up, then cosine decay."""
    backbone_lr: Annotated[float, Field(gt=0, le=100)] = 0.3
    """Learning rate of the backbone relative to ``lr``."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.05
    warmup: Annotated[int, Field(ge=0, le=10**9)] = 50
    """Iterations of linear warm-up."""
    average: Annotated[float, Field(ge=0, lt=1)] = 0.995
    """Decay of the moving average of the weights, less in the first iterations; the average is what detects."""
    box_weight: Annotated[float, Field(ge=0, le=1000)] = 2.0
    """Weight of the box loss relative to the classification loss."""
    top: Annotated[int, Field(ge=1, le=1000)] = 10
    """Cells per label, if they are ``aligned``."""
    assignment: Literal["aligned", "centre"] = "aligned"
    """Cells of a label: those that already say it best (TOOD), or those near its centre, by its size (FCOS)."""
    log_every: Annotated[int, Field(ge=1, le=10**9)] = 10
    """Iterations between two logged steps."""
    checkpoint_every: Annotated[int, Field(ge=1, le=10**9)] = 100
    """Iterations between two checkpoints."""
    keep_checkpoints: Annotated[int, Field(ge=1, le=1000)] = checkpoint.KEEP
    """Checkpoints that are kept."""

    def lr_factor(self, iteration: int) -> float:
        """The factor of the learning rate at an iteration of a round.

        >>> [round(StudentPlan(iterations=100, warmup=10).lr_factor(i), 3) for i in (0, 9, 50, 99)]
        [0.1, 0.981, 0.51, 0.02]
        """
        cosine = 0.5 * (1 + math.cos(math.pi * iteration / self.iterations))
        return min(1.0, (iteration + 1) / max(1, self.warmup)) * (_LAST_LR + (1 - _LAST_LR) * cosine)

    def average_decay(self, iteration: int) -> float:
        """The decay of the moving average after an iteration of a round."""
        return min(self.average, (1 + iteration) / (10 + iteration))


@dataclass(frozen=True, kw_only=True)
class StudentConfig:
    """Everything a student run depends on."""

    kind: Literal["student"] = "student"
    """Tells a student run from one of `tag2box train`."""
    name: str = "student"
    """Name of the run in the report."""
    labels: Path | None = None
    """The label set to learn from."""
    photos: Path | None = None
    """Root of the photos, if they were moved since they were labelled."""
    start: Literal["imagenet", "teacher"] = "imagenet"
    """First weights of the backbone: pretrained ones, or those of the run that made the labels, which know the tags."""
    backbone: Annotated[BackboneSettings, extend.Plugin("backbone")] = lite0.Lite0()
    network: Annotated[StudentSettings, extend.Plugin("student")] = AnchorFree()
    noise: Noise = Noise()
    augmentation: Augmentation = Augmentation()
    rounds: Rounds = Rounds()
    plan: StudentPlan = StudentPlan()
    precision: Literal["fp32", "bf16", "auto"] = "fp32"
    """Autocast precision of the network, in training and detection.

    ``auto`` is settled by a short measurement when the run starts: bf16 where it is faster than fp32. It is not the
    default because runs of different machines would then differ.
    """
    device: Literal["cpu", "cuda"] | None = None
    """Device to compute on; default: a GPU if there is one."""
    inference: Inference = Inference(scales=(320,), long_max=320, mirror=False, predict=Predict(nms_iou=0.5))

    def torch_device(self) -> torch.device:
        """The device; raises if it cannot do what the settings require."""
        return Compute(precision=self.precision, device=self.device).torch_device()


def build_student(config: StudentConfig, num_classes: int, *, pretrained: bool) -> nn.Module:
    """The network, its heads initialised from the seed of the run."""
    torch.manual_seed(config.plan.seed)
    network = config.network.build(config.backbone.build(pretrained=pretrained), num_classes)
    if not (isinstance(network, nn.Module) and isinstance(network, StudentModule)):
        raise errors.UserError(
            f"network.kind: {type(network).__name__} is no network of a student; expected an nn.Module with strides, "
            "num_classes, backbone and forward"
        )
    return network


# ---------------------------------------------------------------- state


@dataclass(frozen=True)
class StudentState:
    """The network that is trained, its moving average, and the optimizer."""

    network: nn.Module
    average: nn.Module
    optimizer: Optimizer

    @classmethod
    def new(cls, network: nn.Module, average: nn.Module, plan: StudentPlan) -> "StudentState":
        """The state before the first iteration of a round, in which both networks are equal."""
        average.load_state_dict(network.state_dict())
        return cls(network, average.requires_grad_(False).eval(), _optimizer(network, plan))

    def update_average(self, decay: float) -> None:
        """One step of the moving average."""
        with torch.no_grad():
            pairs = zip(self.average.state_dict().values(), self.network.state_dict().values(), strict=True)
            for mean, now in pairs:
                if mean.is_floating_point():
                    mean.lerp_(now.to(mean.dtype), 1 - decay)

    def save(self, run: Path, plan: StudentPlan, *, iteration: int, classes: tuple[str, ...], seconds: float) -> None:
        """Write a checkpoint."""
        assert isinstance(self.network, StudentModule)
        files = {
            checkpoint.MODEL: checkpoint.contiguous(self.average.state_dict()),
            TRAINED: checkpoint.contiguous(self.network.state_dict()),
            checkpoint.OPTIMIZER: checkpoint.optimizer_tensors(self.optimizer),
        }
        checkpoint.save_files(
            run,
            files,
            iteration=iteration,
            classes=classes,
            preprocess=asdict(self.network.backbone.preprocess),
            seconds=seconds,
            keep=plan.keep_checkpoints,
        )

    def restore(self, run: Path) -> tuple[int, float]:
        """Load the last checkpoint, if there is one: iterations done and seconds spent."""
        if not checkpoint.has_checkpoint(run):
            return 0, 0.0
        state = checkpoint.read_state(run)
        checkpoint.load_model(run, state, self.average)
        checkpoint.load_model(run, state, self.network, TRAINED)
        checkpoint.load_optimizer(run, state, self.optimizer)
        return state.iteration, state.seconds


def _optimizer(network: nn.Module, plan: StudentPlan) -> Optimizer:
    """AdamW over the trainable parameters; those of the backbone have a rate of their own."""
    assert isinstance(network, StudentModule)
    backbone = {id(p) for p in network.backbone.parameters()}
    trainable = [p for p in network.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if id(p) in backbone], "scale": plan.backbone_lr},
        {"params": [p for p in trainable if id(p) not in backbone], "scale": 1.0},
    ]
    return AdamW([group for group in groups if group["params"]], lr=plan.lr, weight_decay=plan.weight_decay)


# ---------------------------------------------------------------- rounds


def fit_student(
    config: StudentConfig,
    labels: LabelSet,
    networks: tuple[nn.Module, nn.Module],
    *,
    run: Path,
    progress: Progress = silent,
    dist: DistContext = SINGLE_PROCESS,
) -> None:
    """Train from the last checkpoint to the end of the last round.

    Args:
        networks: two of the same shape; the first has the weights to start from.
    """
    training = _Training(config, run, progress, dist)
    state = StudentState.new(*networks, config.plan)
    training.done, seconds = state.restore(run)
    if training.done and loop.has_ended(run):
        return
    if training.done:
        training.log.write("resume", {"iteration": training.done})
    training.began, own = time.monotonic() - seconds, labels
    for number in range(config.rounds.count):
        if number:
            made = training.next_labels(number, labels, state)
            if round_agreement(own.content, made.content) >= config.rounds.agreement:
                break
            own = made
            if training.done == number * config.plan.iterations:
                state.network.load_state_dict(state.average.state_dict())
                state = StudentState.new(state.network, state.average, config.plan)
        training.run_round(number, own.content, state)
    training.end()


class _Training:
    """A run that is trained: its log, its clock, and what a round does."""

    def __init__(self, config: StudentConfig, run: Path, progress: Progress, dist: DistContext) -> None:
        self.config, self.run, self.progress, self.dist = config, run, progress, dist
        self.log = events.EventLog(run) if dist.is_main else events.NullEventLog()
        self.began = 0.0
        self.done = 0  # iterations of all rounds

    def run_round(self, number: int, content: LabelledPhotos, state: StudentState) -> None:
        """The iterations of a round that are left, if there are any."""
        plan, spikes = self.config.plan, loop.SpikeWatch()
        source = _batches(self.config, content, state.network)
        left = range(self.done, (number + 1) * plan.iterations)
        with (
            loop.graceful_stop() as stop,
            self.progress("training", left.stop, left.start) as bar,
            ThreadPoolExecutor(1, thread_name_prefix="tag2box-pictures") as pool,
        ):
            for iteration, pictures in zip(left, self._pictures(source, pool, left), strict=True):
                losses = self._step(state, pictures, iteration % plan.iterations)
                self.done = iteration + 1
                spikes.new.append(losses["total"])
                bar.advance(f"loss {losses['total']:.3f}")
                stops = bool(stop()) if self.dist.world_size == 1 else self.dist.any(bool(stop()))
                is_last = self.done == left.stop
                if self.done % plan.log_every == 0 or is_last:
                    self._log_step(losses, spikes, iteration)
                if (self.done % plan.checkpoint_every == 0 or is_last or stops) and self.dist.is_main:
                    spent = time.monotonic() - self.began
                    state.save(self.run, plan, iteration=self.done, classes=content.classes, seconds=spent)
                if stops and self.done < self.config.rounds.count * plan.iterations:
                    raise errors.Interrupted(
                        f"{self.run}: stopped after {self.done} iterations and saved; continue with --resume"
                    ) from (errors.Terminated() if stop() == signal.SIGTERM else None)

    def _pictures(
        self, source: StudentBatches, pool: ThreadPoolExecutor, left: range
    ) -> Iterator[list[TrainingPicture]]:
        shard = self.dist.shard(self.config.plan.batch_size)
        return batches.prefetch(pool, lambda iteration: source.batch(iteration, shard), left)

    def _step(self, state: StudentState, pictures: Sequence[TrainingPicture], local: int) -> dict[str, float]:
        """One iteration of a round: losses, gradients of all ranks, optimizer, moving average."""
        plan = self.config.plan
        drop = self.config.noise.drop if local >= DROP_AFTER * plan.iterations else 0.0
        loss = batch_loss(self.config, state.network, pictures, drop=drop, dist=self.dist)
        sums = (
            torch.tensor([0.0, 0.0, 0.0])
            if loss is None
            else torch.stack([loss.classes, loss.boxes, loss.fit]).detach()
        )
        classes, boxes, fit = torch.tensor(self.dist.all_gather_object(sums.tolist())).sum(dim=0).tolist()
        state.optimizer.zero_grad(set_to_none=True)
        if loss is not None:
            loss.total(fit, plan.box_weight).backward()
        self.dist.all_reduce_gradients(state.network.parameters())
        norm = clip_grad_norm_([p for p in state.network.parameters() if p.grad is not None], _MAX_NORM).item()
        total = (classes + plan.box_weight * boxes) / max(fit, 1.0)
        if not (math.isfinite(total) and math.isfinite(norm)):
            raise errors.UserError(
                f"{self.run}: training diverged: the loss is {total}, the norm of its gradient {norm}; {_LOWER_LR}; "
                f"{checkpoint.last_checkpoint(self.run)}"
            )
        optim.set_lr(state.optimizer, plan.lr * plan.lr_factor(local))
        state.optimizer.step()
        state.update_average(plan.average_decay(local))
        return {"classes": classes / max(fit, 1.0), "boxes": boxes / max(fit, 1.0), "total": total}

    def _log_step(self, losses: Mapping[str, float], spikes: loop.SpikeWatch, iteration: int) -> None:
        plan = self.config.plan
        if (ratio := spikes.highest_ratio()) is not None:
            events.warn(self.log, self.run, self.done, f"the loss was {ratio:.0f} times its median; {_LOWER_LR}")
        lr = plan.lr * plan.lr_factor(iteration % plan.iterations)
        spent = time.monotonic() - self.began
        self.log.write("step", {"iteration": self.done, "losses": losses, "lr": lr, "seconds": spent})

    def next_labels(self, number: int, first: LabelSet, state: StudentState) -> LabelSet:
        """The labels of a further round: those on disk, or new ones of the student.

        They are mixed with the labels of the first round, not of the last one: mistakes do not add up.
        """
        folder, begins = self.run / f"labels-round-{number + 1}", number * self.config.plan.iterations
        if self.dist.any(is_label_set(folder)):
            return LabelSet.open(folder, first.content.root)
        if self.done > begins:
            raise errors.UserError(
                f"{folder}: missing, though the run is beyond it; restore it, or train a new student"
            )
        made = self._relabelled(first, state)
        f1 = round_agreement(first.content, made.content)
        if self.dist.is_main:
            made.write(folder)
        self.log.write("round", {"iteration": begins, "round": number + 1, "agreement": f1})
        return made

    def _relabelled(self, before: LabelSet, state: StudentState) -> LabelSet:
        config, content = self.config, before.content
        inference = replace(config.inference, mirror=True)
        detector = StudentDetector(state.average, content.classes, inference, config.precision)
        found = detector.detect(content.files(), progress=self.progress, dist=self.dist)
        mixed = relabelled(content, found, config.rounds.rule)
        return replace(before, content=mixed, rule=asdict(config.rounds.rule), digest="")

    def end(self) -> None:
        """Log the end."""
        seconds = time.monotonic() - self.began
        self.log.write("end", {"iteration": self.done, "seconds": seconds, "peak_memory_mb": loop.peak_memory_mb()})


def batch_loss(
    config: StudentConfig,
    network: nn.Module,
    pictures: Sequence[TrainingPicture],
    *,
    drop: float = 0.0,
    dist: DistContext = SINGLE_PROCESS,
) -> StudentLoss | None:
    """The losses of some pictures; None without any, on a rank beyond the batch size.

    Args:
        drop: share of the labels of all ranks that become regions: those with the largest loss.
    """
    assert isinstance(network, StudentModule)
    plan, device, outputs = config.plan, network.backbone.device, None
    labels = [picture.labels.to(device) for picture in pictures]
    if pictures:
        with autocast(device, config.precision):
            levels = network.forward(torch.stack([picture.pixels for picture in pictures]).to(device))
        outputs = decode_levels(levels, network.strides)
    if drop:
        labels = without_worst(labels, outputs, drop, dist)
    return None if outputs is None else student_loss(*outputs, labels, top=plan.top, assignment=plan.assignment)


def _batches(config: StudentConfig, content: LabelledPhotos, network: nn.Module) -> StudentBatches:
    assert isinstance(network, StudentModule)
    top = top_scores(content.photos, content.classes)
    return StudentBatches(
        content.files(),
        [prepare_labels(photo, content.classes, config.noise, top) for photo in content.photos],
        config.augmentation,
        config.plan.batch_size,
        config.plan.seed,
        config.plan.iterations,
        network.backbone.preprocess.neutral(),
    )
