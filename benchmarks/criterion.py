"""The criterion alone: sampling, discovery, labels and losses, forward and backward, and a reference with loops.

    python benchmarks/criterion.py --out runs/criterion.json

The backbone is a stub with 64 features per proposal and almost no cost; the heads are the real ones. Photos have two or
three classes with two objects each, and proposals cluster around objects like those of selective search. ``curves``
(with --curves) holds time and peak memory against proposals, images and classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from criterion_twin import total_loss
from measuring import Row, arguments, in_fresh_process, machine, measure, peak_mb, set_threads
from tag2box.io import write_json
from tag2box.methods.wscl import Sampling, no_exemplars, with_discovered
from tag2box.models.augment import Augment, Chosen, Rois, augment_rois
from tag2box.models.backbone import Backbone
from tag2box.models.detector import Detector, Heads, RefineHead
from tag2box.models.rng import RowRng, StepRng
from tag2box.ops.boxes import iou
from tag2box.ops.losses import mil_partition, mil_scores
from tag2box.training.criterion import Criterion, LossOutput, teachers
from tag2box.types import AugmentedRois, AugmentRois, BatchMeta, LabelerInput, Outputs, Proposals, StageScores

WIDTH, HEIGHT, FEATURES = 1000, 688, 64
CRITERION = Criterion()


class StubNeck(Backbone):
    """RoI maps of 16 x 2 x 2 and one small linear layer."""

    channels, map_size, vector_size, stride = 16, 2, FEATURES, 1

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(FEATURES, FEATURES)

    def neck(self, maps: Tensor, row_rng: RowRng | None = None) -> Tensor:
        return torch.relu(self.fc(maps.flatten(1)))


@dataclass(frozen=True)
class Size:
    """Size of a batch."""

    images: int = 8
    proposals: int = 2000
    classes: int = 20


@dataclass(frozen=True)
class World:
    """A batch and a network for it."""

    detector: Detector
    maps: Tensor
    proposals: Proposals
    tags: Tensor

    def outputs(self) -> tuple[StageScores, Tensor]:
        vector = self.detector.neck(self.maps)
        return self.detector.score(vector), self.detector.embed(vector)

    def views(self, scores: StageScores) -> AugmentRois:
        """Augmented copies, the same at every call."""
        image_ids, rng, augment = self.proposals.image_ids(), StepRng(0, 0), Augment()
        partition = mil_partition(scores.mil_det.detach(), self.proposals.sizes)

        def make(rows: Tensor) -> AugmentedRois:
            images = image_ids[rows]
            chosen = Chosen(rows, images, augment.masks(rng, images, StubNeck.map_size))
            rois = Rois(self.maps[rows], self.detector.backbone.neck_stem(self.maps[rows]))
            return augment_rois(self.detector, rois, partition[images], chosen=chosen, augment=augment, rng=rng)

        return make


def make_world(size: Size, dtype: torch.dtype = torch.float32, seed: int = 0) -> World:
    """Features that encode the overlap of a proposal with each object, and heads that read them."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.nn.functional.normalize(torch.rand(size.classes, FEATURES, generator=g), dim=1)
    tags = torch.zeros(size.images, size.classes, dtype=torch.bool)
    boxes, maps = [], []
    for image in range(size.images):
        present = torch.randperm(size.classes, generator=g)[: 2 + image % 2]
        tags[image, present] = True
        objects = some_boxes(2 * len(present), g)
        boxes.append(proposals_around(objects, size.proposals, g))
        covered = iou(boxes[-1], objects) @ codes[present.repeat(2)]  # (P, F)
        maps.append(3 * covered + 0.1 * torch.rand(size.proposals, FEATURES, generator=g))
    torch.manual_seed(seed)
    detector = Detector(StubNeck(), size.classes, Heads())
    read_codes(detector, codes, g)
    features = torch.cat(maps).view(-1, 16, 2, 2).to(dtype)
    proposals = Proposals(torch.cat(boxes).to(dtype), (size.proposals,) * size.images)
    return World(detector.to(dtype), features, proposals, tags)


def read_codes(detector: Detector, codes: Tensor, g: torch.Generator) -> None:
    """Set each head's weights to the codes of its classes, with noise per stage."""
    assert isinstance(detector.backbone, StubNeck)
    with torch.no_grad():
        detector.backbone.fc.weight.copy_(torch.eye(FEATURES))
        detector.backbone.fc.bias.zero_()
        centred = 6 * (codes - codes.mean(dim=0))
        detector.mil.cls.weight.copy_(centred)
        detector.mil.det.weight.copy_(centred)
        for stage in detector.refine:
            assert isinstance(stage, RefineHead)
            stage.cls.weight[:-1].copy_(centred + 0.12 * torch.randn(centred.shape, generator=g))


