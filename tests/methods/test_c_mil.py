from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given, settings, strategies as st

from strategies import make_labeler_input
from tag2box import extend
from tag2box.methods.c_mil import CMil, greedy_subsets, hinge_loss
from tag2box.methods.protocols import MilResult
from tag2box.methods.wsddn import Wsddn
from tag2box.ops.losses import image_scores
from tag2box.types import BatchMeta, Requirements, StageScores

WORLDS: list[tuple[tuple[int, ...], list[list[int]]]] = [
    ((), []),  # no photo
    ((0,), [[1, 0]]),  # no proposals
    ((1,), [[1, 1]]),
    ((5,), [[0, 0]]),  # no tags
    ((4, 0, 9), [[1, 0, 1], [1, 1, 0], [0, 0, 1]]),
    ((6, 7), [[1], [0]]),  # one class
    ((12, 3), [[1] * 30, [0] * 29 + [1]]),
]
EARLY = 2e-3  # lambda of 0.21 at the default steepness


def world(sizes: tuple[int, ...], tags: list[list[int]], *, background: int = 0, seed: int = 0) -> tuple:
    """Logits as leaves, in double precision, and their batch metadata."""
    inputs = make_labeler_input(sizes, tags, seed=seed)
    g = torch.Generator().manual_seed(seed)
    shape = (sum(sizes), inputs.tags.shape[1] + background)
    leaves = [torch.randn(shape, generator=g, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    return StageScores(leaves[0], leaves[1], (), ()), BatchMeta(inputs.proposals, inputs.tags)


def gradients(result: MilResult, scores: StageScores) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(result.loss, [scores.mil_cls, scores.mil_det], allow_unused=True)


@pytest.mark.parametrize(("sizes", "tags"), WORLDS)
@pytest.mark.parametrize("background", [0, 1])
@pytest.mark.parametrize("share", ["best", "all"])
@pytest.mark.parametrize("score", ["mean", "merged"])
def test_at_the_end_it_is_plain_mil_to_the_bit(
    sizes: tuple, tags: list, background: int, share: str, score: str
) -> None:
    scores, meta = world(sizes, tags, background=background)
    ours, plain = CMil(share=share, subset_score=score)(scores, meta, 1.0), Wsddn()(scores, meta, 1.0)  # type: ignore[arg-type]
    assert torch.equal(ours.scores, plain.scores)
    assert torch.equal(ours.loss, plain.loss)
    for a, b in zip(gradients(ours, scores), gradients(plain, scores), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("share", ["best", "all"])
def test_at_the_start_a_photo_is_one_bag_of_mean_scores(share: str) -> None:
    scores, meta = world((5, 3), [[1, 0, 0], [0, 1, 1]])
    result = CMil(share=share, subset_score="mean")(scores, meta, 0.0)  # type: ignore[arg-type]
    plain = Wsddn()(scores, meta, 0.0)
    sums = torch.stack([x.sum(dim=0) for x in plain.scores.split((5, 3))])
    torch.testing.assert_close(image_scores(result.scores, (5, 3)), sums / torch.tensor([[5.0], [3.0]]))
    assert result.subsets is not None and result.subsets.tolist() == [0] * 5 + [1] * 3


@pytest.mark.parametrize("share", ["best", "all"])
def test_at_the_start_a_photo_is_one_bag_of_merged_logits(share: str) -> None:
    scores, meta = world((5, 3), [[1, 0, 0], [0, 1, 1]])
    result = CMil(share=share)(scores, meta, 0.0)  # type: ignore[arg-type]
    phi = image_scores(result.scores, (5, 3))
    for n, rows in enumerate((slice(0, 5), slice(5, 8))):
        torch.testing.assert_close(phi[n], scores.mil_cls[rows].mean(dim=0).softmax(dim=0))
    cls, det = gradients(result, scores)
    assert (cls != 0).all() and (det == 0).all()  # which box it is cannot be learnt yet
    torch.testing.assert_close(cls[0], cls[4])  # every box learns the same


def loop_scores(scores: StageScores, meta: BatchMeta, fraction: float, ours: CMil) -> torch.Tensor:
    """Mean scores of each subset, or two softmaxes of mean logits over subsets, shared out to members."""
    cut = meta.proposals.split
    pairs = zip(cut(scores.mil_cls), cut(scores.mil_det), strict=True)
    own = torch.cat([scores.mil_cls[:0], *(c.softmax(dim=1) * d.softmax(dim=0) for c, d in pairs)])
    threshold = torch.tensor(1 + ours.steepness * fraction).log() / torch.tensor(1 + ours.steepness).log()
    out = torch.zeros_like(own)
    for span in meta.proposals.spans():
        boxes = meta.proposals.boxes[span.start : span.stop]
        x = own[span.start : span.stop, : meta.tags.shape[1]].sum(dim=1)
        ids = greedy_subsets(boxes, x, threshold.item(), top=ours.top, window=ours.window).tolist()
        groups = [[span.start + r for r, i in enumerate(ids) if i == g] for g in range(max(ids, default=-1) + 1)]
        det = [[scores.mil_det[rows, c].mean() for c in range(own.shape[1])] for rows in groups]
        for g, rows in enumerate(groups):
            over_classes = torch.stack([scores.mil_cls[rows, c].mean() for c in range(own.shape[1])]).softmax(dim=0)
            for c in range(own.shape[1]):
                score = over_classes[c] * det[g][c].exp() / sum(d[c].exp() for d in det)
                if ours.subset_score == "mean":
                    score = torch.stack([own[r, c] for r in rows]).mean()
                top = max(rows, key=lambda r, c=c: (own[r, c].item(), -r))
                for r in rows if ours.share == "all" else [top]:
                    part = len(rows) if ours.share == "all" else 1
                    out[r, c] = score / part
    return out


@pytest.mark.parametrize(("sizes", "tags"), WORLDS)
@pytest.mark.parametrize("background", [0, 1])
@pytest.mark.parametrize("score", ["mean", "merged"])
@pytest.mark.parametrize("ours", [CMil(), CMil(share="all"), CMil(top=3), CMil(window=2), CMil(steepness=5.0)], ids=str)
def test_scores_match_the_loop(
    sizes: tuple, tags: list, background: int, ours: CMil, score: Literal["mean", "merged"]
) -> None:
    ours, (scores, meta) = replace(ours, subset_score=score), world(sizes, tags, background=background)
    for fraction in (0.0, EARLY, 0.2):
        got = ours(scores, meta, fraction).scores
        torch.testing.assert_close(got, loop_scores(scores, meta, fraction, ours))


@pytest.mark.parametrize(("sizes", "tags"), WORLDS)
@pytest.mark.parametrize("fraction", [0.0, EARLY, 1.0])
def test_it_survives_and_back_propagates(sizes: tuple, tags: list, fraction: float) -> None:
    scores, meta = world(sizes, tags)
    result = CMil()(scores, meta, fraction)
    assert result.loss.isfinite() and result.second is None
    assert all(g.isfinite().all() for g in gradients(result, scores))


@settings(max_examples=40)
@given(st.integers(0, 500), st.sampled_from([0.0, 1e-4, EARLY, 0.05, 0.5, 1.0]), st.sampled_from(["best", "all"]))
def test_sums_over_proposals_are_scores_of_an_image(seed: int, fraction: float, share: str) -> None:
    scores, meta = world((7, 11), [[1, 0], [1, 1]], seed=seed)
    phi = image_scores(CMil(share=share)(scores, meta, fraction).scores, (7, 11))  # type: ignore[arg-type]
    assert (phi > 0).all() and (phi <= 1 + 1e-9).all()
    other = image_scores(CMil(share="best" if share == "all" else "all")(scores, meta, fraction).scores, (7, 11))
    torch.testing.assert_close(phi, other)


@pytest.mark.parametrize("score", ["mean", "merged"])
def test_its_gradient_is_that_of_differences(score: Literal["mean", "merged"]) -> None:
    scores, meta = world((6, 4), [[1, 0], [0, 1]])

    def loss(cls: torch.Tensor, det: torch.Tensor) -> torch.Tensor:
        return CMil(subset_score=score)(replace(scores, mil_cls=cls, mil_det=det), meta, EARLY).loss

    assert torch.autograd.gradcheck(loss, (scores.mil_cls, scores.mil_det))


def test_the_best_box_of_the_best_subset_is_the_top_proposal() -> None:
    """Three boxes on an object split a softmax; as one subset they beat a single box that scores more than each."""
    inputs = make_labeler_input((4,), [[1, 0]])
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 9], [0, 0, 9, 10], [50, 50, 60, 60]])
    meta = BatchMeta(replace(inputs.proposals, boxes=boxes), inputs.tags)
    det = torch.tensor([[1.0, 0], [1.1, 0], [1.0, 0], [1.05, 0]])
    scores = StageScores(torch.tensor([[2.0, 0], [2.0, 0], [2.0, 0], [0.0, 0]]), det, (), ())
    merged = CMil()(scores, meta, EARLY).scores
    assert merged[:, 0].argmax() == 1 and merged[0, 0] == merged[2, 0] == 0


