from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tag2box.annotations import Detections, Photo
from tag2box.errors import UserError
from tag2box.images import View, boxes_in_view, read_photo, render_view, resized
from tag2box.inference.predict import Inference, Predict, Scored, run_detector
from tag2box.methods.wsrpn import Rescore
from tag2box.models.class_maps import Prior
from tag2box.models.detector import Detector, Heads
from tag2box.ops.boxes import decode
from tag2box.ops.superpixels import Superpixels, straddling
from tag2box.progress import Bar
from tag2box.training.feature_cache import FeatureCache, RoiMaps
from tag2box.types import Proposals
from tiny import tiny_detector, tiny_photos, tiny_store

ALL = Predict(nms_iou=1.0, max_detections=10_000)  # keeps every box of every class
COUNTS = (5, 0, 1)


class Boxes:
    """Proposals handed in."""

    def __init__(self, boxes: Tensor, scores: Tensor | None = None) -> None:
        self.given = boxes
        self.thought = torch.zeros(len(boxes)) if scores is None else scores

    def boxes(self, photo_id: str) -> Tensor:
        return self.given

    def scores(self, photo_id: str) -> Tensor:
        return self.thought


def run(folder: Path, inference: Inference, detector: Detector | None = None) -> tuple[dict[str, Detections], RoiMaps]:
    photos = tiny_photos(folder, len(COUNTS)).photos
    network = detector or tiny_detector(3)
    live = RoiMaps(network.backbone, photos, tiny_store(folder, photos, counts=COUNTS))
    return run_detector(network, photos, live.store, maps=live, inference=inference), live


def by_hand(detector: Detector, photo: Photo, boxes: Tensor, views: list[tuple[int, bool]]) -> tuple[Tensor, Tensor]:
    """Mean scores (P, C) and mean boxes (P, C, 4) in the photo's pixels, one view and one corner at a time."""
    all_probs, all_boxes = [], []
    for short, flip in views:
        view, size = View(short, flip, 2000), (photo.height, photo.width)
        image, seen = render_view(view, read_photo(photo.path).float(), size), boxes_in_view(view, boxes, size)
        maps = detector.backbone.roi_maps(detector.backbone.trunk(image[None]), Proposals(seen, (len(seen),)))
        maps = maps.half().float() if detector.backbone.frozen_roi_maps else maps
        out = detector.score(detector.neck(maps))
        all_probs.append(sum(x.softmax(dim=1)[:, :-1] for x in out.refine) / len(out.refine))
        moved = decode(sum(out.deltas) / len(out.deltas), seen).reshape(len(boxes), -1, 4)  # type: ignore[arg-type]
        height, width = resized((photo.height, photo.width), short, 2000)
        if flip:
            moved = torch.stack([width - moved[..., 2], moved[..., 1], width - moved[..., 0], moved[..., 3]], dim=2)
        across, down = photo.width / width, photo.height / height
        all_boxes.append(moved * torch.tensor([across, down, across, down]))
    return torch.stack(all_probs).mean(dim=0), torch.stack(all_boxes).mean(dim=0)  # type: ignore[arg-type]


def test_views_are_every_scale_upright_then_flipped() -> None:
    assert Inference(scales=(24, 32), long_max=99).views() == (
        View(24, False, 99),
        View(24, True, 99),
        View(32, False, 99),
        View(32, True, 99),
    )
    assert Inference(scales=(24,), mirror=False).views() == (View(24, False, 2000),)
    assert len(Inference().views()) == 14


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("mirror", [False, True])
@pytest.mark.parametrize("scales", [(40,), (24, 36)])
def test_detections_are_the_mean_over_the_views(
    tmp_path: Path, scales: tuple[int, ...], mirror: bool, frozen: bool
) -> None:
    detector = tiny_detector(3, frozen)
    found, live = run(tmp_path, Inference(scales=scales, mirror=mirror, predict=ALL), detector)
    photo = live.photos[0]
    flips = [False, True] if mirror else [False]
    with torch.no_grad():
        probs, boxes = by_hand(detector, photo, live.store.boxes(photo.id), [(s, f) for s in scales for f in flips])
    mine = found[photo.id]
    assert len(mine) == probs.numel()
    for score, label, box in zip(mine.scores, mine.labels, mine.boxes, strict=True):
        row = int((probs[:, label] - score).abs().argmin())
        assert probs[row, label].item() == pytest.approx(score.item(), abs=1e-5)
        x1, y1, x2, y2 = boxes[row, label].tolist()
        cut = [max(x1, 0), max(y1, 0), min(x2, photo.width), min(y2, photo.height)]
        assert box.tolist() == pytest.approx(cut, abs=1e-2)


