"""What the network says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StageScores:
    """Head outputs of R proposals, all before any softmax. The MIL columns are C, or C+1 with a background column."""

    mil_cls: Float[Tensor, "R c"]
    mil_det: Float[Tensor, "R c"]
    refine: tuple[Float[Tensor, "R c1"], ...]  # K x (R, C+1)
    deltas: tuple[Float[Tensor, "R c4"], ...]  # K x (R, 4C), or () without box regression
    mil_more: tuple[Float[Tensor, "R c"], ...] = ()  # cls and det of every further MIL head


@dataclass(frozen=True, slots=True)
class Outputs:
    """What the network says of R proposals. What nothing asks for (``Needs``) has no columns."""

    scores: StageScores
    embed: Float[Tensor, "R D"]  # z, unit length
    vectors: Float[Tensor, "R F"]  # v~, the regularised feature vectors that the heads read
    responses: Float[Tensor, "R L s s"] | None = None  # of L layers, the mean over channels of the clean maps


@dataclass(frozen=True, slots=True)
class Views:
    """V augmented copies of m chosen proposals, as the heads see them."""

    embed: Float[Tensor, "V m D"]
    probs: tuple[Float[Tensor, "V m C"], ...]  # teacher scores of the copies, K stages, detached


ViewMaker = Callable[[Int[Tensor, " m"]], Views]
"""Proposal rows in, augmented copies out: all that a labeler ever learns about the network."""
