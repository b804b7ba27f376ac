from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

from conftest import golden_names, load_golden
from strategies import box_sets
from tag2box.ops.boxes import areas, clip, containment, decode, encode, greedy_match, intersections, iou, mask_boxes


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([], [], []),
        ([], [[0, 0, 1, 1]], []),
        ([[0, 0, 2, 2]], [[0, 0, 2, 2]], [[1.0]]),
        ([[0, 0, 2, 2]], [[2, 0, 4, 2]], [[0.0]]),  # exclusive edges: touching boxes share nothing
        ([[0, 0, 2, 2]], [[1, 0, 3, 2]], [[1 / 3]]),
        ([[5, 5, 5, 5]], [[5, 5, 5, 5]], [[0.0]]),  # an empty box overlaps nothing, not even itself
    ],
)
def test_iou_table(a: list, b: list, expected: list) -> None:
    got = iou(torch.tensor(a).reshape(-1, 4).float(), torch.tensor(b).reshape(-1, 4).float())
    assert got.shape == (len(a), len(b))
    torch.testing.assert_close(got, torch.tensor(expected).reshape(len(a), len(b)))


@settings(deadline=None)
@given(box_sets(), box_sets())
def test_iou_is_symmetric_within_zero_and_one_and_counts_pixels(a: torch.Tensor, b: torch.Tensor) -> None:
    got = iou(a, b)
    torch.testing.assert_close(got, iou(b, a).T)
    assert ((got >= 0) & (got <= 1)).all()
    for i, box in enumerate(a.tolist()):
        for j, other in enumerate(b.tolist()):
            mine, others = pixels(box), pixels(other)
            assert got[i, j] == pytest.approx(len(mine & others) / len(mine | others))
            assert intersections(a, b)[i, j] == len(mine & others)
            assert areas(a)[i] == len(mine)


def pixels(box: list[float]) -> set[tuple[int, int]]:
    x1, y1, x2, y2 = (int(v) for v in box)
    return {(x, y) for x in range(x1, x2) for y in range(y1, y2)}


@given(box_sets())
def test_decode_undoes_encode(boxes: torch.Tensor) -> None:
    shifted = boxes + torch.tensor([1.0, -2.0, 3.0, 0.5])
    torch.testing.assert_close(decode(encode(shifted, boxes), boxes), shifted, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("name", golden_names("boxcoder_*.npz"))
def test_coder_matches_the_reference(name: str) -> None:
    """The reference counts pixels inclusively: its x2 + 1 is our exclusive edge. Tolerance: float32 rounding."""
    g = {k: torch.as_tensor(v) for k, v in load_golden(name).items()}
    if g["in_weights"].tolist() != [10, 10, 5, 5]:
        pytest.skip("the reference case uses other code weights")
    edge = torch.tensor([0.0, 0.0, 1.0, 1.0])
    proposals = g["in_proposals"] + edge
    torch.testing.assert_close(encode(g["in_reference"] + edge, proposals), g["out_encode"], atol=1e-4, rtol=1e-4)
    expected = g["out_decode"] + edge.repeat(g["out_decode"].shape[1] // 4)
    torch.testing.assert_close(decode(g["in_codes"], proposals), expected, atol=1e-2, rtol=1e-4)


def test_clip_cuts_at_the_border() -> None:
    got = clip(torch.tensor([[-5.0, 2.0, 30.0, 40.0]]), width=20, height=10)
    assert got.tolist() == [[0.0, 2.0, 20.0, 10.0]]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([], [], []),
        ([[0, 0, 4, 4]], [[1, 1, 2, 2]], [[1.0]]),  # whichever is the larger
        ([[1, 1, 2, 2]], [[0, 0, 4, 4]], [[1.0]]),
        ([[0, 0, 2, 2]], [[1, 0, 3, 2]], [[0.5]]),
        ([[0, 0, 2, 2]], [[2, 0, 4, 2]], [[0.0]]),
        ([[5, 5, 5, 5]], [[0, 0, 9, 9], [5, 5, 5, 5]], [[0.0, 0.0]]),  # an empty box lies in nothing
    ],
)
def test_containment_table(a: list, b: list, expected: list) -> None:
    got = containment(torch.tensor(a).reshape(-1, 4).float(), torch.tensor(b).reshape(-1, 4).float())
    assert got.tolist() == expected


# ---------------------------------------------------------------- boxes of masks


def test_maps_without_a_positive_cell_have_no_box():
    assert mask_boxes(torch.zeros(0, 3, 4)).shape == (0, 4)
    assert mask_boxes(torch.full((2, 3, 4), -1.0)).tolist() == [[0, 0, 0, 0]] * 2
    assert mask_boxes(torch.ones(1, 3, 4)).tolist() == [[0, 0, 4, 3]]


@given(st.integers(0, 10_000), st.integers(1, 7), st.integers(1, 7))
def test_the_box_of_a_mask_is_that_of_the_bilinearly_enlarged_map(seed, rows, columns):
    logits = torch.randn(1, rows, columns, generator=torch.Generator().manual_seed(seed)) - 0.5
    logits = logits + 0.2 * logits.sign()  # a cell barely above zero would be positive only between the samples below
    factor = 64
    large = torch.nn.functional.interpolate(logits[None], scale_factor=factor, mode="bilinear")[0, 0]
    ys, xs = (large > 0).nonzero(as_tuple=True)
    box = mask_boxes(logits)[0]
    if len(xs):
        expected = torch.tensor([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]) / factor
        assert torch.allclose(box, expected, atol=2 / factor)
    assert bool((logits > 0).any()) == bool(box.any())


@pytest.mark.parametrize(
    ("overlaps", "expected"),
    [
        (torch.zeros(0, 0), []),
        (torch.zeros(2, 0), [-1, -1]),
        (torch.zeros(0, 2), []),
        (torch.tensor([[0.49, 0.5]]), [1]),
        (torch.tensor([[0.7, 0.7], [0.7, 0.1]]), [0, -1]),  # ties go to the first, even if the next row then has none
        (torch.tensor([[0.6, -1.0], [0.9, 0.5]]), [0, 1]),
    ],
)
def test_greedy_match_of(overlaps, expected):
    assert greedy_match(overlaps, 0.5).tolist() == expected


@settings(max_examples=60, deadline=None)
@given(box_sets(), box_sets(), st.sampled_from([0.0, 0.3, 0.5]))
def test_greedy_match_is_the_rule_written_with_loops(first, second, least):
    overlaps = iou(first, second)
    free, expected = list(range(len(second))), []
    for row in overlaps.tolist():
        best, chosen = -1.0, -1
        for column in free:
            if row[column] >= least and row[column] > best:
                best, chosen = row[column], column
        free = [column for column in free if column != chosen]
        expected.append(chosen)
    assert greedy_match(overlaps, least).tolist() == expected
