"""The network's outputs as rows of one matrix: what is passed between processes, and what gradients are taken of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tag2box.maths.numbers import at_least_single
from tag2box.model.detector import Detector
from tag2box.model.heads import RefineHead
from tag2box.types import Needs, Outputs, StageScores, Views


@dataclass(frozen=True, slots=True)
class Layout:
    """Which columns hold what."""

    mil: int  # columns of the MIL head
    classes: int
    stages: int
    regress: bool
    embed: int  # 0 where nothing reads embeddings
    vector: int = 0  # 0 where nothing reads feature vectors
    mil_heads: int = 1

    @classmethod
    def of(cls, detector: Detector, needs: Needs) -> Layout:
        """The layout of a detector's outputs."""
        first = detector.refine[0]
        assert isinstance(first, RefineHead)
        return cls(
            mil=detector.mil.cls.out_features,
            classes=detector.num_classes,
            stages=len(detector.refine),
            regress=first.box is not None,
            embed=detector.similarity.out.out_features if needs.exemplars else 0,
            vector=detector.backbone.vector_size if needs.vectors else 0,
            mil_heads=1 + len(detector.mil_more),
        )

    @property
    def width(self) -> int:
        """Columns in all."""
        return sum(self._widths)

    @property
    def _widths(self) -> list[int]:
        boxes = [4 * self.classes] * self.stages if self.regress else []
        stages = [self.classes + 1] * self.stages
        return [*[self.mil] * (2 * self.mil_heads), *stages, *boxes, self.embed, self.vector]

    def outputs(self, rows: Float[Tensor, "R w"]) -> Outputs:
        """The rows as what they mean."""
        *scores, embed, vectors = rows.split(self._widths, dim=1)
        mil_cls, mil_det, *more = scores[: 2 * self.mil_heads]
        rest = scores[2 * self.mil_heads :]
        stages = StageScores(mil_cls, mil_det, tuple(rest[: self.stages]), tuple(rest[self.stages :]), tuple(more))
        return Outputs(stages, embed, vectors)

    def views(self, rows: Float[Tensor, "m w"], kinds: int) -> Views:
        """Copies; their scores without gradient."""
        widths = [self.embed, *[self.classes] * self.stages]
        columns = rows.view(len(rows), kinds, sum(widths)).transpose(0, 1).split(widths, dim=2)
        return Views(columns[0], tuple(probs.detach() for probs in columns[1:]))


def pack(outputs: Outputs) -> Float[Tensor, "R w"]:
    """Outputs side by side, in single precision at least."""
    scores = outputs.scores
    mil = [scores.mil_cls, scores.mil_det, *scores.mil_more]
    parts = [*mil, *scores.refine, *scores.deltas, outputs.embed, outputs.vectors]
    return torch.cat([at_least_single(part) for part in parts], dim=1)


def pack_views(views: Views) -> Float[Tensor, "m w"]:
    """Copies side by side."""
    kinds = torch.cat([views.embed, *(probs.to(views.embed.dtype) for probs in views.probs)], dim=2)  # (V, m, .)
    return kinds.transpose(0, 1).flatten(1)
