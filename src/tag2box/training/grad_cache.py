"""The exact step: the gradients of ``step.plain_step`` photo by photo (GradCache), or over several processes.

The criterion depends on the network only through the outputs of proposals and of augmented copies. So it runs on these
as leaves, gathered over all ranks; the gradients it leaves there are then propagated through the network per
micro-batch, whose graph is either stored (``StoredGraph``) or recomputed (``Recomputed``). See docs/large-batches.md.

Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup", RepL4NLP 2021,
https://arxiv.org/abs/2101.06983.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from tag2box.methods.wscl import contrast_share
from tag2box.models.augment import Chosen, rois_of
from tag2box.models.detector import Detector
from tag2box.models.drop_block import FixedFactors, InvertedAttention, hardest_rows
from tag2box.models.rng import StepRng, Stream
from tag2box.ops.losses import mil_partition
from tag2box.training.criterion import LossOutput
from tag2box.training.dist import SINGLE_PROCESS
from tag2box.training.packing import Layout, pack, pack_copies
from tag2box.training.step import Forward, Step
from tag2box.types import AugmentedRois, Batch, BatchMeta

Only = Sequence[nn.Parameter] | None
"""The parameters that get gradients, in a first of two backward passes; None: all."""


def exact_step(
    step: Step, learner: nn.Module, batch: Batch, rng: StepRng, fraction: float, *, measure: bool = False
) -> LossOutput:
    """Losses and labels of the batch of all ranks; gradients are left in the parameters of ``learner``.

    Args:
        measure: also the share of WSCL in the gradient at the neck.
    """
    run = ForwardPass.run(step, learner, batch, rng)
    run.outputs.requires_grad_()
    loss = run.loss(fraction)
    neck, weighted = step.measured(loss) if measure else ([], loss.total)
    contrast = _neck_gradients(run, neck, weighted) if neck else []
    loss.total.backward()
    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in (run.outputs, *run.copies)]
    scale = loss_scale(grads) if step.precision == "fp16" else 1.0
    learner.zero_grad(set_to_none=True)
    run.backward(grads[0] * scale, [grad * scale for grad in grads[1:]])
    step.dist.all_reduce_gradients(learner.parameters())
    unscale(learner.parameters(), scale)
    return loss.detached(contrast_share(neck, contrast) if measure else None)


def _neck_gradients(run: ForwardPass, neck: list[nn.Parameter], loss: Float[Tensor, ""]) -> list[Tensor | None]:
    """Gradients of a loss at the neck, summed over all ranks; the graphs are kept, and ``grad`` is empty afterwards."""
    leaves = [run.outputs, *run.copies]
    found = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
    grads = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]
    scale = loss_scale(grads) if run.step.precision == "fp16" else 1.0
    for p in neck:
        p.grad = None
    run.backward(grads[0] * scale, [grad * scale for grad in grads[1:]], only=neck)
    run.step.dist.all_reduce_gradients(neck)
    unscale(neck, scale)
    contrast = [p.grad for p in neck]
    for p in neck:
        p.grad = None
    return contrast


def inverted(step: Step, settings: InvertedAttention, batch: Batch, rng: StepRng, fraction: float) -> Step:
    """The step whose regularizer drops cells by inverted attention, after a first pass that drops none."""
    run = ForwardPass.run(replace(step, memory="exact"), step.detector, batch, rng)
    run.outputs.requires_grad_()
    loss, sizes = run.loss(fraction), run.meta.proposals.sizes
    drawn = run.forward.draw(run.meta.proposals.image_ids())
    if not loss.losses["refine"].requires_grad:  # no refinement stage: no class whose cells could be dropped
        return replace(step, regularizer=FixedFactors(drawn))
    (grad,) = torch.autograd.grad(loss.losses["refine"], run.outputs)
    gradient = torch.zeros_like(drawn)
    for done in run.passes:
        assert isinstance(done, Recomputed)
        gradient[done.part.rows] = done.cell_gradient(grad[done.part.rows]).to(drawn)
    logits = run.layout.unpack(run.outputs.detach()).scores.refine
    stages = list(zip(logits, loss.labeling.stages, strict=False))
    losses = sum(x.weight * functional.cross_entropy(scores, x.cls, reduction="none") for scores, x in stages)
    assert isinstance(losses, Tensor)
    is_hard = hardest_rows(losses, stages[-1][1].cls < run.layout.classes, sizes, settings.hardest)
    rand = rng.row_rng(Stream.DROP_BLOCK, run.meta.proposals.image_ids()).uniform(*drawn.shape[1:])
    values = settings.invert(gradient, rand, is_hard, late=fraction >= settings.late)
    return replace(step, regularizer=FixedFactors(values))


def preview(step: Step, batch: Batch, rng: StepRng, fraction: float = 0.0) -> LossOutput:
    """Losses and labels of this rank's photos, photo by photo and without gradients."""
    with torch.no_grad():
        single = replace(step, memory="exact", dist=SINGLE_PROCESS)
        return ForwardPass.run(single, step.detector, batch, rng).loss(fraction).detached()