@pytest.mark.parametrize("heads", [Heads(), Heads(regress=False)])
@pytest.mark.parametrize("mirror", [False, True])
def test_a_photo_without_proposals_has_no_detections(tmp_path: Path, heads: Heads, mirror: bool) -> None:
    found, live = run(tmp_path, Inference(scales=(24, 32), mirror=mirror), tiny_detector(3, heads=heads))
    assert list(found) == [photo.id for photo in live.photos]
    assert len(found["photo1"]) == 0
    assert found["photo1"].boxes.shape == (0, 4)
    assert len(found["photo0"]) > 0
    assert len(found["photo2"]) == 3  # one box, three classes


def test_no_photos_no_detections() -> None:
    live = RoiMaps(tiny_detector(2).backbone, (), Boxes(torch.zeros(0, 4)))
    assert run_detector(tiny_detector(2), (), live.store, maps=live, inference=Inference()) == {}


def symmetric_photo(folder: Path) -> Photo:
    """Noise and its mirror image side by side, stored without loss."""
    half = np.random.default_rng(0).integers(0, 255, (32, 24, 3), dtype=np.uint8)
    path = folder / "twin.png"
    Image.fromarray(np.concatenate([half, half[:, ::-1]], axis=1)).save(path)
    return Photo("twin", path, 48, 32)


@pytest.mark.parametrize("mirror", [True, False])
def test_with_flipped_views_a_symmetric_photo_has_symmetric_detections(tmp_path: Path, mirror: bool) -> None:
    photo = symmetric_photo(tmp_path)
    left = torch.tensor([[2.0, 3, 17, 20]])
    right = torch.tensor([[31.0, 3, 46, 20]])
    detector = tiny_detector(2, heads=Heads(regress=False))

    def scores(boxes: Tensor) -> Tensor:
        live = RoiMaps(detector.backbone, (photo,), Boxes(boxes))
        inference = Inference(scales=(32, 40), mirror=mirror, predict=ALL)
        found = run_detector(detector, (photo,), live.store, maps=live, inference=inference)["twin"]
        return found.scores[found.labels.argsort()]

    assert torch.allclose(scores(left), scores(right), atol=1e-4) is mirror


def test_flipped_views_also_make_moved_boxes_symmetric(tmp_path: Path) -> None:
    photo = symmetric_photo(tmp_path)
    detector = tiny_detector(2)
    live = RoiMaps(detector.backbone, (photo,), Boxes(torch.tensor([[6.0, 3, 17, 20], [31.0, 3, 42, 20]])))
    found = run_detector(detector, (photo,), live.store, maps=live, inference=Inference(scales=(32,), predict=ALL))[
        "twin"
    ]
    for label in (0, 1):
        a, b = found.boxes[found.labels == label].tolist()
        assert sorted([48 - b[2], 48 - b[0]]) == pytest.approx([a[0], a[2]], abs=1e-2)
        assert (b[1], b[3]) == pytest.approx((a[1], a[3]), abs=1e-2)


def same(a: Detections, b: Detections) -> bool:
    return all(torch.equal(x, y) for x, y in ((a.boxes, b.boxes), (a.scores, b.scores), (a.labels, b.labels)))


def test_cached_features_give_the_same_detections(tmp_path: Path) -> None:
    inference = Inference(scales=(24, 32), predict=ALL)
    detector = tiny_detector(3)
    found, live = run(tmp_path, inference, detector)
    cached = FeatureCache(live, tmp_path / "maps")
    cached.build(inference.views())
    for photo in live.photos:
        photo.path.unlink()  # they are not read again
    kept = run_detector(detector, live.photos, live.store, maps=cached, inference=inference)
    assert found.keys() == kept.keys() and all(same(found[name], kept[name]) for name in found)
    cached.close()


class ViewByView(RoiMaps):
    """The photo decoded again for every view."""

    def passes(self, index: int, views: Sequence[View]) -> Iterator[Tensor]:
        return (next(RoiMaps.passes(self, index, [view])) for view in views)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("scales", [(32,), (24, 40, 32)])
