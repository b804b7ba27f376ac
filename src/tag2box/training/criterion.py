"""The criterion: network outputs and tags in, pseudo labels and losses out. It has no access to the network.

The total loss is a weighted sum over a tuple of terms (``Criterion.terms``). A term of another package is added with
``criterion.extra = [{kind = "package.module:Name", ...}]``; see docs/adding-a-loss-term.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from operator import or_
from typing import Annotated, Literal, Protocol

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from tag2box.extend import Plugin
from tag2box.methods import casd, discovery, oim, pcl, protocols, wscl, wsddn, wsrpn
from tag2box.models import class_maps
from tag2box.models.class_maps import NO_PRIOR, Prior
from tag2box.ops.losses import box_loss, negative_loss, refine_loss
from tag2box.training.reviewed import with_reviewed
from tag2box.types import (
    IGNORED,
    AugmentedRois,
    AugmentRois,
    BatchMeta,
    LabelerInput,
    Labeling,
    Outputs,
    Proposals,
    PseudoLabels,
    Requirements,
    StageScores,
)


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a loss term can read of a batch."""

    outputs: Outputs
    meta: BatchMeta
    mil: protocols.MilResult
    inputs: LabelerInput
    labeling: Labeling  # also without refinement stages, whose labels are then only logged
    taught: Labeling  # the labels of the refinement stages that exist
    fraction: float  # share of the training iterations done


