"""What MobileSAM's masks make of boxes that are slightly wrong, right, or a part of the object.

    python benchmarks/snap.py --data voc07-mini --split train --photos 60 --out docs/results/snap.json

True boxes are changed: each side moved by up to 20 % of the object's size ("jittered"), or a random quarter of the
object taken ("part"). The changed box, and its centre, are prompts; the boxes of the masks are compared with the truth.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor

from tag2box.formats.datasets import read_photos, read_truth
from tag2box.formats.listing import DataSource
from tag2box.images import read_photo
from tag2box.io import write_json
from tag2box.models.mobile_sam import mobile_sam
from tag2box.ops.boxes import clip, row_iou
from tag2box.proposals.base import resized_image
from tag2box.proposals.sam_boxes import EmbeddedImage, SnapBoxes, grid_points, long_side_size
from tag2box.runs import machine

JITTER = 0.2  # of the object's sides
PART = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--split")
    parser.add_argument("--classes", type=Path, help="file of class names")
    parser.add_argument("--photos", type=int, default=60, help="number of photos, evenly spaced over the dataset")
    parser.add_argument("--long-side", type=int, default=512)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    classes = tuple(args.classes.read_text().split()) if args.classes else None
    figures = measure(DataSource(path=args.data, split=args.split, classes=classes), args.photos, args.long_side)
    print(figures)
    if args.out:
        write_json(args.out, figures)


def measure(source: DataSource, count: int, long_side: int) -> dict[str, object]:
    network, generator = mobile_sam(), torch.Generator().manual_seed(0)
    truth, photos = read_truth(source), read_photos(source)
    objects = dict(zip(truth.ids, truth.objects, strict=True))
    found: dict[str, list[Tensor]] = {}
    seconds = {"encoder": 0.0, "prompt": 0.0}
    prompts = 0
    chosen = [photos[round(i * (len(photos) - 1) / max(count - 1, 1))] for i in range(min(count, len(photos)))]
    for photo in chosen:
        size = (photo.width, photo.height)
        width, height = long_side_size(size, long_side)
        start = time.process_time()
        image = EmbeddedImage.of(network, resized_image(read_photo(photo.path), width, height))
        seconds["encoder"] += time.process_time() - start
        start = time.process_time()
        image.at_points(grid_points(width, height, 4))
        seconds["prompt"] += time.process_time() - start
        prompts += len(grid_points(width, height, 4))
        own = objects[photo.id]
        scale = torch.tensor([width / size[0], height / size[1]] * 2)
        boxes = own.boxes[~(own.difficult | own.crowd)].float() * scale
        for name, changed in prompts_of(boxes, (width, height), generator).items():
            centres = (changed[:, :2] + changed[:, 2:]) / 2
            found.setdefault(f"{name}, before", []).append(row_iou(changed, boxes)[:, None])
            found.setdefault(f"{name}, box as prompt", []).append(overlaps(image.at_boxes(changed), boxes))
            found.setdefault(f"{name}, centre as prompt", []).append(overlaps(image.at_points(centres), boxes))
    return {
        "photos": len(chosen),
        "objects": sum(len(part) for part in found["right, before"]),
        "long_side": long_side,
        "encoder_seconds": round(seconds["encoder"] / len(chosen), 3),
        "prompt_seconds": round(seconds["prompt"] / prompts, 4),
        "machine": machine(),
        "rows": {name: summary(torch.cat(parts)) for name, parts in found.items()},
    }


def prompts_of(boxes: Tensor, size: tuple[int, int], generator: torch.Generator) -> dict[str, Tensor]:
    """The boxes themselves, jittered, and a part of each."""
    sides = (boxes[:, 2:] - boxes[:, :2]).repeat(1, 2)
    moved = boxes + (2 * torch.rand(boxes.shape, generator=generator) - 1) * JITTER * sides
    corner = boxes[:, :2] + torch.rand(len(boxes), 2, generator=generator) * (1 - PART) * sides[:, :2]
    part = torch.cat([corner, corner + PART * sides[:, :2]], dim=1)
    return {"right": boxes, "jittered": clip(moved, *size), "part": part}


def overlaps(found: SnapBoxes, boxes: Tensor) -> Tensor:
    """IoU of each mask's box with the object of its prompt; the column of the best quality comes first."""
    masks = len(found.boxes) // max(len(boxes), 1)
    if not masks:
        return torch.zeros(0, 2)
    rows = row_iou(found.boxes, boxes.repeat_interleave(masks, dim=0)).view(-1, masks)
    best = found.quality.view(-1, masks).argmax(dim=1, keepdim=True)
    return torch.cat([rows.gather(1, best), rows.amax(dim=1, keepdim=True)], dim=1)


def summary(rows: Tensor) -> dict[str, float]:
    """Mean IoU and share of objects with IoU 0.5, of the mask with the best quality and of the best mask."""
    names = ("best quality", "best mask") if rows.shape[1] > 1 else ("",)
    figures = {}
    for name, column in zip(names, rows.T, strict=True):
        figures[f"mean IoU, {name}".strip(", ")] = round(float(column.mean()), 3)
        figures[f"IoU >= 0.5, {name}".strip(", ")] = round(float((column >= 0.5).float().mean()), 3)
    return figures


if __name__ == "__main__":
    main()