@pytest.mark.parametrize("mirror", [False, True])
def test_reading_once_detects_what_reading_for_every_view_does(
    tmp_path: Path, mirror: bool, scales: tuple[int, ...], frozen: bool
) -> None:
    inference = Inference(scales=scales, mirror=mirror, predict=ALL)
    detector = tiny_detector(3, frozen)
    found, live = run(tmp_path, inference, detector)
    twin = ViewByView(live.backbone, live.photos, live.store)
    expected = run_detector(detector, live.photos, live.store, maps=twin, inference=inference)
    assert found.keys() == expected.keys() and all(same(found[name], expected[name]) for name in found)


def test_each_photo_is_read_once_and_only_one_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    lock = threading.Lock()

    def note(event: str) -> None:
        with lock:
            events.append(event)

    def counted(path: Path, at_least: tuple[int, int] | None = None) -> Tensor:
        note(f"read {path.stem} {threading.current_thread() is threading.main_thread()}")
        return read_photo(path, at_least)

    class Counting:
        def advance(self, note_: str = "") -> None:
            note("done")

    @contextmanager
    def progress(title: str, total: int, done: int = 0) -> Iterator[Bar]:
        yield Counting()

    monkeypatch.setattr("tag2box.images.read_photo", counted)
    photos = tiny_photos(tmp_path, 4).photos
    live = RoiMaps(tiny_detector(3).backbone, photos, tiny_store(tmp_path, photos))
    run_detector(
        tiny_detector(3), photos, live.store, maps=live, inference=Inference(scales=(24, 32)), progress=progress
    )
    assert [event for event in events if event != "done"] == [f"read photo{i} False" for i in range(4)]
    for i in range(2, 4):
        assert events[: events.index(f"read photo{i} False")].count("done") >= i - 1


def test_a_broken_photo_is_reported_in_its_turn(tmp_path: Path) -> None:
    photos = tiny_photos(tmp_path, 3).photos
    live = RoiMaps(tiny_detector(3).backbone, photos, tiny_store(tmp_path, photos))
    photos[1].path.write_bytes(b"no photo at all")
    before = threading.active_count()
    with pytest.raises(UserError, match=r"photo1\.jpg: not readable as a photo"):
        run_detector(tiny_detector(3), photos, live.store, maps=live, inference=Inference(scales=(24,)))
    assert threading.active_count() == before


def test_a_photo_without_proposals_is_never_opened(tmp_path: Path) -> None:
    photos = tiny_photos(tmp_path, 3).photos
    live = RoiMaps(tiny_detector(3).backbone, photos, tiny_store(tmp_path, photos, counts=(2, 0, 2)))
    photos[1].path.unlink()
    found = run_detector(tiny_detector(3), photos, live.store, maps=live, inference=Inference(scales=(24, 32)))
    assert len(found["photo1"]) == 0 < len(found["photo2"])


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_network_is_left_as_it_was(tmp_path: Path, training: bool) -> None:
    detector = tiny_detector(3)
    detector.train(training)
    found, _ = run(tmp_path, Inference(scales=(24,)), detector)
    assert detector.training is training
    assert not any(d.scores.requires_grad for d in found.values())


def test_prediction_settings_have_an_effect(tmp_path: Path) -> None:
    base = Inference(scales=(24,), predict=ALL)
    every, live = run(tmp_path, base)
    few, _ = run(tmp_path, replace(base, predict=replace(ALL, max_detections=2)))
    assert few["photo0"].scores.tolist() == every["photo0"].scores.tolist()[:2]
    none, _ = run(tmp_path, replace(base, predict=replace(ALL, score_threshold=1.0)))
    assert all(len(d) == 0 for d in none.values())
    edge = torch.tensor([live.photos[0].width, live.photos[0].height] * 2)
    boxes = every["photo0"].boxes
    assert ((boxes >= 0) & (boxes <= edge)).all()