@dataclass(frozen=True)
class ForwardPass:
    """A batch after its forward pass: gathered outputs, and the augmented copies requested since."""

    step: Step
    layout: Layout
    meta: BatchMeta  # of all ranks
    forward: Forward
    passes: Sequence[MicroBatchPass]  # of this rank
    outputs: Float[Tensor, "R w"]  # of all ranks
    copies: list[Float[Tensor, "m w"]] = field(default_factory=list)  # one matrix per request; of all ranks
    images: list[Int[Tensor, " m"]] = field(default_factory=list)  # the photo of each of their rows

    @classmethod
    def run(cls, step: Step, learner: nn.Module, batch: Batch, rng: StepRng) -> ForwardPass:
        """Run this rank's photos through the network and gather the outputs of all ranks."""
        dist, forward = step.dist, Forward(step, learner, rng)
        layout = Layout.of(step.detector, step.criterion.requirements)
        shards = dist.all_gather_object(batch.meta().to(torch.device("cpu")))
        meta = BatchMeta.joined(shards).to(batch.tags.device)
        drawn = forward.draw(meta.proposals.image_ids())
        before = tuple(size for shard in shards[: dist.rank] for size in shard.proposals.sizes)
        parts = _micro_batches(batch, drawn, before=before, split=step.memory == "exact")
        kind = StoredGraph if step.memory == "plain" else Recomputed
        passes: list[MicroBatchPass] = [kind(forward, layout, part) for part in parts]
        empty = next(step.detector.parameters()).new_zeros(0, layout.width)
        outputs = dist.all_gather(torch.cat([p.value for p in passes]) if passes else empty)
        return cls(step, layout, meta, forward, passes, outputs)

    def loss(self, fraction: float) -> LossOutput:
        """The criterion on the gathered outputs."""
        return self.step.criterion(self.layout.unpack(self.outputs), self.meta, self.augment_rois, fraction=fraction)

    def augment_rois(self, rows: Int[Tensor, " m"]) -> AugmentedRois:
        """Augmented copies of chosen proposals of the whole batch; each rank computes those of its own photos."""
        images = self.meta.proposals.image_ids()[rows]
        chosen = self.forward.chosen(rows, images)
        kinds = self.step.augment.kinds
        width = kinds * sum(self.layout.copy_widths)
        where = torch.cat([rows.new_zeros(0), *(d.part.owns(images).nonzero().flatten() for d in self.passes)])
        own = [d.augmented(d.part.own(chosen)) for d in self.passes]
        values = torch.cat([self.outputs.new_zeros(0, width), *own])
        order = self.step.dist.all_gather(where[:, None]).flatten()
        leaf = torch.empty(len(rows), width, dtype=values.dtype, device=values.device)
        leaf.index_copy_(0, order, self.step.dist.all_gather(values))
        self.copies.append(leaf.requires_grad_(torch.is_grad_enabled()))
        self.images.append(images)
        return self.layout.unpack_copies(leaf, kinds)

    def backward(
        self, grad: Float[Tensor, "R w"], copy_grads: Sequence[Float[Tensor, "m w"]], only: Only = None
    ) -> None:
        """Propagate the gradients of the outputs through the network, micro-batch by micro-batch.

        Args:
            only: the parameters that get gradients, for a first of two passes; default: all of the learner.
        """
        for done in self.passes if only is None else ():
            done.release()
        for done in self.passes:
            own = [g[done.part.owns(images)] for g, images in zip(copy_grads, self.images, strict=True)]
            done.backward(grad[done.part.rows], own, only)


