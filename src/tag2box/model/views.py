"""Augmented copies of proposals, made on the RoI map: random masking and Gaussian noise (eq. 6-7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from tag2box.maths.mil import mil_view_scores
from tag2box.maths.numbers import at_least_single
from tag2box.model.detector import Detector
from tag2box.model.luck import Luck, Purpose
from tag2box.model.regularise import mask_factors, noise
from tag2box.types import Views


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

    @property
    def kinds(self) -> int:
        """V, the number of copies of a proposal."""
        return int(self.mask) + int(self.noise)

    def masks(self, luck: Luck, images: Int[Tensor, " m"], side: int) -> Float[Tensor, "m 1 h w"]:
        """What the cells of the masked copies of all m chosen proposals of a batch are multiplied with."""
        return mask_factors(
            luck.dice(Purpose.MASK, images).uniform(1, side, side), self.drop, rescale=self.rescale_mask
        )

    def copies(
        self, maps: Float[Tensor, "m ch h w"], masks: Float[Tensor, "m 1 h w"], luck: Luck, images: Int[Tensor, " m"]
    ) -> list[tuple[Purpose, Float[Tensor, "m ch h w"]]]:
        """The augmented maps, one tensor a kind of copy, each with what its neck draws from."""
        made: list[tuple[Purpose, Tensor]] = []
        if self.mask:
            made.append((Purpose.MASK_NECK, maps * masks.to(maps.dtype)))
        if self.noise:
            channels = maps.shape[1] if self.noise_per_channel else 1
            drawn = luck.dice(Purpose.NOISE, images).normal(channels, *maps.shape[2:])
            made.append((Purpose.NOISE_NECK, noise(maps, drawn.to(maps.dtype))))
        return made


@dataclass(frozen=True, slots=True)
class Chosen:
    """Proposals of which copies are wanted."""

    rows: Int[Tensor, " m"]
    images: Int[Tensor, " m"]  # numbers in the whole batch
    masks: Float[Tensor, "m 1 h w"]

    def __getitem__(self, index: Tensor) -> Chosen:
        """Some of them."""
        return Chosen(self.rows[index], self.images[index], self.masks[index])


def make_views(
    detector: Detector,
    maps: Float[Tensor, "m ch h w"],
    partition: Float[Tensor, "m c"],
    *,
    chosen: Chosen,
    augment: Augment,
    luck: Luck,
) -> Views:
    """Copies of chosen proposals as the heads see them.

    Args:
        maps: of the chosen proposals.
        partition: of each one's image, what its copies are weighed against in the MIL head's softmax over proposals:
            the log-sum-exp of the original proposals' detection logits.
    """
    copies = augment.copies(maps, chosen.masks, luck, chosen.images)
    vectors = [detector.neck(copy, luck.dice(purpose, chosen.images)) for purpose, copy in copies]
    embeds = [detector.embed(vector) for vector in vectors]
    with torch.no_grad():
        stages = [_view_probs(detector, vector, partition) for vector in vectors]
    count, width, depth = len(maps), detector.num_classes, len(detector.refine)
    probs = [_stack([s[k] for s in stages], (count, width), like=partition) for k in range(depth)]
    return Views(_stack(embeds, (count, detector.similarity.out.out_features), like=partition), tuple(probs))


def _view_probs(
    detector: Detector, vector: Float[Tensor, "m F"], partition: Float[Tensor, "m c"]
) -> list[Float[Tensor, "m C"]]:
    """Teacher scores of copies: the MIL head's, then the softmax of stage 1 .. K-1; foreground columns."""
    scores = detector.score(vector)
    mil = mil_view_scores(at_least_single(scores.mil_cls), at_least_single(scores.mil_det), partition)
    probs = [mil, *(at_least_single(logits).softmax(dim=1) for logits in scores.refine[:-1])]
    return [p[:, : detector.num_classes] for p in probs]


def _stack(kinds: list[Tensor], shape: tuple[int, int], *, like: Tensor) -> Float[Tensor, "V m x"]:
    return torch.stack(kinds) if kinds else like.new_zeros(0, *shape)
