from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image

from tag2box.annotations import Photo, TaggedPhotos
from tag2box.images import View
from tag2box.training.batches import (
    ImageBatches,
    Loader,
    Sample,
    SampledView,
    batch_slots,
    collate,
    draw_rows,
    epoch_order,
    grouped_order,
)
from tag2box.types import SideInfo


def _boxes(count: int) -> torch.Tensor:
    return torch.arange(count * 4, dtype=torch.float32).reshape(count, 4)


def load_sample(
    photos: TaggedPhotos, source: Fixed, index: int, view: View, *, max_proposals=None, seed=(0,)
) -> Sample:
    """A photo as the batch source reads it."""
    return ImageBatches(photos, source, Loader(), 0).sample(SampledView(index, view, tuple(seed)), max_proposals)


class Fixed:
    """Proposals by photo id, without a store."""

    def __init__(self, counts: dict[str, int]) -> None:
        self.counts = counts

    def boxes(self, photo_id: str) -> torch.Tensor:
        return _boxes(self.counts[photo_id])

    def scores(self, photo_id: str) -> torch.Tensor:
        return torch.zeros(self.counts[photo_id])


@pytest.mark.parametrize("n", [0, 1, 7])
def test_an_epoch_holds_every_photo_once(n: int) -> None:
    assert sorted(epoch_order(n, 0, 3)) == list(range(n))


