"""The detector: a backbone and the heads on it, as the few steps a batch goes through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from tag2box.model.backbone import Backbone
from tag2box.model.heads import MilHead, RefineHead, SimilarityHead
from tag2box.model.luck import Dice
from tag2box.types import Batch, Proposals, StageScores


@dataclass(frozen=True, kw_only=True)
class Heads:
    """What stands on the backbone."""

    stages: Annotated[int, Field(ge=0)] = 3
    """K, the number of refinement stages; without any, the MIL head itself detects."""
    regress: bool = True
    """Class-specific box regression in every stage."""
    embed_dim: Annotated[int, Field(ge=1)] = 128
    """D, the size of the similarity embedding."""
    mil_background: bool = False
    """A background column in both MIL softmaxes (the published code has one, the paper has none).

    A single class always gets one: a softmax over one column is 1 whatever the photo shows, and nothing would learn.
    """

    mil_heads: Annotated[int, Field(ge=1, le=2)] = 1
    """Pairs of MIL layers; a coupled MIL strategy reads two."""
    mil_temperature: Annotated[float, Field(gt=0)] = 1.0
    """What detection logits are divided by before the softmax over proposals; WSDDN's authors take 2."""

    box_prior: Annotated[float, Field(ge=0)] = 0.0
    """Maps of proposals are multiplied by this times the score their method gave them; 0 leaves them as they are.

    WSDDN's authors take 10 with Edge Boxes. Needs proposals with scores.
    """

    def mil_columns(self, num_classes: int) -> int:
        """Width of the MIL head."""
        return num_classes + int(self.mil_background or num_classes == 1)


class Detector(nn.Module):
    """Trunk, RoI maps, neck and heads. Each step is a method; nothing here knows about losses or labels."""

    def __init__(self, backbone: Backbone, num_classes: int, heads: Heads) -> None:
        super().__init__()
        features = backbone.vector_size
        self.num_classes = num_classes
        self.backbone = backbone
        self.box_prior = heads.box_prior
        columns, temperature = heads.mil_columns(num_classes), heads.mil_temperature
        self.mil, *more = (MilHead(features, columns, temperature=temperature) for _ in range(heads.mil_heads))
        self.mil_more = nn.ModuleList(more)
        self.refine = nn.ModuleList(
            RefineHead(features, num_classes, regress=heads.regress) for _ in range(heads.stages)
        )
        self.similarity = SimilarityHead(features, heads.embed_dim)

    def roi_maps(self, batch: Batch) -> Float[Tensor, "R ch h w"]:
        """f: one small map a proposal; read from the batch where frozen maps were kept."""
        return self.believed(self._plain_maps(batch), batch.clues.objectness)

    def believed(
        self, maps: Float[Tensor, "R ch h w"], objectness: Float[Tensor, " R"] | None
    ) -> Float[Tensor, "R ch h w"]:
        """Maps weighed by what is thought of their proposals, where that is asked for."""
        if self.box_prior == 0:
            return maps
        assert objectness is not None  # asked for before training starts
        return maps * (self.box_prior * objectness).to(maps)[:, None, None, None]

    def _plain_maps(self, batch: Batch) -> Float[Tensor, "R ch h w"]:
        if batch.maps is not None:
            return batch.maps
        if batch.images is not None:
            return self.backbone.roi_maps(self.backbone.trunk(batch.images), batch.proposals)
        assert batch.trunks is not None  # a Batch carries one of the three
        photos = zip(batch.trunks, batch.proposals.split(batch.proposals.boxes), strict=True)
        return torch.cat([self.backbone.roi_maps(t[None], Proposals(b, (len(b),))) for t, b in photos])

    def neck(self, maps: Float[Tensor, "R ch h w"], dice: Dice | None = None) -> Float[Tensor, "R F"]:
        """v = eta(f): the feature vector of each proposal."""
        return self.backbone.neck(maps, dice)

    def score(self, vector: Float[Tensor, "R F"]) -> StageScores:
        """Logits and deltas of all stages."""
        stages = [stage for stage in self.refine if isinstance(stage, RefineHead)]
        more = [head for head in self.mil_more if isinstance(head, MilHead)]
        mil_cls, mil_det = self.mil.logits(vector)
        return StageScores(
            mil_cls=mil_cls,
            mil_det=mil_det,
            refine=tuple(stage.cls(vector) for stage in stages),
            deltas=tuple(stage.box(vector) for stage in stages if stage.box is not None),
            mil_more=tuple(x for head in more for x in head.logits(vector)),
        )

    def embed(self, vector: Float[Tensor, "R F"]) -> Float[Tensor, "R D"]:
        """z = phi(v): unit-length embeddings."""
        embedding: Tensor = self.similarity(vector)
        return embedding
