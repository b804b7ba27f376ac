"""A backbone of stride 8 with a few channels, and label sets of generated scenes or tiny photos."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from tag2box.labels.label_set import LabelSet
from tag2box.labels.labelled import LabelBox, LabelledPhoto, LabelledPhotos
from tag2box.models.backbone import Backbone, BackboneSettings
from tag2box.storage import FileStamp
from tag2box.student.network import StudentSettings
from tiny import TinyBackbone, tiny_photos

SMALL = (
    "backbone.kind=tiny_student:Tiny", "network.width=8", "network.depth=1", "network.frozen_stages=0",
    "augmentation.sides=[64]", "plan.batch_size=2", "plan.warmup=2", "plan.log_every=1", "plan.checkpoint_every=2",
    "inference.scales=[64]", "inference.long_max=64",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Tiny(BackboneSettings):
    """Settings of ``TinyTrunk``."""

    kind: Literal["tiny_student:Tiny"] = "tiny_student:Tiny"

    def build(self, *, pretrained: bool = True) -> TinyTrunk:
        return TinyTrunk(frozen=False)


class TinyTrunk(TinyBackbone):
    """The mean pixels of squares of 8 x 8."""

    stride = 8

    def trunk(self, images: Tensor) -> Tensor:
        return torch.relu(self.conv(functional.avg_pool2d(self.preprocess(images), self.stride)))

    def trunk_modules(self) -> tuple[nn.Module, ...]:
        return (self.conv,)


@dataclass(frozen=True, kw_only=True)
class OwnNetwork(StudentSettings):
    """A network of another package: one level, one convolution."""

    kind: Literal["tiny_student:OwnNetwork"] = "tiny_student:OwnNetwork"

    def build(self, backbone: Backbone, num_classes: int) -> OneLevel:
        return OneLevel(backbone, num_classes)


class OneLevel(nn.Module):
    """Logits and distances from the map of stride 8."""

    strides = (8,)

    def __init__(self, backbone: Backbone, num_classes: int) -> None:
        super().__init__()
        self.backbone, self.num_classes = backbone, num_classes
        self.out = nn.Conv2d(backbone.channels, num_classes + 4, 1)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        out = self.out(self.backbone.trunk(images))
        return (torch.cat([out[:, : self.num_classes], functional.softplus(out[:, self.num_classes :])], dim=1),)


@dataclass(frozen=True, kw_only=True)
class NoNetwork(StudentSettings):
    """Builds something else."""

    kind: Literal["tiny_student:NoNetwork"] = "tiny_student:NoNetwork"

    def build(self, backbone: Backbone, num_classes: int) -> nn.Module:
        return nn.Identity()


def tiny_labels(folder: Path, count: int = 4) -> Path:
    """A label set with a box per tag, each photo with a higher score than the one before."""
    tagged = tiny_photos(folder, count)
    photos = []
    for place, (photo, row) in enumerate(zip(tagged.photos, tagged.tags.tolist(), strict=True)):
        score = 0.2 + 0.6 * place / count
        names = tuple(name for name, is_there in zip(tagged.classes, row, strict=True) if is_there)
        boxes = tuple(
            LabelBox((4.0 + 6 * number, 6.0, 24.0 + 6 * number, 30.0), name, score, why="best of its tag")
            for number, name in enumerate(names)
        )
        stamp, file = FileStamp.of(photo.path), photo.path.relative_to(folder).as_posix()
        photos.append(LabelledPhoto(photo.id, file, photo.width, photo.height, names, boxes, stamp=stamp))
    LabelSet(LabelledPhotos(folder, tagged.classes, tuple(photos))).write(folder / "labels")
    return folder / "labels"
