from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st

from conftest import background_last, golden_names, load_golden
from grid_boxes import grid_boxes
from strategies import random_boxes
from tag2box.methods.pcl import bag_loss, cluster_centres, most_connected, top_group
from tag2box.ops.boxes import iou
from tag2box.ops.losses import assign, refine_loss
from tag2box.types import Proposals, PseudoBoxes, PseudoLabels

EDGE = torch.tensor([0.0, 0.0, 1.0, 1.0])  # the references count pixels inclusively
CASES = golden_names("pcl_*.npz")


def centres_with_loops(
    boxes: torch.Tensor, scores: list[float], *, groups: int, graph_iou: float, leave: int, most: int
) -> list[tuple[int, float]]:
    """(row, score) of the centres by the definition: k-means, graph, the most connected, the best few."""
    left = [r for r, top in enumerate(top_group(torch.tensor(scores), groups).tolist()) if top]
    overlap = iou(boxes, boxes)
    found: list[tuple[int, float]] = []
    while left and (not found or len(left) > leave):
        near = {r: [o for o in left if o == r or overlap[r, o] > graph_iou] for r in left}
        centre = max(left, key=lambda r: (len(near[r]), scores[r], -r))
        found.append((centre, max(scores[o] for o in near[centre])))
        left = [r for r in left if r not in near[centre]]
    return sorted(found, key=lambda pair: -pair[1])[:most]


@given(
    st.integers(1, 14),
    st.integers(0, 10_000),
    st.sampled_from([0.0, 0.2, 0.4]),
    st.integers(0, 5),
    st.integers(1, 5),
)
def test_centres_match_the_definition_written_with_loops(
    size: int, seed: int, graph_iou: float, leave: int, most: int
) -> None:
    boxes = grid_boxes(size, seed)
    scores = torch.rand(len(boxes), generator=torch.Generator().manual_seed(seed))
    rows, best = cluster_centres(boxes, scores, groups=2, graph_iou=graph_iou, leave=leave, most=most)
    expected = centres_with_loops(boxes, scores.tolist(), groups=2, graph_iou=graph_iou, leave=leave, most=most)
    assert list(zip(rows.tolist(), best.tolist(), strict=True)) == expected


@pytest.mark.parametrize(
    ("edges", "nodes", "leave", "centres", "best"),
    [
        ([], 0, 5, [], []),
        ([], 1, 5, [0], [0]),  # one centre always, however few
        ([], 3, 0, [0, 1, 2], [0, 1, 2]),
        ([], 3, 2, [0], [0]),
        ([(0, 2), (1, 2)], 4, 0, [2, 3], [0, 3]),  # the star before its better leaves
        ([(0, 1), (2, 3)], 4, 0, [0, 2], [0, 2]),  # equals: the better one
        ([(0, 1), (1, 2), (2, 3)], 4, 0, [1, 3], [0, 3]),  # a removed node is no neighbour any more
    ],
)
def test_the_most_connected(
    edges: list[tuple[int, int]], nodes: int, leave: int, centres: list[int], best: list[int]
) -> None:
    near = torch.eye(nodes, dtype=torch.bool)
    for a, b in edges:
        near[a, b] = near[b, a] = True
    got = most_connected(near, leave)
    assert [x.tolist() for x in got] == [centres, best]


def test_empty_boxes_are_their_own_neighbours() -> None:
    rows, _ = cluster_centres(torch.zeros(3, 4), torch.tensor([0.5, 0.5, 0.5]), leave=0)
    assert rows.tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", CASES)
def test_graph_and_centres_are_those_of_the_reference(name: str) -> None:
    """In the order they are picked, with their members, then the best five; scores to the bit."""
    g = load_golden(name)
    boxes = torch.as_tensor(g["in_boxes"]) + EDGE
    kept = []
    for c in g["positive_classes"].tolist():
        scores = torch.as_tensor(g["in_source_prob"])[:, c - g["in_im_labels"].shape[1]]
        ids = torch.as_tensor(g[f"c{c}_top_idx_orig"])
        ids = ids[scores[ids].argsort(descending=True, stable=True)]
        near = iou(boxes[ids], boxes[ids]) > 0.4
        at = [g[f"c{c}_top_idx_orig"].tolist().index(i) for i in ids.tolist()]
        assert torch.equal(near, torch.as_tensor(g[f"c{c}_graph"]).bool()[at][:, at])
        assert ids[most_connected(near, 5)[0]].tolist() == g[f"c{c}_centers_in_pick_order_orig"].tolist()
        pool = torch.as_tensor(g[f"c{c}_pool"])
        rows, best = cluster_centres(boxes[pool], scores[pool])
        assert pool[rows].tolist() == g[f"c{c}_final_centers_orig"].tolist()
        kept += best.tolist()
    assert kept == g["out_gt_scores"].flatten().tolist()


# ---------------------------------------------------------------- the loss


def some_labels(
    sizes: tuple[int, ...], rows: list[int], cls: list[int], classes: int
) -> tuple[Proposals, PseudoLabels]:
    proposals = Proposals(random_boxes(sum(sizes), torch.Generator().manual_seed(5), size=20), sizes)
    score = torch.arange(1, len(rows) + 1) / 10
    pseudo_boxes = PseudoBoxes(torch.tensor(rows, dtype=torch.long), torch.tensor(cls, dtype=torch.long), score)
    labels = assign(proposals, pseudo_boxes, classes, 0.2)
    weight = labels.weight * torch.linspace(0.5, 1.5, sum(sizes))  # weights may differ inside a cluster
    return proposals, replace(labels, weight=weight)


