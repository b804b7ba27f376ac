"""Two softmaxes (eq. 1; WSDDN, Bilen and Vedaldi 2016): which class a proposal shows, and which proposal shows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tag2box.maths.mil import mil_scores
from tag2box.mil.result import MilResult, TagLoss
from tag2box.types import Facts, Needs, StageScores


@dataclass(frozen=True, kw_only=True)
class Wsddn(TagLoss):
    """The image's score for a class is the sum over its proposals."""

    kind: Literal["wsddn"] = "wsddn"

    @property
    def needs(self) -> Needs:
        """Nothing else."""
        return Needs()

    def __call__(self, scores: StageScores, facts: Facts, progress: float) -> MilResult:
        """X, and its loss."""
        mil = mil_scores(scores.mil_cls, scores.mil_det, facts.proposals.sizes)
        return MilResult(mil, self.tag_loss(mil, facts))
