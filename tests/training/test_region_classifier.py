"""WSRPN's region classifier: trained in turn with the detector, on its own convolutions, then on shared ones."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tag2box.annotations import Photo
from tag2box.inference.predict import Inference, run_detector
from tag2box.methods.oicr import Oicr
from tag2box.methods.wscl import Contrast
from tag2box.methods.wsddn import Wsddn
from tag2box.methods.wsrpn import Rescore, turn_of
from tag2box.models.augment import Augment
from tag2box.models.detector import Detector, Heads, compute_maps
from tag2box.models.drop_block import DropBlock
from tag2box.models.rng import StepRng
from tag2box.ops.boxes import iou
from tag2box.ops.losses import CLAMP, mil_scores
from tag2box.training.criterion import Criterion
from tag2box.training.dist import DistContext
from tag2box.training.feature_cache import RoiMaps
from tag2box.training.step import Step
from tag2box.types import Batch, BatchMeta, Proposals, StageScores
from tiny import tiny_detector, tiny_photos, tiny_store
from together import together

RNG = StepRng(7, 1)
TURNS = (0.25, 0.65, 0.8)
MOMENTS = {"region": 0.0, "detector": 0.3, "region, shared": 0.7, "detector, shared": 0.9}
WSRPN = Criterion(labeler=Oicr(), contrast=Contrast(enabled=False), rescore=Rescore(keep=0.5, turns=TURNS))


def make_step(**how: object) -> Step:
    detector = tiny_detector(3, frozen=False, heads=Heads(embed_dim=6, region=True)).double()
    for backbone in (detector.backbone, detector.region.backbone):  # type: ignore[union-attr]
        backbone.dropout = 0.3  # type: ignore[assignment]
    return Step(detector, WSRPN, DropBlock(block=2), Augment(), **how)  # type: ignore[arg-type]


def make_batch(sizes: tuple[int, ...] = (9, 0, 7), pixels: str = "images") -> Batch:
    g = torch.Generator().manual_seed(2)
    corner = torch.rand(sum(sizes), 2, generator=g) * 20
    boxes = torch.cat([corner, corner + 8 + torch.rand(sum(sizes), 2, generator=g) * 12], dim=1).double()
    tags = torch.eye(3, dtype=torch.bool)[torch.arange(len(sizes)) % 3]
    images = torch.rand(len(sizes), 3, 40, 44, generator=g, dtype=torch.float64) * 255
    batch = Batch(tuple(f"{i}" for i in range(len(sizes))), tags, Proposals(boxes, sizes), images=images)
    detector = make_step().detector
    with torch.no_grad():
        if pixels == "trunks":
            return replace(batch, images=None, trunks=tuple(detector.backbone.trunk(images)))
        return replace(batch, images=None, maps=detector.roi_maps(batch)) if pixels == "maps" else batch


def gradients(step: Step) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in step.detector.named_parameters() if p.grad is not None}


def changed(step: Step) -> set[str]:
    """The first two parts of the names of parameters that would move."""
    return {".".join(name.split(".")[:3]) for name, grad in gradients(step).items() if bool(grad.any())}


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.25, 0.5, 0.65, 0.8, 1.0])
def test_turns_are_those_of_the_loop(fraction: float) -> None:
    turn = 0
    for begin in TURNS:
        if fraction >= begin:
            turn += 1
    assert turn_of(fraction, TURNS) == turn
    rescore = Rescore(turns=TURNS)
    assert rescore.trains_region(fraction) is (turn in {0, 2}) and rescore.shares(fraction) is (turn in {2, 3})


def test_turns_must_rise() -> None:
    with pytest.raises(ValueError, match="rising"):
        Rescore(turns=(0.5, 0.4, 0.8))


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("memory", ["plain", "exact"])
def test_each_turn_trains_its_own_part(moment: str, memory: str) -> None:
    """The property of WSRPN: two networks in turn; convolutions are trained until they are shared, never after."""
    step = make_step(memory=memory)
    step(make_batch(), RNG, MOMENTS[moment])
    parts = changed(step)
    is_region, is_shared = moment.startswith("region"), "shared" in moment
    assert all(part.startswith("region") is is_region for part in parts) and parts
    prefix = "region.backbone" if is_region else "backbone"
    trunk, neck = f"{prefix}.conv", "region.backbone.fc" if is_region else "backbone.fc.weight"
    assert (any(part.startswith(trunk) for part in parts)) is not is_shared
    assert any(part.startswith(neck) for part in parts)
    assert ("region.mil.cls" in parts) is is_region and ("mil.cls.weight" in parts) is not is_region
    assert any(part.startswith("refine") for part in parts) is not is_region


def scores_with_loops(detector: Detector, maps: Tensor, sizes: tuple[int, ...]) -> list[list[float]]:
    """Window after window, class after class: softmax over classes times softmax over the windows of the photo."""
    region = detector.region
    assert region is not None
    vectors = region.backbone.neck(maps)
    cls, det = ([[float(w @ v + b) for w, b in zip(layer.weight, layer.bias, strict=True)] for v in vectors]
                for layer in (region.mil.cls, region.mil.det))  # fmt: skip
    found, first = [], 0
    for size in sizes:
        windows = range(first, first + size)
        for r in windows:
            over_classes = [math.exp(x) / sum(math.exp(y) for y in cls[r]) for x in cls[r]]
            sums = [sum(math.exp(det[other][c]) for other in windows) for c in range(len(cls[r]))]
            found.append([p * math.exp(det[r][c]) / sums[c] for c, p in enumerate(over_classes)])
        first += size
    return found


@pytest.mark.parametrize("sizes", [(0,), (1,), (9, 0, 7)])
@pytest.mark.parametrize("moment", ["region", "region, shared"])
def test_scores_and_loss_of_the_region_classifier_match_the_loop(sizes: tuple[int, ...], moment: str) -> None:
    detector, batch = make_step().detector.eval(), make_batch(sizes)
    assert detector.region is not None
    detector.region.is_shared = "shared" in moment
    with torch.no_grad():
        for p in detector.region.mil.parameters():
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
        own = compute_maps(detector.backbone if detector.region.is_shared else detector.region.backbone, batch)
        logits = detector.region.logits(detector.region.maps(batch, compute_maps(detector.backbone, batch)))
        expected = scores_with_loops(detector, own, sizes)
    found = Wsddn()(StageScores(*logits, (), ()), BatchMeta(batch.proposals, batch.tags), MOMENTS[moment])
    assert found.scores.tolist() == [pytest.approx(row) for row in expected]
    loss, first = 0.0, 0
    for tags, size in zip(batch.tags.tolist(), sizes, strict=True):
        own_rows, first = expected[first : first + size], first + size
        columns = detector.region.mil.cls.out_features
        sums = [min(max(sum(row[c] for row in own_rows), CLAMP), 1 - CLAMP) for c in range(columns)]
        padded = tags + [False] * (columns - len(tags))  # a background column is never present
        terms = [-math.log(phi if tag else 1 - phi) for phi, tag in zip(sums, padded, strict=True)]
        loss += sum(terms) / len(terms) / len(sizes) if size else 0.0
    assert found.loss.item() == pytest.approx(loss)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("pixels", ["images", "trunks", "maps"])
def test_photo_by_photo_and_at_once_are_the_same(moment: str, pixels: str) -> None:
    batch, found = make_batch(pixels=pixels), []
    for memory in ("plain", "exact"):
        step = make_step(memory=memory)
        loss = step(batch, RNG, MOMENTS[moment])
        found.append((loss.total.item(), gradients(step)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
    assert found[0][1].keys() == found[1][1].keys()
    for name, grad in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], grad, rtol=1e-9, atol=1e-12, msg=name)


def test_processes_together_leave_the_gradients_of_one() -> None:
    batch, alone = make_batch((5, 7)), make_step()
    alone(batch, RNG, 0.3)
    wanted = gradients(alone)

    def work(dist: DistContext) -> dict[str, Tensor]:
        step = make_step(memory="exact", dist=dist)
        step(batch.photo(dist.rank), RNG, 0.3)
        return gradients(step)

    for grads in together(2, work):
        for name, grad in wanted.items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-9, atol=1e-12, msg=name)


def test_the_detector_sees_only_what_the_region_classifier_keeps() -> None:
    step, batch = make_step(), make_batch()
    loss = step(batch, RNG, 0.3)
    assert {"region", "mil", "refine"} <= loss.losses.keys()
    for labels in loss.labeling.stages:
        counts = [int((part > 0).sum()) for part in batch.proposals.split(labels.weight)]
        assert [0 < count <= most for count, most in zip(counts, (4, 0, 4), strict=True)] == [True, False, True]
    first = make_step()
    total = first(batch, RNG, 0.0)
    torch.testing.assert_close(total.total, total.losses["region"])


# ---------------------------------------------------------------- detection


def test_detection_keeps_the_best_windows_of_the_region_classifier(tmp_path: Path) -> None:
    photos = tiny_photos(tmp_path, 2)
    store = tiny_store(tmp_path, photos.photos, counts=[9, 0])
    detector = tiny_detector(3, heads=Heads(embed_dim=6, region=True, regress=False)).eval()
    inference = Inference(scales=(48,), mirror=False)

    def boxes(keep: float) -> dict[str, Tensor]:
        maps = RoiMaps(detector.backbone, photos.photos, store)
        rescore = Rescore(keep=keep, nms_iou=1.0)
        found = run_detector(detector, photos.photos, store, maps=maps, inference=inference, rescore=rescore)
        return {name: own.boxes for name, own in found.items()}

    kept = boxes(0.4)["photo0"]
    expected = store.boxes("photo0")[region_order(detector, photos.photos[0], store.boxes("photo0"), tmp_path)[:4]]
    assert bool((iou(kept, expected).amax(dim=1) > 0.99).all()) and len(kept)
    assert len(boxes(1.0)["photo0"]) > len(kept) and not len(boxes(0.4)["photo1"])


def region_order(detector: Detector, photo: Photo, boxes: Tensor, folder: Path) -> Tensor:
    """Windows of a photo by the region classifier's score, best first."""
    (maps,) = RoiMaps(detector.backbone, [photo], tiny_store(folder / "again", [photo], counts=[9])).passes(
        0, Inference(scales=(48,), mirror=False).views()
    )
    assert detector.region is not None
    with torch.no_grad():
        scores = mil_scores(*detector.region.logits(maps), (len(boxes),))[:, :3].sum(dim=1)
    return scores.argsort(descending=True)
