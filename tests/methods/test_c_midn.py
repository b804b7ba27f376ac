from __future__ import annotations

import pytest
import torch
from torch import Tensor

from strategies import make_labeler_input
from tag2box import extend
from tag2box.errors import UserError
from tag2box.methods.c_midn import CMidn
from tag2box.methods.slv import cells_of, likelihood_map
from tag2box.ops.boxes import iou
from tag2box.ops.losses import mil_loss, mil_scores
from tag2box.types import BatchMeta, Proposals, Requirements, SideInfo, StageScores

WORLDS: list[tuple[tuple[int, ...], list[list[int]]]] = [
    ((), []),  # no photo
    ((0,), [[1, 0]]),  # no proposals
    ((1,), [[1, 1]]),  # nothing else would be left
    ((5,), [[0, 0]]),  # no tags
    ((4, 0, 9), [[1, 0, 1], [1, 1, 0], [0, 0, 1]]),
    ((6, 7), [[1], [0]]),  # one class
    ((12, 3), [[1] * 30, [0] * 29 + [1]]),
]


def world(sizes: tuple[int, ...], tags: list[list[int]], background: int = 0) -> tuple[StageScores, BatchMeta]:
    inputs = make_labeler_input(sizes, tags)
    shape = (sum(sizes), inputs.tags.shape[1] + background)
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    evidence = torch.rand(sum(sizes), inputs.tags.shape[1], generator=torch.Generator().manual_seed(5)).square()
    g = torch.Generator().manual_seed(6)
    segments = tuple(torch.randint(inputs.tags.shape[1] + 1, (8, 10), generator=g) for _ in sizes)
    proposals = Proposals(inputs.proposals.boxes, sizes, ((200, 160),) * len(sizes))  # cells of 20 pixels
    meta = BatchMeta(proposals, inputs.tags, side_info=SideInfo(class_evidence=evidence, segments=segments))
    return StageScores(leaves[0], leaves[1], (), (), (leaves[2], leaves[3])), meta


def loop_removed(first: Tensor, meta: BatchMeta, ours: CMidn) -> list[list[bool]]:
    """Cell by cell and box by box."""
    removed = [[False] * first.shape[1] for _ in range(len(first))]
    for photo, (span, tags) in enumerate(zip(meta.proposals.spans(), meta.tags.tolist(), strict=True)):
        boxes = meta.proposals.boxes[span.start : span.stop]
        for c in [c for c, present in enumerate(tags) if present and len(span)]:
            scores = first[span.start : span.stop, c]
            assert meta.side_info.class_evidence is not None
            voters = scores if ours.guide == "mil" else meta.side_info.class_evidence[span.start : span.stop, c]
            votes, cell = likelihood_map(boxes, voters.to(scores.dtype), ours.cell).tolist(), ours.cell
            held = {(x, y) for y, line in enumerate(votes) for x, v in enumerate(line) if v >= ours.mask and v > 0}
            if ours.guide == "segmentation":
                assert meta.side_info.segments is not None
                shown, cell = meta.side_info.segments[photo].tolist(), 20.0
                held = {(x, y) for y, line in enumerate(shown) for x, v in enumerate(line) if v == c}
            top, hidden = scores.tolist().index(max(scores.tolist())), []
            for i, (left, up, right, down) in enumerate(cells_of(boxes, cell).tolist()):
                inside = sum(left <= x < right and up <= y < down for x, y in held)
                near = iou(boxes[i][None], boxes[top][None]).item() > ours.removed_iou
                hidden.append(near and inside / max(len(held), 1) < ours.covered)
            for i, gone in enumerate(hidden):
                removed[span.start + i][c] = gone and not all(hidden)
    return removed


@pytest.mark.parametrize(("sizes", "tags"), WORLDS)
@pytest.mark.parametrize("background", [0, 1])
@pytest.mark.parametrize(
    "ours",
    [
        CMidn(),
        CMidn(removed_iou=0.1, covered=1.1),
        CMidn(mask=0.9, cell=3.0),
        CMidn(guide="class_maps", covered=0.5, removed_iou=0.2),
        CMidn(guide="segmentation", covered=0.2, removed_iou=0.1),
    ],
    ids=str,
)
def test_both_heads_match_their_definition(sizes: tuple, tags: list, background: int, ours: CMidn) -> None:
    scores, meta = world(sizes, tags, background)
    result = ours(scores, meta, 0.3)
    first = mil_scores(scores.mil_cls, scores.mil_det, sizes)
    gone = torch.tensor(loop_removed(first.detach(), meta, ours), dtype=torch.bool).reshape(first.shape)
    assert torch.equal(ours.removed(first.detach(), meta), gone)
    assert torch.equal(result.scores, first) and result.second is not None
    start = 0
    for size in sizes:
        for r in range(start, start + size):
            for c in range(first.shape[1]):
                seen = [q for q in range(start, start + size) if not gone[q, c]]
                weight = torch.stack([scores.mil_more[1][q, c] for q in seen]).softmax(dim=0)
                box = weight[seen.index(r)].item() if r in seen else 0.0
                cls = scores.mil_more[0][r].softmax(dim=0)[c].item()
                assert result.second[r, c].item() == pytest.approx(cls * box, abs=1e-12)
        start += size
    wide = torch.cat([meta.tags, meta.tags.new_zeros(len(sizes), background)], dim=1)
    expected = sum(mil_loss(x, wide, sizes) for x in (first, result.second))
    torch.testing.assert_close(result.loss, expected)


