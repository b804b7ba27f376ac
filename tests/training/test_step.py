"""One batch, three ways: plain, recomputed photo by photo, over processes. All give the gradients of one graph."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from tag2box.methods.discovery import Discovery
from tag2box.methods.oicr import Oicr
from tag2box.methods.wscl import Contrast, Sampling
from tag2box.methods.wsrpn import Rescore
from tag2box.models.augment import Augment, rois_of
from tag2box.models.backbone import Backbone
from tag2box.models.class_maps import Prior
from tag2box.models.context import Context
from tag2box.models.detector import Detector, Heads
from tag2box.models.drop_block import DropBlock
from tag2box.models.rng import StepRng
from tag2box.ops.losses import mil_partition
from tag2box.training.criterion import Criterion
from tag2box.training.dist import DistContext
from tag2box.training.grad_cache import exact_step, preview
from tag2box.training.packing import Layout, pack, pack_copies
from tag2box.training.step import Forward, Step, plain_step
from tag2box.types import (
    CANDIDATE,
    IGNORED,
    TAGS_ONLY,
    AugmentedRois,
    AugmentRois,
    Batch,
    Exemplars,
    LabelerInput,
    Proposals,
    SideInfo,
)
from tiny import TinyBackbone, tiny_detector
from together import together

RNG = StepRng(11, 4)


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
    codes: tuple[int, ...] = ()  # of reviewed photos, one per proposal

    def step(self, **how: object) -> Step:
        detector = tiny_detector(self.classes, frozen=False, heads=self.heads).double()
        for part in detector.backbone.modules():
            if isinstance(part, Backbone):
                part.dropout = 0.4
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
        proposals = Proposals(boxes.double(), self.sizes, ((44, 40),) * count)
        evidence = torch.rand(sum(self.sizes), self.classes, generator=generator, dtype=torch.float64)
        side_info = SideInfo(
            class_evidence=evidence if self.criterion.prior != Prior() else None,
            reviewed=torch.tensor(self.codes) if self.codes else None,
        )
        batch = Batch(tuple(f"{i}" for i in range(count)), tags, proposals, images=images, side_info=side_info)
        detector = self.step().detector
        with torch.no_grad():
            if self.pixels == "trunks":
                return replace(batch, images=None, trunks=tuple(detector.backbone.trunk(images)))
            if self.pixels == "maps":
                return replace(batch, images=None, maps=detector.roi_maps(batch))
        return batch


BOXED = (*[TAGS_ONLY] * 9, 1, 0, *[CANDIDATE] * 4, IGNORED, *[TAGS_ONLY] * 3, *[CANDIDATE] * 2)
"""Of four photos, the second is reviewed and has boxes of two classes, the last one is, and has none."""
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
    "prior": World(
        (9, 0, 5),
        ((0,), (1,), (0, 1)),
        criterion=Criterion(contrast=Contrast(weight=1.0), prior=Prior(evidence=2.0, area=0.9)),
    ),
    "prior in MIL": World(
        (9, 0, 5),
        ((0,), (1,), (0, 1)),
        heads=Heads(embed_dim=6, mil_background=True),
        criterion=Criterion(contrast=Contrast(weight=1.0), prior=Prior(evidence=2.0, area=0.9), prior_in_mil=True),
    ),
    "context": World((9, 0, 5), ((0,), (1,), (0, 1)), heads=Heads(embed_dim=6, context=Context(on="both"))),
    "frame minus ring": World(
        (9, 0, 5), ((0,), (1,), (0, 1)), heads=Heads(embed_dim=6, context=Context(on="both", regions="rings"))
    ),
    "neck": World((9, 0, 5), ((0,), (1,), (0, 1)), heads=Heads(embed_dim=6, neck=7)),
    "neck and context of maps": World(
        (9, 5), ((0,), (0, 1)), pixels="maps", heads=Heads(embed_dim=6, neck=7, context=Context(on="both"))
    ),
    "context of trunks": World(
        (9, 5), ((0,), (0, 1)), pixels="trunks", heads=Heads(embed_dim=6, context=Context(on="mil", scale=1.3))
    ),
    "reviewed photos": World((9, 7, 3, 2), ((0, 2), (0, 1), (2,), ()), codes=BOXED),
    "reviewed photos, rescored": World(
        (9, 7, 3, 2),
        ((0, 2), (0, 1), (2,), ()),
        criterion=Criterion(rescore=Rescore(keep=0.4, begin=0.0), reviewed_weight=2.5, contrast=Contrast(weight=1.0)),
        codes=BOXED,
    ),
    "one regression": World((9, 5), ((0,), (0, 1)), heads=Heads(embed_dim=6, regress_by_class=False)),
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
    """The twin: outputs packed into one matrix, one graph from the photos to the loss, a bare ``backward()``."""
    step, batch = world.step(), world.batch()
    detector, forward = step.detector, Forward(step, step.detector, RNG)
    layout = Layout.of(detector, step.criterion.requirements)
    images, sizes = batch.proposals.image_ids(), batch.proposals.sizes
    rois = rois_of(detector, batch)
    rows = pack(forward.outputs(rois, forward.draw(images), images))

    def augment_rois(chosen: Tensor) -> AugmentedRois:
        partition = mil_partition(layout.unpack(rows.detach()).scores.mil_det, sizes)[images[chosen]]
        copies = forward.augmented(rois[chosen], partition, forward.chosen(chosen, images[chosen]))
        return layout.unpack_copies(pack_copies(copies), step.augment.kinds)

    loss = step.criterion(layout.unpack(rows), batch.meta(), augment_rois)
    loss.total.backward()
    return loss.total.item(), gradients(detector)


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
    outcome = step(world.batch(), RNG)
    assert outcome.total.item() == pytest.approx(total, rel=1e-12)
    assert_same(gradients(step.detector), wanted, 1e-10)
    assert not outcome.total.requires_grad


@pytest.mark.parametrize("name", WORLDS)
def test_the_exact_step_equals_the_plain_one_to_the_bit(name: str) -> None:
    """With the stored graph of the whole batch, packing and gathering change no bit; in single precision, too."""
    for dtype in (torch.float64, torch.float32):
        results = []
        for function in (plain_step, exact_step):
            step, batch = WORLDS[name].step(), WORLDS[name].batch()
            step.detector.to(dtype)
            batch = converted(batch, dtype)
            loss = function(step, step.detector, batch, RNG, 0.5)
            results.append((loss, gradients(step.detector)))
        (plain, plain_grads), (exact, exact_grads) = results
        assert torch.equal(plain.total, exact.total)
        assert plain_grads.keys() == exact_grads.keys()
        assert all(torch.equal(plain_grads[key], exact_grads[key]) for key in plain_grads)


@pytest.mark.parametrize("memory", ["plain", "exact"])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(
    "name", ["one photo, no proposals", "no tags at all", "many", "trunks", "neck", "context", "OICR+"]
)
def test_the_share_of_wscl_is_that_of_two_steps_and_measuring_changes_no_bit(
    name: str, precision: str, memory: str
) -> None:
    """The twin: the whole step with WSCL and without it, and the difference of their gradients at the neck."""
    world, found = WORLDS[name], {}
    for weight, measure in ((0.0, False), (1.0, False), (1.0, True)):
        contrast = replace(world.criterion.contrast, weight=weight)
        made = replace(world, criterion=replace(world.criterion, contrast=contrast))
        step = made.step(memory=memory, precision=precision)
        loss = step(made.batch(), RNG, 0.5, measure=measure)
        found[weight, measure] = loss, gradients(step.detector)
        names = {key for key, p in step.detector.named_parameters() for q in neck_of(step) if p is q}
    assert names and found[1.0, False][0].contrast_share is None
    assert_equal(found[1.0, False][1], found[1.0, True][1])
    own = [g - found[0.0, False][1][key] for key, g in found[1.0, True][1].items() if key in names]
    rest = [g for key, g in found[0.0, False][1].items() if key in names]
    share, norms = found[1.0, True][0].contrast_share, [float(sum(g.square().sum() for g in x)) for x in (own, rest)]
    if not world.criterion.contrast.enabled or not norms[1]:
        assert share is None
    else:
        assert share == pytest.approx((norms[0] / norms[1]) ** 0.5, rel=1e-6 if precision == "fp32" else 0.02, abs=1e-6)


def neck_of(step: Step) -> list[torch.nn.Parameter]:
    return step.detector.backbone.neck_parameters()


def assert_equal(mine: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert mine.keys() == wanted.keys() and all(torch.equal(mine[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("memory", ["plain", "exact"])
def test_processes_together_measure_the_share_of_one(memory: str) -> None:
    world = WORLDS["many"]
    alone = world.step()(world.batch(), RNG, 0.5, measure=True).contrast_share
    assert alone is not None and alone > 0

    def work(dist: DistContext) -> tuple[float | None, dict[str, Tensor], dict[str, Tensor]]:
        step, batch = world.step(memory=memory, dist=dist), share_of(world.batch(), dist)
        share = step(batch, RNG, 0.5, measure=True).contrast_share
        measured = gradients(step.detector)
        step(batch, RNG, 0.5)
        return share, measured, gradients(step.detector)

    for share, measured, plain in together(3, work):
        assert share == pytest.approx(alone, rel=1e-9)
        assert_equal(measured, plain)


def test_a_frozen_neck_has_no_share() -> None:
    world = WORLDS["many"]
    step = world.step()
    for p in neck_of(step):
        p.requires_grad_(False)
    assert neck_of(step) == [] and step(world.batch(), RNG, measure=True).contrast_share is None


def test_the_added_layer_of_a_frozen_neck_is_what_the_share_is_measured_on() -> None:
    step = WORLDS["neck and context of maps"].step()
    for name, p in step.detector.backbone.named_parameters():
        p.requires_grad_("layer" in name)
    assert [list(p.shape) for p in neck_of(step)] == [[7, 8], [7]]
    share = step(WORLDS["neck and context of maps"].batch(), RNG, 0.5, measure=True).contrast_share
    assert share is not None and share > 0


@dataclass(frozen=True)
class Watched:
    """Sampling that notes the teacher scores of all proposals and of their copies."""

    seen: list[tuple[Tensor, Tensor]]

    def __call__(self, inputs: LabelerInput, augment_rois: AugmentRois) -> Exemplars:
        copies = augment_rois(torch.arange(len(inputs.embed)))
        self.seen.extend(zip(inputs.probs, copies.probs, strict=True))
        return Sampling()(inputs, augment_rois)


def test_a_copy_like_its_proposal_has_its_score_whether_the_prior_is_inside_mil_or_not() -> None:
    """Without dropout and with factors of 1, the teacher scores of copies are those of their proposals."""
    world, found = WORLDS["prior in MIL"], []
    for in_mil in (False, True):
        watched = Watched([])
        criterion = replace(world.criterion, prior_in_mil=in_mil, sampling=watched)  # type: ignore[arg-type]
        step = replace(world, criterion=criterion, augment=Augment(noise=False, drop=0.0)).step()
        for part in step.detector.backbone.modules():
            if isinstance(part, Backbone):
                part.dropout = 0.0
        replace(step, regularizer=DropBlock(drop=0.0))(world.batch(), RNG)
        for own, copies in watched.seen:
            torch.testing.assert_close(copies[0], own)
        found.append(watched.seen[0][0])
    assert len(watched.seen) == 3 and not torch.equal(*found)
    for span in world.batch().proposals.spans():  # the same order of boxes
        a, b = (own[span.start : span.stop] for own in found)
        assert torch.equal(a.argsort(dim=0), b.argsort(dim=0))


def converted(batch: Batch, dtype: torch.dtype) -> Batch:
    return replace(
        batch,
        proposals=replace(batch.proposals, boxes=batch.proposals.boxes.to(dtype)),
        images=None if batch.images is None else batch.images.to(dtype),
        maps=None if batch.maps is None else batch.maps.to(dtype),
        trunks=None if batch.trunks is None else tuple(trunk.to(dtype) for trunk in batch.trunks),
    )


@pytest.mark.parametrize("memory", ["plain", "exact"])
@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize(
    "name",
    [
        "many",
        "no tags at all",
        "trunks",
        "maps",
        "the published code's views",
        "context",
        "neck",
        "prior",
        "reviewed photos",
    ],
)
def test_processes_together_leave_the_gradients_of_one(name: str, count: int, memory: str) -> None:
    """Five processes outnumber the photos: some have none, and others no exemplar."""
    world = WORLDS[name]
    _, wanted = through_the_graph(world)

    def work(dist: DistContext) -> tuple[float, dict[str, Tensor]]:
        step, batch = world.step(memory=memory, dist=dist), world.batch()
        outcome = step(share_of(batch, dist), RNG)
        return outcome.total.item(), gradients(step.detector)

    done = together(count, work)
    for total, grads in done:
        assert total == done[0][0]
        assert_same(grads, wanted, 1e-10)


def share_of(batch: Batch, dist: DistContext) -> Batch:
    mine = [batch.photo(i) for i in dist.shard(len(batch.ids))]
    if not mine:
        return replace(Batch.empty(batch.tags.shape[1]), proposals=Proposals(torch.zeros(0, 4).double(), ()))
    meta = [photo.meta().proposals for photo in mine]
    return Batch(
        ids=tuple(photo.ids[0] for photo in mine),
        tags=torch.cat([photo.tags for photo in mine]),
        proposals=Proposals(
            torch.cat([p.boxes for p in meta]),
            tuple(p.sizes[0] for p in meta),
            tuple(f for p in meta for f in p.frames),
        ),
        images=None if batch.images is None else torch.cat([p.images for p in mine if p.images is not None]),
        maps=None if batch.maps is None else torch.cat([p.maps for p in mine if p.maps is not None]),
        trunks=None if batch.trunks is None else tuple(p.trunks[0] for p in mine if p.trunks is not None),
        side_info=SideInfo.joined([photo.side_info for photo in mine]),
    )


def test_a_photo_draws_the_same_on_any_rank_but_not_in_the_next_iteration() -> None:
    world = WORLDS["many"]
    step = world.step()
    totals = [step(world.batch(), rng).total.item() for rng in (RNG, RNG, StepRng(11, 5))]
    assert totals[0] == totals[1] != totals[2]


def test_preview_changes_no_gradient_and_returns_the_losses_of_the_step() -> None:
    world = WORLDS["many"]
    step = world.step()
    previewed = preview(step, world.batch(), RNG)
    assert gradients(step.detector) == {}
    stepped = step(world.batch(), RNG)
    assert previewed.total.item() == pytest.approx(stepped.total.item(), rel=1e-12)
    assert torch.equal(previewed.labeling.stages[-1].pseudo_boxes.rows, stepped.labeling.stages[-1].pseudo_boxes.rows)


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
        outcome = step(replace(batch, images=batch.images.float(), proposals=boxes), RNG)
        assert outcome.total.dtype == torch.float32
        grads.append(torch.cat([g.flatten() for g in gradients(step.detector).values()]))
    assert torch.nn.functional.cosine_similarity(grads[0], grads[1], dim=0) > 0.98
    assert not torch.equal(grads[0], grads[1])


def test_the_backbone_of_these_tests_learns_and_drops() -> None:
    backbone = WORLDS["many"].step().detector.backbone
    assert isinstance(backbone, TinyBackbone)
    assert not backbone.frozen_roi_maps and backbone.dropout == 0.4
