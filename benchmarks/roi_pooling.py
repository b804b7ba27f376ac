"""RoIAlign and RoIPool before lite0's pretrained tail: does a true box keep the ImageNet class of its crop?

    python benchmarks/roi_pooling.py --data VOC2007 --split train --photos 100

Each true box is classified twice by the same network: as a crop of the photo, and pooled from the photo's feature map.
The share of boxes for which the two agree is printed for both kinds of pooling, and written to OUT.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import interpolate, linear

from tag2box.formats.voc_boxes import read_voc_truth
from tag2box.formats.voc_tags import voc_root
from tag2box.images import View, boxes_in_view, read_photo, render_view
from tag2box.io import write_json
from tag2box.models.lite0 import Lite0, Lite0Backbone
from tag2box.models.weights.zoo import lite0_weights
from tag2box.types import Proposals

POOLINGS: tuple[Literal["align", "max"], ...] = ("align", "max")
CROP = 224
MIN_SIDE = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a VOC folder")
    parser.add_argument("--split", default="train")
    parser.add_argument("--photos", type=int, default=100, help="number of photos, from the first of the split")
    parser.add_argument("--short", type=int, default=384)
    parser.add_argument("--out", type=Path, default=Path("runs/roi_pooling.json"))
    args = parser.parse_args()
    networks = {pooling: Lite0(pooling=pooling).build().eval() for pooling in POOLINGS}
    classifier = lite0_weights()
    agree: dict[str, int] = dict.fromkeys(POOLINGS, 0)
    boxes_used = 0
    truth = read_voc_truth(args.data, split=args.split)
    for name, objects in list(zip(truth.ids, truth.objects, strict=True))[: args.photos]:
        boxes = objects.boxes[~objects.difficult].float()
        boxes = boxes[((boxes[:, 2:] - boxes[:, :2]) >= MIN_SIDE).all(dim=1)]
        if len(boxes) == 0:
            continue
        image = read_photo(voc_root(args.data) / "JPEGImages" / f"{name}.jpg").float()
        with torch.no_grad():
            crops = [_class_of_crop(networks["align"], classifier, image, box) for box in boxes.round().long().tolist()]
            view, size = View(args.short), (image.shape[1], image.shape[2])
            seen, placed = render_view(view, image, size), boxes_in_view(view, boxes, size)
            for pooling, network in networks.items():
                maps = network.roi_maps(network.trunk(seen[None]), Proposals(placed, (len(placed),)))
                agree[pooling] += sum(a == b for a, b in zip(crops, _classes(network, classifier, maps), strict=True))
        boxes_used += len(boxes)
    result = {"photos": args.photos, "boxes": boxes_used, "short": args.short, "min_side": MIN_SIDE}
    shares = {pooling: count / max(boxes_used, 1) for pooling, count in agree.items()}
    write_json(args.out, result | {"agree": shares})
    print(", ".join(f"{pooling} {100 * share:.1f} %" for pooling, share in shares.items()), f"of {boxes_used} boxes")


def _class_of_crop(network: Lite0Backbone, classifier: dict[str, Tensor], image: Tensor, box: list[int]) -> int:
    x1, y1, x2, y2 = box
    crop = interpolate(image[None, :, max(y1, 0) : y2, max(x1, 0) : x2], (CROP, CROP), mode="bilinear", antialias=True)
    (cls,) = _classes(network, classifier, network.tail(network.trunk(crop)))
    return cls


def _classes(network: Lite0Backbone, classifier: dict[str, Tensor], maps: Tensor) -> list[int]:
    found: list[int] = linear(network.neck(maps), classifier["_fc.weight"], classifier["_fc.bias"]).argmax(1).tolist()
    return found


if __name__ == "__main__":
    main()
