"""Context contrast (Kantorov et al., "ContextLocNet", ECCV 2016): heads read a box minus its surroundings.

A part of an object scores as high as the whole one, but so do the part's surroundings. So the logit of a box is
w . v(box) - weight * w . v(surroundings): it is high only if the evidence ends where the box does.

``ContextBackbone`` computes RoI maps of both as one map with twice the channels, so the feature cache, exact steps and
several processes work as without context.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from tag2box.models.backbone import Backbone, Preprocess
from tag2box.models.rng import RowRng
from tag2box.types import Proposals


@dataclass(frozen=True, kw_only=True)
class Context:
    """Contrast between a proposal and its surroundings (Kantorov et al., 2016, https://arxiv.org/abs/1609.04331)."""

    on: Literal["none", "mil", "refine", "both"] = "none"
    """Heads that read the contrast: the detection stream of the MIL head, the refinement stages, both, or none."""
    scale: Annotated[float, Field(gt=1, le=10)] = 1.8
    """Sides of the surroundings relative to those of the proposal."""
    weight: Annotated[float, Field(ge=-10, le=10)] = 1.0
    """Factor of the surroundings; a negative one adds them (the paper's additive model)."""

    def contrast(self, own: Float[Tensor, "R F"], around: Float[Tensor, "R F"]) -> Float[Tensor, "R F"]:
        """v(box) - weight * v(surroundings)."""
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


class ContextBackbone(Backbone):
    """A backbone whose RoI maps and feature vectors hold those of a proposal, then those of its surroundings."""

    def __init__(self, inner: Backbone, scale: float) -> None:
        super().__init__()
        self.inner, self.scale = inner, scale
        self.stride, self.map_size, self.layers = inner.stride, inner.map_size, inner.layers
        self.channels, self.vector_size = 2 * inner.channels, 2 * inner.vector_size

    @property
    def preprocess(self) -> Preprocess:  # type: ignore[override]
        """The preprocessing of the inner backbone."""
        return self.inner.preprocess

    def trunk(self, images: Float[Tensor, "N 3 H W"]) -> Float[Tensor, "N c h w"]:
        """The map of each photo."""
        return self.inner.trunk(images)

    def roi_maps(self, features: Float[Tensor, "N c h w"], proposals: Proposals) -> Float[Tensor, "R ch s s"]:
        """RoI maps of the proposals and of their surroundings, channel after channel."""
        around = surroundings(proposals, self.scale)
        return torch.cat([self.inner.roi_maps(features, proposals), self.inner.roi_maps(features, around)], dim=1)

    def neck(self, maps: Float[Tensor, "R ch s s"], row_rng: RowRng | None = None) -> Float[Tensor, "R F"]:
        """The vectors of both; dropout zeroes the same values of each."""
        parts = zip(maps.chunk(2, dim=1), _twice(row_rng), strict=True)
        return torch.cat([self.inner.neck(part, rng) for part, rng in parts], dim=1)

    def neck_stem(self, maps: Float[Tensor, "R ch s s"]) -> Float[Tensor, "R 2 ..."]:
        """The first part of the inner neck, for both."""
        return torch.stack([self.inner.neck_stem(part) for part in maps.chunk(2, dim=1)], dim=1)

    def neck_tail(
        self, stem: Float[Tensor, "R 2 ..."], factors: Float[Tensor, "R s s"], row_rng: RowRng | None = None
    ) -> Float[Tensor, "R F"]:
        """The rest of the inner neck, for both, with the same factors on their cells and the same dropout."""
        parts = zip(stem.unbind(dim=1), _twice(row_rng), strict=True)
        return torch.cat([self.inner.neck_tail(part, factors, rng) for part, rng in parts], dim=1)

    def responses(self, maps: Float[Tensor, "R ch s s"], stem: Float[Tensor, "R 2 ..."]) -> Float[Tensor, "R L s s"]:
        """Responses of the proposals; those of their surroundings are not used."""
        return self.inner.responses(maps.chunk(2, dim=1)[0], stem[:, 0])

    @property
    def photo_channels(self) -> int:
        """Those of the inner backbone."""
        return self.inner.photo_channels

    def photo_features(self, trunk: Float[Tensor, "N c h w"], *, dense: bool = False) -> Float[Tensor, "N F h1 w1"]:
        """Those of the inner backbone."""
        return self.inner.photo_features(trunk, dense=dense)

    def photo_modules(self) -> tuple[nn.Module, ...]:
        """Those of the inner backbone."""
        return self.inner.photo_modules()

    def roi_map_modules(self) -> tuple[nn.Module, ...]:
        """Those of the inner backbone."""
        return self.inner.roi_map_modules()

    def roi_map_key(self) -> str:
        """The inner key and the scale."""
        return f"{self.inner.roi_map_key()} context {self.scale}"

    def trunk_modules(self) -> tuple[nn.Module, ...]:
        """Those of the inner backbone."""
        return self.inner.trunk_modules()

    def trunk_key(self) -> str:
        """The inner key: trunk maps do not depend on the context."""
        return self.inner.trunk_key()


def _twice(row_rng: RowRng | None) -> tuple[RowRng | None, RowRng | None]:
    """Two RNGs that draw the same numbers."""
    return (None, None) if row_rng is None else (row_rng.copy(), row_rng)
