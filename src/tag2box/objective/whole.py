"""The objective: head outputs and tags in, losses out. It never meets the network (spec: the life of a batch)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tag2box.labelers import BuiltIn, Discovery, Labeler
from tag2box.mil import BuiltInMil, MilResult, Rescore, Wsddn
from tag2box.objective.attention import Attention
from tag2box.objective.contrast import Contrast, grown
from tag2box.objective.refine import Refine
from tag2box.objective.sampling import Sampling, no_exemplars
from tag2box.objective.sift import Known, put_back
from tag2box.objective.spatial import Spatial
from tag2box.types import Facts, Labeling, Losses, Needs, Outputs, Scene, StageScores, ViewMaker, Views


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one batch came to."""

    total: Float[Tensor, ""]
    losses: Losses
    labeling: Labeling
    tags: Bool[Tensor, "N C"]  # those it was about

    def detached(self) -> Outcome:
        """The same numbers without a graph."""
        terms = {name: value.detach() for name, value in self.losses.named().items()}
        return Outcome(self.total.detach(), Losses(**terms), self.labeling, self.tags)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """L = L_mil + L_cls + L_reg + lambda L_wscl (eq. 13), with the labeler and the sampling it rests on."""

    mil: BuiltInMil = field(default_factory=Wsddn)
    rescore: Rescore = Rescore()
    labeler: BuiltIn = field(default_factory=Discovery)
    sampling: Sampling = Sampling()
    contrast: Contrast = Contrast()
    refine: Refine = Refine()
    spatial: Spatial = Spatial()
    attention: Attention = Attention()

    @property
    def needs(self) -> Needs:
        """What all parts together ask the network and the data for."""
        extras = self.spatial.needs | self.attention.needs | Needs(exemplars=self.contrast.enabled)
        return self.mil.needs | self.labeler.needs | extras

    def __call__(self, outputs: Outputs, facts: Facts, views: ViewMaker, *, progress: float = 0.0) -> Outcome:
        """Losses and labels of a batch: score, sample, label, compare.

        Args:
            progress: share of the training that is done, for parts that change on the way.
        """
        mil = self.mil(outputs.scores, facts, progress)
        spatial = self.spatial(mil.scores, outputs.vectors, facts) if self.spatial.weight else None
        known = Known(outputs, facts, views, mil)
        if not self.rescore.acts(progress):
            return self._refined(known, spatial, progress)
        worth = over_looks(mil.scores.detach()[:, : facts.tags.shape[1]], facts).sum(dim=1)
        rows = self.rescore(worth, facts).nonzero().flatten()
        outcome = self._refined(known.only(rows), spatial, progress)
        return replace(outcome, labeling=put_back(outcome.labeling, rows, facts))

    def _refined(self, known: Known, spatial: Float[Tensor, ""] | None, progress: float) -> Outcome:
        """What the stages learn, and the sum of everything."""
        outputs, facts, mil, scores = known.outputs, known.facts, known.mil, known.outputs.scores
        scene = self._scene(outputs, facts, mil, progress)
        if self.needs.exemplars:
            scene = replace(scene, exemplars=self.sampling(scene, self._taught(known.views)))
        labeling = label(self.labeler, scene)
        taught = replace(labeling, stages=labeling.stages[: len(scores.refine)])  # none where labels are only looked at
        losses = Losses(
            mil=mil.loss,
            refine=self.refine.cls_loss(scores, taught, facts.proposals.sizes),
            box=self.refine.box_loss(scores, taught, facts.proposals),
            contrast=self.contrast(grown(scene, labeling)) if self.contrast.enabled else mil.loss.new_zeros(()),
            spatial=spatial,
            attention=None
            if outputs.responses is None
            else self.attention(outputs.responses, labeling.stages[-1], facts),
        )
        return Outcome(self._total(losses, progress), losses, labeling, facts.tags)

    def _taught(self, views: ViewMaker) -> ViewMaker:
        """Copies whose teachers are those of the proposals."""

        def make(rows: Int[Tensor, " m"]) -> Views:
            made = views(rows)
            return replace(made, probs=last_by(made.probs, self.refine.last_teacher))

        return make

    def _total(self, losses: Losses, progress: float) -> Float[Tensor, ""]:
        total = self.mil.weight * losses.mil + losses.refine + losses.box + self.contrast.weight * losses.contrast
        if losses.spatial is not None:
            total = total + self.spatial.weight * losses.spatial
        if losses.attention is not None:
            total = total + self.attention.strength(progress) * losses.attention
        return total

    def _scene(self, outputs: Outputs, facts: Facts, mil: MilResult, progress: float) -> Scene:
        num_classes = facts.tags.shape[1]
        taught_by = teachers(mil.scores, outputs.scores, num_classes, self.refine.last_teacher)
        return Scene(
            facts.proposals,
            facts.tags,
            tuple(over_looks(probs, facts) for probs in taught_by),
            outputs.embed,
            no_exemplars(outputs.embed),
            vectors=outputs.vectors.detach() if self.labeler.needs.vectors else None,
            second=None if mil.second is None else over_looks(mil.second.detach()[:, :num_classes], facts),
            clues=facts.clues,
            progress=progress,
        )


def label(labeler: Labeler, scene: Scene) -> Labeling:
    """Run any labeler. Labels are facts for the losses, so nothing in here is differentiated."""
    with torch.no_grad():
        return labeler(scene)


def over_looks(scores: Float[Tensor, "R C"], facts: Facts) -> Float[Tensor, "R C"]:
    """The mean over the looks at a photo, for each of them: so that all looks get the same labels."""
    if facts.looks == 1:
        return scores
    together = [(looks, scores[span.start : span.stop]) for looks, span in facts.seen_together()]
    means = [own.view(len(looks), -1, own.shape[1]).mean(dim=0).repeat(len(looks), 1) for looks, own in together]
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
    return last_by((mil.detach()[:, :num_classes], *refined), last)


def last_by(probs: tuple[Tensor, ...], last: Literal["previous", "mean"]) -> tuple[Tensor, ...]:
    """Teachers, of proposals or of copies, whose last may be the mean of all stages before."""
    first, *refined = probs
    if last == "mean" and refined:
        refined[-1] = torch.stack(refined).mean(dim=0)
    return (first, *refined)