def test_it_is_registered() -> None:
    assert [extend.find_part("MIL head", kind) for kind in ("wsddn", "c_mil")] == [Wsddn, CMil]
    assert (CMil().kind, Wsddn().kind) == ("c_mil", "wsddn")
    assert CMil().requirements == Wsddn().requirements == Requirements()


def loop_hinge(merged: list[list[float]], tags: list[list[int]], counts: list[int], over: str) -> float:
    """One photo and class at a time."""
    total, first = 0.0, 0
    for present, count in zip(tags, counts, strict=True):
        own, first = merged[first : first + count], first + count
        terms = [max(0.0, 1 - (1 if y else -1) * max(f[c] for f in own)) for c, y in enumerate(present)] if own else [0]
        total += sum(terms) / (len(terms) if over == "mean" else 1)
    return total / max(len(counts), 1)


@pytest.mark.parametrize("over", ["mean", "sum"])
@pytest.mark.parametrize(
    ("counts", "tags"),
    [([], []), ([0], [[1, 0]]), ([1], [[1, 1]]), ([3, 0, 5], [[1, 0, 1], [1, 1, 0], [0, 0, 0]]), ([4], [[0]])],
)
def test_the_hinge_loss_matches_the_loop(
    counts: list[int], tags: list[list[int]], over: Literal["mean", "sum"]
) -> None:
    classes = len(tags[0]) if tags else 2
    merged = 2 * torch.rand(sum(counts), classes, dtype=torch.float64)
    target = torch.tensor(tags, dtype=torch.bool).reshape(len(tags), classes)
    got = hinge_loss(merged, target, counts, over_classes=over)
    assert got.item() == pytest.approx(loop_hinge(merged.tolist(), tags, counts, over))
    assert hinge_loss(merged, target, counts, unsure=torch.ones_like(target), over_classes=over).item() == 0


