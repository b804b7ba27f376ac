"""Training steps of VGG16 with random weights on generated photos, for steps.py, processes.py and precision.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from criterion import HEIGHT, WIDTH, proposals_around, some_boxes
from tag2box.cli.training_data import build_regularizer
from tag2box.models.detector import Detector
from tag2box.models.rng import StepRng
from tag2box.models.vgg16 import Vgg16, Vgg16Backbone
from tag2box.recipes import od_wscl
from tag2box.training.criterion import Criterion, LossOutput
from tag2box.training.optim import Sgd
from tag2box.training.step import Step
from tag2box.types import Batch, BatchMeta, Outputs, Proposals

TRAINED, VIEWS = 0.7, 0.7  # for estimates: share of trained convolutions, augmented proposals per proposal


@dataclass(frozen=True)
class Shape:
    """Size of a step; ``vector`` is the width of fc6 and fc7."""

    images: int = 8
    proposals: int = 2000
    classes: int = 20
    width: int = WIDTH
    height: int = HEIGHT
    vector: int = 4096


SMALL = Shape(images=2, proposals=24, classes=4, width=96, height=64, vector=16)
WARM = Shape(images=1, proposals=8, classes=20, width=96, height=64)


# ---------------------------------------------------------------- data


def make_batch(shape: Shape, slots: Sequence[int]) -> Batch:
    """Photos by number, the same in every process; two or three classes each, boxes clustered around objects."""
    photos = [_photo(shape, slot) for slot in slots]
    boxes, sizes = torch.cat([boxes for _, boxes in photos]), (shape.proposals,) * len(slots)
    return Batch(
        ids=tuple(f"photo{slot}" for slot in slots),
        tags=torch.stack([_tags(shape, slot) for slot in slots]),
        proposals=Proposals(boxes, sizes),
        images=torch.stack([pixels for pixels, _ in photos]),
    )


def _photo(shape: Shape, slot: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(slot)
    coarse = 255 * torch.rand(1, 3, -(-shape.height // 16), -(-shape.width // 16), generator=g)
    pixels = functional.interpolate(coarse, (shape.height, shape.width), mode="bilinear")[0]
    boxes = proposals_around(some_boxes(4 + 2 * (slot % 2), g), shape.proposals, g)
    return pixels, boxes * torch.tensor([shape.width / WIDTH, shape.height / HEIGHT]).repeat(2)


def _tags(shape: Shape, slot: int) -> Tensor:
    present = torch.randperm(shape.classes, generator=torch.Generator().manual_seed(slot))[: 2 + slot % 2]
    return torch.zeros(shape.classes, dtype=torch.bool).index_fill(0, present, True)


# ---------------------------------------------------------------- network and step


class CountingCriterion:
    """A criterion that also counts the proposals it augments."""

    def __init__(self, criterion: Criterion, around: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
        self.sampled = 0
        self._criterion = criterion
        self._around = around

    def __getattr__(self, name: str) -> Any:
        return getattr(self._criterion, name)

    def __call__(self, outputs: Outputs, meta: BatchMeta, views: Callable[[Tensor], Any], **others: Any) -> LossOutput:
        def counted(rows: Tensor) -> Any:
            self.sampled = len(rows)
            return self._around("network", views)(rows)

        outcome: LossOutput = self._around("criterion", self._criterion)(outputs, meta, counted, **others)
        return outcome


def unwrapped(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """The callable itself."""
    return work


@dataclass(frozen=True)
class Training:
    """A network, its optimizer with momentum, and a step on a batch."""

    detector: Detector
    optimizer: Optimizer
    step: Step
    batch: Batch
    criterion: CountingCriterion

    def iterate(self, batch: Batch | None = None) -> None:
        """One iteration of the training loop, with the same random draws at every call."""
        self.step(batch or self.batch, StepRng(0, 0))
        self.optimizer.step()


def make_training(
    shape: Shape,
    slots: Sequence[int],
    *,
    around: Callable[[str, Callable[..., Any]], Callable[..., Any]] = unwrapped,
    **settings: Any,
) -> Training:
    """The od-wscl recipe on VGG16. ``around`` wraps RoIPool and the criterion; ``settings`` are those of the step."""
    torch.manual_seed(0)
    backbone = Vgg16Backbone(Vgg16(), vector_size=shape.vector)
    _keep_scale(backbone)
    backbone.roi_maps = around("RoIPool", backbone.roi_maps)  # type: ignore[method-assign]
    config = od_wscl()
    detector = Detector(backbone, shape.classes, config.heads).train()
    counting = CountingCriterion(config.criterion, around)
    regularizer = build_regularizer(config, detector)
    step = Step(detector, counting, regularizer, config.augment, **settings)  # type: ignore[arg-type]
    optimizer = Sgd(lr=0.0).build(detector)  # constant weights: every repetition does the same work
    for parameter in detector.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()  # allocates momentum, as within a run
    return Training(detector, optimizer, step, make_batch(shape, slots), counting)


def _keep_scale(backbone: Vgg16Backbone) -> None:
    """Random convolutions that preserve the scale of activations."""
    for layer in backbone.features:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]


# ---------------------------------------------------------------- estimate


def expected_seconds(shape: Shape, memory: str, gflops: float) -> float:
    """Estimated time of a step from its FLOPs, at two thirds of the machine's GEMM speed."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        Vgg16Backbone(Vgg16(), vector_size=8).features(torch.empty(1, 3, shape.height, shape.width))
    trunk = counter.get_total_flops()
    neck = (2 + VIEWS) * 2 * shape.proposals * (512 * 49 + shape.vector) * shape.vector
    forward, backward = trunk + neck, 2 * (TRAINED * trunk + neck)
    work = forward * (2 if memory == "exact" else 1) + backward
    return float(shape.images * work / (0.66e9 * gflops))
