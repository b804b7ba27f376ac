"""The network's outputs as rows of one matrix: what is passed between processes, and what gradients are taken of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tag2box.models.augment import Augment, Chosen, Rois, make_views, rois_of
from tag2box.models.detector import Detector, RefineHead
from tag2box.models.drop_block import Regulariser
from tag2box.models.rng import StepRng, Stream
from tag2box.ops.boxes import at_least_single
from tag2box.ops.mil import mil_partition
from tag2box.training.dist import Precision
from tag2box.types import AugmentedRois, Batch, Outputs, Proposals, Requirements, StageScores


@dataclass(frozen=True, slots=True)
class Layout:
    """Which columns hold what."""

    mil: int  # columns of the MIL head
    classes: int
    stages: int
    regress: bool
    embed: int  # 0 where nothing reads embeddings
    vector: int = 0  # 0 where nothing reads feature vectors
    mil_heads: int = 1
    layers: int = 0  # 0 where nothing reads responses
    side: int = 0  # of the maps that responses are given of

    @classmethod
    def of(cls, detector: Detector, requirements: Requirements) -> Layout:
        """The layout of a detector's outputs."""
        heads = [head for head in detector.refine if isinstance(head, RefineHead)]
        return cls(
            mil=detector.mil.cls.out_features,
            classes=detector.num_classes,
            stages=len(detector.refine),
            regress=any(head.box is not None for head in heads),
            embed=detector.similarity.out.out_features if requirements.exemplars else 0,
            vector=detector.backbone.vector_size if requirements.vectors else 0,
            mil_heads=1 + len(detector.mil_more),
            layers=detector.backbone.layers if requirements.responses else 0,
            side=detector.backbone.map_size,
        )

    @property
    def width(self) -> int:
        """Columns in all."""
        return sum(self._widths)

    @property
    def _widths(self) -> list[int]:
        boxes = [4 * self.classes] * self.stages if self.regress else []
        stages = [self.classes + 1] * self.stages
        responses = self.layers * self.side**2
        return [*[self.mil] * (2 * self.mil_heads), *stages, *boxes, self.embed, self.vector, responses]

    @property
    def view_widths(self) -> list[int]:
        """Columns of one copy: its embedding, and its scores by each teacher; without stages one still teaches."""
        return [self.embed, *[self.classes] * max(self.stages, 1)]

    def outputs(self, rows: Float[Tensor, "R w"]) -> Outputs:
        """The rows as what they mean."""
        *scores, embed, vectors, flat = rows.split(self._widths, dim=1)
        mil_cls, mil_det, *more = scores[: 2 * self.mil_heads]
        rest = scores[2 * self.mil_heads :]
        stages = StageScores(mil_cls, mil_det, tuple(rest[: self.stages]), tuple(rest[self.stages :]), tuple(more))
        responses = flat.unflatten(1, (self.layers, self.side, self.side)) if self.layers else None
        return Outputs(stages, embed, vectors, responses)

    def views(self, rows: Float[Tensor, "m w"], kinds: int) -> AugmentedRois:
        """Copies; their scores without gradient."""
        widths = self.view_widths
        columns = rows.view(len(rows), kinds, sum(widths)).transpose(0, 1).split(widths, dim=2)
        return AugmentedRois(columns[0], tuple(probs.detach() for probs in columns[1:]))


def pack(outputs: Outputs) -> Float[Tensor, "R w"]:
    """Outputs side by side, in single precision at least."""
    scores = outputs.scores
    mil = [scores.mil_cls, scores.mil_det, *scores.mil_more]
    responses = [] if outputs.responses is None else [outputs.responses.flatten(1)]
    parts = [*mil, *scores.refine, *scores.deltas, outputs.embed, outputs.vectors, *responses]
    return torch.cat([at_least_single(part) for part in parts], dim=1)


def pack_views(views: AugmentedRois) -> Float[Tensor, "m w"]:
    """Copies side by side."""
    kinds = torch.cat([views.embed, *(probs.to(views.embed.dtype) for probs in views.probs)], dim=2)  # (V, m, .)
    return kinds.transpose(0, 1).flatten(1)