def bag_loss_with_loops(logits: torch.Tensor, labels: PseudoLabels, sizes: tuple[int, ...]) -> float:
    """Cluster after cluster, background after background, by the definition."""
    p, background = logits.softmax(dim=1).tolist(), logits.shape[1] - 1
    total, start = 0.0, 0
    for size in sizes:
        rows = range(start, start + size)
        for i in range(len(labels.pseudo_boxes)):
            members = [r for r in rows if labels.owner[r] == i and labels.cls[r] != background]
            if members:
                mean = sum(p[r][int(labels.pseudo_boxes.cls[i])] for r in members) / len(members)
                total -= sum(float(labels.weight[r]) for r in members) * math.log(mean) / size / len(sizes)
        for r in rows:
            if labels.cls[r] == background:
                total -= float(labels.weight[r]) * math.log(p[r][background]) / size / len(sizes)
        start += size
    return total


WORLDS: list[tuple[tuple[int, ...], list[int], list[int]]] = [
    ((), [], []),
    ((0,), [], []),
    ((4,), [], []),  # no pseudo boxes
    ((1,), [0], [0]),
    ((6, 0, 5), [1, 2, 9], [0, 2, 1]),
    ((30,), [3, 7, 7, 20], [1, 0, 2, 1]),
]


@pytest.mark.parametrize(("sizes", "rows", "cls"), WORLDS)
def test_the_bag_loss_matches_the_definition_written_with_loops(sizes: tuple, rows: list, cls: list) -> None:
    _, labels = some_labels(sizes, rows, cls, 3)
    logits = torch.randn(sum(sizes), 4, requires_grad=True)
    loss = bag_loss(logits, labels, sizes)
    assert loss.item() == pytest.approx(bag_loss_with_loops(logits, labels, sizes), rel=1e-5)
    loss.backward()
    assert logits.grad is None or logits.grad.isfinite().all()


def test_its_gradient_is_that_of_small_differences() -> None:
    sizes = (9, 5)
    _, labels = some_labels(sizes, [1, 4, 10], [0, 2, 1], 3)
    labels = replace(labels, weight=labels.weight.double())
    logits = torch.randn(14, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: bag_loss(x, labels, sizes), (logits,))


@given(st.integers(1, 12), st.integers(0, 10_000))
def test_with_clusters_of_one_it_is_the_loss_of_proposals(count: int, seed: int) -> None:
    """The property the idea rests on: only inside a cluster do they differ."""
    g = torch.Generator().manual_seed(seed)
    apart = torch.arange(count)[:, None] * 10.0 + torch.tensor([0.0, 0.0, 5.0, 5.0])
    rows = torch.randperm(count, generator=g)[: (count + 1) // 2]  # the others are background
    pseudo_boxes = PseudoBoxes(rows, torch.randint(0, 3, (len(rows),), generator=g), torch.rand(len(rows), generator=g))
    labels = assign(Proposals(apart, (count,)), pseudo_boxes, 3)
    ours, theirs = (torch.randn(count, 4, generator=g.manual_seed(seed)).requires_grad_() for _ in range(2))
    bags, singles = bag_loss(ours, labels, (count,)), refine_loss(theirs, labels, (count,))
    torch.testing.assert_close(bags, singles)
    bags.backward()
    singles.backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_cluster_with_one_sure_member_is_judged_more_mildly_than_its_members_one_by_one() -> None:
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 9]])
    labels = assign(Proposals(boxes, (2,)), PseudoBoxes(torch.tensor([0]), torch.tensor([0]), torch.ones(1)), 1)
    logits = torch.tensor([[5.0, 0.0], [-5.0, 0.0]])
    assert bag_loss(logits, labels, (2,)).item() == pytest.approx(math.log(2), abs=0.01)
    assert refine_loss(logits, labels, (2,)).item() > 2


def test_hopeless_members_do_not_underflow() -> None:
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, 9]])
    labels = assign(Proposals(boxes, (2,)), PseudoBoxes(torch.tensor([0]), torch.tensor([0]), torch.ones(1)), 1)
    logits = torch.tensor([[-300.0, 0.0], [-300.0, 0.0]], requires_grad=True)
    loss = bag_loss(logits, labels, (2,))
    loss.backward()
    assert loss.item() == pytest.approx(300)
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_those_of_the_reference(name: str) -> None:
    """1e-5 relative for the loss, 1e-6 absolute for its gradient.

    In its loss of proposals the reference adds 1e-6 to every probability: there 1e-4, and 1e-5.
    """
    g = load_golden(name)
    count, classes = len(g["in_boxes"]), g["in_im_labels"].shape[1]
    for prefix, key, gradient, loss_of, close in (
        ("out", "out_pcl_loss", "out_grad_ref_logits", bag_loss, 1e-5),
        ("oicr", "oicr_loss", "oicr_grad_ref_logits", refine_loss, 1e-4),
    ):
        cls = torch.as_tensor(g[f"{prefix}_labels"]).flatten()
        owner = torch.as_tensor(g[f"{prefix}_gt_assignment"]).flatten().long()
        ids = owner.unique().clamp(min=0).unique()
        first = torch.tensor([int((owner == i).nonzero()[0]) for i in ids.tolist()])
        labels = PseudoLabels(
            torch.where(cls == 0, classes, cls - 1),
            torch.as_tensor(g[f"{prefix}_cls_loss_weights"]).flatten(),
            torch.as_tensor(g["in_boxes"]),
            PseudoBoxes(first, cls[first] - 1, torch.ones(len(ids))),
            owner,
        )
        logits = background_last(torch.as_tensor(g["in_ref_logits"])).requires_grad_()
        loss = loss_of(logits, labels, (count,))
        loss.backward()
        assert loss.item() == pytest.approx(float(g[key]), rel=close)
        expected = background_last(torch.as_tensor(g[gradient]))
        torch.testing.assert_close(logits.grad, expected, atol=0.1 * close, rtol=10 * close)
