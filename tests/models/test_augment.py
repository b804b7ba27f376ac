from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tag2box.models.augment import Augment, Chosen, Rois, augment_rois
from tag2box.models.detector import Detector, Heads
from tag2box.models.rng import StepRng
from tag2box.ops.losses import mil_partition, mil_scores
from tag2box.types import AugmentedRois, Proposals, StageScores
from tiny import TinyBackbone, tiny_detector

MAPS = torch.rand(5, TinyBackbone.channels, 3, 3, generator=torch.Generator().manual_seed(4)) + 0.1
SIZES = (3, 0, 2)
RNG = StepRng(3, 0)


def maps_of(rows: int) -> Tensor:
    return torch.rand(rows, TinyBackbone.channels, 3, 3) + 0.1


def augmented(
    rows: list[int], augment: Augment, *, num_classes: int = 3, heads: Heads | None = None
) -> tuple[AugmentedRois, Detector, StageScores]:
    detector = tiny_detector(num_classes, heads=heads)
    scores = detector.score(detector.neck(MAPS))
    images = Proposals(torch.zeros(5, 4), SIZES).image_ids()[rows]
    chosen = Chosen(torch.tensor(rows, dtype=torch.long), images, augment.masks(RNG, images, 3))
    partition = mil_partition(scores.mil_det, SIZES)[images]
    rois = Rois(MAPS, detector.backbone.neck_stem(MAPS))[chosen.rows]
    views = augment_rois(detector, rois, partition, chosen=chosen, augment=augment, rng=RNG)
    return views, detector, scores


def copies_of(maps: Tensor, augment: Augment, rng: StepRng = RNG, images: Tensor | None = None) -> list[Tensor]:
    images = torch.zeros(len(maps), dtype=torch.long) if images is None else images
    chosen = Chosen(torch.arange(len(maps)), images, augment.masks(rng, images, maps.shape[-1]))
    return [maps * factors for _, factors in augment.factors(chosen, rng, maps.shape[1])]


@pytest.mark.parametrize("rows", [[], [2], [4, 0, 0]])
@pytest.mark.parametrize(
    ("mask", "noise", "kinds"), [(False, False, 0), (True, False, 1), (False, True, 1), (True, True, 2)]
)
def test_a_switch_adds_or_removes_a_kind_of_copy(rows: list[int], mask: bool, noise: bool, kinds: int) -> None:
    views, detector, scores = augmented(rows, Augment(mask=mask, noise=noise))
    assert views.embed.shape == (kinds, len(rows), detector.similarity.out.out_features)
    assert [p.shape for p in views.probs] == [(kinds, len(rows), 3)] * len(scores.refine)


def test_a_mask_that_drops_nothing_changes_nothing() -> None:
    rows = [4, 0, 2]
    views, detector, scores = augmented(rows, Augment(drop=0.0, noise=False))
    clean = detector.neck(MAPS)
    assert torch.allclose(views.embed[0], detector.embed(clean)[rows], atol=1e-6)
    mil = mil_scores(scores.mil_cls, scores.mil_det, SIZES)[:, :3]
    assert torch.allclose(views.probs[0][0], mil[rows], atol=1e-6)
    for k in (1, 2):  # teacher of stage k+1 is the softmax of stage k
        assert torch.allclose(views.probs[k][0], scores.refine[k - 1].softmax(dim=1)[rows, :3], atol=1e-6)


@pytest.mark.parametrize(
    "heads", [Heads(mil_background=True), Heads(mil_background=False), Heads(stages=1), Heads(stages=0)]
)
@pytest.mark.parametrize("num_classes", [1, 3])
def test_scores_of_copies_are_probabilities_of_the_foreground(heads: Heads, num_classes: int) -> None:
    views, _, _ = augmented([0, 3], Augment(), num_classes=num_classes, heads=heads)
    assert len(views.probs) == max(heads.stages, 1)
    for probs in views.probs[1:]:
        assert probs.shape == (2, 2, num_classes)
        assert ((probs >= 0) & (probs <= 1)).all()
    # a copy is weighed against the originals alone, so a MIL score has no upper bound of one
    assert torch.isfinite(views.probs[0]).all()
    assert (views.probs[0] > 0).all()


@pytest.mark.parametrize("noise", [False, True])
def test_mil_score_of_a_copy_matches_the_loop(noise: bool) -> None:
    """Softmax over classes of the copy, times exp of its detection logit over the sum of its image's originals."""
    rows, images = [4, 0, 2], [2, 0, 0]
    views, detector, scores = augmented(rows, Augment(mask=not noise, noise=noise))
    (made,) = copies_of(MAPS[rows], Augment(mask=not noise, noise=noise), images=torch.tensor(images))
    copy = detector.score(detector.neck(made))
    originals = torch.split(scores.mil_det, list(SIZES))
    for i, image in enumerate(images):
        for c in range(3):
            over_classes = copy.mil_cls[i, c].exp() / copy.mil_cls[i].exp().sum()
            over_boxes = copy.mil_det[i, c].exp() / originals[image][:, c].exp().sum()
            assert views.probs[0][0, i, c].item() == pytest.approx((over_classes * over_boxes).item(), rel=1e-4)


def test_gradients_reach_the_network_through_embeddings_alone() -> None:
    views, detector, _ = augmented([0, 1], Augment())
    assert views.embed.requires_grad
    assert not any(p.requires_grad for p in views.probs)
    views.embed.sum().backward()
    assert detector.backbone.fc.weight.grad is not None  # type: ignore[union-attr]
    assert detector.mil.cls.weight.grad is None


def test_a_mask_zeroes_a_cell_in_all_channels_or_leaves_it() -> None:
    maps = maps_of(200)
    (masked,) = copies_of(maps, Augment(drop=0.3, noise=False))
    kept = masked == maps
    assert (kept | (masked == 0)).all()
    assert torch.equal(kept.all(dim=1), kept.any(dim=1))
    assert kept.float().mean().item() == pytest.approx(0.7, abs=0.04)


def test_rescaling_keeps_the_sum_of_a_flat_map() -> None:
    maps = torch.ones(300, 2, 3, 3)
    (masked,) = copies_of(maps, Augment(drop=0.4, rescale_mask=True, noise=False))
    (plain,) = copies_of(maps, Augment(drop=0.4, noise=False))
    assert masked.sum().item() == pytest.approx(maps.sum().item(), rel=1e-5)
    assert plain.sum() < 0.7 * maps.sum()


def test_noise_is_one_map_for_all_channels_or_one_each() -> None:
    maps = maps_of(300)
    (shared,) = copies_of(maps, Augment(mask=False))
    factor = shared / maps - 1
    assert torch.allclose(factor, factor[:, :1].expand_as(factor), atol=1e-4)
    (apart,) = copies_of(maps, Augment(mask=False, noise_per_channel=True))
    own = apart / maps - 1
    assert not torch.allclose(own, own[:, :1].expand_as(own), atol=1e-1)
    for drawn in (factor, own):
        assert drawn.mean().item() == pytest.approx(0.0, abs=0.05)
        assert drawn.std().item() == pytest.approx(1.0, abs=0.05)


def test_copies_follow_the_seed() -> None:
    first = copies_of(MAPS, Augment(), StepRng(7, 0))
    again = copies_of(MAPS, Augment(), StepRng(7, 0))
    other = copies_of(MAPS, Augment(), StepRng(7, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
