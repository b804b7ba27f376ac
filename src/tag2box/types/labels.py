"""What the objective decides: exemplars, seeds, pseudo labels, losses."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tag2box.types.batch import Clues, Proposals


@dataclass(frozen=True, slots=True)
class Needs:
    """What a part of the objective asks for beyond scores and tags."""

    exemplars: bool = False  # the set S, and embeddings with it
    vectors: bool = False  # feature vectors of proposals
    counts: bool = False  # Clues.counts; missing ones are bridged
    evidence: bool = False  # Clues.evidence
    objectness: bool = False  # Clues.objectness
    mil_heads: int = 1
    responses: bool = False  # mean responses of the network's layers to a proposal's cells
    layers: int = 1  # how many of these layers, at least
    looks: int = 1  # how many looks at a photo, at least

    def __or__(self, other: Needs) -> Needs:
        """What both ask for."""
        return Needs(*(max(getattr(self, need.name), getattr(other, need.name)) for need in fields(Needs)))


@dataclass(frozen=True, slots=True)
class Exemplars:
    """The set S (eq. 8): embeddings believed to show class ``cls``. M rows."""

    embed: Float[Tensor, "M D"]
    cls: Int[Tensor, " M"]
    weight: Float[Tensor, " M"]  # instance difficulty omega (eq. 12), detached
    rows: Int[Tensor, " M"]  # the proposal each one shows
    probs: tuple[Float[Tensor, " M"], ...] = ()  # K x teacher score of its class on this very view, detached

    def __len__(self) -> int:
        return int(self.cls.shape[0])


@dataclass(frozen=True, slots=True)
class Scene:
    """What a labeler sees of a batch: scores, embeddings and exemplars, never the network."""

    proposals: Proposals
    tags: Bool[Tensor, "N C"]
    probs: tuple[Float[Tensor, "R C"], ...]  # K teachers: MIL scores, then softmax of stage 1 .. K-1; detached
    embed: Float[Tensor, "R D"]  # unit length
    exemplars: Exemplars
    vectors: Float[Tensor, "R F"] | None = None  # detached; None unless the labeler needs them
    second: Float[Tensor, "R C"] | None = None  # scores of a second MIL head, where there is one; detached
    clues: Clues = Clues()
    progress: float = 0.0  # share of the training that is done


@dataclass(frozen=True, slots=True)
class Seeds:
    """Pseudo ground truth of one stage: S proposals taken for objects."""

    rows: Int[Tensor, " S"]
    cls: Int[Tensor, " S"]
    score: Float[Tensor, " S"]  # teacher score, becomes the loss weight of what is assigned to the seed
    boxes: Float[Tensor, "S 4"] | None = None  # where pseudo boxes are not those of their rows, only near them

    def placed(self, proposals: Proposals) -> Float[Tensor, "S 4"]:
        """The pseudo boxes."""
        return proposals.boxes[self.rows] if self.boxes is None else self.boxes

    def __len__(self) -> int:
        return int(self.rows.shape[0])

    def to(self, device: torch.device) -> Seeds:
        """The same on a device."""
        boxes = None if self.boxes is None else self.boxes.to(device)
        return Seeds(self.rows.to(device), self.cls.to(device), self.score.to(device), boxes)


@dataclass(frozen=True, slots=True)
class PseudoLabels:
    """Instance-level supervision of one stage. A weight of zero takes a proposal out of the loss."""

    cls: Int[Tensor, " R"]  # 0 .. C-1, or C for background
    weight: Float[Tensor, " R"]
    boxes: Float[Tensor, "R 4"]  # the pseudo box each proposal should regress to
    seeds: Seeds
    owner: Int[Tensor, " R"]  # the seed each proposal was judged by; -1 where its image has none


@dataclass(frozen=True, slots=True)
class Labeling:
    """A labeler's answer: K stages of pseudo labels, and the thresholds it used, for the curves."""

    stages: tuple[PseudoLabels, ...]
    thresholds: tuple[Float[Tensor, " t"], ...] = ()  # tau per stage, one entry per (image, class)


@dataclass(frozen=True, slots=True)
class Losses:
    """The terms of eq. 13 and those that other systems add to it (None where they are off), unweighted."""

    mil: Float[Tensor, ""]
    refine: Float[Tensor, ""]
    box: Float[Tensor, ""]
    contrast: Float[Tensor, ""]
    spatial: Float[Tensor, ""] | None = None  # WSDDN's regulariser
    attention: Float[Tensor, ""] | None = None  # CASD's two terms by their weights, before the ramp

    def named(self) -> dict[str, Float[Tensor, ""]]:
        """The terms that are on, by name."""
        terms = ((term.name, getattr(self, term.name)) for term in fields(self))
        return {name: value for name, value in terms if value is not None}
