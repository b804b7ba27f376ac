"""One training step: forward, criterion, backward.

``plain_step`` is the default and the reference; ``grad_cache.exact_step`` gives the same gradients with recomputation
(GradCache) or over several processes.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tag2box.methods.wscl import contrast_share
from tag2box.models.adversary import MaskNet
from tag2box.models.augment import Augment, Chosen, Rois, augment_rois, rois_of
from tag2box.models.detector import Detector
from tag2box.models.drop_block import InvertedAttention, Regularizer
from tag2box.models.rng import StepRng, Stream
from tag2box.models.runtime import HALF_TYPES, Precision, autocast
from tag2box.ops.losses import at_least_single, mil_partition
from tag2box.training.criterion import Criterion, LossOutput
from tag2box.training.dist import SINGLE_PROCESS, DistContext, Memory
from tag2box.types import AugmentedRois, Batch, Outputs


@dataclass(frozen=True)
class Step:
    """The parts of a training step, called on a batch.

    Example:
        step = Step(detector, Criterion(), DropBlock(), Augment())
        loss = step(batch, StepRng(seed=0, iteration=i), fraction=i / iterations)
        optimizer.step()
    """

    detector: Detector
    criterion: Criterion
    regularizer: Regularizer
    augment: Augment
    memory: Memory = "plain"
    precision: Precision = "fp32"
    dist: DistContext = SINGLE_PROCESS

    @property
    def device(self) -> torch.device:
        """The device of the network."""
        return next(self.detector.parameters()).device

    @property
    def adversary(self) -> MaskNet | None:
        """The regularizer, if it is trained against the detector."""
        return self.regularizer if isinstance(self.regularizer, MaskNet) else None

    def __call__(self, batch: Batch, rng: StepRng, fraction: float = 0.0, *, measure: bool = False) -> LossOutput:
        """Losses and labels of the batch of all ranks; gradients are left in the detector's parameters.

        Args:
            measure: also the share of WSCL in the gradient at the neck, at the cost of a further backward pass of WSCL.
        """
        if self.detector.region is None:
            return self._run(self.detector, batch, rng, fraction, measure)
        rescore = self.criterion.rescore
        self.detector.region.is_shared = rescore.shares(fraction)
        loss = self._run(self.detector, batch, rng, fraction, measure)
        self.detector.drop_gradients(trains_region=rescore.trains_region(fraction))
        return loss

    def adversarial_step(self, batch: Batch, rng: StepRng, fraction: float = 0.0) -> LossOutput:
        """The same batch again; the adversary gets its negated, weighted share of the gradients."""
        assert self.adversary is not None
        loss = self._run(self.adversary, batch, rng, fraction)
        for p in self.adversary.parameters():
            if p.grad is not None:
                p.grad.mul_(-self.adversary.settings.weight)
        return loss

    def _run(
        self, learner: nn.Module, batch: Batch, rng: StepRng, fraction: float, measure: bool = False
    ) -> LossOutput:
        if isinstance(self.regularizer, InvertedAttention):
            from tag2box.training.grad_cache import inverted  # imported here because it builds on this module

            dropped = inverted(self, self.regularizer, batch, rng, fraction)
            return dropped._run(learner, batch, rng, fraction, measure)
        if self.memory == "plain" and self.precision != "fp16" and self.dist.world_size == 1:
            return plain_step(self, learner, batch, rng, fraction, measure=measure)
        from tag2box.training.grad_cache import exact_step  # imported here because it builds on this module

        return exact_step(self, learner, batch, rng, fraction, measure=measure)

    def measured(self, loss: LossOutput) -> tuple[list[nn.Parameter], Float[Tensor, ""]]:
        """The trainable parameters of the neck, none without WSCL, and lambda L_wscl."""
        weighted = self.criterion.contrast.weight * loss.losses["contrast"]
        return self.detector.backbone.neck_parameters() if weighted.requires_grad else [], weighted


def plain_step(
    step: Step, learner: nn.Module, batch: Batch, rng: StepRng, fraction: float, *, measure: bool = False
) -> LossOutput:
    """Forward, criterion and backward through one autograd graph.

    Args:
        learner: the module whose parameters get gradients: the detector, or its adversary.
        measure: also the share of WSCL in the gradient at the neck.
    """
    images = batch.proposals.image_ids()
    forward = Forward(step, learner, rng)
    with forward.autocast():
        rois = rois_of(step.detector, batch)
        outputs = forward.outputs(rois, forward.draw(images), images)
    ends = [*outputs.tensors()]

    def augment_rois(rows: Int[Tensor, " m"]) -> AugmentedRois:
        partition = mil_partition(outputs.scores.mil_det.detach(), batch.proposals.sizes)[images[rows]]
        with forward.autocast():
            copies = forward.augmented(rois[rows], partition, forward.chosen(rows, images[rows]))
        ends.append(copies.embed)
        return copies

    loss = step.criterion(outputs, batch.meta(), augment_rois, fraction=fraction)
    learner.zero_grad(set_to_none=True)
    neck, weighted = step.measured(loss) if measure else ([], loss.total)
    contrast = torch.autograd.grad(weighted, neck, retain_graph=True, allow_unused=True) if neck else ()
    # A zero gradient for every output: parameters that the loss does not reach are then decayed like all others.
    roots = [x for x in (loss.total, *ends) if x.requires_grad]
    grads = [torch.ones_like(x) if x is loss.total else torch.zeros_like(x) for x in roots]
    if roots:
        torch.autograd.backward(roots, grads, inputs=[p for p in learner.parameters() if p.requires_grad])
    return loss.detached(contrast_share(neck, contrast) if measure else None)


@dataclass(frozen=True)
class Forward:
    """The training forward pass of proposals: precision, RNG streams, regularizer."""

    step: Step
    learner: nn.Module
    rng: StepRng

    def autocast(self) -> AbstractContextManager[object]:
        """Half precision inside the block, if it is set."""
        is_half = self.step.precision in HALF_TYPES
        return autocast(self.step.device, self.step.precision) if is_half else nullcontext()

    def draw(self, images: Int[Tensor, " R"]) -> Float[Tensor, "R h w"]:
        """Random numbers of the regularizer for the proposals of a batch; ``images`` are numbers in the whole batch."""
        return self.step.regularizer.draw(self.rng, images, self.step.detector.backbone.map_size)

    def outputs(self, rois: Rois, drawn: Float[Tensor, "R h w"], images: Int[Tensor, " R"]) -> Outputs:
        """Scores of the regularized RoI maps, embeddings and responses of the clean ones; at least single precision."""
        detector, needed = self.step.detector, self.step.criterion.requirements
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.learner is not detector):
            factors = self.step.regularizer.factors(drawn, rois.maps, images)
        vectors = detector.backbone.neck_tail(rois.stem, factors, self.rng.row_rng(Stream.NECK, images))
        embed = nothing = rois.maps.new_zeros(len(rois.maps), 0)
        if needed.exemplars:
            row_rng = self.rng.row_rng(Stream.CLEAN_NECK, images)
            embed = detector.embed(detector.backbone.neck_tail(rois.stem, torch.ones_like(drawn), row_rng))
        responses = detector.backbone.responses(rois.maps, rois.stem) if needed.responses else None
        kept = detector.own(vectors) if needed.vectors else nothing
        scores = detector.score(vectors)
        if detector.region is not None and rois.region is not None:
            logits = detector.region.logits(rois.region, self.rng.row_rng(Stream.REGION_NECK, images))
            scores = replace(scores, region=logits)
        outputs = Outputs(scores, embed, kept, responses)
        return outputs.map(at_least_single) if self.step.precision in HALF_TYPES else outputs

    def chosen(self, rows: Int[Tensor, " m"], images: Int[Tensor, " m"]) -> Chosen:
        """Proposals to copy, with the masks drawn for them."""
        side = self.step.detector.backbone.map_size
        return Chosen(rows, images, self.step.augment.masks(self.rng, images, side))

    def augmented(self, rois: Rois, partition: Float[Tensor, "m c"], chosen: Chosen) -> AugmentedRois:
        """Augmented copies of chosen proposals."""
        step = self.step
        copies = augment_rois(step.detector, rois, partition, chosen=chosen, augment=step.augment, rng=self.rng)
        return replace(copies, embed=at_least_single(copies.embed))
