"""Cost of every system's labels at the paper's size, as a share of a whole step of VGG16 in the same run.

    python benchmarks/labelers.py --out docs/results/labelers.json

The batch is that of benchmarks/criterion.py: 8 photos, 2,000 proposals each, 20 classes. A whole step is the network,
forward and backward of one photo in exact mode times 8, and the system's criterion with its backward, labels among it.
Labels are to take no more than ``bar`` of it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from criterion import FEATURES, Size, StubNeck, World, make_world
from measuring import Row, arguments, machine, measure, set_threads
from tag2box.io import write_json
from tag2box.models.detector import Detector
from tag2box.ops.superpixels import Superpixels
from tag2box.recipes import RECIPES, Config
from tag2box.systems import SYSTEMS
from tag2box.training.criterion import Criterion
from tag2box.types import BatchMeta, Outputs, Requirements, SideInfo
from vgg_world import SMALL, Shape, make_training

FRACTIONS = (0.0, 0.5, 1.0)  # of the training: some labelers change over time
BAR = 0.25
"""Largest share of a step that labels are to take."""


@dataclass
class Timed:
    """A labeler that records the CPU seconds of its last call."""

    labeler: Any
    seconds: float = 0.0

    @property
    def requirements(self) -> Requirements:
        found: Requirements = self.labeler.requirements
        return found

    def __call__(self, inputs: Any) -> Any:
        before = time.process_time()
        found = self.labeler(inputs)
        self.seconds = time.process_time() - before
        return found


def detector_of(config: Config, world: World) -> Detector:
    """The world's network with a system's heads, which get the weights of the world's own heads."""
    torch.manual_seed(0)
    detector = Detector(StubNeck(), world.detector.num_classes, replace(config.heads, early_layers=0))
    known = world.detector.state_dict()
    for name, value in detector.state_dict().items():
        source = name.replace("mil_more.0", "mil").replace("refine.3", "refine.2")
        if source in known and known[source].shape == value.shape:
            value.copy_(known[source])
    return detector


def load_side_info(world: World) -> SideInfo:
    """Two objects per tag, random scores, the superpixels of a random image, and random segments."""
    g, rows = torch.Generator().manual_seed(0), len(world.proposals.boxes)
    evidence, objectness = torch.rand(2, rows, generator=g)
    coarse = torch.rand(1, 3, 30, 40, generator=g) * 255
    image = torch.nn.functional.interpolate(coarse, (400, 533), mode="bicubic").clamp(0, 255)[0].to(torch.uint8)
    photos, classes = world.tags.shape
    return SideInfo(
        2 * world.tags.long(),
        evidence,
        objectness,
        superpixels=(torch.from_numpy(Superpixels()(image)),) * photos,
        segments=tuple(torch.randint(classes + 1, (40, 53), generator=g) for _ in range(photos)),
    )


def cost_of(config: Config, world: World, repeats: int) -> Row:
    """CPU seconds of a system's labeler and of its criterion with backward, at the most expensive fraction."""
    own = replace(world, detector=detector_of(config, world))
    timed = Timed(config.criterion.labeler)
    off = replace(config.criterion.attention, input_weight=0.0, layer_weight=0.0)  # attention runs in the network
    criterion: Criterion = replace(config.criterion, labeler=timed, attention=off)
    right, bottom = world.proposals.boxes[:, 2:].amax(dim=0).ceil().int().tolist()
    proposals = replace(world.proposals, frames=((right, bottom),) * len(world.proposals.sizes))
    meta = BatchMeta(proposals, world.tags, side_info=load_side_info(world))
    labels: list[float] = []

    def work(fraction: float) -> None:
        vectors = own.detector.neck(own.maps)
        scores, embed = own.detector.score(vectors), own.detector.embed(vectors)
        outcome = criterion(Outputs(scores, embed, vectors), meta, own.views(scores), fraction=fraction)
        outcome.total.backward()
        labels.append(timed.seconds)

    worst: Row = {}
    for fraction in FRACTIONS:
        labels.clear()
        whole = measure(partial(work, fraction), repeats)
        found = {"fraction": fraction, "labeler_cpu": min(labels[1:]), "criterion_cpu": whole["cpu"]["min"]}
        worst = max(worst, found, key=lambda row: row.get("labeler_cpu", -1.0))
    return worst


def share_of(cost: Row, network_cpu: float) -> Row:
    """The share of the labels in a whole step, network and criterion, and its bar."""
    share = cost["labeler_cpu"] / (network_cpu + cost["criterion_cpu"])
    return {"share_of_step": share, "bar": BAR, "is_within": share <= BAR}


def network_cpu_of(shape: Shape) -> float:
    """CPU seconds of forward and backward of one photo in VGG16."""
    training = make_training(replace(shape, images=1), [0], memory="exact")
    return float(measure(training.iterate, 1)["cpu"]["min"])


def main() -> None:
    parser = arguments(__doc__, "labelers", repeats=3)
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="names of `tag2box systems`")
    args = parser.parse_args()
    set_threads(args.threads)
    size = Size(images=2, proposals=40, classes=5) if args.small else Size()
    network = size.images * network_cpu_of(SMALL if args.small else Shape())
    print(f"network, {size.images} photos: {network:.1f} CPU s", flush=True)
    world = make_world(size)
    assert world.maps.flatten(1).shape[1] == FEATURES
    rows: list[Row] = []
    for system in (SYSTEMS[name] for name in args.systems.split(",")):
        cost = cost_of(system(RECIPES["od-wscl"]()), world, args.repeats)
        rows.append({"system": system.title, **cost, **share_of(cost, network)})
        print(f"{system.title}: labels {cost['labeler_cpu']:.2f} CPU s, {rows[-1]['share_of_step']:.1%}", flush=True)
    write_json(args.out, {"machine": machine(), "size": vars(size), "network_cpu": network, "rows": rows})


if __name__ == "__main__":
    main()