def test_epochs_and_seeds_differ() -> None:
    orders = {epoch_order(50, seed, epoch) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4


@given(st.integers(1, 9), st.integers(1, 12), st.integers(0, 5), st.integers(1, 8))
def test_iterations_together_are_the_endless_sequence_of_epochs(n: int, batch: int, seed: int, iterations: int) -> None:
    endless = [i for epoch in range(batch * iterations // n + 1) for i in epoch_order(n, seed, epoch)]
    drawn = [i for it in range(iterations) for i in (slot.index for slot in batch_slots(n, batch, seed, it))]
    assert drawn == endless[: batch * iterations]


def test_slots_of_a_photo_drawn_twice_in_a_batch_differ() -> None:
    slots = batch_slots(2, 6, 0, 1)
    assert [slot.epoch for slot in slots] == [3, 3, 4, 4, 5, 5] and len(set(slots)) == 6


def test_no_photos_give_no_batch() -> None:
    with pytest.raises(ValueError, match="no photos"):
        batch_slots(0, 2, 0, 0)


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 9), st.integers(0, 3), st.integers(0, 5))
def test_a_grouped_epoch_holds_every_photo_once(wide: list[bool], batch: int, seed: int, epoch: int) -> None:
    assert sorted(grouped_order(np.array(wide), batch, seed, epoch)) == list(range(len(wide)))


def test_a_grouped_epoch_of_nothing_is_empty() -> None:
    assert grouped_order(np.zeros(0, bool), 4, 0, 0) == ()


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(1, 9), st.integers(0, 3))
def test_grouped_batches_mix_only_at_the_ends_of_epochs(wide: list[bool], batch: int, seed: int) -> None:
    n, flags = len(wide), np.array(wide)
    epochs = 3
    for epoch in range(epochs):
        inside = [
            batch_slots(n, batch, seed, i, wide=flags)
            for i in range(-(-epoch * n // batch), (epoch + 1) * n // batch)  # batches of this epoch alone
        ]
        mixed = sum(len({wide[slot.index] for slot in slots}) == 2 for slots in inside)
        assert mixed <= 2
        assert all(slot.epoch == epoch for slots in inside for slot in slots)


def test_grouping_reorders_and_nothing_else() -> None:
    flags = np.arange(64) % 3 == 0
    plain = [slot for i in range(24) for slot in batch_slots(64, 8, 5, i)]
    grouped = [slot for i in range(24) for slot in batch_slots(64, 8, 5, i, wide=flags)]
    assert set(plain) == set(grouped) and plain != grouped
    kinds = [{bool(flags[slot.index]) for slot in grouped[i : i + 8]} for i in range(0, 192, 8)]
    assert sum(len(kind) == 2 for kind in kinds) == 3  # one an epoch: what is left of 22 wide and 42 tall
    assert [kind for kind in kinds if len(kind) == 1][:8] != sorted([k for k in kinds if len(k) == 1][:8], key=str)


@pytest.mark.parametrize(("count", "most", "kept"), [(0, 3, 0), (1, 1, 1), (5, None, 5), (5, 9, 5), (9, 4, 4)])
def test_drawn_rows_are_a_subset_in_order(count: int, most: int | None, kept: int) -> None:
    drawn = draw_rows(count, most, (0, 1, 2))
    rows = drawn.tolist()
    assert len(drawn) == kept and rows == sorted(set(rows)) and set(rows) <= set(range(count))
    assert torch.equal(drawn, draw_rows(count, most, (0, 1, 2)))


def test_another_seed_draws_other_rows() -> None:
    assert not torch.equal(draw_rows(99, 9, (0, 1)), draw_rows(99, 9, (0, 2)))


@pytest.fixture
def photos(tmp_path: Path) -> TaggedPhotos:
    sizes = {"a": (40, 30), "b": (20, 50), "c": (25, 25)}
    found = []
    for name, (width, height) in sizes.items():
        Image.new("RGB", (width, height), (10, 20, 255)).save(tmp_path / f"{name}.png")
        found.append(Photo(name, tmp_path / f"{name}.png", width, height))
    return TaggedPhotos(("x", "y"), tuple(found), torch.tensor([[True, False], [False, False], [True, True]]))


def test_no_proposals_one_proposal_and_no_tags_pass_through(photos: TaggedPhotos) -> None:
    source = Fixed({"a": 0, "b": 1, "c": 5})
    samples = [load_sample(photos, source, i, View(20, i == 2, 40), max_proposals=3, seed=(0, 0, i)) for i in range(3)]
    batch = collate(samples)
    assert batch.images is not None and batch.images.shape == (3, 3, 40, 27)
    assert batch.ids == ("a", "b", "c") and batch.proposals.sizes == (0, 1, 3)
    assert batch.tags.tolist() == photos.tags.tolist()
    assert batch.images[0, :, 0, 0].tolist() == pytest.approx([10, 20, 255], abs=1e-3)  # raw RGB
    assert batch.images[0, :, 20:].abs().sum() == 0 and batch.images[1, :, :, 16:].abs().sum() == 0  # zero padding
    assert torch.allclose(batch.images[1, :, :40, :16].mean((1, 2)), torch.tensor([10.0, 20.0, 255.0]), atol=1e-3)


def test_photos_are_padded_with_the_given_colour(photos: TaggedPhotos) -> None:
    samples = [load_sample(photos, Fixed({"a": 0, "b": 0, "c": 0}), i, View(20)) for i in range(3)]
    images, black = collate(samples, (124.0, 116.5, 104.0)).images, collate(samples).images
    assert images is not None and black is not None
    for image, zero, sample in zip(images, black, samples, strict=True):
        height, width = sample.image.shape[1:]
        assert torch.equal(image[:, :height, :width], sample.image)
        for beyond in (image[:, height:], image[:, :, width:]):
            assert (beyond == torch.tensor([124.0, 116.5, 104.0]).view(3, 1, 1)).all()
        assert not zero[:, height:].any() and not zero[:, :, width:].any()


def test_unsure_tags_come_through(photos: TaggedPhotos) -> None:
    source = Fixed({"a": 0, "b": 0, "c": 0})
    assert collate([load_sample(photos, source, i, View(20)) for i in range(3)]).unsure is None
    unsure = torch.tensor([[False, True], [True, False], [False, False]])
    doubtful = replace(photos, unsure=unsure)
    batch = collate([load_sample(doubtful, source, i, View(20)) for i in (1, 0)])
    assert batch.unsure is not None and torch.equal(batch.unsure, unsure[[1, 0]])


def test_boxes_are_in_pixels_of_the_view(photos: TaggedPhotos) -> None:
    sample = load_sample(photos, Fixed({"a": 2}), 0, View(60))
    assert sample.image.shape == (3, 60, 80) and torch.allclose(sample.boxes, _boxes(2) * 2)


def test_a_batch_of_photos_without_any_proposal() -> None:
    empty = Sample("e", torch.ones(3, 4, 5), torch.zeros(2, dtype=torch.bool), torch.zeros(0, 4))
    batch = collate([empty, empty])
    assert batch.proposals.boxes.shape == (0, 4) and batch.proposals.sizes == (0, 0)


def test_a_sample_has_no_room_for_truth() -> None:
    assert set(Sample.__slots__) == {"id", "image", "tags", "boxes", "unsure", "side_info"}
    side_info = {"counts", "evidence", "objectness", "class_evidence", "reviewed", "superpixels", "segments"}
    assert set(SideInfo.__slots__) == side_info