def test_the_hinge_loss_raises_the_best_subset_of_a_tag_and_lowers_that_of_other_classes() -> None:
    merged = torch.rand(7, 3, dtype=torch.float64, requires_grad=True)
    hinge_loss(merged, torch.tensor([[1, 0, 0], [0, 1, 1]], dtype=torch.bool), [4, 3]).backward()
    expected = torch.zeros(7, 3, dtype=torch.float64)
    for rows, signs in ((slice(0, 4), (-1, 1, 1)), (slice(4, 7), (1, -1, -1))):
        for c, sign in enumerate(signs):
            expected[rows.start + int(merged[rows, c].argmax()), c] = sign / 6
    torch.testing.assert_close(merged.grad, expected)


@pytest.mark.parametrize(("sizes", "tags"), WORLDS)
@pytest.mark.parametrize("fraction", [0.0, EARLY, 1.0])
def test_with_the_hinge_loss_scores_are_the_same(sizes: tuple, tags: list, fraction: float) -> None:
    scores, meta = world(sizes, tags, background=1)
    result, plain = CMil(loss="hinge")(scores, meta, fraction), CMil()(scores, meta, fraction)
    assert torch.equal(result.scores, plain.scores)
    assert 0 <= result.loss.item() <= 2
    grads = gradients(result, scores)
    assert all(g is None or g.isfinite().all() for g in grads)
    assert not sum(sizes) or (grads[0] is not None and grads[0].abs().sum() > 0)
