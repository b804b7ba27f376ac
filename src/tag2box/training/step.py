"""The life of a batch, in one short function: the same whether it runs at once, photo by photo or over processes.

The objective depends on the network through the outputs of proposals and of chosen copies alone. So it is given these
as leaves, for the batch of all processes; its gradients of them are what goes back through the network, wherever that
ran. See docs/large-batches.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tag2box.models.augment import Augment, Chosen
from tag2box.models.detector import Detector
from tag2box.models.drop_block import MaskNet, Regulariser
from tag2box.models.rng import StepRng
from tag2box.training.criterion import Criterion, LossOutput
from tag2box.training.dist import SINGLE_PROCESS, DistContext, Memory, Precision
from tag2box.training.grad_cache import MicroBatch, MicroBatchPass, Network, Recomputed, StoredGraph, scale_of, unscale
from tag2box.types import AugmentedRois, Batch, BatchMeta


@dataclass(frozen=True)
class Step:
    """Network, regulariser, views and objective, called on a batch."""

    detector: Detector
    criterion: Criterion
    regularise: Regulariser
    augment: Augment
    memory: Memory = "plain"
    precision: Precision = "fp32"
    dist: DistContext = SINGLE_PROCESS

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(self.detector.parameters()).device

    @property
    def adversary(self) -> MaskNet | None:
        """The regulariser, where it learns against the detector."""
        return self.regularise if isinstance(self.regularise, MaskNet) else None

    def __call__(self, batch: Batch, rng: StepRng, fraction: float = 0.0) -> LossOutput:
        """Losses and labels of the batch of all processes; leaves the gradients in the detector's parameters."""
        return self._learn(self.detector, batch, rng, fraction)

    def adversarial_step(self, batch: Batch, rng: StepRng, fraction: float = 0.0) -> LossOutput:
        """The same through the network as it now is; leaves the rival the opposite of its share of the gradients."""
        assert self.adversary is not None
        outcome = self._learn(self.adversary, batch, rng, fraction)
        for p in self.adversary.parameters():
            if p.grad is not None:
                p.grad.mul_(-self.adversary.settings.weight)
        return outcome

    def _learn(self, learner: nn.Module, batch: Batch, rng: StepRng, fraction: float) -> LossOutput:
        run = self._through(batch, rng, self.dist, learner)
        leaf = run.outputs.requires_grad_()
        outcome = self._judged(leaf, run, fraction)
        outcome.total.backward()
        grads = [_grad(rows) for rows in (leaf, *run.copies)]
        scale = scale_of(grads) if self.precision == "fp16" else 1.0
        learner.zero_grad(set_to_none=True)
        run.back(grads[0] * scale, [grad * scale for grad in grads[1:]])
        self.dist.all_reduce_gradients(learner.parameters())
        unscale(learner.parameters(), scale)
        return outcome.detached()

    def look(self, batch: Batch, rng: StepRng, fraction: float = 0.0) -> LossOutput:
        """The same without gradients, on this process's photos alone."""
        with torch.no_grad():
            alone = replace(self, memory="exact", dist=SINGLE_PROCESS)
            run = alone._through(batch, rng, SINGLE_PROCESS, self.detector)
            return alone._judged(run.outputs, run, fraction).detached()

    def _through(self, batch: Batch, rng: StepRng, dist: DistContext, learner: nn.Module) -> _Run:
        """All photos of this process through the network, and the outputs of everybody's."""
        shares = dist.all_gather_object(batch.meta().to(torch.device("cpu")))
        meta = BatchMeta.joined(shares).to(batch.tags.device)
        side = self.detector.backbone.map_size
        drawn = self.regularise.draw(rng, meta.proposals.image_ids(), side)
        before = tuple(size for share in shares[: dist.rank] for size in share.proposals.sizes)
        parts = _parts(batch, drawn, before=before, apart=self.memory == "exact")
        network = Network(
            detector=self.detector,
            regularise=self.regularise,
            learner=learner,
            augment=self.augment,
            requirements=self.criterion.requirements,
            precision=self.precision,
            rng=rng,
        )
        passes: list[MicroBatchPass] = [
            StoredGraph(network, p) if self.memory == "plain" else Recomputed(network, p) for p in parts
        ]
        empty = next(self.detector.parameters()).new_zeros(0, network.layout.width)
        outputs = dist.gather(torch.cat([p.value for p in passes]) if passes else empty)
        return _Run(network, dist, meta, passes, outputs)

    def _judged(self, rows: Float[Tensor, "R w"], run: _Run, fraction: float) -> LossOutput:
        return self.criterion(run.network.layout.outputs(rows), run.meta, run.views, fraction=fraction)


@dataclass(frozen=True)
class _Run:
    """A batch that has gone through the network, and the copies that were asked for since."""

    network: Network
    dist: DistContext
    meta: BatchMeta  # of all processes
    passes: Sequence[MicroBatchPass]  # of this one
    outputs: Float[Tensor, "R w"]  # of all
    copies: list[Float[Tensor, "m w"]] = field(default_factory=list)  # one matrix a call of views; of all
    images: list[Int[Tensor, " m"]] = field(default_factory=list)  # the photo of each of their rows

    def views(self, rows: Int[Tensor, " m"]) -> AugmentedRois:
        """Copies of chosen proposals of the whole batch: each process makes those of its own photos."""
        network = self.network
        images = self.meta.proposals.image_ids()[rows]
        side = network.detector.backbone.map_size
        chosen = Chosen(rows, images, network.augment.masks(network.rng, images, side))
        kinds, layout = network.augment.kinds, network.layout
        width = kinds * sum(layout.view_widths)
        where = torch.cat([rows.new_zeros(0), *(d.part.owns(images).nonzero().flatten() for d in self.passes)])
        values = torch.cat([self.outputs.new_zeros(0, width), *(d.views(d.part.own(chosen)) for d in self.passes)])
        order = self.dist.gather(where[:, None]).flatten()
        leaf = torch.empty(len(rows), width, dtype=values.dtype, device=values.device)
        leaf.index_copy_(0, order, self.dist.gather(values))
        self.copies.append(leaf.requires_grad_(torch.is_grad_enabled()))
        self.images.append(images)
        return layout.views(leaf, kinds)

    def back(self, grad: Float[Tensor, "R w"], copy_grads: Sequence[Float[Tensor, "m w"]]) -> None:
        """Through the network again: each pass takes what concerns its own photos."""
        for done in self.passes:
            done.settle()
        for done in self.passes:
            own = [g[done.part.owns(images)] for g, images in zip(copy_grads, self.images, strict=True)]
            done.backward(grad[done.part.rows], own)


def _grad(leaf: Tensor) -> Tensor:
    """Its gradient; zero where nothing depended on it."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _parts(batch: Batch, drawn: Tensor, *, before: tuple[int, ...], apart: bool) -> list[MicroBatch]:
    """Photos that go through the network together: all of them, or each ``apart``."""
    groups = [batch.photo(i) for i in range(len(batch.ids))] if apart else [batch] if batch.ids else []
    first, start = len(before), sum(before)
    parts: list[MicroBatch] = []
    for group in groups:
        count = len(group.proposals.boxes)
        parts.append(MicroBatch(group, first, start, drawn[start : start + count]))
        first, start = first + len(group.ids), start + count
    return parts
