"""A loss term from outside the package, for the table of settings."""

from dataclasses import dataclass

from torch import Tensor

from tag2box.training.criterion import LossInputs
from tag2box.types import Requirements


@dataclass(frozen=True, kw_only=True)
class LogitNorm:
    """Mean square of the MIL detection logits."""

    weight: float = 1.0
    requirements = Requirements()

    def __call__(self, batch: LossInputs) -> Tensor:
        logits = batch.outputs.scores.mil_det
        return logits.square().mean() if logits.numel() else logits.sum()
