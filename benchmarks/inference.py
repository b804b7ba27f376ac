"""How fast are photos detected in? Reading each once for all its views, against reading it anew for every view.

    python benchmarks/inference.py --data ../shared/data/voc07-mini --out docs/results/inference.json

Real photos, random boxes as proposals, a network with random weights: time does not depend on what it knows. For one
scale, and for the seven scales with mirror images of the test:

    every view    the photo decoded and resized for each view, in turn with the network, as tag2box 0.2 did
    once          ``engine.infer.detect``: decoded once, one photo ahead, a scale shared by its mirror image

and what the parts of a single photo at one scale take. ``--pairs`` adds: a scale and its mirror image through the trunk
as a batch of two, against one after the other.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from measuring import Row, machine, measure, spread_of
from tag2box.annotations import BoxSource, Photo
from tag2box.commands.runs import build_detector
from tag2box.data.images import find_photos, load_image, load_view, read_photo
from tag2box.data.transforms import View, boxes_in_view
from tag2box.inference.predict import Inference, detect_photos_with
from tag2box.io import write_json
from tag2box.models.detector import Detector
from tag2box.models.lite0 import Lite0
from tag2box.models.vgg16 import Vgg16
from tag2box.recipes import Config, photos
from tag2box.training.feature_cache import LiveRoiMaps
from tag2box.types import Proposals

BACKBONES = {"lite0": Lite0(), "lite0-8": Lite0(pool_size=8), "vgg16": Vgg16()}


@dataclass(frozen=True)
class RandomBoxes(BoxSource):
    """So many boxes for every photo: what they hold does not matter to the time they take."""

    photos: dict[str, Photo]
    count: int

    def boxes(self, photo_id: str, /) -> Float32[Tensor, "P 4"]:
        photo = self.photos[photo_id]
        generator = torch.Generator().manual_seed(photo.width * 10_007 + photo.height)
        side = torch.tensor([photo.width, photo.height], dtype=torch.float32)
        extent = side * (0.1 + 0.8 * torch.rand(self.count, 2, generator=generator))
        corner = (side - extent) * torch.rand(self.count, 2, generator=generator)
        return torch.cat([corner, corner + extent], dim=1)


class EveryView(LiveRoiMaps):
    """Decode, resize, trunk and pool for each view, one after the other."""

    def passes(self, index: int, views: Sequence[View]) -> Iterator[Float[Tensor, "P ch h w"]]:
        return (self._one(self.photos[index], view) for view in views)

    def _one(self, photo: Photo, view: View) -> Float[Tensor, "P ch h w"]:
        boxes = boxes_in_view(view, self.store.boxes(photo.id), (photo.height, photo.width))
        trunk = self.backbone.trunk(load_view(photo, view)[None])
        return self.backbone.roi_maps(trunk, Proposals(boxes, (len(boxes),)))


WAYS = {"every view": EveryView, "once": LiveRoiMaps}


def side_by_side(detector: Detector, found: Sequence[Photo], store: BoxSource, inference: Inference, n: int) -> Row:
    """Both ways in turn, so that whatever else the machine does meets both."""
    ways = {name: way(detector.backbone, found, store) for name, way in WAYS.items()}
    laps: dict[str, list[Row]] = {name: [] for name in ways}
    for lap in range(n + 1):
        for name, maps in ways.items():
            work = partial(detect_photos_with, detector, found, store, maps=maps, inference=inference)
            row = measure(work, 1, warm=False)
            laps[name] += [row] if lap else []  # the first warms up
    rows: Row = {"photos": len(found), "views": len(inference.views()), "repeats": n}
    for name, own in laps.items():
        rows[name] = {clock: spread_of([lap[clock]["median"] for lap in own]) for clock in ("wall", "cpu")}
        rows[name]["images_per_second"] = round(len(found) / rows[name]["wall"]["median"], 4)
    before, after = (_medians(rows[name]) for name in ways)
    rows["times faster"] = {clock: round(before[clock] / after[clock], 3) for clock in before}
    return rows


def parts(detector: Detector, photo: Photo, store: BoxSource, scale: int, n: int) -> Row:
    """Where the time of a photo goes, at one scale."""
    backbone, view = detector.backbone, View(scale, long_max=2000)
    read = load_image(photo, [view])
    seen = read.seen(view)
    boxes = boxes_in_view(view, store.boxes(photo.id), (photo.height, photo.width))
    with torch.no_grad():
        trunk = backbone.trunk(seen[None])
        maps = backbone.roi_maps(trunk, Proposals(boxes, (len(boxes),)))
        works: dict[str, Callable[[], object]] = {
            "decode": lambda: read_photo(photo.path),
            "resize": lambda: read.seen(view),
            "trunk": lambda: backbone.trunk(seen[None]),
            "roi maps": lambda: backbone.roi_maps(trunk, Proposals(boxes, (len(boxes),))),
            "neck and heads": lambda: detector.score(detector.neck(maps)),
        }
        return {name: _medians(measure(work, n)) for name, work in works.items()}


def pairs(detector: Detector, photo: Photo, scales: Sequence[int], n: int) -> Row:
    """The trunk on a scale and its mirror image: as a batch of two, and one after the other."""
    trunk, rows = detector.backbone.trunk, {}
    with torch.no_grad():
        for scale in scales:
            seen = load_view(photo, View(scale, long_max=2000))
            both = torch.stack([seen, seen.flip(2)])
            apart = measure(lambda b=both: [trunk(x[None]) for x in b], n)  # type: ignore[misc]
            together = measure(lambda b=both: trunk(b), n)  # type: ignore[misc]
            rows[str(scale)] = {"apart": _medians(apart), "together": _medians(together)}
    return rows


def _medians(row: Row) -> Row:
    return {clock: row[clock]["median"] for clock in ("wall", "cpu")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a VOC folder, or any folder of photos")
    parser.add_argument("--photos", type=int, default=6)
    parser.add_argument("--boxes", type=int, default=300)
    parser.add_argument("--scale", type=int, default=480, help="of the test at one scale")
    parser.add_argument("--backbone", choices=BACKBONES, default="lite0-8")
    parser.add_argument("--scales", type=int, nargs="+", default=Inference().scales, help="of the test at several")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    files = sorted((asked.data / "JPEGImages" if (asked.data / "JPEGImages").exists() else asked.data).glob("*.jpg"))
    found = find_photos(files[:: max(1, len(files) // asked.photos)][: asked.photos])
    store = RandomBoxes({photo.id: photo for photo in found}, asked.boxes)
    config: Config = replace(photos(), backbone=BACKBONES[asked.backbone])
    detector = build_detector(config, 20, pretrained=False).eval()
    one, many = Inference(scales=(asked.scale,), mirror=False), Inference(scales=tuple(asked.scales))
    n = asked.repeats
    result: Row = {
        "machine": machine(),
        "backbone": asked.backbone,
        "boxes": asked.boxes,
        "one photo, one scale": side_by_side(detector, found[:1], store, one, n),
        "parts of it, seconds": parts(detector, found[0], store, asked.scale, n),
        "photos, one scale": side_by_side(detector, found, store, one, n),
        "photos, all scales and mirrored": side_by_side(detector, found, store, many, n),
    }
    if asked.pairs:
        result["pairs through the trunk"] = pairs(detector, found[0], asked.scales, n)
    print(result)
    if asked.out:
        write_json(asked.out, result)


if __name__ == "__main__":
    main()
