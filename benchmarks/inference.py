"""Speed of detection: each photo decoded once for all its views, or once per view.

    python benchmarks/inference.py --data VOC2007 --out docs/results/inference.json

Real photos, random boxes as proposals, a network with random weights (time does not depend on the weights). For one
scale, and for the seven scales with horizontal flips of the test:

    every view    the photo decoded and resized per view, alternating with the network
    once          ``inference.predict``: decoded once, one photo ahead, resized once per scale

and the time of each stage for a single photo at one scale. ``--pairs`` adds: a scale and its horizontal flip through
the trunk as a batch of two, or one after the other.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from loader import RandomBoxes
from measuring import Row, machine, measure, spread_of
from tag2box.annotations import BoxSource, Photo
from tag2box.cli.inputs import find_photos
from tag2box.images import View, boxes_in_view, load_image, load_view, read_photo
from tag2box.inference.predict import Inference, run_detector
from tag2box.io import write_json
from tag2box.models.detector import Detector
from tag2box.models.lite0 import Lite0
from tag2box.models.vgg16 import Vgg16
from tag2box.recipes import Config, photos
from tag2box.runs import build_detector
from tag2box.training.feature_cache import RoiMaps
from tag2box.types import Proposals

BACKBONES = {"lite0": Lite0(), "lite0-8": Lite0(pool_size=8), "vgg16": Vgg16()}


class EveryView(RoiMaps):
    """Decode, resize, trunk and RoI pooling per view, one view after the other."""

    def passes(self, index: int, views: Sequence[View]) -> Iterator[Float[Tensor, "P ch h w"]]:
        return (self._one(self.photos[index], view) for view in views)

    def _one(self, photo: Photo, view: View) -> Float[Tensor, "P ch h w"]:
        boxes = boxes_in_view(view, self.store.boxes(photo.id), (photo.height, photo.width))
        trunk = self.backbone.trunk(load_view(photo, view)[None])
        return self.backbone.roi_maps(trunk, Proposals(boxes, (len(boxes),)))


WAYS = {"every view": EveryView, "once": RoiMaps}


def side_by_side(detector: Detector, found: Sequence[Photo], store: BoxSource, inference: Inference, n: int) -> Row:
    """Both variants alternately, so that other load on the machine affects both."""
    ways = {name: way(detector.backbone, found, store) for name, way in WAYS.items()}
    laps: dict[str, list[Row]] = {name: [] for name in ways}
    for lap in range(n + 1):
        for name, maps in ways.items():
            work = partial(run_detector, detector, found, store, maps=maps, inference=inference)
            row = measure(work, 1, warm=False)
            laps[name] += [row] if lap else []  # the first is a warm-up
    rows: Row = {"photos": len(found), "views": len(inference.views()), "repeats": n}
    for name, own in laps.items():
        rows[name] = {clock: spread_of([lap[clock]["median"] for lap in own]) for clock in ("wall", "cpu")}
        rows[name]["images_per_second"] = round(len(found) / rows[name]["wall"]["median"], 4)
    before, after = (_medians(rows[name]) for name in ways)
    rows["times faster"] = {clock: round(before[clock] / after[clock], 3) for clock in before}
    return rows


def parts(detector: Detector, photo: Photo, store: BoxSource, scale: int, n: int) -> Row:
    """Time per stage of one photo at one scale."""
    backbone, view = detector.backbone, View(scale, long_max=2000)
    read = load_image(photo, [view])
    seen = read.render(view)
    boxes = boxes_in_view(view, store.boxes(photo.id), (photo.height, photo.width))
    with torch.no_grad():
        trunk = backbone.trunk(seen[None])
        maps = backbone.roi_maps(trunk, Proposals(boxes, (len(boxes),)))
        works: dict[str, Callable[[], object]] = {
            "decode": lambda: read_photo(photo.path),
            "resize": lambda: read.render(view),
            "trunk": lambda: backbone.trunk(seen[None]),
            "roi maps": lambda: backbone.roi_maps(trunk, Proposals(boxes, (len(boxes),))),
            "neck and heads": lambda: detector.score(detector.neck(maps)),
        }
        return {name: _medians(measure(work, n)) for name, work in works.items()}


def pairs(detector: Detector, photo: Photo, scales: Sequence[int], n: int) -> Row:
    """The trunk on a scale and its horizontal flip: as a batch of two, and one after the other."""
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
    parser.add_argument("--scale", type=int, default=480, help="of the single-scale test")
    parser.add_argument("--backbone", choices=BACKBONES, default="lite0-8")
    parser.add_argument("--scales", type=int, nargs="+", default=Inference().scales, help="of the multi-scale test")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    files = sorted((args.data / "JPEGImages" if (args.data / "JPEGImages").exists() else args.data).glob("*.jpg"))
    found = find_photos(files[:: max(1, len(files) // args.photos)][: args.photos])
    store = RandomBoxes({photo.id: photo for photo in found}, args.boxes)
    config: Config = replace(photos(), backbone=BACKBONES[args.backbone])
    detector = build_detector(config, 20, pretrained=False).eval()
    one, many = Inference(scales=(args.scale,), mirror=False), Inference(scales=tuple(args.scales))
    n = args.repeats
    result: Row = {
        "machine": machine(),
        "backbone": args.backbone,
        "boxes": args.boxes,
        "one photo, one scale": side_by_side(detector, found[:1], store, one, n),
        "stages of it, seconds": parts(detector, found[0], store, args.scale, n),
        "photos, one scale": side_by_side(detector, found, store, one, n),
        "photos, all scales and flips": side_by_side(detector, found, store, many, n),
    }
    if args.pairs:
        result["pairs through the trunk"] = pairs(detector, found[0], args.scales, n)
    print(result)
    if args.out:
        write_json(args.out, result)


if __name__ == "__main__":
    main()
