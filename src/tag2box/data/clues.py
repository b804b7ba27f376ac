"""Where the clues of photos come from: what is known beside tags and boxes, and asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float32, Int
from torch import Tensor

from tag2box.types import Clues

OfProposals = Callable[[str], Float32[Tensor, " P"]]
"""A photo's id in, a number for each of its proposals out, in their order."""


@dataclass(frozen=True, slots=True)
class ClueSource:
    """Clues by photo. What nothing asks for is None, and never read."""

    counts: Int[Tensor, "N C"] | None = None
    evidence: OfProposals | None = None
    objectness: OfProposals | None = None

    def of(self, index: int, photo_id: str, rows: Int[Tensor, " p"]) -> Clues:
        """The clues of one photo, and of the proposals that were drawn from it."""
        counts = None if self.counts is None else self.counts[index : index + 1]
        return Clues(counts, *(None if x is None else x(photo_id)[rows] for x in (self.evidence, self.objectness)))


NO_CLUES = ClueSource()
