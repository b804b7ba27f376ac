"""One batch, three ways: at once, photo by photo, over processes. All must give the gradients of the graph itself."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from tag2box.methods.discovery import Discovery
from tag2box.methods.oicr import Oicr
from tag2box.methods.wscl import Contrast
from tag2box.models.augment import Augment, Chosen, rois_of
from tag2box.models.detector import Detector, Heads
from tag2box.models.drop_block import DropBlock
from tag2box.models.rng import StepRng
from tag2box.ops.mil import mil_partition
from tag2box.training.criterion import Criterion
from tag2box.training.dist import DistContext
from tag2box.training.grad_cache import Network
from tag2box.training.step import Step
from tag2box.types import AugmentedRois, Batch, Proposals
from tiny import TinyBackbone, tiny_detector
from together import together

LUCK = StepRng(11, 4)


@dataclass(frozen=True)
class World:
    """A batch and how it is trained on."""

    sizes: tuple[int, ...]
    tags: tuple[tuple[int, ...], ...]
    classes: int = 3
    augment: Augment = Augment()
    criterion: Criterion = field(default_factory=lambda: Criterion(contrast=Contrast(weight=1.0)))
    pixels: str = "images"
    heads: Heads = Heads(embed_dim=6)

    def step(self, **how: object) -> Step:
        detector = tiny_detector(self.classes, frozen=False, heads=self.heads).double()
        detector.backbone.dropout = 0.4  # type: ignore[assignment]
        return Step(detector, self.criterion, DropBlock(block=2), self.augment, **how)  # type: ignore[arg-type]

    def batch(self) -> Batch:
        generator = torch.Generator().manual_seed(2)
        count = len(self.sizes)
        corner = torch.rand(sum(self.sizes), 2, generator=generator) * 20
        boxes = torch.cat([corner, corner + 6 + torch.rand(sum(self.sizes), 2, generator=generator) * 14], dim=1)
        images = torch.rand(count, 3, 40, 44, generator=generator, dtype=torch.float64) * 255
        tags = torch.zeros(count, self.classes, dtype=torch.bool)
        for i, present in enumerate(self.tags):
            tags[i, list(present)] = True
        batch = Batch(tuple(f"{i}" for i in range(count)), tags, Proposals(boxes.double(), self.sizes), images=images)
        detector = self.step().detector
        with torch.no_grad():
            if self.pixels == "trunks":
                return replace(batch, images=None, trunks=tuple(detector.backbone.trunk(images)))
            if self.pixels == "maps":
                return replace(batch, images=None, maps=detector.roi_maps(batch))
        return batch


WORLDS = {
    "one photo, no proposals": World((0,), ((0,),)),
    "one proposal, no tags": World((1,), ((),)),
    "no tags at all": World((4, 3), ((), ())),
    "one class": World((5, 3), ((0,), (0,)), classes=1),
    "many": World((9, 0, 1, 12), ((0, 2), (1,), (2,), (0, 1, 2))),
    "many classes": World((8, 6), ((3, 17), (0, 19)), classes=20),
    "trunks": World((9, 5, 6), ((0, 2), (), (2,)), pixels="trunks"),
    "maps": World((9, 5, 6), ((0, 2), (), (2,)), pixels="maps"),
    "the published code's views": World(
        (9, 5), ((0,), (0, 1)), augment=Augment(rescale_mask=True, noise_per_channel=True)
    ),
    "no stages": World((9, 5), ((0,), (0, 1)), heads=Heads(embed_dim=6, stages=0)),
    "no views": World((9, 5), ((0,), (0, 1)), augment=Augment(mask=False, noise=False)),
    "OICR+": World((9, 5), ((0,), (0, 1)), criterion=Criterion(labeler=Oicr(), contrast=Contrast(enabled=False))),
    "discovery alone": World(
        (9, 5), ((0,), (0, 1)), criterion=Criterion(labeler=Discovery(), contrast=Contrast(enabled=False))
    ),
}


def gradients(detector: Detector) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in detector.named_parameters() if p.grad is not None}


def through_the_graph(world: World) -> tuple[float, dict[str, Tensor]]:
    """The twin: no leaves, no parts; one graph from the photos to the loss."""
    step, batch = world.step(), world.batch()
    detector = step.detector
    network = Network(detector, step.regularise, detector, step.augment, step.criterion.requirements, "fp32", LUCK)
    images, sizes = batch.proposals.image_ids(), batch.proposals.sizes
    rois = rois_of(detector, batch)
    drawn = step.regularise.draw(LUCK, images, detector.backbone.map_size)
    rows = network.outputs(rois, drawn, images)

    def views(chosen: Tensor) -> AugmentedRois:
        masks = step.augment.masks(LUCK, images[chosen], detector.backbone.map_size)
        partition = mil_partition(network.layout.outputs(rows.detach()).scores.mil_det, sizes)[images[chosen]]
        copies = network.views(rois[chosen], partition, Chosen(chosen, images[chosen], masks))
        return network.layout.views(copies, step.augment.kinds)

    outputs = network.layout.outputs(rows)
    outcome = step.criterion(outputs, batch.meta(), views)
    outcome.total.backward()
    return outcome.total.item(), gradients(detector)


def assert_same(mine: dict[str, Tensor], wanted: dict[str, Tensor], rtol: float) -> None:
    assert mine.keys() == wanted.keys()
    scale = max(float(g.abs().max()) for g in wanted.values())
    for name, grad in wanted.items():
        torch.testing.assert_close(mine[name], grad, rtol=rtol, atol=rtol * max(scale, 1e-30), msg=name)


@pytest.mark.parametrize("memory", ["plain", "exact"])
@pytest.mark.parametrize("name", WORLDS)
def test_a_step_leaves_the_gradients_of_the_graph(name: str, memory: str) -> None:
    world = WORLDS[name]
    total, wanted = through_the_graph(world)
    step = world.step(memory=memory)
    outcome = step(world.batch(), LUCK)
    assert outcome.total.item() == pytest.approx(total, rel=1e-12)
    assert_same(gradients(step.detector), wanted, 1e-10)
    assert not outcome.total.requires_grad


@pytest.mark.parametrize("memory", ["plain", "exact"])
@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("name", ["many", "no tags at all", "trunks", "maps", "the published code's views", "OICR+"])
def test_processes_together_leave_the_gradients_of_one(name: str, count: int, memory: str) -> None:
    """Five processes outnumber the photos: some have none, and others no exemplar."""
    world = WORLDS[name]
    _, wanted = through_the_graph(world)

    def work(dist: DistContext) -> tuple[float, dict[str, Tensor]]:
        step, batch = world.step(memory=memory, dist=dist), world.batch()
        outcome = step(share_of(batch, dist), LUCK)
        return outcome.total.item(), gradients(step.detector)

    done = together(count, work)
    for total, grads in done:
        assert total == done[0][0]
        assert_same(grads, wanted, 1e-10)


def share_of(batch: Batch, dist: DistContext) -> Batch:
    mine = [batch.photo(i) for i in dist.share(len(batch.ids))]
    if not mine:
        return replace(Batch.empty(batch.tags.shape[1]), proposals=Proposals(torch.zeros(0, 4).double(), ()))
    meta = [photo.meta().proposals for photo in mine]
    return Batch(
        ids=tuple(photo.ids[0] for photo in mine),
        tags=torch.cat([photo.tags for photo in mine]),
        proposals=Proposals(torch.cat([p.boxes for p in meta]), tuple(p.sizes[0] for p in meta)),
        images=None if batch.images is None else torch.cat([p.images for p in mine if p.images is not None]),
        maps=None if batch.maps is None else torch.cat([p.maps for p in mine if p.maps is not None]),
        trunks=None if batch.trunks is None else tuple(p.trunks[0] for p in mine if p.trunks is not None),
    )


def test_a_photo_draws_the_same_whoever_runs_it_but_not_in_the_next_iteration() -> None:
    world = WORLDS["many"]
    step = world.step()
    totals = [step(world.batch(), rng).total.item() for rng in (LUCK, LUCK, StepRng(11, 5))]
    assert totals[0] == totals[1] != totals[2]


def test_looking_changes_no_gradient_and_sees_what_the_step_sees() -> None:
    world = WORLDS["many"]
    step = world.step()
    looked = step.look(world.batch(), LUCK)
    assert gradients(step.detector) == {}
    stepped = step(world.batch(), LUCK)
    assert looked.total.item() == pytest.approx(stepped.total.item(), rel=1e-12)
    assert torch.equal(looked.labeling.stages[-1].pseudo_boxes.rows, stepped.labeling.stages[-1].pseudo_boxes.rows)


def test_half_precision_stays_near_and_its_losses_are_single() -> None:
    """bf16 has 8 bits of mantissa: gradients agree in direction, not in their digits."""
    world = WORLDS["many"]
    grads = []
    for precision in ("fp32", "bf16"):
        step = world.step(precision=precision)
        step.detector.float()
        batch = world.batch()
        assert batch.images is not None
        boxes = Proposals(batch.proposals.boxes.float(), batch.proposals.sizes)
        outcome = step(replace(batch, images=batch.images.float(), proposals=boxes), LUCK)
        assert outcome.total.dtype == torch.float32
        grads.append(torch.cat([g.flatten() for g in gradients(step.detector).values()]))
    assert torch.nn.functional.cosine_similarity(grads[0], grads[1], dim=0) > 0.98
    assert not torch.equal(grads[0], grads[1])


def test_the_backbone_of_these_tests_learns_and_drops() -> None:
    backbone = WORLDS["many"].step().detector.backbone
    assert isinstance(backbone, TinyBackbone)
    assert not backbone.frozen_roi_maps and backbone.dropout == 0.4
