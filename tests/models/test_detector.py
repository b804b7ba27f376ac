from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tag2box.models.backbone import innermost
from tag2box.models.context import Context
from tag2box.models.detector import Detector, Heads, NeckBackbone
from tag2box.models.rng import StepRng, Stream
from tag2box.types import Batch, Proposals, SideInfo
from tiny import TinyBackbone, tiny_detector

BOXES = torch.tensor([[0.0, 0, 16, 16], [8, 4, 30, 20], [2, 2, 20, 30]])


def batch_of(sizes: tuple[int, ...], classes: int = 3) -> Batch:
    """Images of noise, the first boxes of the list in each."""
    boxes = torch.cat([BOXES[:n] for n in sizes])
    tags = torch.ones(len(sizes), classes, dtype=torch.bool)
    return Batch(
        tuple(str(i) for i in range(len(sizes))),
        tags,
        Proposals(boxes, sizes),
        images=torch.rand(len(sizes), 3, 32, 32) * 255,
    )


@pytest.mark.parametrize(
    ("mil_background", "num_classes", "columns"), [(False, 1, 2), (True, 1, 2), (False, 3, 3), (True, 3, 4)]
)
def test_mil_columns(mil_background: bool, num_classes: int, columns: int) -> None:
    assert Heads(mil_background=mil_background).mil_columns(num_classes) == columns


@pytest.mark.parametrize("sizes", [(0,), (1,), (3, 0, 2)])
@pytest.mark.parametrize("stages", [0, 1, 3])
@pytest.mark.parametrize("num_classes", [1, 3, 40])
def test_shapes_of_all_outputs(sizes: tuple[int, ...], stages: int, num_classes: int) -> None:
    detector, rows = tiny_detector(num_classes, heads=Heads(stages=stages, embed_dim=6)), sum(sizes)
    maps = detector.roi_maps(batch_of(sizes))
    vector = detector.neck(maps)
    scores = detector.score(vector)
    assert maps.shape == (rows, TinyBackbone.channels, 3, 3)
    assert scores.mil_cls.shape == scores.mil_det.shape == (rows, max(num_classes, 2))
    assert [x.shape for x in scores.refine] == [(rows, num_classes + 1)] * stages
    assert [x.shape for x in scores.deltas] == [(rows, 4 * num_classes)] * stages
    assert detector.embed(vector).shape == (rows, 6)


def test_all_mil_heads_have_the_temperature() -> None:
    vector = torch.rand(2, TinyBackbone.vector_size)
    plain = tiny_detector(3, heads=Heads(mil_heads=2)).score(vector)
    warm = tiny_detector(3, heads=Heads(mil_heads=2, mil_temperature=4.0)).score(vector)
    for a, b, factor in [
        (plain.mil_cls, warm.mil_cls, 1), (plain.mil_det, warm.mil_det, 4),
        (plain.mil_more[0], warm.mil_more[0], 1), (plain.mil_more[1], warm.mil_more[1], 4),
    ]:  # fmt: skip
        assert torch.equal(a / factor, b)


def test_without_regression_there_are_no_deltas() -> None:
    detector = tiny_detector(3, heads=Heads(regress=False))
    assert detector.score(torch.rand(2, TinyBackbone.vector_size)).deltas == ()
    assert not any("box" in name for name, _ in detector.named_parameters())


@pytest.mark.parametrize("num_classes", [1, 3])
@pytest.mark.parametrize("rows", [0, 1, 4])
def test_one_regression_for_all_classes_gives_each_class_the_same_deltas(num_classes: int, rows: int) -> None:
    """Loop twin: the deltas of class c are those of the only regression, w . v + b."""
    detector, vector = (
        tiny_detector(num_classes, heads=Heads(stages=2, embed_dim=6, regress_by_class=False)),
        torch.rand(rows, TinyBackbone.vector_size, generator=torch.Generator().manual_seed(0)),
    )
    scores = detector.score(vector)
    assert [x.shape for x in scores.deltas] == [(rows, 4 * num_classes)] * 2
    for stage, deltas in zip(detector.refine, scores.deltas, strict=True):
        weight, bias = stage.box.weight.tolist(), stage.box.bias.tolist()  # type: ignore[union-attr]
        for r in range(rows):
            for c in range(num_classes):
                for k in range(4):
                    value = sum(w * v for w, v in zip(weight[k], vector[r].tolist(), strict=True)) + bias[k]
                    assert deltas[r, 4 * c + k].item() == pytest.approx(value, abs=1e-5)


def test_stages_have_weights_of_their_own() -> None:
    scores = tiny_detector(3).score(torch.rand(2, TinyBackbone.vector_size))
    assert not torch.equal(scores.refine[0], scores.refine[1])
    assert not torch.equal(scores.deltas[0], scores.deltas[1])


