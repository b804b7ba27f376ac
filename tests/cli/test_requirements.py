"""A missing requirement of a system is an error in one line, before anything is trained."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from tag2box.annotations import TaggedPhotos
from tag2box.cli.train import train
from tag2box.cli.training_data import (
    check_proposal_scores,
    check_requirements,
    load_side_info,
    prepare_data,
    read_training,
)
from tag2box.data import reviewed_boxes
from tag2box.errors import UserError
from tag2box.methods.oicr import Oicr
from tag2box.models.detector import Heads
from tag2box.proposals.base import Candidates
from tag2box.proposals.store import ProposalStore, write_store
from tag2box.recipes import Config, Data
from tag2box.training.proposal_cache import ProposalCache
from tag2box.types import LabelerInput, Labeling, Requirements
from tiny import tiny_photos, tiny_store
from tiny_world import small_config, small_data, small_network


@dataclass(frozen=True, kw_only=True)
class Asking(Oicr):
    """A labeler with requirements."""

    asks: Requirements = Requirements()

    @property
    def requirements(self) -> Requirements:
        return self.asks

    def __call__(self, inputs: LabelerInput) -> Labeling:
        for name in ("counts", "evidence", "objectness"):
            assert (getattr(inputs.side_info, name) is not None) == getattr(self.asks, name)
        return super().__call__(inputs)


def asking(config: Config, requirements: Requirements) -> Config:
    return replace(config, criterion=replace(config.criterion, labeler=Asking(asks=requirements)))


def scored(folder: Path, photos: TaggedPhotos, *scores: float) -> ProposalStore:
    """A store with a proposal of each score in every photo."""
    boxes = torch.tensor([[0.0, 0, 9, 9]]).repeat(len(scores), 1)
    found = [Candidates(boxes, torch.tensor(scores, dtype=torch.float32)) for _ in photos.photos]
    write_store(folder, {"kind": "tiny"}, photos.photos, found)
    return ProposalStore.open(folder)


@pytest.mark.parametrize(
    "requirements",
    [
        Requirements(),
        Requirements(exemplars=True, vectors=True),
        Requirements(counts=True),
        Requirements(evidence=True),
        Requirements(mil_heads=1),
    ],
)
def test_what_is_there_is_not_complained_of(tmp_path: Path, requirements: Requirements) -> None:
    photos = tiny_photos(tmp_path, 3)
    counted = replace(photos, counts=torch.where(photos.tags, 1, -1))
    config = asking(Config(), requirements)
    check_requirements(config, counted)
    check_proposal_scores(config, counted, tiny_store(tmp_path, photos.photos))


COUNTS = {"no counts": None, "only unknown counts": -1}


@pytest.mark.parametrize("value", COUNTS.values(), ids=COUNTS)
def test_counts_that_no_photo_has(tmp_path: Path, value: int | None) -> None:
    photos = tiny_photos(tmp_path, 2)
    counts = None if value is None else torch.full(photos.tags.shape, value)
    config = asking(Config(data=Data(tags=Path("tags.csv"))), Requirements(counts=True))
    says = (
        'tags.csv: criterion.labeler.kind = "oicr" needs counts of objects, and no photo has any; add a column counts'
    )
    with pytest.raises(UserError, match=says) as error:
        check_requirements(config, replace(photos, counts=counts))
    assert "\n" not in str(error.value) and "data.counts=boxes" in str(error.value)


def test_one_count_is_enough(tmp_path: Path) -> None:
    photos = tiny_photos(tmp_path, 2)
    counts = torch.full(photos.tags.shape, -1)
    counts[1, 1] = 2
    check_requirements(asking(Config(), Requirements(counts=True)), replace(photos, counts=counts))


def test_superpixels_of_a_photo_that_is_gone(tmp_path: Path) -> None:
    photos = tiny_photos(tmp_path, 2)
    photos.photos[1].path.unlink()
    check_requirements(Config(), photos)
    with pytest.raises(UserError, match=r"photo1.jpg: no such photo, and .* needs its superpixels; put it back"):
        check_requirements(asking(Config(), Requirements(evidence=True)), photos)


def test_a_second_head_that_is_not_there(tmp_path: Path) -> None:
    config, photos = asking(Config(), Requirements(mil_heads=2)), tiny_photos(tmp_path, 1)
    with pytest.raises(UserError, match=r"heads.mil_heads: is 1, but .* reads 2; set heads.mil_heads=2"):
        check_requirements(config, photos)
    check_requirements(replace(config, heads=replace(config.heads, mil_heads=2)), photos)


@pytest.mark.parametrize(
    ("scores", "says"),
    [
        ((), "needs scores of proposals, and tiny gives none; set proposals.kind=edge_boxes"),
        ((0.0, 0.0), "needs scores of proposals, and tiny gives none"),
        ((0.2, 1.5), "needs scores within 0 and 1, these reach from 0.2 to 1.5"),
        ((-3.0, 0.5), "needs scores within 0 and 1, these reach from -3 to 0.5"),
        ((0.0, 1.0), ""),
        ((0.3,), ""),
    ],
)
def test_scores_of_proposals(tmp_path: Path, scores: tuple[float, ...], says: str) -> None:
    photos = tiny_photos(tmp_path, 2)
    store = scored(tmp_path / "store", photos, *scores)
    check_proposal_scores(Config(), photos, store)
    config = asking(Config(), Requirements(objectness=True))
    if not says:
        check_proposal_scores(config, photos, store)
        return
    prior = replace(Config(), heads=Heads(box_prior=10.0))
    for asked in (config, prior):
        with pytest.raises(UserError, match=says) as error:
            check_proposal_scores(asked, photos, store)
        assert "\n" not in str(error.value)


# ---------------------------------------------------------------- on the way to a run


def test_a_lack_leaves_no_run_and_no_proposals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_network(monkeypatch)
    small_data(tmp_path)
    config = asking(small_config(tmp_path), Requirements(counts=True))
    with pytest.raises(UserError, match="no photo has any"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_gets_what_it_requires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The labeler of this run asserts that it has it, in training and in the pictures on the way."""
    small_network(monkeypatch)
    small_data(tmp_path)
    table = tmp_path / "tags.csv"
    head, first, *rows = table.read_text().splitlines()
    name = first.partition(",")[2].partition(";")[0]
    table.write_text("\n".join([f"{head},counts", f"{first},{name}:2", *(f"{row}," for row in rows)]) + "\n")
    edges = ("proposals.kind=edge_boxes", "proposals.short_side=48", "proposals.min_side=6", "plan.iterations=2")
    config = small_config(tmp_path, *edges, f"data.proposals={tmp_path / 'store'}")
    train(asking(config, Requirements(counts=True, evidence=True, objectness=True)), tmp_path / "run")
    assert len(list((tmp_path / "run" / "maps").glob("*.npy"))) == 1
    train(asking(config, Requirements()), tmp_path / "plain")
    assert not list((tmp_path / "plain" / "maps").glob("*.npy"))


