"""A deterministic picture for MobileSAM: gradients and a disc, three quarters as high as wide."""

from __future__ import annotations

import torch


def picture(side: int) -> torch.Tensor:
    y, x = torch.meshgrid(torch.arange(side * 3 // 4).float(), torch.arange(side).float(), indexing="ij")
    disc = (x - side / 3) ** 2 + (y - side / 4) ** 2 < (side / 8) ** 2
    return torch.stack([x * 255 / side, y * 255 / side, disc * 200.0 + 20])


def points(side: int) -> torch.Tensor:
    return torch.tensor([[1 / 3, 1 / 4], [0.8, 0.5], [0.05, 0.7]]) * side


def boxes(side: int) -> torch.Tensor:
    return torch.tensor([[0.2, 0.12, 0.46, 0.38], [0.5, 0.4, 0.9, 0.7], [0.0, 0.0, 1.0, 0.75]]) * side
