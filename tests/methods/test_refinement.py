"""The refinement losses, and the teacher of the last stage."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from strategies import CRITERION_CASES, make_labeler_input, plain_views
from tag2box.methods.c_wsl import CWsl
from tag2box.methods.discovery import Discovery
from tag2box.methods.mist import Mist
from tag2box.methods.oicr import Oicr
from tag2box.methods.oim import reweighted
from tag2box.methods.pcl import Pcl, bag_loss
from tag2box.methods.wscl import Contrast
from tag2box.ops.losses import box_loss, refine_loss
from tag2box.training.criterion import Criterion, Refine, teachers
from tag2box.types import AugmentRois, BatchMeta, LabelerInput, Labeling, Outputs, StageScores

REFINES = {
    "clusters": Refine(over="clusters"),
    "reweighted": Refine(reweight=True),
    "both": Refine(over="clusters", reweight=True, hard_gain=0.5, seed_cut=0.5),
    "mean teacher": Refine(last_teacher="mean"),
}


def random_scores(total: int, classes: int, stages: int = 3, seed: int = 0) -> StageScores:
    g = torch.Generator().manual_seed(seed)

    def leaf(width: int) -> Tensor:
        return torch.randn(total, width, generator=g).requires_grad_()

    refine, deltas = (tuple(leaf(width) for _ in range(stages)) for width in (classes + 1, 4 * classes))
    return StageScores(leaf(classes), leaf(classes), refine, deltas)


def crowded(sizes: tuple[int, ...], tags: list[list[int]]) -> tuple[LabelerInput, Labeling]:
    """Labels of which many are foreground."""
    inputs = make_labeler_input(sizes, tags, seed=3)
    return inputs, Oicr(foreground_iou=0.05)(inputs)


@pytest.mark.parametrize("labeler", [Oicr(), Pcl(), Mist(), CWsl()], ids=lambda x: x.kind)
@pytest.mark.parametrize("refine", REFINES.values(), ids=REFINES.keys())
@pytest.mark.parametrize(("sizes", "tags"), CRITERION_CASES)
def test_every_mixture_survives_and_back_propagates(labeler: Oicr, refine: Refine, sizes: tuple, tags: list) -> None:
    inputs, scores = make_labeler_input(sizes, tags), random_scores(sum(sizes), len(tags[0]))
    criterion = Criterion(labeler=labeler, refine=refine, contrast=Contrast(enabled=False))
    views: AugmentRois = plain_views(inputs)  # type: ignore[assignment]
    out = criterion(Outputs(scores, inputs.embed, inputs.embed[:, :0]), BatchMeta(inputs.proposals, inputs.tags), views)
    out.total.backward()
    assert out.total.isfinite() and len(out.labeling.stages) == 3
    assert all(leaf.grad is None or leaf.grad.isfinite().all() for leaf in scores.refine)


def test_stage_losses_add_up_with_the_first_counted_more() -> None:
    inputs, labeling = crowded((9, 6), [[1, 0], [1, 1]])
    scores, sizes = random_scores(15, 2), inputs.proposals.sizes
    for over, loss in (("proposals", refine_loss), ("clusters", bag_loss)):
        parts = [loss(x, labels, sizes) for x, labels in zip(scores.refine, labeling.stages, strict=True)]
        got = Refine(over=over, first_stage=3.0).cls_loss(scores, labeling, sizes)
        torch.testing.assert_close(got, 3 * parts[0] + parts[1] + parts[2])


def test_weights_of_the_student_are_used_in_the_class_loss_alone() -> None:
    inputs, labeling = crowded((9, 6), [[1, 0], [1, 1]])
    scores, sizes = random_scores(15, 2), inputs.proposals.sizes
    refine = Refine(reweight=True, hard_gain=0.7, seed_cut=0.4, first_stage=1.0)
    stages = list(zip(scores.refine, labeling.stages, strict=True))
    weights = [reweighted(x, labels, hard_gain=0.7, seed_cut=0.4) for x, labels in stages]
    assert any(not torch.equal(w, labels.weight) for w, (_, labels) in zip(weights, stages, strict=True))
    parts = [refine_loss(x, replace(labels, weight=w), sizes) for (x, labels), w in zip(stages, weights, strict=True)]
    torch.testing.assert_close(refine.cls_loss(scores, labeling, sizes), torch.stack(parts).sum())
    boxes = [box_loss(d, inputs.proposals, labels) for d, labels in zip(scores.deltas, labeling.stages, strict=True)]
    torch.testing.assert_close(refine.box_loss(scores, labeling, inputs.proposals), torch.stack(boxes).sum())


def test_without_gain_and_cut_re_weighting_changes_nothing() -> None:
    inputs, labeling = crowded((9,), [[1, 1]])
    scores, sizes = random_scores(9, 2), inputs.proposals.sizes
    plain = Refine().cls_loss(scores, labeling, sizes)
    assert torch.equal(Refine(reweight=True, hard_gain=0, seed_cut=0).cls_loss(scores, labeling, sizes), plain)


@pytest.mark.parametrize("refine", REFINES.values(), ids=REFINES.keys())
def test_without_stages_there_is_no_class_loss(refine: Refine) -> None:
    inputs, labeling = crowded((4,), [[1, 0]])
    assert refine.cls_loss(random_scores(4, 2, stages=0), labeling, inputs.proposals.sizes).item() == 0


@pytest.mark.parametrize("stages", [0, 1, 2, 3, 4])
def test_the_last_teacher_is_the_mean_of_all_stages_before_it(stages: int) -> None:
    scores, mil = random_scores(6, 2, stages=stages), torch.rand(6, 3)
    previous, mean = teachers(mil, scores, 2), teachers(mil, scores, 2, "mean")
    assert len(previous) == len(mean) == max(stages, 1)
    assert torch.equal(mean[0], mil[:, :2])  # with one stage its teacher is the MIL head, whatever the setting
    assert all(torch.equal(a, b) for a, b in zip(previous[:-1], mean[:-1], strict=True))
    if stages > 1:
        softmaxes = [logits.softmax(dim=1)[:, :2] for logits in scores.refine[:-1]]
        torch.testing.assert_close(previous[-1], softmaxes[-1].detach())
        torch.testing.assert_close(mean[-1], (sum(softmaxes) / len(softmaxes)).detach())
    assert not any(x.requires_grad for x in (*previous, *mean))


def test_copies_of_proposals_have_the_same_last_teacher() -> None:
    inputs, scores = make_labeler_input((1, 1), [[1, 0], [0, 1]]), random_scores(2, 2)
    views: AugmentRois = plain_views(inputs)  # type: ignore[assignment]
    seen: list[LabelerInput] = []

    class Watching(Discovery):
        """Keeps what it is shown."""

        def __call__(self, shown: LabelerInput) -> Labeling:
            seen.append(shown)
            return super().__call__(shown)

    for last in ("previous", "mean"):
        criterion = Criterion(labeler=Watching(), refine=Refine(last_teacher=last))
        criterion(Outputs(scores, inputs.embed, inputs.embed[:, :0]), BatchMeta(inputs.proposals, inputs.tags), views)
    previous, mean = (shown.exemplars.probs for shown in seen)
    assert len(previous[0]) == 2 * 3  # each proposal and two copies
    torch.testing.assert_close(mean[2], (previous[1] + previous[2]) / 2)
    assert all(torch.equal(a, b) for a, b in zip(previous[:2], mean[:2], strict=True))
