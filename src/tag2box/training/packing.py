"""Outputs of the network as rows of one matrix, so that they can be gathered and differentiated as a whole."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tag2box.models.detector import Detector, RefineHead
from tag2box.types import AugmentedRois, Outputs, Requirements, StageScores


@dataclass(frozen=True, slots=True)
class Layout:
    """Columns of the matrix in which the outputs of proposals are packed, one row per proposal."""

    mil: int  # columns of the MIL head
    classes: int
    stages: int
    regress: bool
    embed: int  # 0 if embeddings are not required
    vector: int = 0  # 0 if feature vectors are not required
    mil_heads: int = 1
    layers: int = 0  # 0 if responses are not required
    side: int = 0  # of the response maps
    region: bool = False  # whether there is a region classifier

    @classmethod
    def of(cls, detector: Detector, requirements: Requirements) -> Layout:
        """The layout of a detector's outputs."""
        heads = [head for head in detector.refine if isinstance(head, RefineHead)]
        return cls(
            mil=detector.mil.cls.out_features,
            classes=detector.num_classes,
            stages=len(detector.refine),
            regress=any(head.box is not None for head in heads),
            embed=detector.similarity.out.out_features if requirements.exemplars else 0,
            vector=detector.vector_size if requirements.vectors else 0,
            mil_heads=1 + len(detector.mil_more),
            layers=detector.backbone.layers if requirements.responses else 0,
            side=detector.backbone.map_size,
            region=detector.region is not None,
        )

    @property
    def width(self) -> int:
        """Total number of columns."""
        return sum(self._widths)

    @property
    def _widths(self) -> list[int]:
        boxes = [4 * self.classes] * self.stages if self.regress else []
        stages = [self.classes + 1] * self.stages
        responses = self.layers * self.side**2
        region = [self.mil] * 2 if self.region else []
        return [*[self.mil] * (2 * self.mil_heads), *stages, *boxes, *region, self.embed, self.vector, responses]

    @property
    def copy_widths(self) -> list[int]:
        """Columns of one copy: its embedding, and its scores by each teacher (one teacher even without stages)."""
        return [self.embed, *[self.classes] * max(self.stages, 1)]

    def unpack(self, rows: Float[Tensor, "R w"]) -> Outputs:
        """The rows as outputs."""
        *scores, embed, vectors, flat = rows.split(self._widths, dim=1)
        mil_cls, mil_det, *more = scores[: 2 * self.mil_heads]
        rest = scores[2 * self.mil_heads :]
        ends = self.stages, self.stages * (2 if self.regress else 1)
        parts = (tuple(rest[: ends[0]]), tuple(rest[ends[0] : ends[1]]), tuple(more), tuple(rest[ends[1] :]))
        stages = StageScores(mil_cls, mil_det, *parts)
        responses = flat.unflatten(1, (self.layers, self.side, self.side)) if self.layers else None
        return Outputs(stages, embed, vectors, responses)

    def unpack_copies(self, rows: Float[Tensor, "m w"], kinds: int) -> AugmentedRois:
        """The rows as augmented copies; their scores without gradient."""
        widths = self.copy_widths
        columns = rows.view(len(rows), kinds, sum(widths)).transpose(0, 1).split(widths, dim=2)
        return AugmentedRois(columns[0], tuple(probs.detach() for probs in columns[1:]))


def pack(outputs: Outputs) -> Float[Tensor, "R w"]:
    """Outputs side by side."""
    return torch.cat([part.flatten(1) for part in outputs.tensors()], dim=1)


def pack_copies(copies: AugmentedRois) -> Float[Tensor, "m w"]:
    """Augmented copies side by side."""
    kinds = torch.cat([copies.embed, *(probs.to(copies.embed.dtype) for probs in copies.probs)], dim=2)  # (V, m, .)
    return kinds.transpose(0, 1).flatten(1)
