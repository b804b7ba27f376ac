"""Time and memory of a step of CASD with four views of a photo, relative to one view.

    python benchmarks/casd_views.py --out docs/results/casd-views.json

VGG16 with random weights, the system's own criterion, layers and inverted attention, exact memory. The views are a
photo and a smaller copy, which a batch pads to the same size, each with its flip. Runs of one and of four views
alternate, each in a process of its own; times are CPU seconds of a step after one that is not counted. With one photo
and one view there is nothing to add to the gradients; with more photos or views there is, which takes a second buffer
of the largest gradient (``--photos 2`` compares batches that both have it).
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import torch

from measuring import Row, arguments, in_fresh_process, machine, peak_mb, set_threads, status_mb
from tag2box.io import write_json
from tag2box.models.detector import Detector
from tag2box.models.rng import StepRng
from tag2box.models.vgg16 import Vgg16, Vgg16Backbone
from tag2box.recipes import RECIPES
from tag2box.systems import SYSTEMS
from tag2box.training.step import Step
from tag2box.types import Batch, Proposals
from vgg_world import SMALL, Shape, make_batch

VIEWS = 4
SHAPE = Shape(images=1, proposals=300, classes=20, width=256, height=192, vector=1024)


def views_batch(shape: Shape, views: int) -> Batch:
    """Photos, each followed by its flip, a smaller copy in the upper left corner, and that one's flip."""
    batch = make_batch(shape, list(range(shape.images)))
    assert batch.images is not None
    shown = [_views(image, own, shape) for image, own in zip(batch.images, _split(batch), strict=True)]
    kept = [view for own in shown for view in own[:views]]
    return replace(
        batch,
        ids=tuple(name for name in batch.ids for _ in range(views)),
        tags=batch.tags.repeat_interleave(views, dim=0),
        proposals=Proposals(torch.cat([boxes for _, boxes in kept]), tuple(len(boxes) for _, boxes in kept)),
        images=torch.stack([pixels for pixels, _ in kept]),
        views_per_image=views,
        flipped=torch.arange(len(kept)) % 2 == 1 if views > 1 else None,
    )


def _split(batch: Batch) -> tuple[torch.Tensor, ...]:
    return batch.proposals.split(batch.proposals.boxes)


def _views(image: torch.Tensor, boxes: torch.Tensor, shape: Shape) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pixels and proposals of the four views of a photo."""
    small = torch.zeros_like(image)
    height, width = shape.height * 5 // 6, shape.width * 5 // 6
    small[:, :height, :width] = torch.nn.functional.interpolate(image[None], (height, width))[0]
    flipped = small.clone()
    flipped[:, :height, :width] = small[:, :height, :width].flip(2)
    less = boxes * torch.tensor([width / shape.width, height / shape.height]).repeat(2)
    places = [boxes, _flipped(boxes, shape.width), less, _flipped(less, width)]
    return list(zip([image, image.flip(2), small, flipped], places, strict=True))


def _flipped(boxes: torch.Tensor, width: float) -> torch.Tensor:
    return torch.stack([width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], dim=1)


def run(shape: Shape, views: int, threads: int) -> Row:
    """CPU seconds and memory of a step in this process."""
    set_threads(threads)
    torch.manual_seed(0)
    config = SYSTEMS["casd"](RECIPES["voc07-ss-vgg16"]())
    detector = Detector(Vgg16Backbone(Vgg16(), vector_size=shape.vector), shape.classes, config.heads)
    regularizer: Any = config.drop_block.build(detector.backbone.channels, 0)
    step, batch = Step(detector, config.criterion, regularizer, config.augment, "exact"), views_batch(shape, views)
    step(batch, StepRng(0, 0), 0.5)
    began = time.process_time()
    above = peak_mb(lambda: step(batch, StepRng(0, 0), 0.5))
    gradients = sum(p.grad.nbytes for p in detector.parameters() if p.grad is not None) / 1e6
    seconds = time.process_time() - began
    return {"seconds": seconds, "step_mb": above, "process_mb": status_mb("VmHWM"), "gradients_mb": gradients}


def compare(shape: Shape, repeats: int, threads: int) -> Row:
    """Medians of alternating runs, and their ratios."""
    runs: dict[int, list[Row]] = {1: [], VIEWS: []}
    for _ in range(repeats):
        for views, found in runs.items():
            found.append(in_fresh_process(run, shape, views, threads))
    keys = ("seconds", "step_mb", "process_mb")
    middle = {v: {key: statistics.median(float(r[key]) for r in found) for key in keys} for v, found in runs.items()}
    return {
        "shape": {
            "photos": shape.images,
            "proposals": shape.proposals,
            "width": shape.width,
            "height": shape.height,
            "vector": shape.vector,
        },
        "runs": {f"{views} view(s)": found for views, found in runs.items()},
        "median": {f"{views} view(s)": found for views, found in middle.items()},
        "ratio": {key: round(middle[VIEWS][key] / middle[1][key], 3) for key in keys},
        "bar": {"seconds": 4.4, "process_mb": 1.3},
    }


def main(argv: list[str] | None = None) -> None:
    """Measure, print the ratios, write the JSON file."""
    parser = arguments(__doc__, "casd-views", repeats=5)
    parser.add_argument("--photos", type=int, default=1, help="of a batch")
    options = parser.parse_args(argv)
    threads = set_threads(options.threads)
    shape = replace(SMALL if options.small else SHAPE, images=options.photos)
    found = compare(shape, options.repeats, threads)
    print(found["ratio"])
    write_json(options.out, {"machine": machine(), "threads": threads, **found})


if __name__ == "__main__":
    main()
