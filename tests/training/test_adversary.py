"""The adversary of Concrete DropBlock: opposite gradients however a batch is run, and a run that can be interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tag2box import settings
from tag2box.errors import UserError
from tag2box.images import Resize
from tag2box.methods.oicr import Oicr
from tag2box.methods.wscl import Contrast
from tag2box.models.adversary import ConcreteDropBlock
from tag2box.models.augment import Augment, rois_of
from tag2box.models.detector import Heads
from tag2box.models.drop_block import DropBlock
from tag2box.models.rng import StepRng
from tag2box.recipes import Config
from tag2box.training import checkpoint
from tag2box.training.batches import BatchSource, FeatureBatches, Loader
from tag2box.training.criterion import Criterion
from tag2box.training.dist import DistContext
from tag2box.training.feature_cache import RoiMaps
from tag2box.training.loop import Plan, Schedule, fit
from tag2box.training.optim import AdversaryOptimizer
from tag2box.training.packing import Layout, pack
from tag2box.training.step import Forward, Step
from tag2box.types import Batch, Proposals
from tiny import TinyBackbone, tiny_detector, tiny_photos, tiny_store
from together import together

RNG = StepRng(5, 2)
SETTINGS = ConcreteDropBlock(hidden=4, block=2, drop=1.0, temperature=0.5, weight=0.25)
CRITERION = Criterion(labeler=Oicr(), contrast=Contrast(enabled=False))


def make_step(**how: object) -> Step:
    detector = tiny_detector(3, frozen=False, heads=Heads(embed_dim=6)).double()
    adversary = SETTINGS.build(TinyBackbone.channels, 0).double()
    return Step(detector, CRITERION, adversary, Augment(), **how)  # type: ignore[arg-type]


def make_batch(sizes: tuple[int, ...] = (6, 0, 1, 5)) -> Batch:
    g = torch.Generator().manual_seed(2)
    corner = torch.rand(sum(sizes), 2, generator=g) * 20
    boxes = torch.cat([corner, corner + 8 + torch.rand(sum(sizes), 2, generator=g) * 12], dim=1).double()
    tags = torch.eye(3, dtype=torch.bool)[torch.arange(len(sizes)) % 3]
    images = torch.rand(len(sizes), 3, 40, 44, generator=g, dtype=torch.float64) * 255
    return Batch(tuple(f"{i}" for i in range(len(sizes))), tags, Proposals(boxes, sizes), images=images)


def gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def through_the_graph() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The twin: gradients of the loss in detector and mask net, by one graph over the whole batch."""
    step, batch = make_step(), make_batch()
    adversary = step.adversary
    assert adversary is not None
    forward = Forward(step, adversary, RNG)
    images = batch.proposals.image_ids()
    rows = pack(forward.outputs(rois_of(step.detector, batch), forward.draw(images), images))
    layout = Layout.of(step.detector, CRITERION.requirements)
    step.criterion(layout.unpack(rows), batch.meta(), no_views).total.backward()
    return gradients(step.detector), gradients(adversary)


def no_views(rows: Tensor) -> None:  # type: ignore[misc]
    raise AssertionError("nothing samples here")


def share_of(batch: Batch, dist: DistContext) -> Batch:
    mine = dist.shard(len(batch.ids))
    spans = batch.proposals.spans()
    rows = slice(spans[mine.start].start, spans[mine.stop - 1].stop)
    photos = slice(mine.start, mine.stop)
    assert batch.images is not None
    own = Proposals(batch.proposals.boxes[rows], batch.proposals.sizes[photos])
    return Batch(batch.ids[photos], batch.tags[photos], own, images=batch.images[photos])


def assert_same(mine: dict[str, Tensor], wanted: dict[str, Tensor], factor: float = 1.0) -> None:
    assert mine.keys() == wanted.keys() and wanted
    scale = max(float(g.abs().max()) for g in wanted.values())
    for name, grad in wanted.items():
        torch.testing.assert_close(mine[name], factor * grad, rtol=1e-9, atol=1e-10 * scale, msg=name)


@pytest.mark.parametrize("memory", ["plain", "exact"])
def test_the_mask_net_receives_the_opposite_gradient(memory: str):
    of_detector, of_net = through_the_graph()
    assert any(bool(g.any()) for g in of_net.values())
    step = make_step(memory=memory)
    stepped = step(make_batch(), RNG)
    assert_same(gradients(step.detector), of_detector)
    assert step.adversary is not None and gradients(step.adversary) == {}  # the first pass is the detector's alone
    adversarial = step.adversarial_step(make_batch(), RNG)
    assert_same(gradients(step.adversary), of_net, -SETTINGS.weight)
    assert_same(gradients(step.detector), of_detector)  # untouched by the second
    assert adversarial.total.item() == pytest.approx(stepped.total.item(), rel=1e-12)


@pytest.mark.parametrize("memory", ["plain", "exact"])
def test_processes_together_leave_the_gradients_of_one(memory: str):
    of_detector, of_net = through_the_graph()

    def work(dist: DistContext) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        step, batch = make_step(memory=memory, dist=dist), share_of(make_batch(), dist)
        step(batch, RNG)
        step.adversarial_step(batch, RNG)
        assert step.adversary is not None
        return gradients(step.detector), gradients(step.adversary)

    for detector, adversary in together(2, work):
        assert_same(detector, of_detector)
        assert_same(adversary, of_net, -SETTINGS.weight)