@pytest.mark.parametrize(("sizes", "tags"), WORLDS)
def test_both_heads_learn(sizes: tuple, tags: list) -> None:
    scores, meta = world(sizes, tags)
    result = CMidn()(scores, meta, 0.0)
    result.loss.backward()
    leaves = [scores.mil_cls, scores.mil_det, *scores.mil_more]
    assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in leaves)
    if sum(sizes) > 1 and scores.mil_cls.shape[1] > 1:
        assert all((leaf.grad != 0).any() for leaf in leaves)


def test_the_second_head_finds_the_other_object() -> None:
    """Two objects that both heads score alike: the first head's is hidden from the second."""
    boxes = torch.tensor([[0.0, 0, 40, 40], [0, 0, 40, 36], [100, 100, 140, 140], [100, 100, 140, 136]])
    det = torch.tensor([[3.0, 0], [2.9, 0], [2.0, 0], [1.5, 0]])
    cls = torch.tensor([[5.0, 0]] * 4)
    meta = BatchMeta(Proposals(boxes, (4,)), torch.tensor([[True, False]]))
    result = CMidn(covered=1.1)(StageScores(cls, det, (), (), (cls, det)), meta, 0.0)
    assert result.second is not None
    assert (result.scores[:, 0].argmax(), result.second[:, 0].argmax()) == (0, 2)
    assert result.second[:2, 0].tolist() == [0, 0]
    assert (result.second[:, 1] > 0).all()  # of a class that is not tagged nothing is hidden


def test_a_box_that_covers_the_mask_is_not_hidden() -> None:
    """A part scores best; the whole object near it holds the mask and stays in the second head's bag."""
    boxes = torch.tensor([[0.0, 0, 40, 24], [0, 0, 40, 40], [200, 200, 240, 240]])
    meta = BatchMeta(Proposals(boxes, (3,)), torch.tensor([[True]]))
    first = torch.tensor([[0.5], [0.4], [0.05]])
    assert CMidn(covered=1.1).removed(first, meta).flatten().tolist() == [True, True, False]
    assert CMidn(mask=0.3).removed(first, meta).flatten().tolist() == [True, False, False]


def test_one_head_is_too_few() -> None:
    scores, meta = world((3,), [[1, 0]])
    alone = StageScores(scores.mil_cls, scores.mil_det, (), ())
    with pytest.raises(UserError, match=r"heads\.mil_heads=2"):
        CMidn()(alone, meta, 0.0)


def test_it_is_registered_and_requires_two_heads() -> None:
    assert extend.find_part("MIL head", "c_midn") is CMidn
    assert CMidn().kind == "c_midn" and CMidn().requirements == Requirements(mil_heads=2)


def test_class_maps_keep_a_box_that_covers_the_object_where_scores_would_remove_it() -> None:
    """The first head's top box is a part; its neighbour is the whole object by the class maps, not by the scores."""
    boxes = torch.tensor([[0.0, 0, 40, 40], [0.0, 0, 48, 64], [100.0, 100, 140, 140]])
    meta = BatchMeta(
        Proposals(boxes, (3,)),
        torch.ones(1, 1, dtype=torch.bool),
        side_info=SideInfo(class_evidence=torch.tensor([[0.1], [0.9], [0.0]])),
    )
    first = torch.tensor([[0.8], [0.1], [0.1]])
    ours = CMidn(covered=0.8)
    assert ours.removed(first, meta).flatten().tolist() == [False, False, False]  # the mask of the scores is the part
    guided = CMidn(guide="class_maps", covered=0.8)
    assert guided.removed(first, meta).flatten().tolist() == [True, False, False]
    assert guided.requirements == Requirements(mil_heads=2, class_evidence=True)


def test_segmentation_is_required_by_name() -> None:
    guided = CMidn(guide="segmentation")
    assert guided.requirements == Requirements(mil_heads=2, segments=True)
    meta = BatchMeta(Proposals(torch.tensor([[0.0, 0, 4, 4]]), (1,), ((9, 9),)), torch.ones(1, 1, dtype=torch.bool))
    with pytest.raises(UserError, match=r"SideInfo\.segments"):
        guided.removed(torch.ones(1, 1), meta)
