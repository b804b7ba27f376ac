"""CASD in the criterion: the proposals compared over views and over layers, and the scores that views share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from strategies import random_boxes
from tag2box.methods.casd import Attention, attention
from tag2box.methods.oicr import Oicr
from tag2box.methods.wscl import Contrast
from tag2box.training.criterion import Criterion, mean_over_views
from tag2box.types import (
    AugmentedRois,
    BatchMeta,
    Outputs,
    Proposals,
    PseudoBoxes,
    PseudoLabels,
    Requirements,
    StageScores,
)

CLASSES = 2


def meta_of(sizes: tuple[int, ...], views_per_image: int, *, flipped: bool = True) -> BatchMeta:
    """``sizes`` proposals of each photo, the same in all its views."""
    g = torch.Generator().manual_seed(0)
    boxes = [b for size in sizes for b in [random_boxes(size, g)] * views_per_image]
    every = tuple(size for size in sizes for _ in range(views_per_image))
    tags = torch.ones(len(every), CLASSES, dtype=torch.bool)
    flips = torch.arange(len(every)) % views_per_image % 2 == 1
    proposals = Proposals(torch.cat([torch.zeros(0, 4), *boxes]), every)
    return BatchMeta(proposals, tags, views_per_image=views_per_image, flipped=flips if flipped else None)


def labels_of(meta: BatchMeta, objects: Tensor) -> PseudoLabels:
    """Foreground for ``objects``, the same in all views."""
    count = len(meta.proposals.boxes)
    none = torch.zeros(0, dtype=torch.long)
    cls = torch.where(objects, 0, CLASSES)
    weight = torch.ones(count)
    return PseudoLabels(
        cls, weight, meta.proposals.boxes, PseudoBoxes(none, none, torch.zeros(0)), torch.full_like(cls, -1)
    )


def terms_with_loops(responses: Tensor, meta: BatchMeta, stages: list[Tensor]) -> tuple[float, float]:
    """Input-wise and layer-wise terms, photo after photo, stage after stage, proposal after proposal."""
    maps, views_per_image = attention(responses), meta.views_per_image
    over_views = over_layers = 0.0
    photos = len(meta.tags) // views_per_image
    for photo in range(photos):
        spans = meta.proposals.spans()[photo * views_per_image : (photo + 1) * views_per_image]
        for objects in stages:
            rows = [r for r in range(len(spans[0])) if objects[spans[0].start + r]]
            for r in rows:
                seen = []
                for v, span in enumerate(spans):
                    own = maps[span.start + r]
                    is_flipped = meta.flipped is not None and bool(meta.flipped[photo * views_per_image + v])
                    seen.append(own.flip(2) if is_flipped else own)
                best = torch.stack([own[-1] for own in seen]).amax(dim=0)
                share = len(rows) * views_per_image
                over_views += sum(float((own[-1] - best).square().mean()) for own in seen) / share
                for own in seen:
                    top = own.amax(dim=0)
                    over_layers += sum(float((layer - top).square().mean()) for layer in own) / share
    return over_views / max(photos, 1), over_layers / max(photos, 1)


CASES = {
    "no photo": ((), 2),
    "no proposal": ((0,), 2),
    "one proposal, one view": ((1,), 1),
    "one proposal": ((1,), 3),
    "many": ((4, 0, 7), 4),
}


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_both_terms_equal_their_definitions_written_with_loops(name: str, layers: int, share: float) -> None:
    sizes, views_per_image = CASES[name]
    meta = meta_of(sizes, views_per_image)
    count = len(meta.proposals.boxes)
    responses = torch.randn(count, layers, 3, 3, generator=torch.Generator().manual_seed(4)).double()
    stages = [
        torch.cat([torch.zeros(0, dtype=torch.bool), *(o.repeat(views_per_image) for o in chosen(sizes, share, seed))])
        for seed in (1, 2, 3)
    ]
    wanted = terms_with_loops(responses, meta, stages)
    labels = [labels_of(meta, objects) for objects in stages]
    assert Attention(input_weight=1.0)(responses, labels, meta).item() == pytest.approx(wanted[0])
    assert Attention(layer_weight=1.0)(responses, labels, meta).item() == pytest.approx(wanted[1])
    both = Attention(input_weight=0.3, layer_weight=0.2)(responses, labels, meta).item()
    assert both == pytest.approx(0.3 * wanted[0] + 0.2 * wanted[1])


def chosen(sizes: tuple[int, ...], share: float, seed: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.rand(size, generator=g) < share for size in sizes]


def test_background_and_what_counts_nothing_are_not_compared() -> None:
    meta = meta_of((3,), 2)
    responses = torch.randn(6, 1, 3, 3)
    term = Attention(input_weight=1.0)
    nothing = labels_of(meta, torch.zeros(6, dtype=torch.bool))
    assert term(responses, [nothing], meta) == 0
    objects = labels_of(meta, torch.ones(6, dtype=torch.bool))
    weightless = PseudoLabels(objects.cls, torch.zeros(6), objects.boxes, objects.pseudo_boxes, objects.owner)
    assert term(responses, [weightless], meta) == 0
    assert term(responses, [objects], meta) > 0


def test_the_same_photo_twice_costs_nothing() -> None:
    """Only views with another attention get a gradient."""
    meta = meta_of((5,), 2)
    one = torch.randn(5, 1, 3, 3)
    labels = labels_of(meta, torch.ones(10, dtype=torch.bool))
    assert Attention(input_weight=1.0)(torch.cat([one, one.flip(3)]), [labels], meta) == 0
    assert Attention(input_weight=1.0)(torch.cat([one, one]), [labels], meta) > 0


def test_requirements_and_ramp() -> None:
    assert Attention().requirements == Requirements() and not Attention().is_on
    assert Attention(input_weight=0.1).requirements == Requirements(responses=True, views_per_image=2)
    assert Attention(layer_weight=0.1).requirements == Requirements(responses=True, layers=2)
    assert [Attention(ramp=0.5).strength(p) for p in (0.0, 0.25, 0.5, 1.0)] == [0.0, 0.5, 1.0, 1.0]
    assert Attention(ramp=0).strength(0.0) == 1.0


@pytest.mark.parametrize(("sizes", "views_per_image"), [((), 2), ((0,), 3), ((1,), 1), ((2, 0, 3), 2)])
def test_views_share_the_mean_of_their_scores(sizes: tuple[int, ...], views_per_image: int) -> None:
    meta = meta_of(sizes, views_per_image)
    scores = torch.rand(len(meta.proposals.boxes), CLASSES)
    shared = mean_over_views(scores, meta)
    for photo in range(len(sizes)):
        spans = meta.proposals.spans()[photo * views_per_image : (photo + 1) * views_per_image]
        mean = torch.stack([scores[s.start : s.stop] for s in spans]).mean(dim=0)
        for span in spans:
            torch.testing.assert_close(shared[span.start : span.stop], mean)


def outputs_of(count: int, layers: int) -> Outputs:
    g = torch.Generator().manual_seed(3)
    draw = lambda width: torch.randn(count, width, generator=g)  # noqa: E731
    refine = tuple(draw(CLASSES + 1) for _ in range(3))
    scores = StageScores(draw(CLASSES), draw(CLASSES), refine, tuple(draw(4 * CLASSES) for _ in range(3)))
    responses = torch.randn(count, layers, 3, 3, generator=g)
    return Outputs(scores, torch.zeros(count, 0), torch.zeros(count, 0), responses)


def no_views(rows: Tensor) -> AugmentedRois:
    raise AssertionError("nothing samples here")


def test_all_views_get_the_same_labels_and_the_term_is_added_by_its_ramp() -> None:
    meta = meta_of((6, 5), 2)
    outputs = outputs_of(22, 2)
    plain = Criterion(labeler=Oicr(), contrast=Contrast(enabled=False))
    casd = Criterion(
        labeler=Oicr(), contrast=Contrast(enabled=False), attention=Attention(input_weight=0.1, layer_weight=0.1)
    )
    without = plain(Outputs(outputs.scores, outputs.embed, outputs.vectors), meta, no_views)
    assert "attention" not in without.losses
    for fraction, share in ((0.0, 0.0), (0.225, 0.5), (1.0, 1.0)):
        outcome = casd(outputs, meta, no_views, fraction=fraction)
        term = outcome.losses["attention"]
        assert term is not None and term > 0
        torch.testing.assert_close(outcome.total, without.total + share * term)
        for stage in outcome.labeling.stages:
            for labels in (stage.cls, stage.weight):
                assert torch.equal(labels[:6], labels[6:12]) and torch.equal(labels[12:17], labels[17:])