@pytest.mark.parametrize("sizes", [(0,), (1,), (3,)])
def test_few_proposals(sizes: tuple[int, ...]):
    step = make_step()
    assert step(make_batch(sizes), RNG).total.isfinite()
    assert step.adversarial_step(make_batch(sizes), RNG).total.isfinite()


def test_plain_drop_block_has_no_adversary():
    assert replace(make_step(), regularizer=DropBlock()).adversary is None


def test_the_adversary_learns_uphill_and_faster_where_the_detector_slows_down():
    step = make_step()
    assert step.adversary is not None
    adversary = AdversaryOptimizer.of(step.adversary)
    step.adversarial_step(make_batch(), RNG)
    before = {name: p.detach().clone() for name, p in step.adversary.named_parameters()}
    grads = gradients(step.adversary)
    adversary.step(cuts=1)
    rate = SETTINGS.lr * SETTINGS.lr_growth
    for name, p in step.adversary.named_parameters():
        decay = 0.0 if name.endswith("bias") else SETTINGS.weight_decay
        torch.testing.assert_close(p.detach(), before[name] - rate * (grads[name] + decay * before[name]))


# ---------------------------------------------------------------- runs


@dataclass(frozen=True)
class Breaking:
    """A source that fails at an iteration, as a machine might."""

    source: BatchSource
    at: int

    @property
    def classes(self) -> tuple[str, ...]:
        return self.source.classes

    def batch(self, iteration: int) -> Batch:
        return self.source.batch(iteration)

    @contextmanager
    def batches(self, iterations: range) -> Iterator[Iterator[Batch]]:
        def made() -> Iterator[Batch]:
            for i in iterations:
                if i == self.at:
                    raise KeyboardInterrupt
                yield self.source.batch(i)

        yield made()

    def preview_batch(self, count: int) -> Batch:
        return self.source.preview_batch(count)

    def photo_boxes(self, photo_id: str) -> Tensor:
        return self.source.photo_boxes(photo_id)


PLAN = Plan(iterations=6, checkpoint_every=2, log_every=2, gallery=1, schedule=Schedule(warmup=1, steps=(0.5,)))


def world(folder: Path) -> tuple[Step, FeatureBatches]:
    photos = tiny_photos(folder, 4)
    store = tiny_store(folder, photos.photos)
    detector = tiny_detector(3, heads=Heads(embed_dim=6))
    adversary = replace(SETTINGS, lr=0.5).build(TinyBackbone.channels, 0)
    live = RoiMaps(detector.backbone, photos.photos, store)
    source = FeatureBatches(photos, store, Loader(batch_size=2, resize=Resize(scales=(48,)), workers=0), 0, live)
    return Step(detector, CRITERION, adversary, Augment()), source


def tensors(run: Path) -> dict[str, Tensor]:
    folder = run / checkpoint.read_state(run).folder
    files = (checkpoint.MODEL, checkpoint.OPTIMIZER, checkpoint.ADVERSARY, checkpoint.ADVERSARY_OPTIMIZER)
    return {f"{f} {name}": t for f in files for name, t in checkpoint.read_tensors(folder / f).items()}


def test_a_resumed_run_is_the_unbroken_one_to_the_bit(tmp_path: Path):
    step, source = world(tmp_path)
    assert step.adversary is not None
    fresh = {name: p.clone() for name, p in step.adversary.state_dict().items()}
    fit(step, source, PLAN, run=tmp_path / "whole")
    step, source = world(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        fit(step, Breaking(source, at=3), PLAN, run=tmp_path / "broken")
    step, source = world(tmp_path)
    fit(step, source, PLAN, run=tmp_path / "broken")
    whole, broken = tensors(tmp_path / "whole"), tensors(tmp_path / "broken")
    assert whole.keys() == broken.keys()
    assert all(torch.equal(whole[name], broken[name]) for name in whole)
    assert step.adversary is not None
    assert all(not torch.equal(p, fresh[name]) for name, p in step.adversary.named_parameters())


def test_a_checkpoint_without_its_mask_net_is_named(tmp_path: Path):
    step, source = world(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        fit(step, Breaking(source, at=2), PLAN, run=tmp_path / "run")
    path = tmp_path / "run" / checkpoint.read_state(tmp_path / "run").folder / checkpoint.ADVERSARY
    path.unlink()
    step, source = world(tmp_path)
    with pytest.raises(UserError, match="missing") as error:
        fit(step, source, PLAN, run=tmp_path / "run")
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_a_config_file_without_a_kind_means_plain_drop_block(tmp_path: Path):
    (tmp_path / "old.toml").write_text("[drop_block]\nblock = 5\ndrop = 0.2\n")
    assert settings.load(Config, [tmp_path / "old.toml"]).drop_block == DropBlock(block=5, drop=0.2)
    concrete = settings.load(Config, [tmp_path / "old.toml"], ["drop_block.kind=concrete"]).drop_block
    assert concrete == ConcreteDropBlock()
