"""A labeler, a MIL head, a loss term, a backbone, a proposal method, two formats and a metric."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from tag2box.annotations import Detections, Photo, Truth
from tag2box.formats.datasets import TagsOnly
from tag2box.formats.export import ExportFormat
from tag2box.formats.folders import photo_files
from tag2box.formats.listing import DataSource, Listing, OnFault, TagRow, list_rows
from tag2box.io import write_text
from tag2box.methods.oicr import Oicr
from tag2box.methods.protocols import MilResult, TagLoss
from tag2box.models.backbone import Backbone, BackboneSettings, Preprocess
from tag2box.models.rng import RowRng
from tag2box.ops import mil_scores
from tag2box.ops.roi import roi_align
from tag2box.proposals.base import FoundBoxes, ProposalMethod
from tag2box.training.criterion import LossInputs
from tag2box.types import BatchMeta, LabelerInput, Labeling, Proposals, Requirements, StageScores


@dataclass(frozen=True, kw_only=True)
class Halved:
    """OICR's labels at a fraction of their weight."""

    factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    requirements = Requirements()

    def __call__(self, inputs: LabelerInput) -> Labeling:
        """Pseudo labels of every stage."""
        labeling = Oicr()(inputs)
        stages = tuple(replace(labels, weight=labels.weight * self.factor) for labels in labeling.stages)
        return replace(labeling, stages=stages)


@dataclass(frozen=True, kw_only=True)
class Sharpened(TagLoss):
    """WSDDN with sharper detection logits."""

    sharpness: Annotated[float, Field(gt=0)] = 2.0
    requirements = Requirements()

    def __call__(self, scores: StageScores, meta: BatchMeta, fraction: float) -> MilResult:
        """Proposal scores and their loss."""
        mil = mil_scores(scores.mil_cls, scores.mil_det * self.sharpness, meta.proposals.sizes)
        return MilResult(mil, self.tag_loss(mil, meta))


@dataclass(frozen=True, kw_only=True)
class LogitNorm:
    """Mean square of the MIL detection logits."""

    weight: Annotated[float, Field(ge=0)] = 0.01
    requirements = Requirements()

    def __call__(self, batch: LossInputs) -> Tensor:
        """The unweighted loss."""
        logits = batch.outputs.scores.mil_det
        return logits.square().mean() if logits.numel() else logits.sum()


@dataclass(frozen=True, kw_only=True)
class Patches(BackboneSettings):
    """Two convolutions over patches."""

    channels: Annotated[int, Field(ge=1)] = 8

    def build(self, *, pretrained: bool = True) -> Backbone:
        """The network."""
        return PatchBackbone(self.channels)


class PatchBackbone(Backbone):
    """A frozen convolution of stride 8, RoIAlign to 4 x 4, and a linear neck."""

    preprocess = Preprocess(order="rgb", scale=1 / 255, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
    stride, map_size, vector_size = 8, 4, 16

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.patches = nn.Conv2d(3, channels, 8, stride=8, padding=4).requires_grad_(False)
        self.linear = nn.Linear(channels * self.map_size**2, self.vector_size)

    def trunk(self, images: Tensor) -> Tensor:
        return torch.relu(self.patches(self.preprocess(images)))

    def roi_maps(self, features: Tensor, proposals: Proposals) -> Tensor:
        return roi_align(features, proposals.boxes, proposals.image_ids(), size=self.map_size, scale=1 / self.stride)

    def neck(self, maps: Tensor, row_rng: RowRng | None = None) -> Tensor:
        return torch.relu(self.linear(maps.flatten(1)))

    def roi_map_modules(self) -> tuple[nn.Module, ...]:
        return (self.patches,)


@dataclass(frozen=True, kw_only=True)
class Grid(ProposalMethod):
    """Windows on a grid."""

    cells: Annotated[int, Field(ge=1)] = 3

    def search(self, bgr: np.ndarray, min_side: float) -> FoundBoxes:
        """Every rectangle of grid cells."""
        height, width = bgr.shape[:2]
        xs, ys = (np.linspace(0, side, self.cells + 1) for side in (width, height))
        pairs = [(a, b) for a in range(self.cells) for b in range(a + 1, self.cells + 1)]
        boxes = np.array([[xs[a], ys[c], xs[b], ys[d]] for a, b in pairs for c, d in pairs])
        return FoundBoxes(boxes, np.zeros(len(boxes)))


class Sidecar(TagsOnly):
    """A folder of photos with a .tags file beside each."""

    what = "a folder of photos with .tags files"

    def recognises(self, path: Path) -> bool:
        """Folders with a .tags file."""
        return path.is_dir() and any(path.rglob("*.tags"))

    def tags(self, source: DataSource, on_fault: OnFault) -> Listing:
        """All photos of the folder, with the tags of their files."""
        rows = []
        for file in photo_files(source.path):
            table = (source.path / file).with_suffix(".tags")
            tags = tuple(table.read_text().split()) if table.exists() else ()
            rows.append(TagRow(file.as_posix(), tags, where=str(table)))
        return list_rows(rows, source.path, source.classes, on_fault)


class Lines(ExportFormat):
    """One line per box."""

    what = "a text file"

    def __call__(
        self, out: Path, photos: Sequence[Photo], classes: Sequence[str], detections: Mapping[str, Detections]
    ) -> None:
        """Write photo, class, score and box."""
        lines = []
        for photo in photos:
            found = detections[photo.id]
            for box, score, label in zip(
                found.boxes.tolist(), found.scores.tolist(), found.labels.tolist(), strict=True
            ):
                lines.append(f"{photo.id} {classes[label]} {score:.4f} {' '.join(f'{x:.1f}' for x in box)}")
        write_text(out, "\n".join(lines) + "\n")


def answered(truth: Truth, detections: Mapping[str, Detections]) -> dict[str, float | None]:
    """Share of photos with at least one detection."""
    found = [len(detections[name].scores) > 0 for name in truth.ids if name in detections]
    return {"answered": sum(found) / len(truth.ids) if truth.ids else None}