def test_cached_maps_are_used_as_they_are() -> None:
    detector, batch = tiny_detector(3), batch_of((3,))
    maps = torch.rand(3, TinyBackbone.channels, 3, 3)
    kept = Batch(batch.ids, batch.tags, batch.proposals, maps=maps)
    assert detector.roi_maps(kept) is maps


def test_maps_of_a_batch_are_those_of_its_images_alone() -> None:
    detector, batch = tiny_detector(3), batch_of((2, 3))
    together = batch.proposals.split(detector.roi_maps(batch))
    assert batch.images is not None
    for i, own in enumerate(together):
        n = batch.proposals.sizes[i]
        alone = Batch((str(i),), batch.tags[i : i + 1], Proposals(BOXES[:n], (n,)), images=batch.images[i : i + 1])
        assert torch.allclose(detector.roi_maps(alone), own, atol=1e-6)


@pytest.mark.parametrize("frozen", [True, False])
def test_the_trunk_learns_only_where_it_is_not_frozen(frozen: bool) -> None:
    detector = tiny_detector(3, frozen)
    assert detector.backbone.frozen_roi_maps is frozen
    scores = detector.score(detector.neck(detector.roi_maps(batch_of((3,)))))
    outputs = (*scores.refine, *scores.deltas, scores.mil_cls, scores.mil_det)
    torch.stack([x.pow(2).sum() for x in outputs]).sum().backward()
    learned = {name for name, p in detector.named_parameters() if p.grad is not None and p.grad.any()}
    assert ("backbone.conv.weight" in learned) is not frozen
    assert "backbone.fc.weight" in learned
    assert not any(name.startswith("similarity") for name in learned)


def test_building_from_the_same_seed_gives_the_same_network() -> None:
    first, second = ([*tiny_detector(2, seed=s).state_dict().values()] for s in (5, 5))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert isinstance(tiny_detector(2), Detector)


@pytest.mark.parametrize("objectness", [[], [0.0], [0.1, 0.3, 1.0]])
def test_a_prior_weighs_maps_by_what_is_thought_of_their_proposals(objectness: list[float]) -> None:
    rows, thought = len(objectness), torch.tensor(objectness)
    batch = replace(batch_of((rows,)), side_info=SideInfo(objectness=thought))
    plain = tiny_detector(3).roi_maps(batch)
    weighed = tiny_detector(3, heads=Heads(box_prior=10.0)).roi_maps(batch)
    assert len(weighed) == rows
    for one, own, belief in zip(weighed, plain, thought, strict=True):
        assert torch.allclose(one, 10 * belief * own)


@pytest.mark.parametrize("rows", [0, 1, 4])
def test_the_neck_is_a_layer_on_the_vectors_of_boxes_and_of_their_surroundings(rows: int) -> None:
    """Loop twin: each value of each vector is max(0, w . v + b)."""
    heads = Heads(embed_dim=6, neck=5, context=Context(on="both"))
    detector = tiny_detector(3, heads=heads)
    maps = torch.rand(rows, 2 * TinyBackbone.channels, 3, 3, generator=torch.Generator().manual_seed(1))
    found = detector.neck(maps)
    inner = innermost(detector.backbone)
    layer = next(part.layer for part in detector.modules() if isinstance(part, NeckBackbone))
    assert detector.vector_size == 5 and found.shape == (rows, 10)
    for r in range(rows):
        for part, own in enumerate(maps[r].chunk(2)):
            vector = inner.neck(own[None])[0].tolist()
            for k in range(5):
                value = sum(w * v for w, v in zip(layer.weight[k].tolist(), vector, strict=True)) + layer.bias[k].item()
                assert found[r, 5 * part + k].item() == pytest.approx(max(0.0, value), abs=1e-5)
    assert detector.score(found).mil_cls.shape == (rows, 3) and detector.embed(found).shape == (rows, 6)
    assert detector.backbone.roi_map_key() == tiny_detector(3, heads=replace(heads, neck=None)).backbone.roi_map_key()


def test_the_neck_drops_out_as_the_backbone_does() -> None:
    backbone = TinyBackbone(dropout=0.5)
    with torch.no_grad():
        backbone.fc.bias.fill_(5.0)
    torch.manual_seed(0)
    detector = Detector(backbone, 3, Heads(neck=200))
    maps = torch.rand(2, TinyBackbone.channels, 3, 3)
    learned = detector.neck(maps, StepRng(0, 0).row_rng(Stream.NECK, torch.zeros(2, dtype=torch.long)))
    assert (learned == 0).float().mean() > 0.6  # by ReLU or by dropout; without dropout, about half
    assert (detector.neck(maps) == 0).float().mean() < 0.6
