"""What every MIL strategy gives, and the settings that all of them have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from tag2box.ops.mil import mil_loss
from tag2box.types import BatchMeta, LabelerInput, Labeling, Requirements, StageScores


@dataclass(frozen=True, slots=True)
class MilResult:
    """Proposal scores, with their graph, and the loss of the tags."""

    scores: Float[Tensor, "R c"]  # C columns, or C+1 with a background column
    loss: Float[Tensor, ""]  # unweighted
    second: Float[Tensor, "R c"] | None = None  # scores of a second head


@dataclass(frozen=True, kw_only=True)
class TagLoss:
    """Binary cross-entropy of image scores against tags (eq. 1)."""

    weight: Annotated[float, Field(ge=0)] = 1.0
    """Factor of L_mil; 4 helps where classes are many (COCO), because the mean over classes starves the head."""
    over_classes: Literal["mean", "sum"] = "mean"

    def tag_loss(self, scores: Float[Tensor, "R c"], meta: BatchMeta) -> Float[Tensor, ""]:
        """The unweighted loss of proposal scores, added up by image."""
        columns = scores.shape[1]
        unsure = None if meta.unsure is None else with_background(meta.unsure, columns)
        tags = with_background(meta.tags, columns)
        return mil_loss(scores, tags, meta.proposals.sizes, unsure=unsure, over_classes=self.over_classes)


def with_background(tags: Bool[Tensor, "N C"], columns: int) -> Bool[Tensor, "N c"]:
    """Tags widened by a background column that is never present, where the MIL head has one."""
    return torch.cat([tags, tags.new_zeros(len(tags), columns - tags.shape[1])], dim=1)


class Labeler(Protocol):
    """What the objective asks of a labeler."""

    @property
    def requirements(self) -> Requirements:
        """What it reads of a scene beyond proposals, tags and scores."""
        ...

    def __call__(self, inputs: LabelerInput) -> Labeling:
        """Pseudo labels of K stages for a whole batch."""
        ...


class MilStrategy(Protocol):
    """What the objective asks of a strategy."""

    @property
    def weight(self) -> float:
        """Factor of its loss."""
        ...

    @property
    def requirements(self) -> Requirements:
        """What it asks for beyond the logits of one head and tags."""
        ...

    def __call__(self, scores: StageScores, meta: BatchMeta, fraction: float) -> MilResult:
        """Scores of proposals, and the loss of a whole batch."""
        ...
