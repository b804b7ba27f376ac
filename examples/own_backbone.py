"""A backbone of your own: three convolutions, and a fourth on each proposal. The guide is docs/backbones.md.

    python examples/own_backbone.py tags.csv photos runs/plain

It begins untrained and learns little: the example shows what a backbone must have. Load weights in ``build``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

import tag2box
from tag2box.models.rng import RowRng, dropout
from tag2box.models.weights import PREPROCESS
from tag2box.ops.roi import roi_align


@dataclass(frozen=True, kw_only=True)
class Plain(tag2box.BackboneSettings):
    """Settings of the backbone; ``build`` makes it."""

    width: int = 16
    """Channels of the first convolution."""
    dropout: float = 0.5
    """Dropout rate on the feature vector."""

    def build(self, *, pretrained: bool = True) -> PlainBackbone:
        """The network; ``pretrained`` is False if a checkpoint is loaded into it."""
        torch.manual_seed(0)
        return PlainBackbone(self.width, self.dropout)


class PlainBackbone(tag2box.Backbone):
    """Photo maps at stride 8, RoI maps of 7 x 7, and their mean."""

    preprocess, stride, map_size = PREPROCESS["torchvision"], 8, 7

    def __init__(self, width: int, dropout_rate: float) -> None:
        super().__init__()
        self.channels = self.vector_size = 8 * width
        sides = (3, width, 2 * width, 4 * width)
        convs = [nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in pairwise(sides)]
        self.body = nn.Sequential(convs[0], nn.ReLU(), convs[1], nn.ReLU(), convs[2])
        self.tail = nn.Conv2d(4 * width, self.channels, 3, padding=1)
        self.dropout_rate = dropout_rate
        self.body.requires_grad_(False)

    def trunk(self, images: Tensor) -> Tensor:
        """Maps of photos."""
        return torch.relu(self.body(self.preprocess(images)))

    def roi_maps(self, features: Tensor, proposals: tag2box.Proposals) -> Tensor:
        """Maps of proposals."""
        ids, scale = proposals.image_ids(), 1 / self.stride
        return torch.relu(self.tail(roi_align(features, proposals.boxes, ids, size=self.map_size, scale=scale)))

    def neck(self, maps: Tensor, row_rng: RowRng | None = None) -> Tensor:
        """Feature vectors of proposals."""
        return dropout(maps.mean(dim=(2, 3)), self.dropout_rate, row_rng)

    def roi_map_modules(self) -> tuple[nn.Module, ...]:
        """What is passed up to RoI maps."""
        return (self.body, self.tail)

    def trunk_modules(self) -> tuple[nn.Module, ...]:
        """What is passed up to photo maps."""
        return (self.body,)


def main(tags: Path, photos: Path, out: Path, iterations: int = 100) -> int:
    """Train with it, load the run, and detect; gives the number of boxes in the first photo."""
    from own_backbone import Plain  # not __main__.Plain, which no other program can import

    base = tag2box.RECIPES["photos-frozen"]()
    config = replace(
        base,
        data=tag2box.Data(tags=tags, photos=photos),
        backbone=Plain(),
        plan=replace(base.plan, iterations=iterations),
    )
    tag2box.train(config, out)
    found = tag2box.load(out)(sorted(photos.glob("*"))[0])
    print(f"{len(found.boxes)} boxes, best score {max(found.scores.tolist(), default=0):.2f}")
    return len(found.boxes)


if __name__ == "__main__":  # proposals are computed by worker processes, which import this file
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), *map(int, sys.argv[4:5]))
