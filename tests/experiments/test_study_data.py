"""Datasets of studies: default splits, errors, and the fingerprint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from study_world import WORLD, write_voc

from tag2box.errors import UserError
from tag2box.experiments.study_data import Splits, SplitStores, open_data, splits_of
from tag2box.formats.coco_boxes import read_coco_truth
from tag2box.formats.listing import DataSource
from tag2box.proposals.base import Candidates
from tag2box.proposals.importers.proposal_files import Imported
from tag2box.proposals.store import write_store
from tag2box.recipes import photos


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("scenes")
    open_data(WORLD, 0, home)
    return home / "scenes" / "seed0"


def voc(folder: Path, scenes: Path, **lists: list[str]) -> Path:
    truth = read_coco_truth(scenes / "train" / "truth.json")
    return write_voc(folder, truth, {i: scenes / "train" / "photos" / f"{i}.jpg" for i in truth.ids}, lists)


IDS = [f"train_{i:05d}" for i in range(6)]


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        (("train", "test"), ("train", "test")),
        (("train", "trainval", "val", "test"), ("trainval", "test")),
        (("train", "val"), ("train", "val")),
    ],
)
def test_a_voc_folder_has_the_usual_splits(tmp_path, scenes, lists, expected):
    folder = voc(tmp_path / "VOC", scenes, **dict.fromkeys(lists, IDS[:3]))
    found = splits_of(DataSource(path=folder), None, None)
    assert (found.train.split, found.test.split) == expected


def test_a_voc_folder_is_opened_with_its_splits(tmp_path, scenes):
    folder = voc(tmp_path / "VOC", scenes, train=IDS[:4], test=IDS[4:])
    data = open_data(splits_of(DataSource(path=folder), None, None), 0, tmp_path / "home")
    assert [photo.id for photo in data.tagged.photos] == IDS[:4] == list(data.train.ids)
    assert [photo.id for photo in data.test_photos] == IDS[4:] == list(data.test.ids)
    assert data.train.classes == data.test.classes == data.tagged.classes
    assert data.name == "VOC, train"
    assert (
        open_data(splits_of(DataSource(path=folder), None, None), 5, tmp_path / "home").fingerprint == data.fingerprint
    )


def test_named_splits_are_used(tmp_path, scenes):
    folder = voc(tmp_path / "VOC", scenes, train=IDS, mine=IDS[:2], yours=IDS[2:3])
    data = open_data(splits_of(DataSource(path=folder, split="mine"), None, "yours"), 0, tmp_path)
    assert (len(data.tagged), len(data.test_photos)) == (2, 1)


def test_coco_files_are_opened(tmp_path, scenes):
    learn, test = (DataSource(path=scenes / p / "truth.json", photos=scenes / p / "photos") for p in ("train", "test"))
    data = open_data(splits_of(learn, test, None), 0, tmp_path)
    assert (len(data.tagged), len(data.test_photos)) == (WORLD.train, WORLD.test)
    drawn = open_data(WORLD, 0, tmp_path)
    assert data.fingerprint == drawn.fingerprint  # the same photos, tags and boxes, in another format


@pytest.mark.parametrize(
    ("lists", "words"),
    [
        ({"all_of_them": IDS}, "no list trainval or train"),
        ({"train": IDS}, "no list test or val"),
        ({"train": IDS[:3], "test": IDS[2:]}, "in both the training and the test split"),
    ],
)
def test_impossible_splits_are_an_error_of_one_line(tmp_path, scenes, lists, words):
    folder = voc(tmp_path / "VOC", scenes, **lists)
    with pytest.raises(UserError, match=words) as error:
        open_data(splits_of(DataSource(path=folder), None, None), 0, tmp_path)
    assert "\n" not in str(error.value)


def test_boxes_are_required(scenes, tmp_path):
    tags = DataSource(path=scenes / "train" / "tags.csv", photos=scenes / "train" / "photos")
    with pytest.raises(UserError, match="has no boxes"):
        open_data(Splits(tags, tags), 0, tmp_path)


def test_the_fingerprint_depends_on_tags_boxes_and_photos(tmp_path, scenes):
    def opened(name: str, **lists: list[str]) -> str:
        folder = voc(tmp_path / name, scenes, **lists)
        return open_data(splits_of(DataSource(path=folder), None, None), 0, tmp_path).fingerprint

    first = opened("a", train=IDS[:4], test=IDS[4:])
    assert opened("b", train=IDS[:4], test=IDS[4:]) == first
    assert opened("c", train=IDS[:3], test=IDS[4:]) != first
    assert opened("d", train=IDS[:4], test=IDS[5:]) != first
    folder = voc(tmp_path / "e", scenes, train=IDS[:4], test=IDS[4:])
    xml = folder / "Annotations" / f"{IDS[5]}.xml"
    xml.write_text(xml.read_text().replace("<xmin>", "<xmin>1", 1))
    assert open_data(splits_of(DataSource(path=folder), None, None), 0, tmp_path).fingerprint != first


def test_proposals_of_another_method_have_another_folder(tmp_path, scenes):
    data = open_data(WORLD, 0, tmp_path)
    config = photos()
    other = replace(config, proposals=replace(config.proposals, max_boxes=7))
    places = {data.proposals(c, part) for c in (config, other) for part in ("train", "test")}
    assert len(places) == 4 and all(place.is_relative_to(tmp_path) for place in places)
    assert data.placed(config).data.proposals == data.train_set(config).proposals


def test_imported_proposals_are_those_of_the_options(tmp_path, scenes):
    data = open_data(WORLD, 0, tmp_path)
    config = replace(photos(), proposals=Imported())
    with pytest.raises(UserError, match="--proposals and --test-proposals"):
        data.placed(config)
    imported = replace(data, boxes=SplitStores(tmp_path / "a", tmp_path / "b"))
    assert (imported.placed(config).data.proposals, imported.test_set(config).proposals) == (
        tmp_path / "a",
        tmp_path / "b",
    )
    assert imported.stores_digest(photos()) == ""
    with pytest.raises(UserError, match="proposal store"):
        imported.stores_digest(config)


def test_stores_of_propose_are_used_by_runs_with_their_method(tmp_path, scenes):
    data, config = open_data(WORLD, 0, tmp_path), photos()
    stores = SplitStores(tmp_path / "a", tmp_path / "b")
    for path, own in ((stores.train, data.tagged.photos), (stores.test, data.test_photos)):
        boxes = [Candidates.unranked(torch.tensor([[0.0, 0, 9, 9]]))] * len(own)
        write_store(path, config.proposals.source(), own, boxes)
    assert stores.method() == config.proposals
    given = replace(data, boxes=stores)
    assert (given.proposals(config, "train"), given.proposals(config, "test")) == (stores.train, stores.test)
    assert given.stores_digest(config) == ""  # as if they had been computed
    other = replace(config, proposals=replace(config.proposals, max_boxes=7))
    assert given.proposals(other, "train") == data.proposals(other, "train")
    write_store(stores.test, other.proposals.source(), [], [])
    with pytest.raises(
        UserError, match=r"b: made with max_boxes 7, not \d+ as .+a; both splits need boxes of one method"
    ):
        stores.method()
    write_store(stores.train, {"kind": "unheard_of"}, [], [])
    write_store(stores.test, {"kind": "unheard_of"}, [], [])
    with pytest.raises(UserError, match=r"a: .+unheard_of"):
        stores.method()
    for path in (stores.train, stores.test):
        write_store(path, {"kind": "imported", "file": path.name}, [], [])
    assert stores.method() == Imported()
