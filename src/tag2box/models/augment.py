"""Augmented copies of RoIs for WSCL: random masking and Gaussian noise on RoI maps (OD-WSCL, eq. 6-7)."""

from dataclasses import dataclass
from typing import Annotated, Self

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from tag2box.models.backbone import Backbone
from tag2box.models.detector import Detector
from tag2box.models.drop_block import rescale_kept
from tag2box.models.rng import RowRng, StepRng, Stream
from tag2box.ops.losses import at_least_single, mil_view_scores
from tag2box.types import AugmentedRois, Batch


@dataclass(frozen=True, slots=True)
class Chosen:
    """Proposals to be augmented."""

    rows: Int[Tensor, " m"]
    images: Int[Tensor, " m"]  # indices in the whole batch
    masks: Float[Tensor, "m 1 h w"]

    def __getitem__(self, index: Tensor) -> Self:
        """The subset at ``index``."""
        return type(self)(self.rows[index], self.images[index], self.masks[index])


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Augmented copies of a sampled proposal that join the sampled set S besides the proposal itself."""

    mask: bool = True
    """Random masking (eq. 6)."""
    drop: Annotated[float, Field(ge=0, lt=1)] = 0.3
    """tau_drop: fraction of map cells that a mask drops."""
    rescale_mask: bool = False
    """Scale kept cells by cells / kept (the published code does, the paper does not)."""
    noise: bool = True
    """Gaussian noise (eq. 7)."""
    noise_per_channel: bool = False
    """Draw noise per channel (published code) instead of one map for all channels (paper)."""

    @property
    def kinds(self) -> int:
        """V, the number of augmented copies per proposal."""
        return int(self.mask) + int(self.noise)

    def masks(self, rng: StepRng, images: Int[Tensor, " m"], side: int) -> Float[Tensor, "m 1 h w"]:
        """Factors on the cells of the masked copies of all m chosen proposals of a batch."""
        return mask_factors(
            rng.row_rng(Stream.MASK, images).uniform(1, side, side), self.drop, rescale=self.rescale_mask
        )

    def factors(self, chosen: Chosen, rng: StepRng, channels: int) -> list[tuple[Stream, Float[Tensor, "m c h w"]]]:
        """Factors on the maps of each kind of copy, with the stream of its neck's dropout.

        c is 1 if all channels of a cell share a factor.
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
class Rois:
    """RoI maps, and the output of the neck's stem for them, which augmented copies share."""

    maps: Float[Tensor, "R ch h w"]
    stem: Float[Tensor, "R ..."]
    region: Float[Tensor, "R ch h w"] | None = None  # the maps that the region classifier reads, if there is one

    def __getitem__(self, rows: Int[Tensor, " m"]) -> Self:
        """The subset at ``rows``, to be augmented: without the region classifier."""
        return type(self)(self.maps[rows], self.stem[rows])

    def vectors(
        self, backbone: Backbone, factors: Float[Tensor, "R c h w"], row_rng: RowRng | None
    ) -> Float[Tensor, "R F"]:
        """Feature vectors of copies whose cells (c = 1) or values (c = ch) are multiplied by factors."""
        if factors.shape[1] == 1:
            return backbone.neck_tail(self.stem, factors[:, 0], row_rng)
        return backbone.neck(self.maps * factors.to(self.maps.dtype), row_rng)


def rois_of(detector: Detector, batch: Batch) -> Rois:
    """RoI maps and stem outputs of a batch."""
    maps = detector.roi_maps(batch)
    region = None if detector.region is None else detector.region.maps(batch, maps)
    return Rois(maps, detector.backbone.neck_stem(maps), region)


def mask_factors(rand: Float[Tensor, "R 1 h w"], drop: float, *, rescale: bool = False) -> Float[Tensor, "R 1 h w"]:
    """Factors of the masked copy (eq. 6): 0 for cells whose random number is below ``drop`` (tau_drop), else 1.

    With ``rescale``, a variant of the published code, kept cells are scaled by cells / kept of the batch.
    """
    mask = (rand >= drop).to(rand.dtype)
    return rescale_kept(mask) if rescale else mask


def noise_factors(rand: Float[Tensor, "R c h w"]) -> Float[Tensor, "R c h w"]:
    """Factors of the noised copy, f + f * N(0, 1) (eq. 7): c = 1, one per cell (paper), or c = ch (published code)."""
    return 1 + rand


def augment_rois(
    detector: Detector,
    rois: Rois,
    partition: Float[Tensor, "m c"],
    *,
    chosen: Chosen,
    augment: Augment,
    rng: StepRng,
) -> AugmentedRois:
    """Embeddings and teacher scores of the augmented copies of chosen proposals.

    Args:
        rois: the chosen proposals.
        partition: denominator of the MIL head's softmax over proposals, per chosen proposal: the log-sum-exp of the
            detection logits of its image's original proposals.
    """
    backbone = detector.backbone
    copies = augment.factors(chosen, rng, backbone.channels)
    vectors = [rois.vectors(backbone, factors, rng.row_rng(stream, chosen.images)) for stream, factors in copies]
    embeds = [detector.embed(vector) for vector in vectors]
    with torch.no_grad():
        stages = [_teacher_scores(detector, vector, partition) for vector in vectors]
    count, width, depth = len(partition), detector.num_classes, max(len(detector.refine), 1)
    probs = [_stack([s[k] for s in stages], (count, width), like=partition) for k in range(depth)]
    return AugmentedRois(_stack(embeds, (count, detector.similarity.out.out_features), like=partition), tuple(probs))


def _teacher_scores(
    detector: Detector, vector: Float[Tensor, "m F"], partition: Float[Tensor, "m c"]
) -> list[Float[Tensor, "m C"]]:
    """Teacher scores of copies: of the MIL head, then the softmax of stages 1 .. K-1; foreground columns only."""
    scores = detector.score(vector)
    mil = mil_view_scores(at_least_single(scores.mil_cls), at_least_single(scores.mil_det), partition)
    probs = [mil, *(at_least_single(logits).softmax(dim=1) for logits in scores.refine[:-1])]
    return [p[:, : detector.num_classes] for p in probs]


def _stack(kinds: list[Tensor], shape: tuple[int, int], *, like: Tensor) -> Float[Tensor, "V m x"]:
    return torch.stack(kinds) if kinds else like.new_zeros(0, *shape)
