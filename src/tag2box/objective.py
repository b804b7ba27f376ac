"""The objective: head outputs and tags in, losses out. It never meets the network (spec: the life of a batch)."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from tag2box.labelers import BuiltIn, Discovery, Labeler
from tag2box.labelers.oicr import argmax_seeds
from tag2box.maths.contrast import wscl
from tag2box.maths.discovery import neighbours
from tag2box.maths.mil import mil_loss, mil_scores
from tag2box.maths.refine import box_loss, refine_loss
from tag2box.types import Exemplars, Labeling, Losses, Proposals, PseudoLabels, Scene, StageScores, ViewMaker


@dataclass(frozen=True, kw_only=True)
class Mil:
    """The image-level loss."""

    weight: Annotated[float, Field(ge=0)] = 1.0
    """Factor of L_mil; 4 helps where classes are many (COCO), because the mean over classes starves the head."""
    over_classes: Literal["mean", "sum"] = "mean"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """IoU sampling (eq. 5): which proposals stand for their class before anything is discovered."""

    iou: bool = True
    """Also take the neighbours of the top proposals; off, the top proposals alone."""
    iou_threshold: Annotated[float, Field(gt=0, le=1)] = 0.5
    """tau_IoU: how much a neighbour overlaps."""

    def __call__(self, scene: Scene, views: ViewMaker) -> Exemplars:
        """S (eq. 5-8): sampled proposals and their augmented copies over the whole batch, class known by the tag."""
        rows, cls = self._rows(scene)
        copies = views(rows)
        repeats = 1 + copies.embed.shape[0]
        own = torch.cat([scene.embed[rows][None], copies.embed]).flatten(0, 1)  # (repeats * m, D)
        probs = [
            torch.cat([p[rows, cls][None], v[:, torch.arange(len(rows)), cls]]).flatten()
            for p, v in zip(scene.probs, copies.probs, strict=True)
        ]
        return Exemplars(
            own,
            cls.repeat(repeats),
            instance_difficulty(scene, rows, cls).repeat(repeats),
            rows.repeat(repeats),
            tuple(probs),
        )

    def _rows(self, scene: Scene) -> tuple[Int[Tensor, " m"], Int[Tensor, " m"]]:
        tops = [argmax_seeds(scene, stage) for stage in range(len(scene.probs))]
        image_of_top = scene.proposals.image_ids()[tops[0].rows]
        spans = scene.proposals.spans()
        rows, classes = [tops[0].rows.new_zeros(0)], [tops[0].rows.new_zeros(0)]
        for i, c in enumerate(tops[0].cls.tolist()):  # every stage has the same (image, class) pairs in the same order
            span = spans[int(image_of_top[i])]
            top_of_stages = torch.stack([t.rows[i] for t in tops])
            near = top_of_stages.unique()
            if self.iou:
                inside = scene.proposals.boxes[span.start : span.stop]
                near = neighbours(inside, top_of_stages - span.start, self.iou_threshold) + span.start
            rows.append(near)
            classes.append(torch.full_like(near, c))
        return torch.cat(rows), torch.cat(classes)


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """The weakly supervised contrastive loss (eq. 11-12)."""

    enabled: bool = True
    weight: Annotated[float, Field(ge=0)] = 0.03
    """lambda; the paper takes 0.01 on COCO."""
    temperature: Annotated[float, Field(gt=0)] = 0.2
    """epsilon."""
    positives: Literal["outside", "inside"] = "outside"
    """Where the positives are averaged: outside the logarithm (the paper) or inside it (its published code)."""

    def __call__(self, exemplars: Exemplars) -> Float[Tensor, ""]:
        """The unweighted loss over S^U."""
        return wscl(
            exemplars.embed,
            exemplars.cls,
            exemplars.weight,
            temperature=self.temperature,
            positives=self.positives,
        )


@dataclass(frozen=True, kw_only=True)
class Refine:
    """Refinement losses (eq. 3-4)."""

    first_stage: Annotated[float, Field(gt=0)] = 3.0
    """Stage 1 counts this much more than the others (not in the paper; its numbers come from it)."""
    box_divisor: Literal["proposals", "pseudo_boxes"] = "proposals"
    """What L_reg is divided by: all proposals (published numbers) or the pseudo boxes (the paper's text)."""


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

    mil: Mil = Mil()
    labeler: BuiltIn = field(default_factory=Discovery)
    sampling: Sampling = Sampling()
    contrast: Contrast = Contrast()
    refine: Refine = Refine()

    @property
    def uses_embeddings(self) -> bool:
        """Whether anything reads the similarity head; if not, the network need not compute it."""
        return self.contrast.enabled or self.labeler.uses_exemplars

    def __call__(
        self,
        scores: StageScores,
        embed: Float[Tensor, "R D"],
        *,
        proposals: Proposals,
        tags: Bool[Tensor, "N C"],
        views: ViewMaker,
        unsure: Bool[Tensor, "N C"] | None = None,
    ) -> Outcome:
        """Losses and labels of a batch: score, sample, label, compare."""
        mil = mil_scores(scores.mil_cls, scores.mil_det, proposals.sizes)
        scene = Scene(proposals, tags, teachers(mil, scores, tags.shape[1]), embed, no_exemplars(embed))
        if self.uses_embeddings:
            scene = Scene(proposals, tags, scene.probs, embed, self.sampling(scene, views))
        labeling = label(self.labeler, scene)
        stages, sizes = labeling.stages, proposals.sizes
        losses = Losses(
            mil=self._mil_loss(mil, tags, unsure, sizes),
            refine=self._over_stages([refine_loss(x, s, sizes) for x, s in zip(scores.refine, stages, strict=True)]),
            box=self._over_stages(
                [self._box_loss(d, proposals, s) for d, s in zip(scores.deltas, stages, strict=False)]
            ),
            contrast=self.contrast(grown(scene, labeling)) if self.contrast.enabled else mil.new_zeros(()),
        )
        total = self.mil.weight * losses.mil + losses.refine + losses.box + self.contrast.weight * losses.contrast
        return Outcome(total, losses, labeling, tags)

    def _mil_loss(
        self,
        mil: Float[Tensor, "R c"],
        tags: Bool[Tensor, "N C"],
        unsure: Bool[Tensor, "N C"] | None,
        sizes: tuple[int, ...],
    ) -> Float[Tensor, ""]:
        wanted = with_background(tags, mil.shape[1])
        open_ = None if unsure is None else with_background(unsure, mil.shape[1])
        return mil_loss(mil, wanted, sizes, unsure=open_, over_classes=self.mil.over_classes)

    def _box_loss(self, deltas: Float[Tensor, "R c4"], proposals: Proposals, labels: PseudoLabels) -> Float[Tensor, ""]:
        return box_loss(deltas, proposals, labels, self.refine.box_divisor)

    def _over_stages(self, per_stage: list[Float[Tensor, ""]]) -> Float[Tensor, ""]:
        weighted = [self.refine.first_stage * x if k == 0 else x for k, x in enumerate(per_stage)]
        return torch.stack(weighted).sum() if weighted else torch.zeros(())


def label(labeler: Labeler, scene: Scene) -> Labeling:
    """Run any labeler. Labels are facts for the losses, so nothing in here is differentiated."""
    with torch.no_grad():
        return labeler(scene)


def teachers(mil: Float[Tensor, "R c"], scores: StageScores, num_classes: int) -> tuple[Float[Tensor, "R C"], ...]:
    """Teacher of stage 1 is the MIL head, of stage k the softmax of stage k-1; foreground columns, detached."""
    refined = [logits.detach().softmax(dim=1)[:, :num_classes] for logits in scores.refine[:-1]]
    return (mil.detach()[:, :num_classes], *refined)


def with_background(tags: Bool[Tensor, "N C"], columns: int) -> Bool[Tensor, "N c"]:
    """Tags widened by a background column that is never present, where the MIL head has one."""
    return torch.cat([tags, tags.new_zeros(len(tags), columns - tags.shape[1])], dim=1)


def instance_difficulty(scene: Scene, rows: Int[Tensor, " m"], cls: Int[Tensor, " m"]) -> Float[Tensor, " m"]:
    """omega (eq. 12): a proposal's MIL score over the sum of its image's, for the class it stands for."""
    mil = scene.probs[0]
    sums = torch.stack([x.sum(dim=0) for x in scene.proposals.split(mil)])  # (N, C)
    return mil[rows, cls] / sums[scene.proposals.image_ids()[rows], cls].clamp(min=torch.finfo(mil.dtype).tiny)


def no_exemplars(embed: Float[Tensor, "R D"]) -> Exemplars:
    """The empty set S."""
    none = torch.zeros(0, dtype=torch.long, device=embed.device)
    return Exemplars(embed[:0], none, embed.new_zeros(0), none)


def grown(scene: Scene, labeling: Labeling) -> Exemplars:
    """S^U: the sampled exemplars and, once each, the discovered proposals that were not among them."""
    s = scene.exemplars
    rows = torch.cat([s.rows, *(stage.seeds.rows for stage in labeling.stages)])
    cls = torch.cat([s.cls, *(stage.seeds.cls for stage in labeling.stages)])
    new = first_seen(rows, cls, scene.tags.shape[1])
    new = new[new >= len(s)]
    return Exemplars(
        torch.cat([s.embed, scene.embed[rows[new]]]),
        torch.cat([s.cls, cls[new]]),
        torch.cat([s.weight, instance_difficulty(scene, rows[new], cls[new])]),
        torch.cat([s.rows, rows[new]]),
    )


def first_seen(rows: Int[Tensor, " a"], cls: Int[Tensor, " a"], num_classes: int) -> Int[Tensor, " b"]:
    """Positions at which a (proposal, class) pair appears for the first time, in order."""
    keys = rows * num_classes + cls
    _, inverse = keys.unique(return_inverse=True)
    first = torch.full((int(inverse.max()) + 1 if len(keys) else 0,), len(keys), device=rows.device)
    first = first.scatter_reduce(0, inverse, torch.arange(len(keys), device=rows.device), reduce="amin")
    return first.sort().values


__all__ = ["Contrast", "Mil", "Objective", "Outcome", "Refine", "Sampling"]
