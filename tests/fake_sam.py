"""MobileSAM with a tiny encoder and masks that need no training: discs of four sizes around the middle of a prompt."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tag2box.models.mobile_sam import MASK_STRIDE, STRIDE, MaskOutput, MobileSam
from tag2box.proposals import sam_boxes

RADII = (0.25, 0.1, 0.2, 0.4)  # as shares of the image's side


class FakeSam(MobileSam):
    def __init__(self) -> None:
        super().__init__(widths=(8, 8, 10, 20), channels=32)

    def masks(self, embedding: Tensor, points: Tensor, kinds: Tensor) -> MaskOutput:
        side = embedding.shape[2] * STRIDE
        middle = points[:, kinds >= 0].mean(dim=1)  # (N, 2)
        cells = (torch.arange(side // MASK_STRIDE) + 0.5) * MASK_STRIDE
        away = ((cells - middle[:, :1])[:, None, :] ** 2 + (cells - middle[:, 1:])[:, :, None] ** 2).sqrt()
        logits = torch.stack([share * side - away for share in RADII], dim=1)
        return MaskOutput(logits, torch.tensor([0.9, 0.6, 0.7, 0.8]).expand(len(points), 4))


def use_fake_sam(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let proposals use it instead of the stored weights."""
    torch.manual_seed(0)
    made = FakeSam()
    monkeypatch.setattr(sam_boxes, "mobile_sam_network", lambda: made)
