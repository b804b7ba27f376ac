"""Mistakes a user can make: one line that says what, where and what to do, exit code 2, nothing written."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable

import mistakes
import pytest
from mistakes import Argv, Desk

from tiny_world import call, one_worker, process, tree

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture
def desk(tmp_path, world, monkeypatch) -> Desk:
    one_worker(monkeypatch)
    shutil.copytree(world.tags.parent, tmp_path, copy_function=os.link, dirs_exist_ok=True)
    shutil.copytree(world.trained("od-wscl"), tmp_path / "run", copy_function=os.link)
    (tmp_path / "found.json").write_text('[{"image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4], "score": 0.5}]')
    return Desk(tmp_path, world)


MISTAKES: dict[Callable[[Desk], Argv], tuple[str, ...]] = {
    mistakes.missing_photo: ("tags.csv:5", "train_00003.jpg"),
    mistakes.corrupt_photo: ("train_00003.jpg", "not readable as a photo"),
    mistakes.photo_cut_short: ("train_00003.jpg", "truncated"),
    mistakes.empty_photo: ("train_00003.jpg", "0 bytes"),
    mistakes.detect_missing_photo: ("train_00003.jpg", "no such photo"),
    mistakes.detect_corrupt_photo: ("train_00003.jpg", "not readable"),
    mistakes.detect_photo_cut_short: ("train_00003.jpg", "truncated"),
    mistakes.detect_empty_folder: ("nothing", "no photos"),
    mistakes.detect_with_a_setting_of_training: ("--set plan.iterations=3", "expected inference.NAME=VALUE"),
    mistakes.detect_with_no_such_setting: ("inference.miror", "did you mean inference.mirror?"),
    mistakes.detect_misspelt_photo: ("TRAIN_00003.JPEG", "no such photo; did you mean train_00003.jpg?"),
    mistakes.detect_pattern_of_nothing: ("*.png", "no such photo, and no file matches this pattern"),
    mistakes.detect_into_a_folder: ("photos", "is a folder; expected a file to write"),
    mistakes.detect_below_a_file: ("tags.csv is no folder",),
    mistakes.detect_onto_a_device: ("/dev/null", "is a device or a pipe; expected a file"),
    mistakes.draw_into_a_file: ("tags.csv", "is a file; expected a folder to write"),
    mistakes.voc_into_a_file: ("tags.csv", "is a file; expected a folder to write"),
    mistakes.detect_with_a_score_of_nothing: ("--min-score nan", "expected a number from 0 to 1"),
    mistakes.detect_with_a_score_in_per_cent: ("--min-score 30", "expected a number from 0 to 1"),
    mistakes.evaluate_with_a_score_of_nothing: ("--min-score nan", "expected a number"),
    mistakes.evaluate_no_metric: ("--metrics: names none", "voc07"),
    mistakes.evaluate_into_a_folder: ("photos", "is a folder; expected a file to write"),
    mistakes.detections_of_a_photo_without_name: ("found.json", "entry 0", "image ''"),
    mistakes.detections_of_an_image_without_id: ("found.json", "entry 0", "image ''"),
    mistakes.report_into_a_folder: ("photos", "is a folder; expected a file to write"),
    mistakes.missing_tags: ("tags.csv", "no such file"),
    mistakes.tags_without_columns: ("tags.csv:1", "image,tags"),
    mistakes.tags_of_excel: ("tags.csv", "line 2", "Windows-1252", "save it as UTF-8"),
    mistakes.tags_of_too_many_classes: ("20,000 classes", "at most 5,000", "--classes"),
    mistakes.no_tag_at_all: ("tags.csv", "no photo has a tag"),
    mistakes.unknown_class: ("tags.csv:", "unknown class 'clock'", "balloon, car"),
    mistakes.config_not_toml: ("mine.toml", "not valid TOML", "line 1"),
    mistakes.config_not_text: ("mine.toml", "not readable"),
    mistakes.config_missing: ("none.toml", "no such file"),
    mistakes.config_without_end: ("/dev/urandom", "a device or a pipe", "expected a TOML settings file"),
    mistakes.config_nested_too_deeply: ("mine.toml", "not valid TOML", "nested too deeply"),
    mistakes.config_of_a_huge_number: ("mine.toml", "not valid TOML", "digits"),
    mistakes.unknown_key: ("--set plan.iteratons=3", "did you mean plan.iterations?"),
    mistakes.unknown_key_in_file: ("mine.toml", "did you mean criterion.contrast.temperature?"),
    mistakes.mistyped_value: ("--set plan.iterations=many", "integer"),
    mistakes.value_out_of_bounds: ("--set plan.seed=-1", "greater than or equal to 0"),
    mistakes.unknown_recipe: ("od-wslc", "did you mean od-wscl?"),
    mistakes.no_data_given: ("data.tags", "not set"),
    mistakes.settings_on_resume: ("--resume", "--set"),
    mistakes.folder_holds_a_run: ("run", "already holds a run", "--resume"),
    mistakes.folder_is_a_file: ("tags.csv", "is a file"),
    mistakes.detect_without_run: ("nowhere", "no run here"),
    mistakes.resume_without_run: ("nowhere", "no run here"),
    mistakes.report_without_run: ("nowhere", "no run here"),
    mistakes.run_without_checkpoint: ("run", "no checkpoint", "--resume"),
    mistakes.settings_of_run_edited: ("config.toml", "heads.embed_dim was 128 when the run was started, is 64"),
    mistakes.weights_of_other_heads: ("model.safetensors", "similarity.out", "another model"),
    mistakes.state_edited: ("state.json", "damaged", "remove", "checkpoint-000004, which is intact, is used"),
    mistakes.state_of_other_classes: ("state.json", 'class 2 was "car" when the run was started, is "cat"'),
    mistakes.weights_of_other_classes: ("model.safetensors", "mil.cls", "another model"),
    mistakes.class_renamed: ("tags.csv", 'class 2 was "car" when the run was started, is "clock"', "train a new run"),
    mistakes.report_after_class_renamed: ("tags.csv", 'class 2 was "car" when the run was started, is "clock"'),
    mistakes.photo_replaced: ("train_00003.jpg", "is not the one with which the run was started", "train a new run"),
    mistakes.weights_not_finite: ("model.safetensors", "mil.cls.weight is not finite", "lower plan.optimizer.lr"),
    mistakes.swapped_weights: ("model.safetensors", "mil.cls.weight is (5, 1280)", "another model"),
    mistakes.model_cut_short: ("model.safetensors", "damaged", "checkpoint-000002, which is intact, is used"),
    mistakes.optimizer_cut_short: ("optimiser.safetensors", "damaged", "checkpoint-000002, which is intact, is used"),
    mistakes.model_missing: ("model.safetensors", "missing", "checkpoint-000002, which is intact, is used"),
    mistakes.state_cut_short: ("state.json", "not readable as JSON"),
    mistakes.state_of_something_else: ("state.json", "field"),
    mistakes.config_of_run_spoilt: ("config.toml", "backbone.kind", "lite0"),
    mistakes.truth_missing: ("truth.json", "no such file"),
    mistakes.truth_not_json: ("truth.json", "not readable as JSON"),
    mistakes.truth_without_images: ("truth.json", "images"),
    mistakes.truth_folder_without_split: ("VOC", "test"),
    mistakes.detections_not_json: ("found.json", "not readable as JSON"),
    mistakes.detections_without_score: ("found.json", "entry 0", "score"),
    mistakes.detections_of_other_photos: ("found.json", "entry 0", "99"),
    mistakes.detections_of_other_classes: ("found.json", "entry 0", "category_id"),
    mistakes.unknown_metric: ("voc08", "voc07"),
    mistakes.unknown_class_asked_for: ("baloon", "balloon"),
    mistakes.report_of_strange_truth: ("photos", "no photo train_00000"),
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_one_line_and_nothing_is_written(mistake, desk, monkeypatch, capsys):
    argv = mistake(desk)
    before = tree(desk.at)
    done = call(argv, monkeypatch, capsys)
    assert done.code == 2
    assert len(done.complaints) == 1, done.err
    line = done.complaints[0]
    assert line.startswith("tag2box: ")
    assert all(word in line for word in MISTAKES[mistake]), line
    assert "Traceback" not in done.err
    assert done.out == ""
    assert tree(desk.at) == before


@pytest.mark.parametrize("mistake", [mistakes.corrupt_photo, mistakes.weights_of_other_heads])
def test_so_it_is_in_a_process_of_its_own(mistake, desk):
    argv = mistake(desk)
    before = tree(desk.at)
    done = process(argv, desk.at)
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(r"tag2box: .+\n", done.err)
    assert all(word in done.err for word in MISTAKES[mistake])
    assert tree(desk.at) == before


def test_after_a_mended_photo_the_same_command_works(desk, monkeypatch, capsys):
    """A failed run leaves nothing behind: neither --resume nor a cleanup is needed."""
    whole = desk.photo().read_bytes()
    argv = mistakes.photo_cut_short(desk)
    assert call(argv, monkeypatch, capsys).code == 2
    desk.spoil(desk.photo(), whole)
    assert call([*argv, "--set", "plan.iterations=1"], monkeypatch, capsys).code == 0