def test_side_info_is_read_only_if_required(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_network(monkeypatch)
    small_data(tmp_path)
    config = small_config(tmp_path, f"feature_cache={tmp_path / 'maps'}", f"data.proposals={tmp_path / 'store'}")
    photos, store = prepare_data(config)
    none = load_side_info(config, photos, store)
    assert (none.counts, none.evidence, none.objectness) == (None, None, None) and not (tmp_path / "maps").exists()
    counted = replace(photos, counts=torch.where(photos.tags, 2, -1))
    some = load_side_info(asking(config, Requirements(counts=True, evidence=True, objectness=True)), counted, store)
    assert some.counts is counted.counts and isinstance(some.evidence, ProposalCache) and some.objectness is not None
    assert torch.equal(some.objectness("photo1"), store.scores("photo1"))


# ---------------------------------------------------------------- the wall between training and boxes


@pytest.mark.parametrize(
    ("counts", "requirements", "reads"),
    [("given", True, False), ("given", False, False), ("boxes", False, False), ("boxes", True, True)],
)
def test_boxes_are_read_only_to_be_counted_and_only_if_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: str, requirements: bool, reads: bool
) -> None:
    """Boxes reach training only if a system needs counts and the user sets data.counts=boxes."""
    read: list[object] = []
    monkeypatch.setattr(reviewed_boxes.datasets, "read_truth", lambda source: read.append(source) or _stop())
    monkeypatch.setattr(reviewed_boxes.datasets, "has_boxes", lambda source: True)
    small_data(tmp_path)
    config = asking(small_config(tmp_path, f"data.counts={counts}"), Requirements(counts=requirements))
    if reads:
        with pytest.raises(UserError, match="truth was read"):
            read_training(config)
    else:
        assert read_training(config).counts is None
    assert bool(read) == reads


def _stop() -> None:
    raise UserError("truth was read")