@dataclass(frozen=True)
class MicroBatch:
    """Photos that go through the network together."""

    batch: Batch
    first: int  # index of the first photo in the whole batch
    start: int  # index of its first proposal in the whole batch
    drawn: Float[Tensor, "R h w"]  # random numbers of the regularizer for its proposals

    @property
    def rows(self) -> slice:
        """Its proposals in the whole batch."""
        return slice(self.start, self.start + len(self.batch.proposals.boxes))

    def images(self) -> Int[Tensor, " R"]:
        """The photo of each proposal, by its index in the whole batch."""
        return self.batch.proposals.image_ids() + self.first

    def owns(self, images: Int[Tensor, " m"]) -> Bool[Tensor, " m"]:
        """Which of some photos of the whole batch are in this micro-batch."""
        return (images >= self.first) & (images < self.first + len(self.batch.ids))

    def own(self, chosen: Chosen) -> Chosen:
        """The chosen proposals of its own photos, rows counted from its first proposal."""
        mine = chosen[self.owns(chosen.images)]
        return replace(mine, rows=mine.rows - self.start)


def _micro_batches(batch: Batch, drawn: Tensor, *, before: tuple[int, ...], split: bool) -> list[MicroBatch]:
    """The whole batch as one micro-batch, or ``split`` into one per photo."""
    groups = [batch.photo(i) for i in range(len(batch.ids))] if split else [batch] if batch.ids else []
    first, start = len(before), sum(before)
    parts: list[MicroBatch] = []
    for group in groups:
        count = len(group.proposals.boxes)
        parts.append(MicroBatch(group, first, start, drawn[start : start + count]))
        first, start = first + len(group.ids), start + count
    return parts


class MicroBatchPass(Protocol):
    """A micro-batch after its forward pass: outputs, augmented copies on request, backward."""

    part: MicroBatch
    value: Float[Tensor, "R w"]  # outputs without a graph

    def augmented(self, chosen: Chosen) -> Float[Tensor, "m w"]:
        """Augmented copies of chosen proposals, rows counted within the micro-batch; without a graph."""
        ...

    def release(self) -> None:
        """Free what only further copies would need."""
        ...

    def backward(
        self, grad: Float[Tensor, "R w"], copy_grads: Sequence[Float[Tensor, "m w"]], only: Only = None
    ) -> None:
        """Add to the gradients of all, or ``only`` some, parameters, given those of the outputs and of all copies."""
        ...


class StoredGraph:
    """A micro-batch whose autograd graph stays in memory until backward."""

    def __init__(self, forward: Forward, layout: Layout, part: MicroBatch) -> None:
        self._forward, self._layout, self.part = forward, layout, part
        with forward.autocast():
            self._rois = rois_of(forward.step.detector, part.batch)
            self._out = pack(forward.outputs(self._rois, part.drawn, part.images()))
        self._copies: list[Tensor] = []
        self.value = self._out.detach()

    def augmented(self, chosen: Chosen) -> Float[Tensor, "m w"]:
        """Augmented copies, whose graph is stored too."""
        partition = _partition(self._layout, self.value, self.part)[chosen.images - self.part.first]
        with self._forward.autocast():
            copies = self._forward.augmented(self._rois[chosen.rows], partition, chosen)
        self._copies.append(pack_copies(copies))
        return self._copies[-1].detach()

    def release(self) -> None:
        """Everything is needed in backward."""

    def backward(
        self, grad: Float[Tensor, "R w"], copy_grads: Sequence[Float[Tensor, "m w"]], only: Only = None
    ) -> None:
        """Backward through the stored graph, which is kept if ``only`` some parameters get gradients."""
        ends = zip([self._out, *self._copies], [grad, *copy_grads], strict=True)
        roots = [(out, g) for out, g in ends if out.requires_grad]
        inputs = [p for p in self._forward.learner.parameters() if p.requires_grad] if only is None else only
        keep = only is not None
        torch.autograd.backward([out for out, _ in roots], [g for _, g in roots], inputs=inputs, retain_graph=keep)


