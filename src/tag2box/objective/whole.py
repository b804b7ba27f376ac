"""The objective: head outputs and tags in, losses out. It never meets the network (spec: the life of a batch)."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tag2box.labelers import BuiltIn, Discovery, Labeler
from tag2box.mil import BuiltInMil, MilResult, Wsddn
from tag2box.objective.contrast import Contrast, grown
from tag2box.objective.refine import Refine
from tag2box.objective.sampling import Sampling, no_exemplars
from tag2box.types import Facts, Labeling, Losses, Needs, Outputs, Scene, StageScores, ViewMaker


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one batch came to."""

    total: Float[Tensor, ""]
    losses: Losses
    labeling: Labeling
    tags: Bool[Tensor, "N C"]  # those it was about

    def detached(self) -> Outcome:
        """The same numbers without a graph."""
        terms = (getattr(self.losses, term.name).detach() for term in fields(self.losses))
        return Outcome(self.total.detach(), Losses(*terms), self.labeling, self.tags)


@dataclass(frozen=True, kw_only=True)
class Objective:
    """L = L_mil + L_cls + L_reg + lambda L_wscl (eq. 13), with the labeler and the sampling it rests on."""

    mil: BuiltInMil = field(default_factory=Wsddn)
    labeler: BuiltIn = field(default_factory=Discovery)
    sampling: Sampling = Sampling()
    contrast: Contrast = Contrast()
    refine: Refine = Refine()

    @property
    def needs(self) -> Needs:
        """What all parts together ask the network and the data for."""
        return self.mil.needs | self.labeler.needs | Needs(exemplars=self.contrast.enabled)

    def __call__(self, outputs: Outputs, facts: Facts, views: ViewMaker, *, progress: float = 0.0) -> Outcome:
        """Losses and labels of a batch: score, sample, label, compare.

        Args:
            progress: share of the training that is done, for parts that change on the way.
        """
        scores = outputs.scores
        mil = self.mil(scores, facts, progress)
        scene = self._scene(outputs, facts, mil, progress)
        if self.needs.exemplars:
            scene = replace(scene, exemplars=self.sampling(scene, views))
        labeling = label(self.labeler, scene)
        losses = Losses(
            mil=mil.loss,
            refine=self.refine.cls_loss(scores, labeling, facts.proposals.sizes),
            box=self.refine.box_loss(scores, labeling, facts.proposals),
            contrast=self.contrast(grown(scene, labeling)) if self.contrast.enabled else mil.loss.new_zeros(()),
        )
        total = self.mil.weight * losses.mil + losses.refine + losses.box + self.contrast.weight * losses.contrast
        return Outcome(total, losses, labeling, facts.tags)

    def _scene(self, outputs: Outputs, facts: Facts, mil: MilResult, progress: float) -> Scene:
        num_classes = facts.tags.shape[1]
        return Scene(
            facts.proposals,
            facts.tags,
            teachers(mil.scores, outputs.scores, num_classes),
            outputs.embed,
            no_exemplars(outputs.embed),
            vectors=outputs.vectors.detach() if self.labeler.needs.vectors else None,
            second=None if mil.second is None else mil.second.detach()[:, :num_classes],
            clues=facts.clues,
            progress=progress,
        )


def label(labeler: Labeler, scene: Scene) -> Labeling:
    """Run any labeler. Labels are facts for the losses, so nothing in here is differentiated."""
    with torch.no_grad():
        return labeler(scene)


def teachers(mil: Float[Tensor, "R c"], scores: StageScores, num_classes: int) -> tuple[Float[Tensor, "R C"], ...]:
    """Teacher of stage 1 is the MIL head, of stage k the softmax of stage k-1; foreground columns, detached."""
    refined = [logits.detach().softmax(dim=1)[:, :num_classes] for logits in scores.refine[:-1]]
    return (mil.detach()[:, :num_classes], *refined)