class LossTerm(Protocol):
    """A loss term of ``criterion.extra``: a frozen dataclass whose fields are its settings."""

    @property
    def weight(self) -> float:
        """The factor of the term in the total loss."""
        ...

    @property
    def requirements(self) -> Requirements:
        """What it reads beyond scores and tags."""
        ...

    def __call__(self, batch: LossInputs) -> Float[Tensor, ""]:
        """The unweighted loss of a batch."""
        ...


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of the total loss."""

    name: str
    weight: float
    loss: Callable[[LossInputs], Float[Tensor, ""]]  # unweighted


@dataclass(frozen=True, slots=True)
class LossOutput:
    """Losses and pseudo labels of one batch."""

    total: Float[Tensor, ""]
    losses: Mapping[str, Float[Tensor, ""]]  # unweighted, by term
    labeling: Labeling
    tags: Bool[Tensor, "N C"]
    contrast_share: float | None = None  # of the gradient at the neck; None if not measured, or if the neck is frozen

    def detached(self, contrast_share: float | None = None) -> LossOutput:
        """The same values without an autograd graph."""
        losses = {name: value.detach() for name, value in self.losses.items()}
        return LossOutput(self.total.detach(), losses, self.labeling, self.tags, contrast_share)


@dataclass(frozen=True, kw_only=True)
class Refine:
    """Losses of the K refinement stages on their pseudo labels (eq. 3-4)."""

    first_stage: Annotated[float, Field(gt=0)] = 3.0
    """Weight of stage 1 relative to the others (used for the paper's figures, not stated in its text)."""
    box_divisor: Literal["proposals", "pseudo_boxes"] = "proposals"
    """Normaliser of L_reg: all proposals (published figures) or the pseudo boxes (the paper's text)."""
    over: Literal["proposals", "clusters"] = "proposals"
    """Unit of L_cls: proposals, or clusters by the mean probability of their members (PCL)."""
    reweight: bool = False
    """Weight proposals in L_cls by the student's current predictions (OIM)."""
    hard_gain: Annotated[float, Field(ge=0)] = 0.2
    """alpha: with ``reweight``, extra weight of foreground that the student is uncertain of."""
    seed_cut: Annotated[float, Field(ge=0, le=1)] = 0.2
    """beta: with ``reweight``, weight taken from a pseudo box that has foreground around it."""
    last_teacher: Literal["previous", "mean"] = "previous"
    """Teacher of the last stage: the stage before it, or the mean of all stages before it (SLV)."""

    def cls_loss(self, scores: StageScores, labeling: Labeling, sizes: Sequence[int]) -> Float[Tensor, ""]:
        """L_cls summed over the stages; zero without stages."""
        stages = zip(scores.refine, labeling.stages, strict=False)  # without stages the labels are only logged
        return self._sum_stages([self._stage_loss(logits, labels, sizes) for logits, labels in stages])

    def _stage_loss(
        self, logits: Float[Tensor, "R c1"], labels: PseudoLabels, sizes: Sequence[int]
    ) -> Float[Tensor, ""]:
        if self.reweight:
            weight = oim.reweighted(logits, labels, hard_gain=self.hard_gain, seed_cut=self.seed_cut)
            labels = replace(labels, weight=weight)
        return pcl.bag_loss(logits, labels, sizes) if self.over == "clusters" else refine_loss(logits, labels, sizes)

    def box_loss(self, scores: StageScores, labeling: Labeling, proposals: Proposals) -> Float[Tensor, ""]:
        """L_reg summed over the stages; zero without box regression."""
        stages = zip(scores.deltas, labeling.stages, strict=False)
        return self._sum_stages([box_loss(d, proposals, labels, self.box_divisor) for d, labels in stages])

    def _sum_stages(self, per_stage: list[Float[Tensor, ""]]) -> Float[Tensor, ""]:
        weighted = [self.first_stage * x if k == 0 else x for k, x in enumerate(per_stage)]
        return torch.stack(weighted).sum() if weighted else torch.zeros(())


@dataclass(frozen=True, kw_only=True)
class Negatives:
    """Certain negatives: no proposal shows a class that its photo is not tagged with. Not in the papers.

    Refinement stages see the tags through pseudo boxes alone, so that photos without a tag, such as those of products
    that have passed, teach them nothing. This term has them score low everywhere on such photos.
    """

    weight: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """Weight of the term; 0 disables it."""
    hardest: Annotated[int, Field(ge=1, le=1_000_000)] = 8
    """Proposals per photo and absent class that count: those with the highest probability."""

    def __call__(self, x: LossInputs) -> Float[Tensor, ""]:
        """The unweighted loss, summed over the stages."""
        meta, sizes = x.meta, x.meta.proposals.sizes
        stage_loss = partial(negative_loss, tags=meta.tags, sizes=sizes, hardest=self.hardest, unsure=meta.unsure)
        return torch.stack([x.mil.loss.new_zeros(()), *map(stage_loss, x.outputs.scores.refine)]).sum()


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """L = L_mil + L_cls + L_reg + lambda L_wscl (eq. 13), with the labeler and the sampling it is based on.

    Example:
        criterion = Criterion(labeler=Mist(), contrast=Contrast(enabled=False))
        loss = criterion(outputs, batch.meta(), augment_rois)
        loss.total.backward()
    """

    mil: Annotated[protocols.MilStrategy, Plugin("MIL head")] = field(default_factory=wsddn.Wsddn)
    rescore: wsrpn.Rescore = wsrpn.Rescore()
    prior: Prior = NO_PRIOR
    """Factors on the teacher scores that pseudo boxes are chosen by, relative to the largest of a photo and class."""
    prior_in_mil: bool = False
    """The prior acts inside the MIL head's softmax over proposals, det + log f, instead of on its scores afterwards.

    Labels are then chosen as before, but the loss of the tags teaches first the boxes that the prior prefers.
    """
    labeler: Annotated[protocols.Labeler, Plugin("labeler")] = field(default_factory=discovery.Discovery)
    inside: Annotated[float, Field(ge=0, le=1)] = 1.0
    """If a pseudo box of any labeler lies in another of its class by more than this fraction of its area, the worse one
    is dropped, and its proposals go to the nearest that is left. 1 drops none."""
    sampling: wscl.Sampling = wscl.Sampling()
    contrast: wscl.Contrast = wscl.Contrast()
    refine: Refine = Refine()
    negatives: Negatives = Negatives()
    reviewed_weight: Annotated[float, Field(ge=0, le=1000)] = 1.0
    """Weight of the proposals of reviewed photos (data.boxes) in L_cls and L_reg; others have their teacher's score."""
    spatial: wsddn.Spatial = wsddn.Spatial()
    attention: casd.Attention = casd.Attention()
    extra: tuple[Annotated[LossTerm, Plugin("loss term")], ...] = ()
    """Further loss terms, each a table with a ``kind``."""

    @cached_property
    def requirements(self) -> Requirements:
        """The union of what all parts require of the network and the data."""
        needed = self.mil.requirements | self.labeler.requirements | Requirements(exemplars=self.contrast.enabled)
        needed = needed | self.spatial.requirements | self.attention.requirements
        needed = needed | Requirements(class_evidence=self.prior.evidence != 0, evidence=self.prior.straddling != 0)
        return reduce(or_, (term.requirements for term in self.extra), needed)

    def for_classes(self, names: Sequence[str]) -> Criterion:
        """The criterion for classes of these names, for a labeler that has settings by class (``for_classes``)."""
        bind = getattr(self.labeler, "for_classes", None)
        return self if bind is None else replace(self, labeler=bind(names))

    @property
    def _factored(self) -> slice:
        """The teachers on whose scores the prior's factors act."""
        return slice(int(self.prior_in_mil), None)

    def terms(self, fraction: float, everything: StageInputs) -> tuple[Term, ...]:
        """The summands of the total loss, in order. The spatial term reads all proposals, also rejected ones."""
        mil, meta, outputs = everything.mil, everything.meta, everything.outputs
        terms = [
            Term("mil", self.mil.weight, lambda x: x.mil.loss),
            Term("refine", 1.0, lambda x: self.refine.cls_loss(x.outputs.scores, x.taught, x.meta.proposals.sizes)),
            Term("box", 1.0, lambda x: self.refine.box_loss(x.outputs.scores, x.taught, x.meta.proposals)),
            Term("contrast", self.contrast.weight, self._contrast),
        ]
        if self.negatives.weight:
            terms.append(Term("negatives", self.negatives.weight, self.negatives))
        if self.spatial.weight:
            spatial = Term("spatial", self.spatial.weight, lambda _: self.spatial(mil.scores, outputs.vectors, meta))
            terms.append(spatial)
        if outputs.responses is not None:
            terms.append(Term("attention", self.attention.strength(fraction), self._attention))
        return (*terms, *(Term(type(term).__name__, term.weight, term) for term in self.extra))

    def __call__(
        self, outputs: Outputs, meta: BatchMeta, augment_rois: AugmentRois, *, fraction: float = 0.0
    ) -> LossOutput:
        """Losses and pseudo labels of a batch: MIL scores, exemplars, labels, then every term."""
        if self.prior_in_mil and self.prior != NO_PRIOR:
            logs = class_maps.log_factors(self.prior, meta)
            gain = class_maps.prior_gain(outputs.scores.mil_det.detach(), logs, meta.proposals.sizes)
            augment_rois = class_maps.with_factors(augment_rois, gain, slice(0, 1))
            outputs = replace(outputs, scores=class_maps.with_prior_in_mil(outputs.scores, logs))
        if outputs.scores.region:
            return self._alternate(outputs, meta, augment_rois, fraction)
        everything = StageInputs(outputs, meta, augment_rois, self.mil(outputs.scores, meta, fraction))
        if not self.rescore.acts(fraction):
            return self._loss(everything, everything, fraction)
        rows = self._kept(everything.mil.scores, meta)
        loss = self._loss(everything.subset(rows), everything, fraction)
        return replace(loss, labeling=wsrpn.scatter_labels(loss.labeling, rows, meta))

    def _alternate(self, outputs: Outputs, meta: BatchMeta, augment_rois: AugmentRois, fraction: float) -> LossOutput:
        """WSRPN: the loss of the region classifier, or that of the detector on the proposals which that one keeps."""
        mil = self.mil if isinstance(self.mil, wsddn.Wsddn) else wsddn.Wsddn()
        cls, det = outputs.scores.region
        region = mil(StageScores(cls, det, (), ()), meta, fraction)
        rows = self._kept(region.scores, meta)
        kept = StageInputs(outputs, meta, augment_rois, region).subset(rows)
        kept = replace(kept, mil=self.mil(kept.outputs.scores, kept.meta, fraction))
        loss = self._loss(kept, kept, fraction)
        total = mil.weight * region.loss if self.rescore.trains_region(fraction) else loss.total
        labeling = wsrpn.scatter_labels(loss.labeling, rows, meta)
        return replace(loss, total=total, losses={**loss.losses, "region": region.loss}, labeling=labeling)

    def _kept(self, scores: Float[Tensor, "R c"], meta: BatchMeta) -> Int[Tensor, " kept"]:
        """The proposals that rescoring keeps, and all reviewed boxes."""
        foreground = scores.detach()[:, : meta.tags.shape[1]]
        is_kept = self.rescore(mean_over_views(foreground, meta).sum(dim=1), meta)
        codes = meta.side_info.reviewed
        if codes is not None:
            is_kept = is_kept | (codes >= 0) | (codes == IGNORED)
        return is_kept.nonzero().flatten()

    def _loss(self, batch: StageInputs, everything: StageInputs, fraction: float) -> LossOutput:
        factors = class_maps.relative_factors(self.prior, batch.meta) if self.prior != NO_PRIOR else None
        inputs = self._labeler_input(batch, factors, fraction)
        if self.requirements.exemplars:
            is_mean = self.refine.last_teacher == "mean"
            augment_rois = self._with_last_teacher(batch.augment_rois) if is_mean else batch.augment_rois
            if factors is not None:
                augment_rois = class_maps.with_factors(augment_rois, factors, self._factored)
            inputs = replace(inputs, exemplars=self.sampling(inputs, augment_rois))
        labeling = run_labeler(self.labeler, inputs, self.reviewed_weight, inside=self.inside)
        taught = replace(labeling, stages=labeling.stages[: len(batch.outputs.scores.refine)])
        x = LossInputs(batch.outputs, batch.meta, batch.mil, inputs, labeling, taught, fraction)
        terms = self.terms(fraction, everything)
        losses = {term.name: term.loss(x) for term in terms}
        total = terms[0].weight * losses[terms[0].name]
        for term in terms[1:]:
            total = total + term.weight * losses[term.name]
        return LossOutput(total, losses, labeling, batch.meta.tags)

    def _contrast(self, x: LossInputs) -> Float[Tensor, ""]:
        if not self.contrast.enabled:
            return x.mil.loss.new_zeros(())
        return self.contrast(wscl.with_discovered(x.inputs, x.labeling), x.meta.proposals.image_ids())

    def _attention(self, x: LossInputs) -> Float[Tensor, ""]:
        assert x.outputs.responses is not None
        return self.attention(x.outputs.responses, x.labeling.stages, x.meta)

    def _with_last_teacher(self, augment_rois: AugmentRois) -> AugmentRois:
        """Augmented copies scored by the same teachers as the proposals."""

        def augment(rows: Int[Tensor, " m"]) -> AugmentedRois:
            made = augment_rois(rows)
            return replace(made, probs=with_last_teacher(made.probs, self.refine.last_teacher))

        return augment

    def _labeler_input(self, batch: StageInputs, factors: Float[Tensor, "R C"] | None, fraction: float) -> LabelerInput:
        outputs, meta, mil = batch.outputs, batch.meta, batch.mil
        num_classes = meta.tags.shape[1]
        probs = teachers(mil.scores, outputs.scores, num_classes, self.refine.last_teacher)
        if meta.views_per_image > 1:
            probs = tuple(mean_over_views(p, meta) for p in probs)
        if factors is not None:
            probs = class_maps.with_prior(probs, factors, self._factored)
        return LabelerInput(
            meta.proposals,
            meta.tags,
            probs,
            outputs.embed,
            wscl.no_exemplars(outputs.embed),
            vectors=outputs.vectors.detach() if self.labeler.requirements.vectors else None,
            deltas=tuple(x.detach() for x in outputs.scores.deltas) if self.labeler.requirements.deltas else (),
            second=None if mil.second is None else mean_over_views(mil.second.detach()[:, :num_classes], meta),
            side_info=meta.side_info,
            fraction=fraction,
            subsets=mil.subsets,
        )


@dataclass(frozen=True, slots=True)
class StageInputs:
    """Outputs, metadata and MIL scores of the proposals that the stages are trained on."""

    outputs: Outputs
    meta: BatchMeta
    augment_rois: AugmentRois
    mil: protocols.MilResult

    def subset(self, rows: Int[Tensor, " r"]) -> StageInputs:
        """The same of some proposals, image after image."""

        def augment(chosen: Int[Tensor, " m"]) -> AugmentedRois:
            return self.augment_rois(rows[chosen])

        second, subsets = (x if x is None else x[rows] for x in (self.mil.second, self.mil.subsets))
        mil = replace(self.mil, scores=self.mil.scores[rows], second=second, subsets=subsets)
        return StageInputs(self.outputs.map(lambda x: x[rows]), self.meta.subset(rows), augment, mil)


def run_labeler(
    labeler: protocols.Labeler, inputs: LabelerInput, reviewed_weight: float = 1.0, *, inside: float = 1.0
) -> Labeling:
    """The labels of a batch, without gradients, as they are constants of the losses: reviewed ones where there are.

    Args:
        inside: as of ``Criterion.inside``.
    """
    num_classes, codes = inputs.tags.shape[1], inputs.side_info.reviewed
    with torch.no_grad():
        labeling = labeler(inputs)
        if inside < 1:
            stages = (discovery.drop_nested(x, inputs.proposals, num_classes, inside) for x in labeling.stages)
            labeling = replace(labeling, stages=tuple(stages))
        if codes is None:
            return labeling
        return with_reviewed(labeling, inputs.proposals, codes, num_classes, reviewed_weight)


def mean_over_views(scores: Float[Tensor, "R C"], meta: BatchMeta) -> Float[Tensor, "R C"]:
    """The mean over the views of a photo, repeated for each view, so that all views get the same labels."""
    if meta.views_per_image == 1:
        return scores
    groups = [(len(views), scores[span.start : span.stop]) for views, span in meta.view_groups()]
    means = [own.view(count, -1, own.shape[1]).mean(dim=0).repeat(count, 1) for count, own in groups]
    return torch.cat([scores[:0], *means])


def teachers(
    mil: Float[Tensor, "R c"],
    scores: StageScores,
    num_classes: int,
    last: Literal["previous", "mean"] = "previous",
) -> tuple[Float[Tensor, "R C"], ...]:
    """Teacher scores: the MIL head for stage 1, the softmax of stage k-1 for stage k; foreground columns, detached."""
    refined = [logits.detach().softmax(dim=1)[:, :num_classes] for logits in scores.refine[:-1]]
    probs = (mil.detach()[:, :num_classes], *refined)
    return with_last_teacher(probs, last) if last == "mean" else probs


def with_last_teacher(probs: tuple[Tensor, ...], last: Literal["previous", "mean"]) -> tuple[Tensor, ...]:
    """Teachers of proposals or of copies, the last optionally replaced by the mean of all stages before."""
    first, *refined = probs
    if last == "mean" and refined:
        refined[-1] = torch.stack(refined).mean(dim=0)
    return (first, *refined)
