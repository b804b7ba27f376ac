"""Context contrast (Kantorov et al., "ContextLocNet", ECCV 2016): heads read a box minus its surroundings.

A part of an object scores as high as the whole one, but so do the part's surroundings. So the logit of a box is
w . v(box) - weight * w . v(surroundings): it is high only if the evidence ends where the box does.

``ContextBackbone`` computes RoI maps of both as one map with twice the channels, so the feature cache, exact steps and
several processes work as without context.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from tag2box.models.backbone import Backbone, WrappedBackbone
from tag2box.models.rng import RowRng
from tag2box.types import Proposals

ContextRegions = Literal["boxes", "rings"]


@dataclass(frozen=True, kw_only=True)
class Context:
    """Contrast between a proposal and its surroundings (Kantorov et al., 2016, https://arxiv.org/abs/1609.04331)."""

    on: Literal["none", "mil", "refine", "both"] = "none"
    """Heads that read the contrast: the detection stream of the MIL head, the refinement stages, both, or none."""
    scale: Annotated[float, Field(gt=1, le=10)] = 1.8
    """Sides of the surroundings relative to those of the proposal."""
    weight: Annotated[float, Field(ge=-10, le=10)] = 1.0
    """Factor of the surroundings; a negative one adds them (the paper's additive model)."""
    regions: ContextRegions = "boxes"
    """What is compared: the box and the enlarged box (``boxes``), or, as the paper and CASD's base have it, the frame
    just within the sides of the box and the ring just outside (``rings``), so that both lie at its border."""

    def contrast(self, own: Float[Tensor, "R F"], around: Float[Tensor, "R F"]) -> Float[Tensor, "R F"]:
        """v(box) - weight * v(surroundings), or v(frame) - weight * v(ring)."""
        return own - self.weight * around


def surroundings(proposals: Proposals, scale: float) -> Proposals:
    """Boxes enlarged around their centres by ``scale``, clipped to their images.

    >>> surroundings(Proposals(torch.tensor([[2.0, 2.0, 4.0, 4.0]]), (1,), ((10, 4),)), 2.0).boxes
    tensor([[1., 1., 5., 4.]])
    """
    centres, half = proposals.boxes[:, :2] + proposals.boxes[:, 2:], proposals.boxes[:, 2:] - proposals.boxes[:, :2]
    enlarged = torch.cat([centres - scale * half, centres + scale * half], dim=1) / 2
    if proposals.frames is not None:
        sides = enlarged.new_tensor(proposals.frames).reshape(-1, 2)[proposals.image_ids()].repeat(1, 2)
        enlarged = enlarged.clamp(min=0).minimum(sides)
    return Proposals(enlarged, proposals.sizes, proposals.frames)


def centres_inside(
    regions: Float[Tensor, "R 4"], boxes: Float[Tensor, "R 4"], side: int
) -> Bool[Tensor, "R side side"]:
    """Which cells of a side x side grid over each region have their centre in its box.

    >>> centres_inside(torch.tensor([[0.0, 0.0, 4.0, 4.0]]), torch.tensor([[0.0, 0.0, 2.0, 4.0]]), 2)
    tensor([[[ True, False],
             [ True, False]]])
    """
    steps = (torch.arange(side, device=boxes.device) + 0.5) / side
    centres = regions[:, :2, None] + (regions[:, 2:] - regions[:, :2])[:, :, None] * steps  # (R, xy, side)
    inside = (centres >= boxes[:, :2, None]) & (centres < boxes[:, 2:, None])
    return inside[:, 1, :, None] & inside[:, 0, None, :]


class ContextBackbone(WrappedBackbone):
    """A backbone whose RoI maps hold those of a proposal, then those of its surroundings.

    Feature vectors do, too: v(box), v(surroundings), or v(box), v(frame), v(ring).
    """

    def __init__(self, inner: Backbone, scale: float, regions: ContextRegions = "boxes") -> None:
        super().__init__(inner)
        self.scale, self.regions = scale, regions
        self.channels, self.vector_size = 2 * inner.channels, (2 if regions == "boxes" else 3) * inner.vector_size

    def roi_maps(self, features: Float[Tensor, "N c h w"], proposals: Proposals) -> Float[Tensor, "R ch s s"]:
        """RoI maps of the proposals and of their surroundings, channel after channel; a ring is zero in the box."""
        around = surroundings(proposals, self.scale)
        maps = self.inner.roi_maps(features, around)
        if self.regions == "rings":
            maps = maps * ~centres_inside(around.boxes, proposals.boxes, self.map_size)[:, None]
        return torch.cat([self.inner.roi_maps(features, proposals), maps], dim=1)

    def neck(self, maps: Float[Tensor, "R ch s s"], row_rng: RowRng | None = None) -> Float[Tensor, "R F"]:
        """The vectors of both; dropout zeroes the same values of each."""
        if self.regions == "rings":
            return self.neck_tail(self.neck_stem(maps), maps.new_ones(len(maps), *maps.shape[2:]), row_rng)
        rngs = [None if row_rng is None else row_rng.copy() for _ in range(2)]
        parts = zip(maps.chunk(2, dim=1), rngs, strict=True)
        return torch.cat([self.inner.neck(part, rng) for part, rng in parts], dim=1)

    def neck_stem(self, maps: Float[Tensor, "R ch s s"]) -> Float[Tensor, "R 2 ..."]:
        """The first part of the inner neck, for both."""
        return torch.stack([self.inner.neck_stem(part) for part in maps.chunk(2, dim=1)], dim=1)

    def neck_tail(
        self, stem: Float[Tensor, "R 2 ..."], factors: Float[Tensor, "R s s"], row_rng: RowRng | None = None
    ) -> Float[Tensor, "R F"]:
        """The rest of the inner neck, for both, with the same factors on their cells and the same dropout."""
        own, around = stem.unbind(dim=1)
        parts = [(own, factors), (around, factors)]
        if self.regions == "rings":
            parts.insert(1, (own, factors * self._frame(factors)))
        rngs = [None if row_rng is None else row_rng.copy() for _ in parts]
        return torch.cat([self.inner.neck_tail(*part, rng) for part, rng in zip(parts, rngs, strict=True)], dim=1)

    def _frame(self, factors: Float[Tensor, "R s s"]) -> Float[Tensor, "1 s s"]:
        """0 in the inner part of a box, whose sides are 1 / ``scale`` of those of the box; 1 in the frame around it."""
        unit = factors.new_tensor([[0.0, 0.0, 1.0, 1.0]])
        margin = (1 - 1 / self.scale) / 2
        return (~centres_inside(unit, unit + margin * unit.new_tensor([1, 1, -1, -1]), self.map_size)).to(factors.dtype)

    def responses(self, maps: Float[Tensor, "R ch s s"], stem: Float[Tensor, "R 2 ..."]) -> Float[Tensor, "R L s s"]:
        """Responses of the proposals; those of their surroundings are not used."""
        return self.inner.responses(maps.chunk(2, dim=1)[0], stem[:, 0])

    def roi_map_key(self) -> str:
        """The inner key, the scale, and the regions if they are rings."""
        return f"{self.inner.roi_map_key()} context {self.scale}" + (" rings" if self.regions == "rings" else "")
