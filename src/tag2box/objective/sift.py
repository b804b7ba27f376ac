"""A batch with some of its proposals, and what was found in it put back into the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from tag2box.mil import MilResult
from tag2box.types import Facts, Labeling, Outputs, Proposals, PseudoLabels, StageScores, ViewMaker, Views


@dataclass(frozen=True, slots=True)
class Known:
    """All that the stages are told of a batch."""

    outputs: Outputs
    facts: Facts
    views: ViewMaker
    mil: MilResult

    def only(self, rows: Int[Tensor, " r"]) -> Known:
        """The same of some proposals, image after image."""
        return Known(_outputs(self.outputs, rows), _facts(self.facts, rows), self._views(rows), _mil(self.mil, rows))

    def _views(self, rows: Int[Tensor, " r"]) -> ViewMaker:
        def make(asked: Int[Tensor, " m"]) -> Views:
            return self.views(rows[asked])

        return make


def put_back(labeling: Labeling, rows: Int[Tensor, " r"], facts: Facts) -> Labeling:
    """Labels of some proposals as labels of all: the others weigh nothing."""
    return replace(labeling, stages=tuple(_put_back(labels, rows, facts) for labels in labeling.stages))


def _put_back(labels: PseudoLabels, rows: Int[Tensor, " r"], facts: Facts) -> PseudoLabels:
    total = len(facts.proposals.boxes)
    return PseudoLabels(
        labels.cls.new_full((total,), facts.tags.shape[1]).index_copy(0, rows, labels.cls),
        labels.weight.new_zeros(total).index_copy(0, rows, labels.weight),
        facts.proposals.boxes.to(labels.boxes.dtype).index_copy(0, rows, labels.boxes),
        replace(labels.seeds, rows=rows[labels.seeds.rows]),
        labels.owner.new_full((total,), -1).index_copy(0, rows, labels.owner),
    )


def _outputs(outputs: Outputs, rows: Int[Tensor, " r"]) -> Outputs:
    scores = outputs.scores
    return Outputs(
        StageScores(
            scores.mil_cls[rows],
            scores.mil_det[rows],
            _each(scores.refine, rows),
            _each(scores.deltas, rows),
            _each(scores.mil_more, rows),
        ),
        outputs.embed[rows],
        outputs.vectors[rows],
        None if outputs.responses is None else outputs.responses[rows],
    )


def _facts(facts: Facts, rows: Int[Tensor, " r"]) -> Facts:
    counts = torch.bincount(facts.proposals.image_ids()[rows], minlength=len(facts.proposals.sizes))
    proposals = Proposals(facts.proposals.boxes[rows], tuple(counts.tolist()))
    return replace(facts, proposals=proposals, clues=facts.clues.of(slice(None), rows))


def _mil(mil: MilResult, rows: Int[Tensor, " r"]) -> MilResult:
    return replace(mil, scores=mil.scores[rows], second=None if mil.second is None else mil.second[rows])


def _each(parts: Sequence[Tensor], rows: Int[Tensor, " r"]) -> tuple[Tensor, ...]:
    return tuple(part[rows] for part in parts)
