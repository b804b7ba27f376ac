"""The network's outputs as rows of one matrix: what is passed between processes, and what gradients are taken of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tag2box.maths.numbers import at_least_single
from tag2box.model.detector import Detector
from tag2box.model.heads import RefineHead
from tag2box.types import StageScores, Views


@dataclass(frozen=True, slots=True)
class Layout:
    """Which columns hold what."""

    mil: int  # columns of the MIL head
    classes: int
    stages: int
    regress: bool
    embed: int  # 0 where nothing reads embeddings

    @classmethod
    def of(cls, detector: Detector, *, embeds: bool) -> Layout:
        """The layout of a detector's outputs."""
        first = detector.refine[0]
        assert isinstance(first, RefineHead)
        return cls(
            mil=detector.mil.cls.out_features,
            classes=detector.num_classes,
            stages=len(detector.refine),
            regress=first.box is not None,
            embed=detector.similarity.out.out_features if embeds else 0,
        )

    @property
    def width(self) -> int:
        """Columns in all."""
        return sum(self._widths)

    @property
    def _widths(self) -> list[int]:
        boxes = [4 * self.classes] * self.stages if self.regress else []
        return [self.mil, self.mil, *[self.classes + 1] * self.stages, *boxes, self.embed]

    def scores(self, rows: Float[Tensor, "R w"]) -> StageScores:
        """Logits and deltas."""
        mil_cls, mil_det, *rest, _ = rows.split(self._widths, dim=1)
        return StageScores(mil_cls, mil_det, tuple(rest[: self.stages]), tuple(rest[self.stages :]))

    def embeddings(self, rows: Float[Tensor, "R w"]) -> Float[Tensor, "R D"]:
        """Embeddings."""
        return rows[:, self.width - self.embed :]

    def views(self, rows: Float[Tensor, "m w"], kinds: int) -> Views:
        """Copies; their scores without gradient."""
        widths = [self.embed, *[self.classes] * self.stages]
        columns = rows.view(len(rows), kinds, sum(widths)).transpose(0, 1).split(widths, dim=2)
        return Views(columns[0], tuple(probs.detach() for probs in columns[1:]))


def pack(scores: StageScores, embed: Float[Tensor, "R D"]) -> Float[Tensor, "R w"]:
    """Outputs side by side, in single precision at least."""
    parts = [scores.mil_cls, scores.mil_det, *scores.refine, *scores.deltas, embed]
    return torch.cat([at_least_single(part) for part in parts], dim=1)


def pack_views(views: Views) -> Float[Tensor, "m w"]:
    """Copies side by side."""
    kinds = torch.cat([views.embed, *(probs.to(views.embed.dtype) for probs in views.probs)], dim=2)  # (V, m, .)
    return kinds.transpose(0, 1).flatten(1)
