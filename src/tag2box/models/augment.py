"""Augmented copies of proposals, made on the RoI map: random masking and Gaussian noise (eq. 6-7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from tag2box.models.backbone import Backbone
from tag2box.models.detector import Detector
from tag2box.models.drop_block import mask_factors, noise_factors
from tag2box.models.rng import RowRng, StepRng, Stream
from tag2box.ops.boxes import at_least_single
from tag2box.ops.mil import mil_view_scores
from tag2box.types import AugmentedRois, Batch


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

    def masks(self, rng: StepRng, images: Int[Tensor, " m"], side: int) -> Float[Tensor, "m 1 h w"]:
        """What the cells of the masked copies of all m chosen proposals of a batch are multiplied with."""
        return mask_factors(
            rng.row_rng(Stream.MASK, images).uniform(1, side, side), self.drop, rescale=self.rescale_mask
        )

    def factors(self, chosen: Chosen, rng: StepRng, channels: int) -> list[tuple[Stream, Float[Tensor, "m c h w"]]]:
        """What the maps of each kind of copy are multiplied with, and what its neck draws from.

        c is 1 where all channels of a cell have the same factor.
        """
        made: list[tuple[Stream, Tensor]] = []
        if self.mask:
            made.append((Stream.MASK_NECK, chosen.masks))
        if self.noise:
            shape = (channels if self.noise_per_channel else 1, *chosen.masks.shape[2:])
            drawn = rng.row_rng(Stream.NOISE, chosen.images).normal(*shape)
            made.append((Stream.NOISE_NECK, noise_factors(drawn)))
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


@dataclass(frozen=True, slots=True)
class Rois:
    """Maps of proposals, and what the neck's first part makes of them, which their copies share."""

    maps: Float[Tensor, "R ch h w"]
    stem: Float[Tensor, "R ..."]

    def __getitem__(self, rows: Int[Tensor, " m"]) -> Rois:
        """Some of them."""
        return Rois(self.maps[rows], self.stem[rows])

    def vectors(
        self, backbone: Backbone, factors: Float[Tensor, "R c h w"], row_rng: RowRng | None
    ) -> Float[Tensor, "R F"]:
        """The vectors of a copy whose cells, or whose every value, is multiplied by factors."""
        if factors.shape[1] == 1:
            return backbone.neck_tail(self.stem, factors[:, 0], row_rng)
        return backbone.neck(self.maps * factors.to(self.maps.dtype), row_rng)


def rois_of(detector: Detector, batch: Batch) -> Rois:
    """The proposals of a batch."""
    maps = detector.roi_maps(batch)
    return Rois(maps, detector.backbone.neck_stem(maps))


def make_views(
    detector: Detector,
    rois: Rois,
    partition: Float[Tensor, "m c"],
    *,
    chosen: Chosen,
    augment: Augment,
    rng: StepRng,
) -> AugmentedRois:
    """Copies of chosen proposals as the heads see them.

    Args:
        rois: the chosen proposals.
        partition: of each one's image, what its copies are weighed against in the MIL head's softmax over proposals:
            the log-sum-exp of the original proposals' detection logits.
    """
    backbone = detector.backbone
    copies = augment.factors(chosen, rng, backbone.channels)
    vectors = [rois.vectors(backbone, factors, rng.row_rng(purpose, chosen.images)) for purpose, factors in copies]
    embeds = [detector.embed(vector) for vector in vectors]
    with torch.no_grad():
        stages = [_view_probs(detector, vector, partition) for vector in vectors]
    count, width, depth = len(partition), detector.num_classes, max(len(detector.refine), 1)
    probs = [_stack([s[k] for s in stages], (count, width), like=partition) for k in range(depth)]
    return AugmentedRois(_stack(embeds, (count, detector.similarity.out.out_features), like=partition), tuple(probs))


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
