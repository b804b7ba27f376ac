"""Augmented copies of proposals, made on the RoI map: random masking and Gaussian noise (eq. 6-7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from tag2box.maths.mil import mil_view_scores
from tag2box.model.detector import Detector
from tag2box.model.regularise import noise, random_mask
from tag2box.types import Proposals, StageScores, ViewMaker, Views


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Which copies of a sampled proposal enter S beside the proposal itself."""

    mask: bool = True
    """Random masking (eq. 6)."""
    drop: Annotated[float, Field(ge=0, lt=1)] = 0.3
    """tau_drop: share of map cells a mask removes."""
    rescale_mask: bool = False
    """Scale the kept cells up by what was removed (the published code does, the paper does not)."""
    noise: bool = True
    """Gaussian noise (eq. 7)."""
    noise_per_channel: bool = False
    """Draw noise for every channel (published code) instead of one map for all of them (paper)."""

    def copies(self, maps: Float[Tensor, "m ch h w"]) -> list[Float[Tensor, "m ch h w"]]:
        """The augmented maps, one tensor a kind of copy."""
        cells = (len(maps), 1, *maps.shape[2:])
        made: list[Tensor] = []
        if self.mask:
            made.append(random_mask(maps, torch.rand(cells, device=maps.device), self.drop, rescale=self.rescale_mask))
        if self.noise:
            shape = maps.shape if self.noise_per_channel else cells
            made.append(noise(maps, torch.randn(shape, device=maps.device, dtype=maps.dtype)))
        return made


def view_maker(
    detector: Detector,
    maps: Float[Tensor, "R ch h w"],
    scores: StageScores,
    *,
    proposals: Proposals,
    augment: Augment,
) -> ViewMaker:
    """The one function through which the objective reaches the network."""
    image_ids = proposals.image_ids()
    image_det = proposals.split(scores.mil_det.detach())

    def make(rows: Int[Tensor, " m"]) -> Views:
        copies = augment.copies(maps[rows])
        vectors = [detector.neck(copy) for copy in copies]
        embeds = [detector.embed(vector) for vector in vectors]
        with torch.no_grad():
            stages = [_view_probs(detector, vector, image_ids[rows], image_det) for vector in vectors]
        width = detector.num_classes
        depth = len(scores.refine)
        probs = [_stack([s[k] for s in stages], (len(rows), width), like=maps) for k in range(depth)]
        return Views(_stack(embeds, (len(rows), detector.similarity.out.out_features), like=maps), tuple(probs))

    return make


def _view_probs(
    detector: Detector,
    vector: Float[Tensor, "m F"],
    image_ids: Int[Tensor, " m"],
    image_det: tuple[Float[Tensor, "P c"], ...],
) -> list[Float[Tensor, "m C"]]:
    """Teacher scores of copies: the MIL head's, then the softmax of stage 1 .. K-1; foreground columns."""
    scores = detector.score(vector)
    mil = mil_view_scores(scores.mil_cls, scores.mil_det, image_ids, image_det)
    probs = [mil, *(logits.softmax(dim=1) for logits in scores.refine[:-1])]
    return [p[:, : detector.num_classes] for p in probs]


def _stack(kinds: list[Tensor], shape: tuple[int, int], *, like: Tensor) -> Float[Tensor, "V m x"]:
    return torch.stack(kinds) if kinds else like.new_zeros(0, *shape)
