"""MIL strategies: how the tags of a photo teach its proposals. One file a strategy.

A strategy is a frozen dataclass whose fields are its settings and whose ``__call__`` does the work.
"""

from __future__ import annotations

from typing import Protocol

from tag2box.mil.c_midn import CMidn
from tag2box.mil.c_mil import CMil
from tag2box.mil.rescore import EVERYTHING, Rescore
from tag2box.mil.result import MilResult
from tag2box.mil.wsddn import Wsddn
from tag2box.types import Facts, Needs, StageScores


class MilStrategy(Protocol):
    """What the objective asks of a strategy."""

    @property
    def weight(self) -> float:
        """Factor of its loss."""
        ...

    @property
    def needs(self) -> Needs:
        """What it asks for beyond the logits of one head and tags."""
        ...

    def __call__(self, scores: StageScores, facts: Facts, progress: float) -> MilResult:
        """Scores of proposals, and the loss of a whole batch."""
        ...


BuiltInMil = Wsddn | CMil | CMidn
"""The strategies that settings know, told apart by their ``kind``: a new one is added here."""

__all__ = ["EVERYTHING", "BuiltInMil", "CMidn", "CMil", "MilResult", "MilStrategy", "Rescore", "Wsddn"]
