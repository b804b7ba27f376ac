from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from strategies import make_labeler_input
from tag2box.images import Resize
from tag2box.methods.oicr import Oicr
from tag2box.methods.slv import Slv
from tag2box.models.augment import Augment
from tag2box.models.drop_block import DropBlock
from tag2box.models.rng import StepRng
from tag2box.training.batches import FeatureBatches, Loader
from tag2box.training.criterion import Criterion, LossOutput
from tag2box.training.events import Gallery, gallery_event, pseudo_event, step_event
from tag2box.training.feature_cache import RoiMaps
from tag2box.training.step import Step
from tag2box.types import Labeling, PseudoBoxes, PseudoLabels
from tiny import tiny_detector, tiny_photos, tiny_store

RNG = StepRng(0, 1)


def world(
    folder: Path, counts: tuple[int, ...] = (5, 0, 7, 1), criterion: Criterion | None = None
) -> tuple[Step, FeatureBatches]:
    photos = tiny_photos(folder, len(counts))
    store = tiny_store(folder, photos.photos, counts=counts)
    detector = tiny_detector(len(photos.classes))
    live = RoiMaps(detector.backbone, photos.photos, store)
    loader = Loader(batch_size=4, resize=Resize(scales=(32,), flip=1.0), max_proposals=3)
    return Step(detector, criterion or Criterion(), DropBlock(), Augment()), FeatureBatches(
        photos, store, loader, 0, live
    )


def outcome_of(labeling: Labeling, tags: torch.Tensor) -> LossOutput:
    """A batch of which only labels and tags matter."""
    zero = torch.zeros(())
    return LossOutput(zero, dict.fromkeys(("mil", "refine", "box", "contrast"), zero), labeling, tags)


def stage(classes: list[int]) -> PseudoLabels:
    """A stage of which only the classes of its pseudo boxes matter."""
    rows = torch.arange(len(classes))
    pseudo_boxes = PseudoBoxes(rows, torch.tensor(classes, dtype=torch.long), torch.ones(len(classes)))
    return PseudoLabels(rows, torch.ones(len(classes)), torch.zeros(len(classes), 4), pseudo_boxes, rows)


def test_a_step_event_holds_all_losses_and_their_weighted_sum(tmp_path: Path) -> None:
    step, source = world(tmp_path)
    assert "contrast_share" not in step_event(7, step(source.batch(0), RNG), 0.01, 2.5)
    outcome = step(source.batch(0), RNG, measure=True)
    event = step_event(7, outcome, 0.01, 2.5)
    assert event["contrast_share"] == outcome.contrast_share is not None
    losses = event["losses"]
    assert isinstance(losses, dict)
    assert (event["iteration"], event["lr"], event["seconds"]) == (7, 0.01, 2.5)
    assert losses["total"] == pytest.approx(
        losses["mil"] + losses["refine"] + losses["box"] + 0.03 * losses["contrast"]
    )
    assert all(value > 0 for value in losses.values())
    json.dumps(event, allow_nan=False)


@pytest.mark.parametrize(
    ("stages", "tags", "per_stage", "per_class"),
    [
        ([[]], [[0, 0]], [None], {}),  # nothing is tagged
        ([[]], [[1, 0]], [0.0], {"a": 0.0}),  # tagged, but without proposals
        ([[0], [0, 0]], [[1, 0]], [1.0, 2.0], {"a": 2.0}),
        ([[0, 1, 1], [0, 0, 1, 1, 1]], [[1, 1], [0, 1]], [1.0, 5 / 3], {"a": 2.0, "b": 1.5}),
    ],
)
def test_pseudo_boxes_are_counted_per_pair_of_image_and_class(
    stages: list[list[int]], tags: list[list[int]], per_stage: list[float | None], per_class: dict[str, float]
) -> None:
    labeling = Labeling(tuple(stage(s) for s in stages))
    event = pseudo_event(3, outcome_of(labeling, torch.tensor(tags, dtype=torch.bool)), ("a", "b"))
    assert event["iteration"] == 3
    assert event["boxes_per_class"] == per_stage
    assert event["per_class"] == per_class
    assert event["threshold"] == [None] * len(stages)
    json.dumps(event, allow_nan=False)


def test_the_mean_threshold_of_each_stage_or_none() -> None:
    taus = (torch.tensor([0.25, 0.75]), torch.zeros(0))
    labeling = Labeling((stage([0]), stage([0])), taus)
    event = pseudo_event(1, outcome_of(labeling, torch.ones(1, 1, dtype=torch.bool)), ("a",))
    assert event["threshold"] == [0.5, None]


def test_argmax_finds_one_box_a_pair() -> None:
    inputs = make_labeler_input((6, 4), [[1, 1], [0, 1]])
    event = pseudo_event(1, outcome_of(Oicr()(inputs), inputs.tags), ("a", "b"))
    assert event["boxes_per_class"] == [1.0, 1.0, 1.0]
    assert event["per_class"] == {"a": 1.0, "b": 1.0}


