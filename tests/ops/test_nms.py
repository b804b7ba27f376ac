from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from conftest import golden_names, load_golden
from strategies import box_sets
from tag2box.ops import boxes as box_ops
from tag2box.ops.box_kernels import survivors
from tag2box.ops.boxes import areas, class_nms, iou, nms


def greedy(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> list[int]:
    """The definition, one box at a time."""
    kept: list[int] = []
    for i in scores.argsort(descending=True, stable=True).tolist():
        if all((iou(boxes[i : i + 1], boxes[j : j + 1]) <= threshold).item() for j in kept):
            kept.append(i)
    return kept


@pytest.mark.parametrize(
    ("boxes", "scores", "expected"),
    [
        ([], [], []),
        ([[0, 0, 4, 4]], [0.5], [0]),
        ([[0, 0, 4, 4], [0, 0, 4, 4]], [0.5, 0.5], [0]),  # equal scores: the first stays
        ([[0, 0, 4, 4], [0, 0, 4, 3], [9, 9, 12, 12]], [0.1, 0.9, 0.5], [1, 2]),
    ],
)
def test_nms_table(boxes: list, scores: list, expected: list) -> None:
    got = nms(torch.tensor(boxes).reshape(-1, 4).float(), torch.tensor(scores), 0.4)
    assert got.tolist() == expected


@given(box_sets(), st.integers(0, 3), st.sampled_from([0.0, 0.1, 0.4, 1.0]), st.randoms(use_true_random=False))
def test_nms_is_greedy_suppression(boxes: torch.Tensor, levels: int, threshold: float, random: object) -> None:
    scores = torch.tensor([random.randint(0, levels) / 3 for _ in range(len(boxes))])  # type: ignore[attr-defined]
    assert nms(boxes, scores, threshold).tolist() == greedy(boxes, scores, threshold)


def test_a_long_chain_of_overlaps_settles() -> None:
    boxes = torch.tensor([[i, 0.0, i + 3.0, 3.0] for i in range(60)])
    scores = torch.linspace(1, 0.1, 60)
    assert nms(boxes, scores, 0.3).tolist() == greedy(boxes, scores, 0.3)


@given(box_sets(low=1))
def test_classes_do_not_suppress_each_other(boxes: torch.Tensor) -> None:
    labels = torch.arange(len(boxes))
    assert sorted(class_nms(boxes, torch.ones(len(boxes)), labels, 0.1).tolist()) == labels.tolist()


@pytest.mark.parametrize("name", golden_names("easy_nms_*.npz"))
@pytest.mark.parametrize("percent", [10, 40])
def test_kept_set_matches_the_reference(name: str, percent: int) -> None:
    g = {k: torch.as_tensor(v) for k, v in load_golden(name).items()}
    cluster = g["in_cluster"]  # the rows that take part
    kept = cluster[nms(g["in_boxes"][cluster], g["in_scores"][cluster], percent / 100)]
    assert kept.tolist() == g[f"out_easy_nms_tv_{percent}"].tolist()


@pytest.mark.parametrize("others", [0, 254, 255, 600])
@pytest.mark.parametrize(("height", "is_kept"), [(2.0, True), (3.0, False)])
def test_an_overlap_of_exactly_the_threshold_is_kept_in_every_block(others: int, height: float, is_kept: bool) -> None:
    """The best box, then many far away (they fill the first blocks), then one that overlaps the best."""
    far = [[10.0 * i, 100.0, 10.0 * i + 1, 101.0] for i in range(others)]
    boxes = torch.tensor([[0.0, 0, 4, 4], *far, [0.0, 0, 4, height]])
    assert iou(boxes[:1], boxes[-1:]).item() == height / 4
    kept = nms(boxes, torch.linspace(1, 0.1, len(boxes)), 0.5)
    assert kept.tolist() == list(range(len(boxes) - (not is_kept)))


@pytest.fixture
def always_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box_ops, "_MIN_COMPILED_BOXES", 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("threshold", [0.0, 0.1, 0.25, 0.4, 0.5, 1.0])
@pytest.mark.parametrize("count", [0, 1, 2, 300])
def test_the_kernel_keeps_what_plain_torch_keeps(
    count: int, threshold: float, dtype: torch.dtype, always_compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole coordinates and few scores: many overlaps of exactly the threshold, many ties, some empty boxes."""
    generator = torch.Generator().manual_seed(count)
    boxes = torch.randint(0, 12, (count, 4), generator=generator).to(dtype)
    boxes[:, 2:] += boxes[:, :2] - 2
    scores = torch.randint(0, 9, (count,), generator=generator).to(dtype)
    labels = torch.randint(0, 4, (count,), generator=generator)
    compiled = nms(boxes, scores, threshold), class_nms(boxes, scores, labels, threshold)
    monkeypatch.setattr(box_ops, "_MIN_COMPILED_BOXES", 1 << 62)
    assert torch.equal(compiled[0], nms(boxes, scores, threshold))
    assert torch.equal(compiled[1], class_nms(boxes, scores, labels, threshold))


@given(box_sets(), st.sampled_from([0.0, 0.1, 0.4, 1.0]))
def test_the_kernel_is_greedy_suppression(boxes: torch.Tensor, threshold: float) -> None:
    ranked = boxes[torch.arange(len(boxes))]
    alive = survivors(ranked, areas(ranked), [len(ranked)], threshold)
    assert alive.nonzero().flatten().tolist() == greedy(ranked, torch.zeros(len(ranked)), threshold)


def test_a_box_that_is_not_a_number_suppresses_nothing(always_compiled: None) -> None:
    boxes = torch.tensor([[float("nan"), 0, 4, 4], [0.0, 0, 4, 4], [0.0, 0, 4, 4]])
    assert nms(boxes, torch.tensor([0.9, 0.8, 0.7]), 0.5).tolist() == [0, 1]
