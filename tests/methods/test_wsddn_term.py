"""WSDDN on its own, and its spatial regularizer as a term of the criterion."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from strategies import make_labeler_input, plain_views
from tag2box.methods.c_midn import CMidn, CMidnLabeler
from tag2box.methods.c_mil import CMil, CMilLabeler
from tag2box.methods.discovery import Discovery
from tag2box.methods.oicr import Oicr
from tag2box.methods.wscl import Contrast
from tag2box.methods.wsddn import Spatial
from tag2box.ops.boxes import iou
from tag2box.training.criterion import Criterion, LossOutput
from tag2box.training.events import step_event
from tag2box.types import BatchMeta, LabelerInput, Outputs, Requirements, StageScores

OFF = Contrast(enabled=False)
WORLDS: list[tuple[tuple[int, ...], list[list[int]]]] = [
    ((0,), [[0, 0]]),
    ((1,), [[1, 1]]),
    ((5,), [[0, 0]]),
    ((4, 0, 9), [[1, 0], [1, 1], [0, 1]]),
    ((6,), [[1]]),
    ((12, 9), [[1] * 30, [0] * 29 + [1]]),
]


def leaves(inputs: LabelerInput, stages: int, heads: int = 1) -> Outputs:
    rows, classes = inputs.probs[0].shape
    g = torch.Generator().manual_seed(7)

    def leaf(width: int) -> torch.Tensor:
        return torch.randn(rows, width, generator=g, requires_grad=True)

    mil, *more = ((leaf(classes), leaf(classes)) for _ in range(heads))
    refine, deltas = (tuple(leaf(w) for _ in range(stages)) for w in (classes + 1, 4 * classes))
    scores = StageScores(*mil, refine, deltas, tuple(x for pair in more for x in pair))
    return Outputs(scores, inputs.embed, leaf(6))


def run(criterion: Criterion, inputs: LabelerInput, outputs: Outputs, fraction: float = 0.1) -> LossOutput:
    views = plain_views(replace(inputs, probs=inputs.probs[: max(len(outputs.scores.refine), 1)]))
    return criterion(outputs, BatchMeta(inputs.proposals, inputs.tags), views, fraction=fraction)  # type: ignore[arg-type]


def loop_term(spatial: Spatial, scores: torch.Tensor, vectors: torch.Tensor, inputs: LabelerInput) -> float:
    """Photo by photo, tag by tag, neighbour by neighbour."""
    total, boxes = 0.0, inputs.proposals.boxes
    for span, tags in zip(inputs.proposals.spans(), inputs.tags.tolist(), strict=True):
        for c in [c for c, present in enumerate(tags) if present]:
            ranked = sorted(span, key=lambda r, c=c: (-scores[r, c].item(), r))
            for r in ranked[1 : spatial.neighbours + 1]:
                if iou(boxes[r][None], boxes[ranked[0]][None]).item() > spatial.iou:
                    apart = vectors[r] - vectors[ranked[0]]
                    total += 0.5 * scores[r, c].item() ** 2 * sum(x.item() ** 2 for x in apart)
    return total / len(inputs.tags)


@pytest.mark.parametrize(("sizes", "tags"), WORLDS)
@pytest.mark.parametrize("spatial", [Spatial(weight=1.0, iou=0.1), Spatial(weight=0.5, iou=0.0, neighbours=2)])
def test_the_term_matches_the_loop(sizes: tuple, tags: list, spatial: Spatial) -> None:
    inputs = make_labeler_input(sizes, tags)
    outputs = leaves(inputs, 3)
    meta = BatchMeta(inputs.proposals, inputs.tags)
    criterion = Criterion(labeler=Oicr(), contrast=OFF, spatial=spatial)
    out, without = run(criterion, inputs, outputs), run(replace(criterion, spatial=Spatial()), inputs, outputs)
    expected = loop_term(spatial, criterion.mil(outputs.scores, meta, 0.1).scores, outputs.vectors, inputs)
    assert "spatial" not in without.losses
    assert out.losses["spatial"].item() == pytest.approx(expected, rel=1e-4, abs=1e-9)
    assert out.total.item() == pytest.approx(without.total.item() + spatial.weight * expected, rel=1e-5)


def test_its_gradient_reaches_the_vectors_and_no_scores() -> None:
    inputs = make_labeler_input((20,), [[1, 1]])
    outputs = leaves(inputs, 0)
    mil = torch.rand(20, 2, requires_grad=True)
    term = Spatial(weight=1.0, iou=0.0)(mil, outputs.vectors, BatchMeta(inputs.proposals, inputs.tags))
    term.backward()
    assert outputs.vectors.grad is not None and (outputs.vectors.grad != 0).any()
    assert mil.grad is None


def test_it_requires_vectors_only_if_enabled() -> None:
    assert Spatial().requirements == Requirements()
    assert Criterion(contrast=OFF, labeler=Oicr(), spatial=Spatial(weight=1e-4)).requirements == Requirements(
        vectors=True
    )


def test_events_contain_the_term_only_if_it_is_enabled() -> None:
    inputs = make_labeler_input((8,), [[1, 0]])
    on = Criterion(labeler=Oicr(), contrast=OFF, spatial=Spatial(weight=1.0, iou=0.0))
    told = [step_event(1, run(o, inputs, leaves(inputs, 3)).detached(), 0.1, 1.0)["losses"] for o in (on, Criterion())]
    assert list(told[0]) == ["mil", "refine", "box", "contrast", "spatial", "total"]  # type: ignore[call-overload]
    assert list(told[1]) == ["mil", "refine", "box", "contrast", "total"]  # type: ignore[call-overload]


@pytest.mark.parametrize(("sizes", "tags"), WORLDS)
@pytest.mark.parametrize("criterion", [Criterion(labeler=Oicr(), contrast=OFF), Criterion()], ids=["plain", "od-wscl"])
def test_without_stages_the_mil_head_learns_and_labels_are_there_to_be_seen(
    sizes: tuple, tags: list, criterion: Criterion
) -> None:
    inputs = make_labeler_input(sizes, tags)
    outputs = leaves(inputs, 0)
    out = run(criterion, inputs, outputs)
    out.total.backward()
    assert (out.losses["refine"].item(), out.losses["box"].item()) == (0, 0)
    assert len(out.labeling.stages) == 1
    pairs = sum(sum(t) for t, size in zip(tags, sizes, strict=True) if size)
    assert len(out.labeling.stages[0].pseudo_boxes) >= pairs
    assert outputs.scores.mil_cls.grad is not None and outputs.scores.mil_cls.grad.isfinite().all()


@pytest.mark.parametrize(("sizes", "tags"), WORLDS)
@pytest.mark.parametrize("stages", [0, 3])
@pytest.mark.parametrize(
    ("mil", "labeler"), [(CMil(), CMilLabeler()), (CMidn(), CMidnLabeler()), (CMil(), Discovery()), (CMidn(), Oicr())]
)
def test_parts_mix(sizes: tuple, tags: list, stages: int, mil: object, labeler: object) -> None:
    inputs = make_labeler_input(sizes, tags)
    outputs = leaves(inputs, stages, heads=2)
    criterion = Criterion(mil=mil, labeler=labeler, spatial=Spatial(weight=1.0))  # type: ignore[arg-type]
    out = run(criterion, inputs, outputs)
    out.total.backward()
    assert out.total.isfinite()
    assert len(out.labeling.stages) == max(stages, 1)
    assert criterion.requirements.vectors and criterion.requirements.mil_heads == (2 if isinstance(mil, CMidn) else 1)
