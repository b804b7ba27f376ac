"""Protocols of labelers and MIL heads, and the image-level loss that all MIL heads share."""

from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field

from tag2box.ops import mil_loss
from tag2box.types import BatchMeta, LabelerInput, Labeling, Requirements, StageScores


class Labeler(Protocol):
    """Makes the pseudo labels that the refinement stages are trained on. Its fields are its settings."""

    @property
    def requirements(self) -> Requirements:
        """Inputs it reads beyond proposals, tags and scores; what no part requires is not computed."""
        ...

    def __call__(self, inputs: LabelerInput) -> Labeling:
        """Pseudo labels of K stages for a whole batch."""
        ...


@dataclass(frozen=True, slots=True)
class MilResult:
    """Result of a MIL head strategy: proposal scores, with their graph, and the image-level loss."""

    scores: Float[torch.Tensor, "R c"]  # C columns, or C+1 with a background column
    loss: Float[torch.Tensor, ""]  # unweighted
    second: Float[torch.Tensor, "R c"] | None = None  # scores of a second MIL head
    subsets: Int[torch.Tensor, " R"] | None = None  # subset of each proposal, for labelers; numbered over the batch


class MilStrategy(Protocol):
    """MIL head strategy: turns the logits of the MIL heads into proposal scores and an image-level loss."""

    @property
    def weight(self) -> float:
        """Factor of its loss."""
        ...

    @property
    def requirements(self) -> Requirements:
        """Inputs it reads beyond tags and the logits of one MIL head."""
        ...

    def __call__(self, scores: StageScores, meta: BatchMeta, fraction: float) -> MilResult:
        """Proposal scores and loss of a whole batch; ``fraction`` of the training is done."""
        ...


@dataclass(frozen=True, kw_only=True)
class TagLoss:
    """Binary cross-entropy of image scores against tags (eq. 1)."""

    weight: Annotated[float, Field(ge=0)] = 1.0
    """Factor of L_mil; 4 helps with many classes (COCO), where the mean over classes makes its gradient small."""
    over_classes: Literal["mean", "sum"] = "mean"

    def tag_loss(self, scores: Float[torch.Tensor, "R c"], meta: BatchMeta) -> Float[torch.Tensor, ""]:
        """The unweighted loss of proposal scores, summed per image."""
        columns = scores.shape[1]
        unsure = None if meta.unsure is None else with_background(meta.unsure, columns)
        tags = with_background(meta.tags, columns)
        return mil_loss(scores, tags, meta.proposals.sizes, unsure=unsure, over_classes=self.over_classes)


def with_background(tags: Bool[torch.Tensor, "N C"], columns: int) -> Bool[torch.Tensor, "N c"]:
    """Tags padded to the columns of the MIL head: a background column, if it has one, is never present."""
    return torch.cat([tags, tags.new_zeros(len(tags), columns - tags.shape[1])], dim=1)