def test_progress_advances_once_per_photo(tmp_path: Path) -> None:
    told: list[object] = []

    class Counting:
        def advance(self, note: str = "") -> None:
            told.append(note)

    @contextmanager
    def progress(title: str, total: int, done: int = 0) -> Iterator[Bar]:
        told.append((title, total))
        yield Counting()

    photos = tiny_photos(tmp_path, 3).photos
    live = RoiMaps(tiny_detector(3).backbone, photos, tiny_store(tmp_path, photos))
    run_detector(tiny_detector(3), photos, live.store, maps=live, inference=Inference(scales=(24,)), progress=progress)
    assert told == [("detecting", 3), "", "", ""]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_dropped_proposals_are_not_detected(tmp_path: Path, count: int) -> None:
    photos = tiny_photos(tmp_path, 1).photos
    detector = tiny_detector(3, heads=Heads(regress=False))
    live = RoiMaps(detector.backbone, photos, tiny_store(tmp_path, photos, counts=(count,)))
    inference, half = Inference(scales=(24, 32), predict=ALL), Rescore(keep=0.5, nms_iou=1.0)
    everything = run_detector(detector, photos, live.store, maps=live, inference=inference)[photos[0].id]
    better = run_detector(detector, photos, live.store, maps=live, inference=inference, rescore=half)[photos[0].id]
    kept = {tuple(box) for box in better.boxes.tolist()}
    assert kept <= {tuple(box) for box in everything.boxes.tolist()}
    assert len(kept) == min(count, max(1, round(count / 2)))
    scores = {(tuple(b), c): s for b, c, s in zip(*(x.tolist() for x in everything_of(everything)), strict=True)}
    again = {(tuple(b), c): s for b, c, s in zip(*(x.tolist() for x in everything_of(better)), strict=True)}
    assert again.items() <= scores.items()


def everything_of(found: Detections) -> tuple[Tensor, Tensor, Tensor]:
    return found.boxes, found.labels, found.scores


def test_a_prior_reads_the_scores_of_proposals(tmp_path: Path) -> None:
    photo = tiny_photos(tmp_path, 1).photos[0]
    detector = tiny_detector(3, heads=Heads(box_prior=10.0, embed_dim=6))
    boxes, inference = torch.tensor([[0.0, 0, 16, 16], [8, 4, 30, 20]]), Inference(scales=(32,), predict=ALL)

    def seen(scores: list[float]) -> list[float]:
        store = Boxes(boxes, torch.tensor(scores))
        live = RoiMaps(detector.backbone, (photo,), store)
        return run_detector(detector, (photo,), store, maps=live, inference=inference)[photo.id].scores.tolist()

    assert seen([0.1, 0.1]) == pytest.approx(unweighed(detector, photo, boxes, inference), abs=1e-6)
    assert seen([0.1, 0.9]) != pytest.approx(seen([0.1, 0.1]), abs=1e-6)


def unweighed(detector: Detector, photo: Photo, boxes: Tensor, inference: Inference) -> list[float]:
    """The same network without a prior."""
    plain = tiny_detector(3)
    plain.load_state_dict(detector.state_dict())
    store = Boxes(boxes)
    live = RoiMaps(plain.backbone, (photo,), store)
    return run_detector(plain, (photo,), store, maps=live, inference=inference)[photo.id].scores.tolist()


def test_straddling_weighs_the_scores_of_proposals_by_the_superpixels_of_the_photo(tmp_path: Path) -> None:
    """Scores are (p bu^s)^(1 / (1 + s)) of the scores without a prior."""
    photo, superpixels = tiny_photos(tmp_path, 1).photos[0], Superpixels(min_size=20)
    detector, boxes = tiny_detector(3), torch.tensor([[0.0, 0, 16, 16], [4, 6, 21, 27]])  # the second is the object
    live, found = RoiMaps(detector.backbone, (photo,), Boxes(boxes)), []
    for s in (0.0, 2.0):
        inference = Inference(scales=(32,), mirror=False, prior=Prior(straddling=s), predict=ALL)
        seen: list[Scored] = []
        run_detector(
            detector,
            (photo,),
            live.store,
            maps=live,
            inference=inference,
            superpixels=superpixels,
            on_scores=lambda _, x, seen=seen: seen.append(x),  # type: ignore[misc]
        )
        found.append(seen[0].probs)
    bu = torch.from_numpy(straddling(superpixels(read_photo(photo.path)), boxes.numpy())).clamp(min=1e-3)
    assert bu[1] > 0.5 > bu[0]
    torch.testing.assert_close(found[1], (found[0] * bu[:, None] ** 2) ** (1 / 3))


def test_detections_that_are_handed_over_are_not_kept(tmp_path: Path) -> None:
    photos = tiny_photos(tmp_path, 3).photos
    live = RoiMaps(tiny_detector(3).backbone, photos, tiny_store(tmp_path, photos))
    detector, inference, seen = tiny_detector(3), Inference(scales=(24,)), {}
    kept = run_detector(detector, photos, live.store, maps=live, inference=inference)
    rest = run_detector(
        detector,
        photos,
        live.store,
        maps=live,
        inference=inference,
        on_photo=lambda photo, own: seen.update({photo.id: own}),
    )
    assert rest == {} and [*seen] == [*kept]
    assert all(torch.equal(seen[name].scores, kept[name].scores) for name in kept)
