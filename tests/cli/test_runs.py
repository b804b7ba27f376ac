"""Run folders: claimed once, read back as they were, loaded into the detector that was saved."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tag2box import settings
from tag2box.annotations import Objects, Truth
from tag2box.cli.detect import detect
from tag2box.cli.evaluate import (
    EvalSet,
    boxes_per_class,
    class_map_rows,
    evaluate_run,
    top_detections,
    truth_source,
)
from tag2box.cli.inputs import find_photos
from tag2box.cli.train import resume, train
from tag2box.cli.training_data import prepare_data, read_training
from tag2box.errors import UserError
from tag2box.formats.datasets import read_truth
from tag2box.metrics.voc_ap import corloc
from tag2box.models.class_maps import ClassMaps
from tag2box.models.lite0 import Lite0
from tag2box.progress import silent
from tag2box.proposals.edge_boxes import EdgeBoxes
from tag2box.proposals.importers.proposal_files import Imported
from tag2box.proposals.selective_search import SelectiveSearch
from tag2box.proposals.store import ProposalStore, write_store
from tag2box.recipes import Config, Data
from tag2box.run_detect import detect_photos
from tag2box.run_inputs import match_store_method
from tag2box.runs import (
    build_detector,
    load_run,
    machine,
    read_config,
    start_run,
    versions,
    with_paths,
)
from tiny_world import same, small_config, small_data, small_network, story, weights
from worlds import random_world


@pytest.fixture
def small(tmp_path, monkeypatch) -> Path:
    small_network(monkeypatch)
    small_data(tmp_path)
    return tmp_path


# ---------------------------------------------------------------- folders


def test_a_new_folder_is_claimed_with_the_settings(tmp_path):
    config = Config(name="mine")
    start_run(config, tmp_path / "run")
    assert read_config(tmp_path / "run") == config


@pytest.mark.parametrize("file", ["config.toml", "events.jsonl", "state.json"])
def test_any_trace_of_a_run_keeps_a_folder(tmp_path, file):
    (tmp_path / file).write_text("")
    with pytest.raises(UserError, match=f"{tmp_path}: already holds a run"):
        start_run(Config(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [file]


def test_other_files_do_not(tmp_path):
    (tmp_path / "notes.txt").write_text("lr too high?")
    start_run(Config(), tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "lr too high?"


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(UserError, match="is a file"):
        start_run(Config(), tmp_path / "run")


@pytest.mark.parametrize("data", [Data(), Data(photos=Path("p"))])
def test_tags_are_needed(data):
    with pytest.raises(UserError, match=r"data\.tags: not set"):
        with_paths(Config(data=data), Path("run"))


def test_a_list_of_photos_becomes_absolute_and_the_name_of_a_split_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.txt").write_text("a\n")
    for split, kept in ((None, None), ("trainval", "trainval"), ("mine.txt", f"{tmp_path / 'mine.txt'}")):
        data = with_paths(Config(data=Data(tags=Path("VOC"), split=split)), Path("run")).data
        assert (data.photos, data.split) == (None, kept)


def test_paths_become_absolute_and_open_ones_go_into_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = with_paths(Config(data=Data(photos=Path("p"), tags=Path("t.csv"))), Path("run"))
    assert (config.data.photos, config.data.tags) == (tmp_path / "p", tmp_path / "t.csv")
    assert (config.data.proposals, config.feature_cache) == (tmp_path / "run/proposals", tmp_path / "run/maps")
    given = replace(config, feature_cache=Path("m"), data=replace(config.data, proposals=Path("s")))
    assert with_paths(given, Path("run")).feature_cache == tmp_path / "m"
    assert with_paths(given, Path("run")).data.proposals == tmp_path / "s"


# ---------------------------------------------------------------- training and loading


def test_a_run_stores_the_settings_it_had(small):
    config = small_config(small)
    train(config, small / "run")
    stored = read_config(small / "run")
    assert stored == with_paths(config, small / "run")
    assert (small / "run" / "config.toml").read_text() == settings.dump(stored)


def test_a_run_can_be_moved_away_from_where_it_was_trained(small):
    train(small_config(small), small / "run")
    photo = small / "photos" / "photo0.jpg"
    before = detect(small / "run", [photo], min_score=0)["photo0"]
    (small / "run").rename(small / "moved")
    after = detect(small / "moved", [photo], min_score=0)["photo0"]
    assert torch.equal(before.boxes, after.boxes)
    assert torch.equal(before.scores, after.scores)


def test_loading_gives_the_saved_weights_and_classes(small):
    train(small_config(small), small / "run")
    trained = load_run(small / "run")
    assert trained.classes == ("bar", "box", "disc")
    assert same(trained.detector.state_dict(), weights(small / "run"))
    assert not trained.detector.training


def test_the_start_event_describes_model_and_data(small):
    train(small_config(small, "name=Mine"), small / "run")
    first = story(small / "run")[0]
    store = ProposalStore.open(small / "run" / "proposals")
    mean = sum(len(store.boxes(f"photo{i}")) for i in range(4)) / 4
    assert first == {
        "event": "start", "name": "Mine", "classes": ["bar", "box", "disc"], "train_photos": 4, "iterations": 6,
        "seed": 0, "proposals_per_photo": mean, "uses": "",
    }  # fmt: skip
    assert set(machine()) == {"cores", "threads", "system", "processor"}
    assert set(versions()) == {"python", "torch", "tag2box"}


def test_a_run_killed_before_its_first_checkpoint_starts_over(small):
    config = with_paths(small_config(small), small / "run")
    train(config, small / "unbroken")
    start_run(config, small / "run")
    resume(small / "run")
    assert same(weights(small / "run"), weights(small / "unbroken"))


def test_without_any_tag_there_is_nothing_to_learn(small):
    (small / "tags.csv").write_text("image,tags\nphoto0.jpg,\n")
    with pytest.raises(UserError, match="no photo has a tag"):
        read_training(small_config(small))


def test_a_detector_is_a_function_of_the_seed():
    config = settings.load(Config, [], ["backbone.pool_size=4"])
    a, b = (build_detector(config, 2, pretrained=False).state_dict() for _ in range(2))
    other = build_detector(replace(config, plan=replace(config.plan, seed=1)), 2, pretrained=False).state_dict()
    assert same(a, b)
    assert not same(a, other)


# ---------------------------------------------------------------- detecting and assessing


def test_detecting_keeps_what_scores_enough_and_names_every_photo(small):
    train(small_config(small), small / "run")
    photos = find_photos([small / "photos"])
    everything = detect_photos(load_run(small / "run"), photos, progress=silent)
    cut = sorted(float(s) for d in everything.values() for s in d.scores)[-5]
    kept = detect(small / "run", [small / "photos"], min_score=cut)
    assert list(kept) == [photo.id for photo in photos]
    assert sum(map(len, kept.values())) == sum(int((d.scores >= cut).sum()) for d in everything.values()) >= 5
    assert not (small / "detections.json").exists()


def test_photos_of_one_name_are_drawn_apart(small):
    train(small_config(small), small / "run")
    for folder in ("a", "b"):
        (small / folder).mkdir()
        (small / folder / "x.jpg").write_bytes((small / "photos" / "photo0.jpg").read_bytes())
    found = detect(small / "run", [small / "a", small / "b"], small / "out.json", draw=small / "drawn")
    assert len(found) == len(list((small / "drawn").iterdir())) == 2
    files = [image["file_name"] for image in json.loads((small / "out.json").read_text())["images"]]
    assert len(set(files)) == 2


def test_detecting_in_nothing_is_a_mistake(tmp_path):
    with pytest.raises(UserError, match="no photos given"):
        detect(tmp_path, [])


def eval_set_of(small: Path, classes: tuple[str, ...]) -> EvalSet:
    photos = find_photos([small / "photos"])
    objects = tuple(Objects.of([[4, 6, 21, 27]], [0]) for _ in photos)
    truth = Truth(classes, tuple(p.id for p in photos), tuple((p.width, p.height) for p in photos), objects)
    return EvalSet(photos, truth, small / "data")


def test_assessing_leaves_figures_and_detections(small):
    train(small_config(small), small / "run")
    data = eval_set_of(small, ("bar", "box", "disc"))
    evaluate_run(small / "run", test=data)
    metrics = json.loads((small / "run" / "metrics.json").read_text())
    assert list(metrics) == ["test"]
    evaluate_run(small / "run", test=data, train=data)
    metrics = json.loads((small / "run" / "metrics.json").read_text())
    assert list(metrics) == ["test", "train", "truth_boxes_per_class"]
    assert set(metrics["train"]["intervals"]) == {"corloc"} and {"voc12", "breakdown"} <= set(
        metrics["test"]["intervals"]
    )
    tops = json.loads((small / "run" / "train-top-boxes.json").read_text())
    assert {row["category_id"] for row in tops} <= {1} and len(tops) <= 4  # every photo has one tag
    rows = json.loads((small / "run" / "detections.json").read_text())
    assert {row["file_name"] for row in rows} == {f"photo{i}.jpg" for i in range(4)}


def test_the_rows_of_class_maps_have_their_scores_and_boxes(small):
    data, maps = eval_set_of(small, ("bar", "box", "disc")), ClassMaps(Lite0().build(), 3, side=64)
    centre, whole, component = class_map_rows(maps, data)
    assert [row.name for row in (centre, whole, component)] == [
        "centred box, probe", "whole photo, probe", "component of the class map",
    ]  # fmt: skip
    for photo in data.photos:
        own = component.detections[photo.id]
        assert own.labels.tolist() == [0, 1, 2]
        assert torch.equal(own.scores, centre.detections[photo.id].scores)
        assert ((own.scores > 0) & (own.scores < 1)).all()
        assert whole.detections[photo.id].boxes[0].tolist() == [0, 0, photo.width, photo.height]
        assert (
            (own.boxes >= 0).all()
            and (own.boxes[:, 2] <= photo.width).all()
            and (own.boxes[:, 2:] > own.boxes[:, :2]).all()
        )


def test_the_top_boxes_have_the_same_corloc():
    truth, found = random_world(5)
    kept = top_detections(truth, found)
    assert corloc(truth, kept) == corloc(truth, found)
    for photo, objects in zip(truth.ids, truth.objects, strict=True):
        assert len(kept[photo]) <= len(objects.labels.unique())


@pytest.mark.parametrize("classes", [("bar", "box", "mug"), ("disc", "box", "bar")])
def test_a_truth_of_other_classes_is_refused(small, classes):
    train(small_config(small), small / "run")
    with pytest.raises(UserError, match="mug" if "mug" in classes else "order of classes"):
        evaluate_run(small / "run", test=eval_set_of(small, classes))
    assert not (small / "run" / "metrics.json").exists()


@pytest.mark.parametrize(
    ("labels", "mean"), [([], None), ([[]], None), ([[0, 0, 0], [1]], 2.0), ([[0, 1], [], [2]], 1.0)]
)
def test_boxes_per_class_counts_objects_per_present_pair(labels, mean):
    objects = tuple(Objects.of([[0, 0, 1, 1]] * len(row), row) for row in labels)
    truth = Truth(("a", "b", "c"), tuple(map(str, range(len(labels)))), ((1, 1),) * len(labels), objects)
    assert boxes_per_class(truth) == mean


def test_truth_is_read_from_a_file_or_a_folder(tmp_path):
    image = {"id": 1, "file_name": "1.jpg", "width": 9, "height": 9}
    content = {"images": [image], "categories": [{"id": 1, "name": "cat"}], "annotations": []}
    (tmp_path / "truth.json").write_text(json.dumps(content))
    assert read_truth(truth_source(tmp_path / "truth.json", split="test")).classes == ("cat",)
    with pytest.raises(UserError, match="no boxes"):
        read_truth(truth_source(tmp_path, split="test"))


def test_a_photo_cut_short_stops_training_unless_bad_ones_are_skipped(small):
    path = small / "photos" / "photo1.jpg"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(UserError, match=r"photo1\.jpg"):
        train(small_config(small), small / "strict")
    assert not (small / "strict" / "config.toml").exists()
    config = small_config(small, "data.skip_bad=true")
    train(config, small / "lenient")
    photos, store = prepare_data(read_config(small / "lenient"))
    assert [photo.id for photo in photos.photos] == ["photo0", "photo2", "photo3"]
    assert list(store.failed) == ["photo1"]


# ---------------------------------------------------------------- the method of a store


@pytest.mark.parametrize(
    ("made", "recipe", "becomes"),
    [
        (None, SelectiveSearch(), SelectiveSearch()),  # no store yet
        (SelectiveSearch(short_side=50), SelectiveSearch(), SelectiveSearch(short_side=50)),
        (EdgeBoxes(short_side=50), SelectiveSearch(), EdgeBoxes(short_side=50)),
        (SelectiveSearch(engine="opencv"), SelectiveSearch(), SelectiveSearch(engine="opencv")),
    ],
)
def test_a_store_decides_how_new_photos_are_searched(tmp_path, made, recipe, becomes):
    if made is not None:
        write_store(tmp_path / "store", made.source(), [], [])
    assert match_store_method(Config(proposals=recipe), tmp_path / "store").proposals == becomes


def test_a_recipe_for_brought_boxes_does_not_become_one_for_others(tmp_path):
    write_store(tmp_path / "store", SelectiveSearch().source(), [], [])
    with pytest.raises(
        UserError, match=r"holds selective_search boxes, but the settings expect MCG boxes; import those, or"
    ):
        match_store_method(Config(proposals=Imported()), tmp_path / "store")


def test_a_run_older_than_a_setting_keeps_what_it_was_made_with(tmp_path: Path) -> None:
    text = settings.dump(Config(proposals=SelectiveSearch()))
    for name, written, engine in (("new", text, "tag2box"), ("old", text.replace('engine = "tag2box"', ""), "opencv")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(written)
        assert read_config(tmp_path / name).proposals == SelectiveSearch(engine=engine)  # type: ignore[arg-type]
