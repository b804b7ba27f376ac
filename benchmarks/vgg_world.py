"""Training steps of VGG16 with random weights on made-up photos: what steps, processes and precision measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from criterion import HEIGHT, WIDTH, proposals_around, some_boxes
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

from tag2box.models.detector import Detector
from tag2box.models.rng import StepRng
from tag2box.models.vgg16 import Vgg16, Vgg16Backbone
from tag2box.recipes import od_wscl
from tag2box.training.criterion import Criterion, LossOutput
from tag2box.training.optim import Sgd
from tag2box.training.step import Step
from tag2box.types import Batch, BatchMeta, Outputs, Proposals

LEARNT, VIEWS = 0.7, 0.7  # for estimates: share of the convolutions that learn, copies of proposals in S to proposals


@dataclass(frozen=True)
class Shape:
    """How large a step is; ``vector`` is the width of fc6 and fc7."""

    images: int = 8
    proposals: int = 2000
    classes: int = 20
    width: int = WIDTH
    height: int = HEIGHT
    vector: int = 4096


SMALL = Shape(images=2, proposals=24, classes=4, width=96, height=64, vector=16)
WARM = Shape(images=1, proposals=8, classes=20, width=96, height=64)


# ---------------------------------------------------------------- what is trained on


def make_batch(shape: Shape, slots: Sequence[int]) -> Batch:
    """The photos with these numbers, the same whoever asks; two or three classes each, boxes crowded around objects."""
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


# ---------------------------------------------------------------- what trains


class Watched:
    """The objective, which also counts the proposals whose copies it asks for."""

    def __init__(self, criterion: Criterion, around: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
        self.sampled = 0
        self._objective = criterion
        self._around = around

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objective, name)

    def __call__(self, outputs: Outputs, meta: BatchMeta, views: Callable[[Tensor], Any], **others: Any) -> LossOutput:
        def counted(rows: Tensor) -> Any:
            self.sampled = len(rows)
            return self._around("network", views)(rows)

        outcome: LossOutput = self._around("objective", self._objective)(outputs, meta, counted, **others)
        return outcome


def unwatched(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """The work itself."""
    return work


@dataclass(frozen=True)
class Training:
    """A network, its optimiser with momentum, and a step over a batch."""

    detector: Detector
    optimizer: Optimizer
    step: Step
    batch: Batch
    criterion: Watched

    def iterate(self, batch: Batch | None = None) -> None:
        """What the training loop does with a batch: the same numbers are drawn at every call."""
        self.step(batch or self.batch, StepRng(0, 0))
        self.optimizer.step()


def make_training(
    shape: Shape,
    slots: Sequence[int],
    *,
    around: Callable[[str, Callable[..., Any]], Callable[..., Any]] = unwatched,
    **settings: Any,
) -> Training:
    """The od-wscl recipe on VGG16. ``around`` wraps RoIPool and the objective; ``settings`` are those of the step."""
    torch.manual_seed(0)
    backbone = Vgg16Backbone(Vgg16(), vector_size=shape.vector)
    _keep_scale(backbone)
    backbone.roi_maps = around("RoIPool", backbone.roi_maps)  # type: ignore[method-assign]
    config = od_wscl()
    detector = Detector(backbone, shape.classes, config.heads).train()
    watched = Watched(config.criterion, around)
    step = Step(detector, watched, config.drop_block, config.augment, **settings)  # type: ignore[arg-type]
    optimizer = Sgd(lr=0.0).build(detector)  # weights stay what they are, so that every repetition does the same
    for parameter in detector.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()  # momentum and gradients are there from now on, as within a run
    return Training(detector, optimizer, step, make_batch(shape, slots), watched)


def _keep_scale(backbone: Vgg16Backbone) -> None:
    """Random convolutions under which photos neither fade nor explode."""
    for layer in backbone.features:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]


# ---------------------------------------------------------------- how long it may take


def expected_seconds(shape: Shape, memory: str, gflops: float) -> float:
    """A guess at a step's time from its multiplications, at two thirds of the machine's GEMM speed."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        Vgg16Backbone(Vgg16(), vector_size=8).features(torch.empty(1, 3, shape.height, shape.width))
    trunk = counter.get_total_flops()
    neck = (2 + VIEWS) * 2 * shape.proposals * (512 * 49 + shape.vector) * shape.vector
    forward, backward = trunk + neck, 2 * (LEARNT * trunk + neck)
    work = forward * (2 if memory == "exact" else 1) + backward
    return shape.images * work / (0.66e9 * gflops)
