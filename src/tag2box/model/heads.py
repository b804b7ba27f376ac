"""Heads over RoI feature vectors: MIL, refinement with box regression, and similarity."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tag2box.maths.numbers import at_least_single, unit_rows

HEAD_STD = 0.001
"""Spread of fresh head weights: scores start nearly uniform."""


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=HEAD_STD)
    nn.init.zeros_(layer.bias)
    return layer


class MilHead(nn.Module):
    """Two linear streams, classification and detection (eq. 1), before their softmaxes."""

    def __init__(self, features: int, columns: int, *, temperature: float = 1.0) -> None:
        super().__init__()
        self.cls = _linear(features, columns)
        self.det = _linear(features, columns)
        self.temperature = temperature

    def logits(self, vector: Float[Tensor, "R F"]) -> tuple[Float[Tensor, "R c"], Float[Tensor, "R c"]]:
        """Of both streams; detection logits are divided by the temperature."""
        return self.cls(vector), self.det(vector) / self.temperature


class RefineHead(nn.Module):
    """One refinement stage: C+1 class logits and, if wanted, class-specific box deltas."""

    def __init__(self, features: int, num_classes: int, *, regress: bool) -> None:
        super().__init__()
        self.cls = _linear(features, num_classes + 1)
        self.box = _linear(features, 4 * num_classes) if regress else None


class SimilarityHead(nn.Module):
    """phi: two linear layers onto the unit sphere (section 4.1)."""

    def __init__(self, features: int, embed_dim: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(features, features)
        self.out = nn.Linear(features, embed_dim)
        for layer in (self.hidden, self.out):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(layer.bias)

    def forward(self, vector: Float[Tensor, "R F"]) -> Float[Tensor, "R D"]:
        """Unit-length embeddings."""
        hidden = torch.relu(self.hidden(vector))
        return unit_rows(at_least_single(self.out(hidden)))
