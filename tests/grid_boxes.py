"""Boxes on a small integer grid, from a seed: ties, duplicates, containment and touching edges all happen."""

from __future__ import annotations

import torch


def grid_boxes(count: int, seed: int, size: int = 12) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    corner = torch.randint(0, size, (count, 2), generator=g)
    return torch.cat([corner, corner + torch.randint(1, size, (count, 2), generator=g)], dim=1).float()
