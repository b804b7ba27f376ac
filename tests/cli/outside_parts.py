"""A package outside tag2box: one part of each kind, named ``outside_parts:Name`` in settings and commands."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8
from numpy import ndarray
from torch import Tensor

import tag2box
from tag2box.formats.csv_tags import CsvTable
from tag2box.models.drop_block import DropBlock
from tag2box.ops.losses import assign
from tag2box.proposals.base import FoundBoxes
from tiny import TinyBackbone


@dataclass(frozen=True)
class TopTwo:
    """A labeler: the two best proposals of each present class."""

    count: int = 2
    requirements = tag2box.Requirements()

    def __call__(self, inputs: tag2box.LabelerInput) -> tag2box.Labeling:
        stages = []
        for probs in inputs.probs:
            rows, classes = [], []
            for span, tags in zip(inputs.proposals.spans(), inputs.tags, strict=True):
                for c in tags.nonzero().flatten():
                    best = probs[span.start : span.stop, c].topk(min(self.count, len(span))).indices + span.start
                    rows.append(best)
                    classes.append(c.expand(len(best)))
            row, cls = (np.concatenate([x.numpy() for x in part] or [np.zeros(0, int)]) for part in (rows, classes))
            row, cls = inputs.tags.new_tensor(row, dtype=int), inputs.tags.new_tensor(cls, dtype=int)  # type: ignore[assignment]
            boxes = tag2box.PseudoBoxes(row, cls, probs[row, cls])
            stages.append(assign(inputs.proposals, boxes, inputs.tags.shape[1], 0.5))
        return tag2box.Labeling(tuple(stages))


@dataclass(frozen=True, kw_only=True)
class Tiny(tag2box.BackboneSettings):
    """A backbone: the network of the tests."""

    frozen: bool = True

    def build(self, *, pretrained: bool = True) -> tag2box.Backbone:
        return TinyBackbone(frozen=self.frozen)


@dataclass(frozen=True, kw_only=True)
class Grid(tag2box.ProposalMethod):
    """A proposal method: a grid of squares."""

    step: int = 16

    def search(self, bgr: UInt8[ndarray, "h w 3"], min_side: float) -> FoundBoxes:
        x, y = np.meshgrid(np.arange(0, bgr.shape[1], self.step), np.arange(0, bgr.shape[0], self.step))
        corners = np.stack([x, y, x + 2 * self.step, y + 2 * self.step], -1).reshape(-1, 4).astype(float)
        return FoundBoxes(corners, np.linspace(0, 1, len(corners)))


@dataclass(frozen=True, kw_only=True)
class Halved(DropBlock):
    """A regularizer: DropBlock under another name."""


@dataclass(frozen=True)
class SmallScores:
    """A loss term: the mean squared MIL score."""

    weight: float = 0.1
    requirements = tag2box.Requirements()

    def __call__(self, batch: tag2box.LossInputs) -> Float[Tensor, ""]:
        return batch.mil.scores.square().sum() / max(1, batch.mil.scores.numel())


class MyTable(CsvTable):
    """A dataset format: a CSV of tags, whatever its suffix."""


class CountFile:
    """An export format: boxes per photo, one line each."""

    what = "a file of counts"
    is_folder = False
    all_scores = False

    def __call__(
        self,
        out: Path,
        photos: Sequence[tag2box.Photo],
        classes: Sequence[str],
        detections: Mapping[str, tag2box.Detections],
    ) -> None:
        out.write_text("".join(f"{photo.id} {len(detections[photo.id])}\n" for photo in photos))


def share_of_photos(truth: tag2box.Truth, detections: Mapping[str, tag2box.Detections]) -> dict[str, float]:
    """A metric: the share of photos with detections."""
    return {"photos": sum(bool(len(found)) for found in detections.values()) / len(truth.ids)}