class Recomputed:
    """A micro-batch that stores only its trunk map; backward recomputes the forward pass with the same RNG streams."""

    def __init__(self, forward: Forward, layout: Layout, part: MicroBatch) -> None:
        self._forward, self._layout, self.part = forward, layout, part
        self._chosen: list[Chosen] = []
        detector = forward.step.detector
        with torch.no_grad(), forward.autocast():
            self._batch = _with_trunk_maps(detector, part.batch)
            self.value = pack(forward.outputs(rois_of(detector, self._batch), part.drawn, part.images()))

    def augmented(self, chosen: Chosen) -> Float[Tensor, "m w"]:
        """Augmented copies; only the chosen proposals are pooled again."""
        self._chosen.append(chosen)
        partition = _partition(self._layout, self.value, self.part)[chosen.images - self.part.first]
        with torch.no_grad(), self._forward.autocast():
            rois = rois_of(self._forward.step.detector, _subset(self._batch, chosen.rows))
            return pack_copies(self._forward.augmented(rois, partition, chosen))

    def cell_gradient(self, grad: Float[Tensor, "R w"]) -> Float[Tensor, "R h w"]:
        """Gradients of the regularizer's factors, given those of the outputs: sums over channels of f times its own."""
        drawn = self.part.drawn.clone().requires_grad_()
        with self._forward.autocast():
            with torch.no_grad():
                rois = rois_of(self._forward.step.detector, self._batch)
            out = pack(self._forward.outputs(rois, drawn, self.part.images()))
        return torch.autograd.grad(out, drawn, grad.to(out.dtype))[0]

    def release(self) -> None:
        """A trainable trunk runs again in backward: its map is freed."""
        if not self._forward.step.detector.backbone.frozen_trunk:
            self._batch = self.part.batch

    def backward(
        self, grad: Float[Tensor, "R w"], copy_grads: Sequence[Float[Tensor, "m w"]], only: Only = None
    ) -> None:
        """Recompute with a graph, then backward through it."""
        again = StoredGraph(self._forward, self._layout, replace(self.part, batch=self._batch))
        for chosen in self._chosen:
            again.augmented(chosen)
        again.backward(grad, copy_grads, only)


def _with_trunk_maps(detector: Detector, photo: Batch) -> Batch:
    has_own_trunk = detector.region is not None and not (detector.region.is_shared or detector.backbone.frozen_trunk)
    if photo.images is None or has_own_trunk:  # a trunk of the region classifier runs on the images, too
        return photo
    return replace(photo, images=None, trunks=tuple(detector.backbone.trunk(photo.images)))


def _subset(photo: Batch, rows: Int[Tensor, " m"]) -> Batch:
    """A photo with some of its proposals."""
    proposals = photo.proposals.image(0, rows)
    maps = None if photo.maps is None else photo.maps[rows]
    return replace(photo, proposals=proposals, maps=maps, side_info=photo.side_info.of(slice(None), rows))


def _partition(layout: Layout, value: Float[Tensor, "R w"], part: MicroBatch) -> Float[Tensor, "N c"]:
    return mil_partition(layout.unpack(value).scores.mil_det, part.batch.proposals.sizes)


def loss_scale(grads: Sequence[Tensor]) -> float:
    """Loss scale for fp16: the power of two that brings the largest output gradient near 1.

    It follows from the batch alone, so a resumed run, or another world size, scales alike.
    """
    largest = max((float(g.abs().max()) for g in grads if g.numel()), default=0.0)
    return 2.0 ** -math.frexp(largest)[1] if 0 < largest < math.inf else 1.0


def unscale(parameters: Iterable[nn.Parameter], scale: float) -> None:
    """Divide gradients by the loss scale, in place; after an overflow all are dropped, so the step is skipped."""
    if scale == 1:
        return
    trainable = [p for p in parameters if p.grad is not None]
    is_finite = all(bool(p.grad.isfinite().all()) for p in trainable if p.grad is not None)
    for p in trainable:
        p.grad = p.grad / scale if is_finite and p.grad is not None else None
