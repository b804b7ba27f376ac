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
    layers: int = 0  # 0 where nothing reads responses
    side: int = 0  # of the maps that responses are given of

    @classmethod
    def of(cls, detector: Detector, needs: Needs) -> Layout:
        """The layout of a detector's outputs."""
        heads = [head for head in detector.refine if isinstance(head, RefineHead)]
        return cls(
            mil=detector.mil.cls.out_features,
            classes=detector.num_classes,
            stages=len(detector.refine),
            regress=any(head.box is not None for head in heads),
            embed=detector.similarity.out.out_features if needs.exemplars else 0,
            vector=detector.backbone.vector_size if needs.vectors else 0,
            mil_heads=1 + len(detector.mil_more),
            layers=detector.backbone.layers if needs.responses else 0,
            side=detector.backbone.map_size,
        )

    @property
    def width(self) -> int:
        """Columns in all."""
        return sum(self._widths)

    @property
    def _widths(self) -> list[int]:
        boxes = [4 * self.classes] * self.stages if self.regress else []
        stages = [self.classes + 1] * self.stages
        responses = self.layers * self.side**2
        return [*[self.mil] * (2 * self.mil_heads), *stages, *boxes, self.embed, self.vector, responses]

    @property
    def view_widths(self) -> list[int]:
        """Columns of one copy: its embedding, and its scores by each teacher; without stages one still teaches."""
        return [self.embed, *[self.classes] * max(self.stages, 1)]

    def outputs(self, rows: Float[Tensor, "R w"]) -> Outputs:
        """The rows as what they mean."""
        *scores, embed, vectors, flat = rows.split(self._widths, dim=1)
        mil_cls, mil_det, *more = scores[: 2 * self.mil_heads]
        rest = scores[2 * self.mil_heads :]
        stages = StageScores(mil_cls, mil_det, tuple(rest[: self.stages]), tuple(rest[self.stages :]), tuple(more))
        responses = flat.unflatten(1, (self.layers, self.side, self.side)) if self.layers else None
        return Outputs(stages, embed, vectors, responses)

    def views(self, rows: Float[Tensor, "m w"], kinds: int) -> Views:
        """Copies; their scores without gradient."""
        widths = self.view_widths
        columns = rows.view(len(rows), kinds, sum(widths)).transpose(0, 1).split(widths, dim=2)
        return Views(columns[0], tuple(probs.detach() for probs in columns[1:]))


def pack(outputs: Outputs) -> Float[Tensor, "R w"]:
    """Outputs side by side, in single precision at least."""
    scores = outputs.scores
    mil = [scores.mil_cls, scores.mil_det, *scores.mil_more]
    responses = [] if outputs.responses is None else [outputs.responses.flatten(1)]
    parts = [*mil, *scores.refine, *scores.deltas, outputs.embed, outputs.vectors, *responses]
    return torch.cat([at_least_single(part) for part in parts], dim=1)


def pack_views(views: Views) -> Float[Tensor, "m w"]:
    """Copies side by side."""
    kinds = torch.cat([views.embed, *(probs.to(views.embed.dtype) for probs in views.probs)], dim=2)  # (V, m, .)
    return kinds.transpose(0, 1).flatten(1)
