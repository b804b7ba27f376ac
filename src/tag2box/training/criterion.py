"""A batch with some of its proposals, and what was found in it put back into the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from tag2box.extend import Plugin
from tag2box.methods.base import Labeler, MilResult, MilStrategy
from tag2box.methods.casd import Attention
from tag2box.methods.discovery import Discovery
from tag2box.methods.oim import reweighted
from tag2box.methods.pcl import bag_loss
from tag2box.methods.wscl import Contrast, Sampling, no_exemplars, with_discovered
from tag2box.methods.wsddn import Spatial, Wsddn
from tag2box.methods.wsrpn import Rescore
from tag2box.ops.refine import box_loss, refine_loss
from tag2box.types import (
    AugmentedRois,
    AugmentRois,
    BatchMeta,
    LabelerInput,
    Labeling,
    Losses,
    Outputs,
    Proposals,
    PseudoLabels,
    Requirements,
    StageScores,
)


@dataclass(frozen=True, slots=True)
class StageInputs:
    """All that the stages are told of a batch."""

    outputs: Outputs
    meta: BatchMeta
    views: AugmentRois
    mil: MilResult

    def only(self, rows: Int[Tensor, " r"]) -> StageInputs:
        """The same of some proposals, image after image."""
        return StageInputs(
            _subset_outputs(self.outputs, rows),
            _subset_meta(self.meta, rows),
            self._views(rows),
            _subset_mil(self.mil, rows),
        )

    def _views(self, rows: Int[Tensor, " r"]) -> AugmentRois:
        def make(asked: Int[Tensor, " m"]) -> AugmentedRois:
            return self.views(rows[asked])

        return make


def scatter_labels(labeling: Labeling, rows: Int[Tensor, " r"], meta: BatchMeta) -> Labeling:
    """Labels of some proposals as labels of all: the others weigh nothing."""
    return replace(labeling, stages=tuple(_scatter_stage(labels, rows, meta) for labels in labeling.stages))


def _scatter_stage(labels: PseudoLabels, rows: Int[Tensor, " r"], meta: BatchMeta) -> PseudoLabels:
    total = len(meta.proposals.boxes)
    return PseudoLabels(
        labels.cls.new_full((total,), meta.tags.shape[1]).index_copy(0, rows, labels.cls),
        labels.weight.new_zeros(total).index_copy(0, rows, labels.weight),
        meta.proposals.boxes.to(labels.boxes.dtype).index_copy(0, rows, labels.boxes),
        replace(labels.pseudo_boxes, rows=rows[labels.pseudo_boxes.rows]),
        labels.owner.new_full((total,), -1).index_copy(0, rows, labels.owner),
    )


def _subset_outputs(outputs: Outputs, rows: Int[Tensor, " r"]) -> Outputs:
    scores = outputs.scores
    return Outputs(
        StageScores(
            scores.mil_cls[rows],
            scores.mil_det[rows],
            _subset_each(scores.refine, rows),
            _subset_each(scores.deltas, rows),
            _subset_each(scores.mil_more, rows),
        ),
        outputs.embed[rows],
        outputs.vectors[rows],
        None if outputs.responses is None else outputs.responses[rows],
    )


def _subset_meta(meta: BatchMeta, rows: Int[Tensor, " r"]) -> BatchMeta:
    counts = torch.bincount(meta.proposals.image_ids()[rows], minlength=len(meta.proposals.sizes))
    proposals = Proposals(meta.proposals.boxes[rows], tuple(counts.tolist()))
    return replace(meta, proposals=proposals, side_info=meta.side_info.of(slice(None), rows))


def _subset_mil(mil: MilResult, rows: Int[Tensor, " r"]) -> MilResult:
    return replace(mil, scores=mil.scores[rows], second=None if mil.second is None else mil.second[rows])


def _subset_each(parts: Sequence[Tensor], rows: Int[Tensor, " r"]) -> tuple[Tensor, ...]:
    return tuple(part[rows] for part in parts)


@dataclass(frozen=True, kw_only=True)
class Refine:
    """Refinement losses (eq. 3-4)."""

    first_stage: Annotated[float, Field(gt=0)] = 3.0
    """Stage 1 counts this much more than the others (not in the paper; its numbers come from it)."""
    box_divisor: Literal["proposals", "pseudo_boxes"] = "proposals"
    """What L_reg is divided by: all proposals (published numbers) or the pseudo boxes (the paper's text)."""
    over: Literal["proposals", "clusters"] = "proposals"
    """What L_cls is made of: proposals, or clusters by the mean probability of their members (PCL)."""
    reweight: bool = False
    """Weigh proposals in L_cls by how the student sees them already (OIM)."""
    hard_gain: Annotated[float, Field(ge=0)] = 0.2
    """alpha: with ``reweight``, foreground the student is unsure of counts this share more."""
    seed_cut: Annotated[float, Field(ge=0, le=1)] = 0.2
    """beta: with ``reweight``, a seed with foreground around it counts this share less."""
    last_teacher: Literal["previous", "mean"] = "previous"
    """Who teaches the last stage: the stage before it, or the mean of all stages before it (SLV)."""

    def cls_loss(self, scores: StageScores, labeling: Labeling, sizes: Sequence[int]) -> Float[Tensor, ""]:
        """L_cls over the stages; zero without any."""
        stages = zip(scores.refine, labeling.stages, strict=False)  # without stages the labels are for pictures only
        return self._over_stages([self._stage_loss(logits, labels, sizes) for logits, labels in stages])

    def _stage_loss(
        self, logits: Float[Tensor, "R c1"], labels: PseudoLabels, sizes: Sequence[int]
    ) -> Float[Tensor, ""]:
        if self.reweight:
            weight = reweighted(logits, labels, hard_gain=self.hard_gain, seed_cut=self.seed_cut)
            labels = replace(labels, weight=weight)
        return bag_loss(logits, labels, sizes) if self.over == "clusters" else refine_loss(logits, labels, sizes)

    def box_loss(self, scores: StageScores, labeling: Labeling, proposals: Proposals) -> Float[Tensor, ""]:
        """L_reg over the stages; zero without box regression."""
        stages = zip(scores.deltas, labeling.stages, strict=False)
        return self._over_stages([box_loss(d, proposals, labels, self.box_divisor) for d, labels in stages])

    def _over_stages(self, per_stage: list[Float[Tensor, ""]]) -> Float[Tensor, ""]:
        weighted = [self.first_stage * x if k == 0 else x for k, x in enumerate(per_stage)]
        return torch.stack(weighted).sum() if weighted else torch.zeros(())


@dataclass(frozen=True, slots=True)
class LossOutput:
    """What one batch came to."""

    total: Float[Tensor, ""]
    losses: Losses
    labeling: Labeling
    tags: Bool[Tensor, "N C"]  # those it was about

    def detached(self) -> LossOutput:
        """The same numbers without a graph."""
        terms = {name: value.detach() for name, value in self.losses.named().items()}
        return LossOutput(self.total.detach(), Losses(**terms), self.labeling, self.tags)


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """L = L_mil + L_cls + L_reg + lambda L_wscl (eq. 13), with the labeler and the sampling it rests on."""

    mil: Annotated[MilStrategy, Plugin("MIL head")] = field(default_factory=Wsddn)
    rescore: Rescore = Rescore()
    labeler: Annotated[Labeler, Plugin("labeler")] = field(default_factory=Discovery)
    sampling: Sampling = Sampling()
    contrast: Contrast = Contrast()
    refine: Refine = Refine()
    spatial: Spatial = Spatial()
    attention: Attention = Attention()

    @property
    def requirements(self) -> Requirements:
        """What all parts together ask the network and the data for."""
        extras = self.spatial.requirements | self.attention.requirements | Requirements(exemplars=self.contrast.enabled)
        return self.mil.requirements | self.labeler.requirements | extras

    def __call__(self, outputs: Outputs, meta: BatchMeta, views: AugmentRois, *, fraction: float = 0.0) -> LossOutput:
        """Losses and labels of a batch: score, sample, label, compare.

        Args:
            progress: share of the training that is done, for parts that change on the way.
        """
        mil = self.mil(outputs.scores, meta, fraction)
        spatial = self.spatial(mil.scores, outputs.vectors, meta) if self.spatial.weight else None
        known = StageInputs(outputs, meta, views, mil)
        if not self.rescore.acts(fraction):
            return self._refined(known, spatial, fraction)
        worth = mean_over_views(mil.scores.detach()[:, : meta.tags.shape[1]], meta).sum(dim=1)
        rows = self.rescore(worth, meta).nonzero().flatten()
        outcome = self._refined(known.only(rows), spatial, fraction)
        return replace(outcome, labeling=scatter_labels(outcome.labeling, rows, meta))

    def _refined(self, known: StageInputs, spatial: Float[Tensor, ""] | None, fraction: float) -> LossOutput:
        """What the stages learn, and the sum of everything."""
        outputs, meta, mil, scores = known.outputs, known.meta, known.mil, known.outputs.scores
        inputs = self._scene(outputs, meta, mil, fraction)
        if self.requirements.exemplars:
            inputs = replace(inputs, exemplars=self.sampling(inputs, self._taught(known.views)))
        labeling = run_labeler(self.labeler, inputs)
        taught = replace(labeling, stages=labeling.stages[: len(scores.refine)])  # none where labels are only looked at
        losses = Losses(
            mil=mil.loss,
            refine=self.refine.cls_loss(scores, taught, meta.proposals.sizes),
            box=self.refine.box_loss(scores, taught, meta.proposals),
            contrast=self.contrast(with_discovered(inputs, labeling))
            if self.contrast.enabled
            else mil.loss.new_zeros(()),
            spatial=spatial,
            attention=None
            if outputs.responses is None
            else self.attention(outputs.responses, labeling.stages[-1], meta),
        )
        return LossOutput(self._total(losses, fraction), losses, labeling, meta.tags)

    def _taught(self, views: AugmentRois) -> AugmentRois:
        """Copies whose teachers are those of the proposals."""

        def make(rows: Int[Tensor, " m"]) -> AugmentedRois:
            made = views(rows)
            return replace(made, probs=with_last_teacher(made.probs, self.refine.last_teacher))

        return make

    def _total(self, losses: Losses, fraction: float) -> Float[Tensor, ""]:
        total = self.mil.weight * losses.mil + losses.refine + losses.box + self.contrast.weight * losses.contrast
        if losses.spatial is not None:
            total = total + self.spatial.weight * losses.spatial
        if losses.attention is not None:
            total = total + self.attention.strength(fraction) * losses.attention
        return total

    def _scene(self, outputs: Outputs, meta: BatchMeta, mil: MilResult, fraction: float) -> LabelerInput:
        num_classes = meta.tags.shape[1]
        taught_by = teachers(mil.scores, outputs.scores, num_classes, self.refine.last_teacher)
        return LabelerInput(
            meta.proposals,
            meta.tags,
            tuple(mean_over_views(probs, meta) for probs in taught_by),
            outputs.embed,
            no_exemplars(outputs.embed),
            vectors=outputs.vectors.detach() if self.labeler.requirements.vectors else None,
            second=None if mil.second is None else mean_over_views(mil.second.detach()[:, :num_classes], meta),
            side_info=meta.side_info,
            fraction=fraction,
        )


def run_labeler(labeler: Labeler, inputs: LabelerInput) -> Labeling:
    """Run any labeler. Labels are facts for the losses, so nothing in here is differentiated."""
    with torch.no_grad():
        return labeler(inputs)


def mean_over_views(scores: Float[Tensor, "R C"], meta: BatchMeta) -> Float[Tensor, "R C"]:
    """The mean over the looks at a photo, for each of them: so that all looks get the same labels."""
    if meta.views_per_image == 1:
        return scores
    together = [(views_per_image, scores[span.start : span.stop]) for views_per_image, span in meta.view_groups()]
    means = [
        own.view(len(views_per_image), -1, own.shape[1]).mean(dim=0).repeat(len(views_per_image), 1)
        for views_per_image, own in together
    ]
    return torch.cat([scores[:0], *means])


def teachers(
    mil: Float[Tensor, "R c"],
    scores: StageScores,
    num_classes: int,
    last: Literal["previous", "mean"] = "previous",
) -> tuple[Float[Tensor, "R C"], ...]:
    """Teacher of stage 1 is the MIL head, of stage k the softmax of stage k-1; foreground columns, detached.

    The ``last`` stage may be taught by the mean of all stages before it instead.
    """
    refined = [logits.detach().softmax(dim=1)[:, :num_classes] for logits in scores.refine[:-1]]
    return with_last_teacher((mil.detach()[:, :num_classes], *refined), last)


def with_last_teacher(probs: tuple[Tensor, ...], last: Literal["previous", "mean"]) -> tuple[Tensor, ...]:
    """Teachers, of proposals or of copies, whose last may be the mean of all stages before."""
    first, *refined = probs
    if last == "mean" and refined:
        refined[-1] = torch.stack(refined).mean(dim=0)
    return (first, *refined)
