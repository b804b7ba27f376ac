"""Boxes that others made: MCG (Arbelaez et al., 2014) and COB (Maninis et al., 2016), whose programs we do not run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NoReturn

from jaxtyping import UInt8
from numpy import ndarray

from tag2box.errors import UserError
from tag2box.proposals.policy import Found, ProposalMethod


@dataclass(frozen=True, kw_only=True)
class Imported(ProposalMethod):
    """Proposals that a store must bring along: none are searched for here."""

    kind: Literal["imported"] = "imported"
    method: Literal["mcg", "cob"] = "mcg"
    """Whose boxes are meant."""
    # how a search would run is not for us to set: these are no settings here
    short_side: int | None = field(default=None, init=False)
    max_boxes: int | None = field(default=None, init=False)
    min_side: int = field(default=0, init=False)

    def ready(self) -> NoReturn:
        """Raise: whoever asks has no store yet."""
        name = self.method.upper()
        raise UserError(
            f'proposals.kind = "imported": {name} boxes are not made here; get them from their authors, '
            "`tag2box proposals import FOLDER DATA --format mcg --out STORE`, then name them with --proposals STORE"
        )

    def search(self, bgr: UInt8[ndarray, "h w 3"], min_side: float) -> Found:
        """There is nothing to search with."""
        self.ready()

    def source(self) -> dict[str, object]:
        """Nothing that a store could have been made with."""
        return {"kind": self.kind, "method": self.method}