def scale_of(grads: Sequence[Tensor]) -> float:
    """What to multiply the gradients of the outputs with."""
    largest = max((float(g.abs().max()) for g in grads if g.numel()), default=0.0)
    return 2.0 ** -math.frexp(largest)[1] if 0 < largest < math.inf else 1.0


def unscale(parameters: Iterable[nn.Parameter], scale: float) -> None:
    """Divide what came back, in place; where something overflowed, all gradients go, and the optimiser stands still."""
    if scale == 1:
        return
    learning = [p for p in parameters if p.grad is not None]
    is_finite = all(bool(p.grad.isfinite().all()) for p in learning if p.grad is not None)
    for p in learning:
        p.grad = p.grad / scale if is_finite and p.grad is not None else None


_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Network:
    """The detector as training runs it."""

    detector: Detector
    regularise: Regulariser
    learner: nn.Module  # whose parameters get gradients: the detector, or the regulariser, which learns against it
    augment: Augment
    requirements: Requirements  # what the objective reads of it
    precision: Precision
    rng: StepRng

    @property
    def layout(self) -> Layout:
        """The columns of its outputs."""
        return Layout.of(self.detector, self.requirements)

    def autocast(self) -> AbstractContextManager[None]:
        """Half precision within, where it is wanted."""
        device = next(self.detector.parameters()).device.type
        return torch.autocast(device, _HALF.get(self.precision, torch.bfloat16), enabled=self.precision in _HALF)

    def outputs(self, rois: Rois, drawn: Float[Tensor, "R h w"], images: Int[Tensor, " R"]) -> Float[Tensor, "R w"]:
        """Scores of the regularised maps, embeddings and responses of the clean ones."""
        detector, rng, nothing = self.detector, self.rng, rois.maps.new_zeros(len(rois.maps), 0)
        vectors = detector.backbone.neck_tail(
            rois.stem, self._factors(rois, drawn, images), rng.row_rng(Stream.NECK, images)
        )
        embed = nothing
        if self.requirements.exemplars:
            clean, row_rng = torch.ones_like(drawn), rng.row_rng(Stream.CLEAN_NECK, images)
            embed = detector.embed(detector.backbone.neck_tail(rois.stem, clean, row_rng))
        responses = detector.backbone.responses(rois.maps, rois.stem) if self.requirements.responses else None
        return pack(
            Outputs(detector.score(vectors), embed, vectors if self.requirements.vectors else nothing, responses)
        )

    def _factors(self, rois: Rois, drawn: Float[Tensor, "R h w"], images: Int[Tensor, " R"]) -> Float[Tensor, "R h w"]:
        """To the detector they are given; only a regulariser that is learning is asked where they come from."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.learner is not self.detector):
            return self.regularise.factors(drawn, rois.maps, images)

    def views(self, rois: Rois, partition: Float[Tensor, "m c"], chosen: Chosen) -> Float[Tensor, "m w"]:
        """Copies of chosen proposals."""
        made = make_views(self.detector, rois, partition, chosen=chosen, augment=self.augment, rng=self.rng)
        return pack_views(made)


@dataclass(frozen=True)
class MicroBatch:
    """Photos that go through the network together."""

    batch: Batch
    first: int  # number of the first photo in the whole batch
    start: int  # number of its first proposal in the whole batch
    drawn: Float[Tensor, "R h w"]  # by the regulariser, for its proposals

    @property
    def rows(self) -> slice:
        """Its proposals in the whole batch."""
        return slice(self.start, self.start + len(self.batch.proposals.boxes))

    def images(self) -> Int[Tensor, " R"]:
        """The photo of each proposal, by its number in the whole batch."""
        return self.batch.proposals.image_ids() + self.first

    def owns(self, images: Int[Tensor, " m"]) -> Bool[Tensor, " m"]:
        """Which of some photos of the whole batch are its own."""
        return (images >= self.first) & (images < self.first + len(self.batch.ids))

    def own(self, chosen: Chosen) -> Chosen:
        """Those chosen that are of its own photos, their rows counted from its first proposal."""
        mine = chosen[self.owns(chosen.images)]
        return replace(mine, rows=mine.rows - self.start)


class MicroBatchPass(Protocol):
    """A part gone through the network: its outputs, copies on demand, and the way back."""

    part: MicroBatch
    value: Float[Tensor, "R w"]  # without a graph

    def views(self, chosen: Chosen) -> Float[Tensor, "m w"]:
        """Copies of chosen proposals, rows counted within the part; without a graph."""
        ...

    def settle(self) -> None:
        """No more copies will be asked for: what only they need can go."""
        ...

    def backward(self, grad: Float[Tensor, "R w"], view_grads: list[Float[Tensor, "m w"]]) -> None:
        """Add to the parameters' gradients, given those of the outputs and of every call of ``views``."""
        ...


