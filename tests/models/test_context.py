"""Context contrast: enlarged boxes, the wrapped backbone, and which heads read the difference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from tag2box.models.context import Context, ContextBackbone, centres_inside, surroundings
from tag2box.models.detector import Heads
from tag2box.models.rng import StepRng, Stream
from tag2box.types import Proposals
from tiny import TinyBackbone, tiny_detector

BOXES = torch.tensor([[4.0, 4.0, 12.0, 20.0], [0.0, 0.0, 40.0, 32.0], [30.0, 2.0, 38.0, 10.0]])
PROPOSALS = Proposals(BOXES, (3,), ((40, 32),))
IMAGES = torch.rand(1, 3, 32, 40, generator=torch.Generator().manual_seed(0)) * 255


def enlarged_by_loop(box: list[float], scale: float, frame: tuple[int, int] | None) -> list[float]:
    """A twin of ``surroundings`` for one box."""
    cx, cy, w, h = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2, box[2] - box[0], box[3] - box[1]
    x1, y1, x2, y2 = cx - scale * w / 2, cy - scale * h / 2, cx + scale * w / 2, cy + scale * h / 2
    if frame is None:
        return [x1, y1, x2, y2]
    return [max(x1, 0), max(y1, 0), min(x2, frame[0]), min(y2, frame[1])]


@pytest.mark.parametrize(
    ("boxes", "sizes"), [([], ()), ([], (0, 0)), ([[1, 2, 3, 4]], (1,)), ([[0, 0, 9, 9], [2, 3, 5, 4]], (1, 1))]
)
@pytest.mark.parametrize("scale", [1.1, 1.8, 5.0])
@pytest.mark.parametrize("framed", [True, False])
def test_surroundings_are_those_of_the_loop(
    boxes: list[list[float]], sizes: tuple[int, ...], scale: float, framed: bool
) -> None:
    frames = tuple((10 + i, 9 - i) for i in range(len(sizes))) if framed else None
    proposals = Proposals(torch.tensor(boxes, dtype=torch.float64).reshape(-1, 4), sizes, frames)
    owners = proposals.image_ids().tolist()
    expected = [
        enlarged_by_loop(box, scale, None if frames is None else frames[i])
        for box, i in zip(boxes, owners, strict=True)
    ]
    torch.testing.assert_close(
        surroundings(proposals, scale).boxes, torch.tensor(expected, dtype=torch.float64).reshape(-1, 4)
    )


@given(st.floats(1.01, 9), st.floats(0, 20), st.floats(0, 20), st.floats(1, 20), st.floats(1, 20))
def test_surroundings_contain_the_box_and_stay_in_the_image(
    scale: float, x: float, y: float, w: float, h: float
) -> None:
    box = torch.tensor([[x, y, x + w, y + h]], dtype=torch.float64)
    x1, y1, x2, y2 = surroundings(Proposals(box, (1,), ((40, 40),)), scale).boxes[0].tolist()
    assert 0 <= x1 <= x + 1e-9
    assert 0 <= y1 <= y + 1e-9
    assert x + w - 1e-9 <= x2 <= 40
    assert y + h - 1e-9 <= y2 <= 40


def test_maps_and_vectors_are_those_of_the_box_then_of_its_surroundings() -> None:
    inner = TinyBackbone()
    outer = ContextBackbone(inner, 1.8)
    trunk = inner.trunk(IMAGES)
    maps = outer.roi_maps(trunk, PROPOSALS)
    around = surroundings(PROPOSALS, 1.8)
    own, ring = inner.roi_maps(trunk, PROPOSALS), inner.roi_maps(trunk, around)
    assert torch.equal(maps, torch.cat([own, ring], dim=1))
    assert maps.shape[1] == outer.channels
    vectors = outer.neck(maps)
    assert torch.equal(vectors, torch.cat([inner.neck(own), inner.neck(ring)], dim=1))
    assert vectors.shape[1] == outer.vector_size
    stem = outer.neck_stem(maps)
    assert torch.equal(outer.neck_tail(stem, torch.ones(3, 3, 3)), vectors)
    torch.testing.assert_close(outer.neck_tail(stem[[2]], torch.ones(1, 3, 3)), vectors[[2]])


def test_dropout_zeroes_the_same_values_of_both() -> None:
    outer = ContextBackbone(TinyBackbone(dropout=0.5), 1.8)
    maps = torch.rand(4, 10, 3, 3) + 1
    maps = torch.cat([maps[:, :5], maps[:, :5]], dim=1)
    rng = StepRng(0, 0).row_rng(Stream.NECK, torch.tensor([0, 0, 1, 1]))
    own, ring = outer.neck(maps, rng).chunk(2, dim=1)
    torch.testing.assert_close(own, ring)
    assert (own == 0).any()
    assert (own != 0).any()


@pytest.mark.parametrize("on", ["none", "mil", "refine", "both"])
@pytest.mark.parametrize("weight", [1.0, 0.5, -1.0])
def test_the_heads_read_the_contrast_where_it_is_on(on: str, weight: float) -> None:
    context = Context(on=on, weight=weight)  # type: ignore[arg-type]
    detector = tiny_detector(3, heads=Heads(embed_dim=4, context=context))
    own = torch.rand(5, 8, generator=torch.Generator().manual_seed(1))
    ring = torch.rand(5, 8, generator=torch.Generator().manual_seed(2))
    scores = detector.score(own if on == "none" else torch.cat([own, ring], dim=1))
    difference = own - weight * ring
    detection, refined = (difference if on in wanted else own for wanted in (("mil", "both"), ("refine", "both")))
    torch.testing.assert_close(scores.mil_cls, detector.mil.cls(own))
    torch.testing.assert_close(scores.mil_det, detector.mil.det(detection))
    for stage, logits, deltas in zip(detector.refine, scores.refine, scores.deltas, strict=True):
        torch.testing.assert_close(logits, stage.cls(refined))  # type: ignore[operator]
        torch.testing.assert_close(deltas, stage.box(own))  # type: ignore[operator]


@pytest.mark.parametrize("side", [1, 3, 7])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_centres_inside_are_those_of_the_loops(count: int, side: int) -> None:
    g = torch.Generator().manual_seed(count)
    corner = torch.rand(count, 2, generator=g) * 9
    boxes = torch.cat([corner, corner + 1 + 9 * torch.rand(count, 2, generator=g)], dim=1)
    regions = surroundings(Proposals(boxes, (count,), ((15, 15),)), 1.8).boxes
    found = centres_inside(regions, boxes, side)
    assert found.shape == (count, side, side)
    for r in range(count):
        x1, y1, x2, y2 = regions[r].tolist()
        for i in range(side):
            for j in range(side):
                y, x = y1 + (i + 0.5) / side * (y2 - y1), x1 + (j + 0.5) / side * (x2 - x1)
                inside = boxes[r, 0] <= x < boxes[r, 2] and boxes[r, 1] <= y < boxes[r, 3]
                assert bool(found[r, i, j]) == bool(inside)


def test_frame_minus_ring_reads_both_sides_of_the_border() -> None:
    """The vectors are those of the box, of its frame (inner part zero) and of the ring (zero in the box)."""
    inner = TinyBackbone()
    outer = ContextBackbone(inner, 1.8, "rings")
    trunk = inner.trunk(IMAGES)
    maps = outer.roi_maps(trunk, PROPOSALS)
    around = surroundings(PROPOSALS, 1.8)
    own, ring = inner.roi_maps(trunk, PROPOSALS), inner.roi_maps(trunk, around)
    ring = ring * ~centres_inside(around.boxes, BOXES, 3)[:, None]
    frame = own.clone()
    frame[:, :, 1, 1] = 0  # of 3 x 3 cells, the middle one
    expected = torch.cat([inner.neck(own), inner.neck(frame), inner.neck(ring)], dim=1)
    torch.testing.assert_close(outer.neck(maps), expected)
    assert outer.vector_size == expected.shape[1] and not ring[1].any()  # the whole photo has no surroundings
    detector = tiny_detector(3, heads=Heads(embed_dim=4, context=Context(on="mil", weight=0.5, regions="rings")))
    box, within, outside = torch.rand(3, 5, 8, generator=torch.Generator().manual_seed(1))
    scores = detector.score(torch.cat([box, within, outside], dim=1))
    torch.testing.assert_close(scores.mil_det, detector.mil.det(within - 0.5 * outside))
    torch.testing.assert_close(scores.mil_cls, detector.mil.cls(box))
    assert outer.roi_map_key() != ContextBackbone(inner, 1.8).roi_map_key()


def test_without_context_the_network_is_as_before() -> None:
    detector = tiny_detector(3, heads=Heads(embed_dim=4))
    assert isinstance(detector.backbone, TinyBackbone)


def test_the_cache_key_names_the_scale() -> None:
    keys = {ContextBackbone(TinyBackbone(), scale).roi_map_key() for scale in (1.5, 1.8)}
    assert len({*keys, TinyBackbone().roi_map_key()}) == 3
    assert ContextBackbone(TinyBackbone(), 1.5).trunk_key() == TinyBackbone().trunk_key()
