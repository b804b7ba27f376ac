"""Student runs: trained, stopped and resumed to the bit, relabelled, and used by the other commands."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from crash_simulator import crash_states, record, write_tree
from tag2box import runs
from tag2box.cli.detect import detect
from tag2box.cli.inputs import find_photos
from tag2box.cli.label import label
from tag2box.cli.student import read_labels, resume_student, train_student
from tag2box.errors import Interrupted, UserError
from tag2box.formats.listing import DataSource
from tag2box.images import read_photo
from tag2box.labels.journal import Journal
from tag2box.labels.label_set import LabelSet
from tag2box.labels.reviews import Action, BoxState
from tag2box.parallel.pool import LocalPool
from tag2box.run_detect import detect_in_pool, detect_task
from tag2box.student.student_training import StudentConfig
from tag2box.training.events import read_events
from tiny_student import SMALL, tiny_labels
from tiny_world import call, same, stopping_at


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("student")
    tiny_labels(folder)
    train_student(folder / "labels", folder / "run", overrides=(*SMALL, "plan.iterations=6"))
    return folder


def all_tensors(run: Path) -> dict[str, torch.Tensor]:
    folder = run / json.loads((run / "state.json").read_text())["folder"]
    files = sorted(folder.glob("*.safetensors"))
    return {f"{file.name} {name}": value for file in files for name, value in load_file(file).items()}


def test_a_run_has_the_files_of_every_run(world: Path) -> None:
    names = {path.name for path in (world / "run").iterdir()}
    assert {"config.toml", "run.json", "photos.json", "events.jsonl", "state.json", "checkpoint-000006"} <= names
    assert (world / "run" / "config.toml").read_text().count('kind = "student"') == 1
    events = [event["event"] for event in read_events(world / "run")]
    assert events == ["start", *["step"] * 6, "end"]


def test_the_network_that_detects_is_the_moving_average(world: Path) -> None:
    tensors = all_tensors(world / "run")
    averaged = tensors["model.safetensors head.class_logits.weight"]
    assert not torch.equal(averaged, tensors["training.safetensors head.class_logits.weight"])
    trained = runs.open_run(world / "run")
    assert torch.equal(trained.detector.state_dict()["head.class_logits.weight"], averaged)


@pytest.mark.parametrize("stopped", [1, 4, 5, 6, 9])  # in either round, and between them
def test_a_run_that_was_stopped_ends_with_the_same_bits(world: Path, tmp_path: Path, stopped: int) -> None:
    how = (*SMALL, "plan.iterations=5", "rounds.count=2", "rounds.agreement=1.0")
    if not (world / "two").exists():
        train_student(world / "labels", world / "two", overrides=how)
    with pytest.raises(Interrupted):
        train_student(world / "labels", tmp_path / "run", overrides=how, progress=stopping_at(stopped))
    resume_student(tmp_path / "run")
    assert same(all_tensors(tmp_path / "run"), all_tensors(world / "two"))
    assert json.loads((tmp_path / "run" / "state.json").read_text())["iteration"] == 10
    assert [event["event"] for event in read_events(tmp_path / "run")][-1] == "end"


def test_a_second_round_learns_from_labels_that_are_kept_beside_it(world: Path, tmp_path: Path) -> None:
    how = (*SMALL, "plan.iterations=2", "rounds.count=2")
    train_student(world / "labels", tmp_path / "run", overrides=(*how, "rounds.agreement=1.0"))
    made = LabelSet.open(tmp_path / "run" / "labels-round-2")
    assert [photo.tags for photo in made.content.photos] == [
        photo.tags for photo in LabelSet.open(world / "labels").content.photos
    ]
    assert json.loads((tmp_path / "run" / "state.json").read_text())["iteration"] == 4
    train_student(world / "labels", tmp_path / "same", overrides=(*how, "rounds.agreement=0.0"))
    assert json.loads((tmp_path / "same" / "state.json").read_text())["iteration"] == 2


def test_a_run_resumes_only_with_what_it_was_started_with(world: Path, tmp_path: Path) -> None:
    labels = tiny_labels(tmp_path)
    with pytest.raises(Interrupted):
        train_student(labels, tmp_path / "run", overrides=(*SMALL, "plan.iterations=4"), progress=stopping_at(2))
    other = LabelSet.open(labels)
    photo, *rest = other.content.photos
    moved = replace(photo, boxes=tuple(replace(box, box=(0.0, 0.0, 9.0, 9.0)) for box in photo.boxes))
    changed = replace(other, content=replace(other.content, photos=(moved, *rest)))
    labels.rename(tmp_path / "before")
    changed.write(labels)
    with pytest.raises(UserError, match="had other tags or boxes when the run was started"):
        resume_student(tmp_path / "run")
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.0005", "lr = 0.002"))
    with pytest.raises(UserError, match=r"plan.lr was 0.0005 when the run was started, is 0.002"):
        resume_student(tmp_path / "run")


def test_a_run_resumes_with_labels_and_photos_that_were_moved(world: Path, tmp_path: Path) -> None:
    labels, how = tiny_labels(tmp_path / "data"), (*SMALL, "plan.iterations=4")
    train_student(labels, tmp_path / "whole", overrides=how)
    with pytest.raises(Interrupted):
        train_student(labels, tmp_path / "run", overrides=how, progress=stopping_at(2))
    (tmp_path / "data").rename(tmp_path / "moved")
    elsewhere = tmp_path / "moved" / labels.name
    with pytest.raises(UserError, match="no label set here"):
        resume_student(tmp_path / "run")
    with pytest.raises(UserError, match="name the folder of the labelled photos with --photos"):
        resume_student(tmp_path / "run", labels=elsewhere)
    resume_student(tmp_path / "run", labels=elsewhere, photos=tmp_path / "moved")
    assert same(all_tensors(tmp_path / "run"), all_tensors(tmp_path / "whole"))


def test_a_run_resumes_after_a_power_cut_at_any_moment(tmp_path: Path) -> None:
    """A sample of the states that may be left of a whole run: the tensors are those of the undisturbed one."""
    labels, disk = tiny_labels(tmp_path), tmp_path / "disk"
    how = (*SMALL, "plan.iterations=3", "plan.checkpoint_every=1")
    disk.mkdir()
    recording = record(disk, lambda done: (train_student(labels, disk / "run", overrides=how), done()))
    expected, rng = all_tensors(disk / "run"), random.Random(0)
    for position in sorted(rng.sample(range(len(recording.log) + 1), 10)):
        state = rng.choice(list(islice(crash_states(recording, position), 40)))
        shutil.rmtree(disk)
        write_tree(state, disk)
        if runs.has_run(disk / "run"):
            resume_student(disk / "run")
        else:
            train_student(labels, disk / "run", overrides=how)
        assert same(all_tensors(disk / "run"), expected), f"power cut after {recording.log[position - 1]}"
        assert not list(disk.rglob(".*"))


def test_an_existing_run_is_not_overwritten(world: Path) -> None:
    with pytest.raises(UserError, match="already holds a run"):
        train_student(world / "labels", world / "run", overrides=SMALL)


# ---------------------------------------------------------------- the other commands


def test_detect_needs_no_proposals(world: Path, tmp_path: Path) -> None:
    found = detect(world / "run", [world / "photos"], tmp_path / "boxes.json", min_score=0.0, draw=tmp_path / "drawn")
    assert len(found) == 4 and all(len(own) for own in found.values())
    assert len(list((tmp_path / "drawn").iterdir())) == 4
    assert not list(tmp_path.rglob("proposals*"))


def test_detect_without_any_box_says_what_to_try(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["detect", f"{world / 'run'}", f"{world / 'photos'}", "--out", f"{tmp_path / 'boxes.json'}", "--min-score"]
    done = call([*argv, "1"], monkeypatch, capsys)
    assert done.code == 0 and "0 boxes in 4 photos" in done.out and "try a lower --min-score" in done.out
    done = call([*argv, "0"], monkeypatch, capsys)
    assert done.code == 0 and "--min-score" not in done.out


def test_decoded_photos_give_the_detections_of_files(world: Path) -> None:
    trained = runs.open_run(world / "run")
    assert isinstance(trained, runs.StudentRun)
    files = sorted((world / "photos").iterdir())
    found = detect(world / "run", [world / "photos"], min_score=0.0)
    for photos in ([read_photo(file) for file in files], find_photos(files)):
        for file, own in zip(files, trained.predict(photos), strict=True):
            assert torch.equal(own.boxes, found[file.stem].boxes) and torch.equal(own.scores, found[file.stem].scores)
    assert trained.predict([]) == []


def test_other_scales_and_flips_are_settings_of_detect(world: Path) -> None:
    one, two = (
        detect(world / "run", [world / "photos"], min_score=0.0, overrides=[f"inference.mirror={mirror}"])
        for mirror in ("false", "true")
    )
    assert any(not torch.equal(one[name].boxes, two[name].boxes) for name in one)
    with pytest.raises(UserError, match="a student has no proposals and no class maps"):
        detect(world / "run", [world / "photos"], overrides=["inference.prior.evidence=1"])
    for override in ("inference.regression=0.5", "inference.predict.vote_iou=0.5"):
        with pytest.raises(UserError, match="of detectors with proposals"):
            detect(world / "run", [world / "photos"], overrides=[override])


@pytest.mark.parametrize("rule", ["fixed", "auto"])
def test_label_puts_a_box_on_every_tag(world: Path, tmp_path: Path, rule: str) -> None:
    made = label(world / "run", DataSource(path=world / "labels"), tmp_path / "labels", rule=rule)  # type: ignore[arg-type]
    assert made.content.photos and all(not photo.unboxed_tags for photo in made.content.photos)
    assert {box.name for photo in made.content.photos for box in photo.boxes} <= set(made.classes)


@pytest.mark.parametrize("workers", [1, 2])
def test_files_of_a_pool_are_equal_to_the_byte(world: Path, tmp_path: Path, workers: int) -> None:
    tagged = DataSource(path=world / "labels")
    for name, pool in (("here", None), ("there", LocalPool(workers))):
        detect(world / "run", [world / "photos"], tmp_path / f"{name}.json", min_score=0, pool=pool)
        label(world / "run", tagged, tmp_path / name, pool=pool)
    assert (tmp_path / "here.json").read_bytes() == (tmp_path / "there.json").read_bytes()
    assert (tmp_path / "here" / "labels.json").read_bytes() == (tmp_path / "there" / "labels.json").read_bytes()
    assert json.loads((tmp_path / "here.json").read_text())["annotations"]


def test_a_pool_detects_in_the_precision_of_the_run_and_without_a_gpu_if_it_says_so(world: Path) -> None:
    trained, photos = runs.open_run(world / "run"), find_photos([world / "photos"])
    assert isinstance(trained, runs.StudentRun)
    half = replace(trained, config=replace(trained.config, precision="bf16", device="cpu"))
    found = detect_in_pool(LocalPool(1), half, photos, runs.NoProposals())
    assert [*found] == [photo.id for photo in photos]
    for low, own, high in zip(half.predict(photos), found.values(), trained.predict(photos), strict=True):
        assert torch.equal(own.scores, low.scores) and not torch.equal(own.scores, high.scores)
    assert detect_task(trained).is_gpu_used and not detect_task(half).is_gpu_used


def test_a_photo_that_a_pool_cannot_read_is_skipped_or_a_line(world: Path, tmp_path: Path) -> None:
    whole = (world / "photos" / "photo0.jpg").read_bytes()
    (tmp_path / "half.jpg").write_bytes(whole[: len(whole) * 3 // 4])  # its header can be read
    places, skipped = [world / "photos", tmp_path / "half.jpg"], list[str]()
    assert len(find_photos(places)) == 5
    found = detect(world / "run", places, pool=LocalPool(1), skipped=skipped, min_score=0)
    assert len(found) == 4 and len(skipped) == 1 and "half.jpg" in skipped[0]
    with pytest.raises(UserError, match=r"half\.jpg"):
        detect(world / "run", places, pool=LocalPool(1))


def test_report_shows_a_student_beside_truth(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["report", f"{world / 'run'}", "--out", f"{tmp_path / 'report.html'}"]
    done = call([*argv, "--test-truth", f"{world / 'labels'}", "--photos", f"{world / 'photos'}"], monkeypatch, capsys)
    assert (done.code, done.complaints) == (0, [])
    assert f"tag2box student {world / 'labels'} --config" in (tmp_path / "report.html").read_text()
    metrics = json.loads((world / "run" / "metrics.json").read_text())
    assert 0 <= metrics["test"]["voc07"]["mAP"] <= 1
    assert "student" in (tmp_path / "report.html").read_text()


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["student", "--out", "run"], "no label set given"),
        (["student", "nowhere", "--out", "run"], "nowhere: no label set here"),
        (["student", "labels", "--out", "run", "--set", "plan.iterationz=3"], "plan.iterationz"),
        (
            ["student", "labels", "--out", "run", "--set", "start=teacher"],
            "start = teacher: the label set names no run",
        ),
        (["student", "labels", "--out", "run", "--set", "network.kind=anchor_fre"], "did you mean anchor_free"),
        (
            ["student", "--out", "run", "--resume", "--set", "plan.iterations=3"],
            "--resume takes its settings from the run",
        ),
        (["student", "--out", "run", "--resume"], "no run here"),
        (["student", "--out", "labels", "--resume"], "labels: a label set; expected a run"),
        (["detect", "labels", "photos"], "labels: a label set; expected a run"),
        (["report", "labels"], "labels: a label set; expected a run"),
        (["trust", "labels"], "labels: no photo is reviewed"),
        (["train", "--out", "WORLD/run", "--resume"], "a student run; expected one of `tag2box train`"),
    ],
)
def test_a_mistake_is_one_line(
    world: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(world)
    out = {"run": f"{tmp_path / 'run'}", "WORLD/run": f"{world / 'run'}"}
    done = call([out.get(word, word) for word in words], monkeypatch, capsys)
    assert done.code == 2 and message in done.err and done.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_settings_of_a_run_are_written_and_read(world: Path) -> None:
    config = runs.read_any_config(world / "run")
    assert isinstance(config, StudentConfig) and config.plan.iterations == 6


def test_reviewed_photos_teach_with_the_boxes_of_their_review(world: Path, tmp_path: Path) -> None:
    folder = tmp_path / "reviewed"
    tiny_labels(folder)
    labels = LabelSet.open(folder / "labels")
    photo = next(photo for photo in labels.content.photos if photo.labels)
    place = photo.boxes.index(photo.labels[0])
    moved = BoxState((1.0, 2.0, 9.0, 11.0), photo.labels[0].name)
    with Journal(folder / "labels", labels) as journal:
        journal.append(photo.id, Action("move", {place: moved}), based_on=0, key="1")
        journal.append(photo.id, Action("done"), based_on=1, key="2")
    config = StudentConfig(labels=folder / "labels")
    read = {own.id: own.boxes for own in read_labels(config).content.photos}
    assert (1.0, 2.0, 9.0, 11.0) in [box.box for box in read[photo.id]]
    assert all(box.source == "review" for box in read[photo.id])
    others = [own for own in labels.content.photos if own.id != photo.id]
    assert all(read[own.id] == own.boxes for own in others) and others
