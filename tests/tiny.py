"""A tiny world for tests of model, engine and commands: a network of a few channels, real photos, a real store.

photos = tiny_photos(tmp_path, 5)                       # JPEGs and tags on disk
store = tiny_store(tmp_path, photos.photos, counts=[6, 0, 6, 1, 6])
detector = tiny_detector(len(photos.classes))           # frozen maps; frozen=False lets the trunk learn
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.nn import functional

from tag2box.annotations import Photo, TaggedPhotos
from tag2box.models.backbone import Backbone, Preprocess
from tag2box.models.class_maps import CellMaps, ClassMaps
from tag2box.models.detector import Detector, Heads
from tag2box.models.rng import RowRng, dropout
from tag2box.ops.roi import roi_align
from tag2box.proposals.base import Candidates
from tag2box.proposals.store import ProposalStore, write_store
from tag2box.types import Proposals

CLASSES = ("disc", "box", "bar", "cross", "ring")
COLOURS = ("crimson", "royalblue", "gold", "seagreen", "purple")


class TinyBackbone(Backbone):
    """Mean pixels of 4 x 4 squares, one 1 x 1 convolution, RoIAlign to 3 x 3, one linear layer."""

    preprocess = Preprocess(order="rgb", scale=1 / 255, mean=(0.5, 0.4, 0.3), std=(0.5, 0.5, 0.5))
    stride = 4
    channels = 5
    map_size = 3
    vector_size = 8
    early_layers = 2

    def __init__(self, *, frozen: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.conv = nn.Conv2d(3, self.channels, 1)
        self.fc = nn.Linear(self.channels * self.map_size**2, self.vector_size)
        self.conv.requires_grad_(not frozen)

    def trunk(self, images: Tensor) -> Tensor:
        pixels = functional.avg_pool2d(self.preprocess(images), self.stride, ceil_mode=True)
        return torch.relu(self.conv(pixels))

    def roi_maps(self, features: Tensor, proposals: Proposals) -> Tensor:
        scale = 1 / self.stride
        return roi_align(features, proposals.boxes, proposals.image_ids(), size=self.map_size, scale=scale)

    def layered_roi_maps(self, features: Tensor, means: Tensor, proposals: Proposals) -> tuple[Tensor, Tensor]:
        maps = self.roi_maps(features, proposals)
        return maps, torch.stack([maps.amax(dim=1), maps.square().mean(dim=1)], dim=1)

    def neck(self, maps: Tensor, row_rng: RowRng | None = None) -> Tensor:
        return dropout(torch.relu(self.fc(maps.flatten(1))), self.dropout, row_rng)

    def roi_map_modules(self) -> tuple[nn.Module, ...]:
        return (self.conv,)


def tiny_detector(
    num_classes: int,
    frozen: bool = True,
    *,
    heads: Heads | None = None,
    seed: int = 0,
    maps_side: int = 0,
    cells: bool = False,
) -> Detector:
    """A detector whose weights come from a seed and are wide enough for scores to differ; train() changes nothing.

    Args:
        maps_side: with a side of photos above 0, the detector has class maps.
        cells: the class maps are those of single cells.
    """
    class_maps = (CellMaps if cells else ClassMaps)(TinyBackbone(), num_classes, maps_side) if maps_side else None
    detector = Detector(TinyBackbone(frozen=frozen), num_classes, heads or Heads(embed_dim=6), class_maps)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in detector.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return detector


def tiny_photos(folder: Path, count: int, classes: Sequence[str] = CLASSES[:3]) -> TaggedPhotos:
    """``count`` JPEGs of differing sizes under ``folder``/photos; photo i is tagged i mod C, every third also i + 1."""
    (folder / "photos").mkdir(parents=True, exist_ok=True)
    tags = torch.zeros(count, len(classes), dtype=torch.bool)
    photos = []
    for i in range(count):
        width, height = 48 + 8 * (i % 3), 40 + 4 * (i % 2)
        image = Image.new("RGB", (width, height), (90 + 20 * (i % 5), 120, 110))
        shown = {i % len(classes)} | ({(i + 1) % len(classes)} if i % 3 == 0 else set())
        for slot, c in enumerate(sorted(shown)):
            tags[i, c] = True
            left = 4 + 22 * slot
            ImageDraw.Draw(image).rectangle([left, 6 + i % 4, left + 16, 26 + i % 4], fill=COLOURS[c % len(COLOURS)])
        path = folder / "photos" / f"photo{i}.jpg"
        image.save(path, quality=95)
        photos.append(Photo(f"photo{i}", path, width, height))
    return TaggedPhotos(tuple(classes), tuple(photos), tags)


def tiny_store(
    folder: Path, photos: Sequence[Photo], *, counts: Sequence[int] | None = None, seed: int = 0
) -> ProposalStore:
    """A proposal store under ``folder``/proposals: random boxes in each photo, 6 unless ``counts`` says otherwise."""
    generator = torch.Generator().manual_seed(seed)
    wanted = [6] * len(photos) if counts is None else counts
    boxes = [Candidates.unranked(tiny_boxes(photo, n, generator)) for photo, n in zip(photos, wanted, strict=True)]
    write_store(folder / "proposals", {"kind": "tiny", "seed": seed}, photos, boxes)
    return ProposalStore.open(folder / "proposals")


def tiny_boxes(photo: Photo, count: int, generator: torch.Generator) -> Tensor:
    """Random boxes of a quarter of the side or more, inside a photo."""
    side = torch.tensor([photo.width, photo.height], dtype=torch.float32)
    extent = side * (0.25 + 0.4 * torch.rand(count, 2, generator=generator))
    corner = (side - extent) * torch.rand(count, 2, generator=generator)
    return torch.cat([corner, corner + extent], dim=1)