def some_boxes(count: int, g: torch.Generator) -> Tensor:
    photo = torch.tensor([WIDTH, HEIGHT], dtype=torch.float32)
    side = photo * (0.2 + 0.4 * torch.rand(count, 2, generator=g))
    corner = (photo - side) * torch.rand(count, 2, generator=g)
    return torch.cat([corner, corner + side], dim=1)


def proposals_around(objects: Tensor, count: int, g: torch.Generator) -> Tensor:
    """A third of the boxes near objects, the others uniform; in random order."""
    near = objects[torch.arange(int(0.34 * count)) % len(objects)]
    sides = (near[:, 2:] - near[:, :2]).repeat(1, 2)
    near = near + 0.11 * sides * torch.randn(near.shape, generator=g)
    boxes = torch.cat([near, some_boxes(count - len(near), g)])[torch.randperm(count, generator=g)]
    return torch.cat([torch.minimum(boxes[:, :2], boxes[:, 2:] - 10), boxes[:, 2:]], dim=1)


def our_step(world: World, criterion: Criterion = CRITERION) -> Tensor:
    scores, embed = world.outputs()
    return parameter_gradient(world, criterion_output(world, scores, embed, criterion).total)


def criterion_output(world: World, scores: StageScores, embed: Tensor, criterion: Criterion = CRITERION) -> LossOutput:
    outputs = Outputs(scores, embed, embed[:, :0])
    return criterion(outputs, BatchMeta(world.proposals, world.tags), world.views(scores))


def twin_step(world: World) -> Tensor:
    scores, embed = world.outputs()
    views = world.views(scores)
    return parameter_gradient(world, total_loss(scores, embed, proposals=world.proposals, tags=world.tags, views=views))


def parameter_gradient(world: World, total: Tensor) -> Tensor:
    """Gradients of all parameters, in one vector."""
    parameters = list(world.detector.parameters())
    return torch.cat([g.flatten() for g in torch.autograd.grad(total, parameters)])


def contrastive_rows(world: World) -> int:
    """|S^U| of the batch."""
    with torch.no_grad():
        scores, embed = world.outputs()
        mil = mil_scores(scores.mil_cls, scores.mil_det, world.proposals.sizes)
        probs = teachers(mil, scores, world.tags.shape[1])
        bare = LabelerInput(world.proposals, world.tags, probs, embed, no_exemplars(embed))
        inputs = replace(bare, exemplars=Sampling()(bare, world.views(scores)))
        return len(with_discovered(inputs, Criterion().labeler(inputs)))


def peak_of_step(size: Size) -> float:
    """Peak memory of the criterion, forward and backward, above that of the network's outputs."""
    our_step(make_world(Size(1, 50, size.classes)))
    world = make_world(size)
    scores, embed = world.outputs()

    def work() -> Tensor:
        return parameter_gradient(world, criterion_output(world, scores, embed).total)

    return peak_mb(work)


def point(size: Size, repeats: int) -> Row:
    world = make_world(size)
    figures = measure(lambda: our_step(world), repeats)
    rows = contrastive_rows(world)
    print(f"{size}: {figures['cpu']['min']:.2f} CPU s, {rows} contrastive rows", flush=True)
    return {**vars(size), "rows": rows, **figures, "peak_mb": in_fresh_process(peak_of_step, size)}


def curves(size: Size, repeats: int) -> list[Row]:
    """Time and memory as one size varies from an eighth to double; the others stay fixed."""
    around = (0.125, 0.25, 0.5, 1, 2)
    sizes = {
        "proposals": [replace(size, proposals=int(share * size.proposals)) for share in around],
        "images": [replace(size, images=n) for n in sorted({max(1, int(share * size.images)) for share in around})],
        "classes": [replace(size, classes=n) for n in (5, 10, 20, 40, 80)],
    }
    return [{"against": name, **point(size, repeats)} for name, points in sizes.items() for size in points]


def main() -> None:
    parser = arguments(__doc__, "criterion", repeats=5)
    parser.add_argument("--proposals", type=int, default=2000, help="per photo")
    parser.add_argument("--no-twin", action="store_true", help="skip the reference, which takes minutes")
    parser.add_argument("--curves", action="store_true", help="also measure growth; takes minutes")
    args = parser.parse_args()
    set_threads(args.threads)
    size = Size(images=2, proposals=40, classes=5) if args.small else Size(proposals=args.proposals)
    result: Row = {"machine": machine(), "ours": point(size, args.repeats)}
    if not args.no_twin:
        world = make_world(size)
        answers: list[Tensor] = []
        result["twin"] = measure(lambda: answers.append(twin_step(world)), 1, warm=False)
        result["relative_difference"] = float((our_step(world) - answers[0]).norm() / answers[0].norm())
        print(
            f"twin: {result['twin']['cpu']['min']:.1f} CPU s, gradients differ by {result['relative_difference']:.1e}"
        )
    result["curves"] = curves(size, args.repeats) if args.curves else []
    write_json(args.out, result)


if __name__ == "__main__":
    main()