class StoredGraph:
    """All at once: the graph stays in memory until the way back."""

    def __init__(self, network: Network, part: MicroBatch) -> None:
        self._network, self.part = network, part
        with network.autocast():
            self._rois = rois_of(network.detector, part.batch)
            self._out = network.outputs(self._rois, part.drawn, part.images())
        self._copies: list[Tensor] = []
        self.value = self._out.detach()

    def views(self, chosen: Chosen) -> Float[Tensor, "m w"]:
        """Copies, whose graph stays too."""
        partition = _partition(self._network.layout, self.value, self.part)[chosen.images - self.part.first]
        with self._network.autocast():
            self._copies.append(self._network.views(self._rois[chosen.rows], partition, chosen))
        return self._copies[-1].detach()

    def settle(self) -> None:
        """Everything is needed on the way back."""

    def backward(self, grad: Float[Tensor, "R w"], view_grads: list[Float[Tensor, "m w"]]) -> None:
        """Through the graph."""
        ends = zip([self._out, *self._copies], [grad, *view_grads], strict=True)
        learning = [(out, g) for out, g in ends if out.requires_grad]
        wanted = [p for p in self._network.learner.parameters() if p.requires_grad]
        torch.autograd.backward([out for out, _ in learning], [g for _, g in learning], inputs=wanted)


class Recomputed:
    """In the memory of one photo: nothing but its trunk's map stays, and the way back runs the network again."""

    def __init__(self, network: Network, part: MicroBatch) -> None:
        self._network, self.part = network, part
        self._chosen: list[Chosen] = []
        with torch.no_grad(), network.autocast():
            self._seen = _through_trunk(network.detector, part.batch)
            rois = rois_of(network.detector, self._seen)
            self.value = network.outputs(rois, part.drawn, part.images())

    def views(self, chosen: Chosen) -> Float[Tensor, "m w"]:
        """Copies; only the chosen proposals are pooled again."""
        self._chosen.append(chosen)
        partition = _partition(self._network.layout, self.value, self.part)[chosen.images - self.part.first]
        with torch.no_grad(), self._network.autocast():
            rois = rois_of(self._network.detector, _only(self._seen, chosen.rows))
            return self._network.views(rois, partition, chosen)

    def settle(self) -> None:
        """A trunk that learns runs again on the way back: its map can go."""
        if not self._network.detector.backbone.frozen_trunk:
            self._seen = self.part.batch

    def backward(self, grad: Float[Tensor, "R w"], view_grads: list[Float[Tensor, "m w"]]) -> None:
        """The same numbers are drawn again, so the graph is that of the first pass."""
        again = StoredGraph(self._network, replace(self.part, batch=self._seen))
        for chosen in self._chosen:
            again.views(chosen)
        again.backward(grad, view_grads)


def _through_trunk(detector: Detector, photo: Batch) -> Batch:
    if photo.images is None:
        return photo
    return replace(photo, images=None, trunks=tuple(detector.backbone.trunk(photo.images)))


def _only(photo: Batch, rows: Int[Tensor, " m"]) -> Batch:
    """A photo with some of its proposals."""
    proposals = Proposals(photo.proposals.boxes[rows], (len(rows),))
    maps = None if photo.maps is None else photo.maps[rows]
    return replace(photo, proposals=proposals, maps=maps, side_info=photo.side_info.of(slice(None), rows))


def _partition(layout: Layout, value: Float[Tensor, "R w"], part: MicroBatch) -> Float[Tensor, "N c"]:
    return mil_partition(layout.outputs(value).scores.mil_det, part.batch.proposals.sizes)