@pytest.mark.parametrize("criterion", [Criterion(), Criterion(labeler=Oicr())])
def test_the_gallery_shows_proposals_of_the_photos_in_their_own_pixels(tmp_path: Path, criterion: Criterion) -> None:
    step, source = world(tmp_path, criterion=criterion)
    event = gallery_event(9, step, source, RNG, 4)
    photos = event["photos"]
    assert isinstance(photos, list)
    assert event["iteration"] == 9
    assert [photo["id"] for photo in photos] == ["photo0", "photo1", "photo2", "photo3"]
    for index, photo in enumerate(photos):
        own = [[round(v, 1) for v in box] for box in source.photo_boxes(photo["id"]).tolist()]
        tagged = source.photos.tags[index].nonzero().flatten().tolist()
        assert all(box in own for box in photo["boxes"])
        assert len(photo["boxes"]) == len(photo["labels"]) == len(photo["scores"])
        assert all(0 <= score <= 1 for score in photo["scores"])
        assert set(photo["labels"]) == (set(tagged) if own else set())
    json.dumps(event, allow_nan=False)


def test_the_gallery_is_the_pseudo_ground_truth_of_the_last_stage(tmp_path: Path) -> None:
    step, source = world(tmp_path)
    photos = gallery_event(1, step, source, RNG, 4)["photos"]
    assert isinstance(photos, list)
    preview_batch = source.preview_batch(4)
    pseudo_boxes = step(preview_batch, RNG).labeling.stages[-1].pseudo_boxes
    for span, photo in zip(preview_batch.proposals.spans(), photos, strict=True):
        own = source.photo_boxes(photo["id"]).tolist()
        mine = [
            (row, c)
            for row, c in zip(pseudo_boxes.rows.tolist(), pseudo_boxes.cls.tolist(), strict=True)
            if row in span
        ]
        assert photo["boxes"] == [[round(v, 1) for v in own[row - span.start]] for row, _ in mine]
        assert photo["labels"] == [c for _, c in mine]


def test_the_gallery_has_the_best_box_of_each_class_of_the_earlier_stages(tmp_path: Path) -> None:
    step, source = world(tmp_path)
    photos = gallery_event(1, step, source, RNG, 4)["photos"]
    assert isinstance(photos, list)
    preview_batch = source.preview_batch(4)
    *earlier, _ = step(preview_batch, RNG).labeling.stages
    gallery = TypeAdapter(Gallery).validate_python({"iteration": 1, "photos": photos})
    assert gallery.stages == len(earlier) + 1 == 3
    for number, stage in enumerate(earlier):
        shown, pseudo = gallery.of_stage(number), stage.pseudo_boxes
        for span, photo in zip(preview_batch.proposals.spans(), photos, strict=True):
            scores = zip(pseudo.rows.tolist(), pseudo.cls.tolist(), pseudo.score.tolist(), strict=True)
            best: dict[int, float] = {}
            for row, label, score in scores:
                if row in span:
                    best[label] = max(score, best.get(label, 0.0))
            found = shown[photo["id"]]
            pairs = zip(found.labels.tolist(), found.scores.tolist(), strict=True)
            assert dict(pairs) == {label: pytest.approx(score, abs=1e-4) for label, score in best.items()}
    assert len(gallery.of_stage(2)["photo2"]) == len(photos[2]["boxes"])


def test_boxes_that_are_no_proposals_are_shown_in_the_photos_own_pixels(tmp_path: Path) -> None:
    step, source = world(tmp_path, criterion=Criterion(labeler=Slv(threshold=0.8)))
    photos = gallery_event(1, step, source, RNG, 4)["photos"]
    assert isinstance(photos, list)
    preview_batch = source.preview_batch(4)
    pseudo_boxes = step(preview_batch, RNG).labeling.stages[-1].pseudo_boxes
    assert pseudo_boxes.boxes is not None
    sizes = [(photo.width, photo.height) for photo in source.photos.photos]
    for (width, height), span, photo in zip(sizes, preview_batch.proposals.spans(), photos, strict=True):
        seen = 32 / min(width, height)
        across, down = round(width * seen) / width, round(height * seen) / height
        mine = [i for i, row in enumerate(pseudo_boxes.rows.tolist()) if row in span]
        own = [[x1 / across, y1 / down, x2 / across, y2 / down] for x1, y1, x2, y2 in pseudo_boxes.boxes[mine].tolist()]
        assert photo["boxes"] == [pytest.approx(box, abs=0.06) for box in own]
    assert sum(len(photo["boxes"]) for photo in photos) >= 3


def test_looking_leaves_no_gradient_and_no_change(tmp_path: Path) -> None:
    step, source = world(tmp_path)
    before = [p.clone() for p in step.detector.parameters()]
    gallery_event(1, step, source, RNG, 2)
    assert all(p.grad is None for p in step.detector.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, step.detector.parameters(), strict=True))


@pytest.mark.parametrize("count", [1, 2, 99])
def test_the_gallery_has_as_many_photos_as_set_if_there_are_enough(tmp_path: Path, count: int) -> None:
    step, source = world(tmp_path)
    photos = gallery_event(1, step, source, RNG, count)["photos"]
    assert isinstance(photos, list)
    assert len(photos) == min(count, 4)


def test_photos_without_proposals_show_nothing(tmp_path: Path) -> None:
    step, source = world(tmp_path, counts=(0, 0))
    photos = gallery_event(1, step, source, RNG, 2)["photos"]
    assert isinstance(photos, list)
    assert [photo["boxes"] for photo in photos] == [[], []]
    outcome = step(source.batch(0), RNG)
    event = step_event(1, outcome, 0.1, 0.0)
    json.dumps([event, pseudo_event(1, outcome, source.classes)], allow_nan=False)
    assert outcome.total.item() == 0.0
