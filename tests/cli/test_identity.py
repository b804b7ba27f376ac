"""A run is resumed, used and reported only with what it was trained on; changes are refused by name."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tag2box import runs, settings, storage
from tag2box.annotations import Photo, TaggedPhotos
from tag2box.cli.detect import detect
from tag2box.cli.report import report
from tag2box.cli.train import resume, train
from tag2box.errors import Busy, Interrupted, UserError
from tag2box.identity import PHOTOS_FILE, RUN_FILE, RunIdentity, photo_identities
from tag2box.io import LOCK, locked
from tag2box.proposals.base import Candidates
from tag2box.proposals.store import ProposalStore, write_store
from tag2box.recipes import Config
from tag2box.training import checkpoint, events
from tiny import tiny_photos
from tiny_world import same, small_config, small_data, small_network, stopping_at, story, tree, weights


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_network(monkeypatch)
    small_data(tmp_path)
    return tmp_path


@pytest.fixture
def stopped(small: Path) -> Path:
    """A run stopped after 3 of 6 iterations, with its proposals beside it."""
    config = small_config(small, f"data.proposals={small / 'store'}")
    with pytest.raises(Interrupted):
        train(config, small / "run", progress=stopping_at(3))
    return small / "run"


# ---------------------------------------------------------------- what is recorded


def test_a_run_records_what_it_is_trained_on(small: Path) -> None:
    config = small_config(small)
    train(config, small / "run")
    content = storage.read_checked_json(small / "run" / RUN_FILE, "", "")
    assert content["classes"] == ["bar", "box", "disc"]
    assert set(content["digests"]) == {"settings", "classes", "tags", "photos", "proposals", "weights"}
    assert content["settings"]["plan.iterations"] == 6
    assert not any(str(small) in str(value) for value in content["settings"].values())
    assert not {"name", "feature_cache", "data.tags", "data.proposals"} & set(content["settings"])
    photos = storage.read_checked_json(small / "run" / PHOTOS_FILE, "", "")["photos"]
    assert list(photos) == [f"photo{i}" for i in range(4)]
    path = small / "photos" / "photo0.jpg"
    assert photos["photo0"][:3] == [path.stat().st_size, path.stat().st_mtime_ns, storage.file_digest(path)]


def test_equal_runs_have_equal_digests_wherever_they_are(small: Path) -> None:
    shutil.copytree(small / "photos", small / "copy" / "photos")
    shutil.copy(small / "tags.csv", small / "copy")
    found = []
    for folder in (small, small / "copy"):
        train(small_config(folder), folder / "run")
        found.append(json.loads((folder / "run" / RUN_FILE).read_text()))
    assert found[0] == found[1]


def tagged(count: int, folder: Path) -> TaggedPhotos:
    return tiny_photos(folder, count) if count else TaggedPhotos(("a",), (), torch.zeros(0, 1, dtype=torch.bool))


@pytest.mark.parametrize("count", [0, 1, 5])
def test_an_unchanged_photo_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    photos = tagged(count, tmp_path)
    first = photo_identities(photos, None)
    read: list[Path] = []
    digest = storage.file_digest
    monkeypatch.setattr(storage, "file_digest", lambda path: (read.append(path), digest(path))[1])
    assert photo_identities(photos, None, first) == first
    assert read == []
    for photo in photos.photos[:1]:
        os.utime(photo.path, ns=(1, 1))
        assert photo_identities(photos, None, first)[photo.id].stamp.sha256 == first[photo.id].stamp.sha256
        assert read == [photo.path]


@pytest.mark.parametrize("change", ["tags", "unsure", "counts"])
def test_every_kind_of_tag_counts(tmp_path: Path, change: str) -> None:
    photos = tiny_photos(tmp_path, 2)
    none = torch.zeros_like(photos.tags)
    plain = replace(photos, unsure=none, counts=none.long())
    other = getattr(plain, change).clone()
    other[1] = ~photos.tags[1] if change != "counts" else 7
    before, after = photo_identities(plain, None), photo_identities(replace(plain, **{change: other}), None)
    assert before["photo0"] == after["photo0"]
    assert before["photo1"].tags != after["photo1"].tags


# ---------------------------------------------------------------- what has changed


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def rename_a_class(home: Path) -> None:
    edit(home / "tags.csv", "box", "clock")


def add_a_class(home: Path) -> None:
    edit(home / "tags.csv", "photo3.jpg,", "photo3.jpg,zebra;")


def swap_a_tag(home: Path) -> None:
    lines = (home / "tags.csv").read_text().splitlines()
    names = [line.split(",")[0] for line in lines[1:3]]
    lines[1:3] = [f"{names[0]},disc;bar", f"{names[1]},box;bar"]
    (home / "tags.csv").write_text("\n".join(lines) + "\n")


def drop_a_photo(home: Path) -> None:
    lines = (home / "tags.csv").read_text().splitlines()
    (home / "tags.csv").write_text("\n".join(lines[:-1]) + "\n")


def add_a_photo(home: Path) -> None:
    shutil.copy(home / "photos" / "photo0.jpg", home / "photos" / "photo9.jpg")
    with (home / "tags.csv").open("a") as file:
        file.write("photo9.jpg,disc\n")


def reverse_the_photos(home: Path) -> None:
    head, *lines = (home / "tags.csv").read_text().splitlines()
    (home / "tags.csv").write_text("\n".join([head, *reversed(lines)]) + "\n")


def replace_photos(home: Path) -> None:
    """By others of the same size."""
    for number in (0, 1):
        path = home / "photos" / f"photo{number}.jpg"
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        path.write_bytes(content)


def other_proposals(home: Path) -> None:
    store = ProposalStore.open(home / "store")
    photos = [Photo(f"photo{i}", home / "photos" / f"photo{i}.jpg", *store.sizes[f"photo{i}"]) for i in range(4)]
    boxes = [Candidates.unranked(store.boxes(photo.id) * (0.9 if photo.id == "photo2" else 1)) for photo in photos]
    write_store(home / "store", dict(store.source), photos, boxes)


def change_a_setting(home: Path) -> None:
    edit(home / "run" / "config.toml", "temperature = 0.2", "temperature = 0.3")


CHANGES: dict[Callable[[Path], None], tuple[str, ...]] = {
    rename_a_class: ("tags.csv: ", 'class 2 was "box" when the run was started, is "clock"', "restore the tags"),
    add_a_class: ("tags.csv: ", "4 classes, there were 3 when the run was started", "restore the tags"),
    swap_a_tag: ("tags.csv: ", "photo photo0 (and 1 more) had other tags when the run was started"),
    drop_a_photo: ("tags.csv: ", "photo photo3 is gone since the run was started"),
    add_a_photo: ("tags.csv: ", "photo photo9 was not there when the run was started"),
    reverse_the_photos: ("tags.csv: ", "the photos were in another order when the run was started"),
    replace_photos: ("photo0.jpg: ", "photo photo0 (and 1 more) is not the one with which the run was started"),
    other_proposals: ("store: ", "photo photo2 had other proposals when the run was started"),
    change_a_setting: (
        "config.toml: ",
        "criterion.contrast.temperature was 0.2 when the run was started, is 0.3",
    ),
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_resumed_run_names_what_has_changed_and_is_left_as_it_is(
    small: Path, stopped: Path, change: Callable[[Path], None]
) -> None:
    change(small)
    before = tree(small)
    with pytest.raises(UserError) as error:
        resume(stopped)
    line = str(error.value)
    assert all(word in line for word in CHANGES[change]), line
    assert "train a new run" in line
    assert tree(small) == before


def test_an_unchanged_run_is_resumed_also_after_a_move(small: Path, stopped: Path) -> None:
    train(small_config(small), small / "unbroken")
    new = small / "elsewhere"
    new.mkdir()
    for name in ("photos", "tags.csv", "store", "run"):
        shutil.copytree(small / name, new / name) if (small / name).is_dir() else shutil.copyfile(
            small / name, new / name
        )  # times change, contents do not
    edit(new / "run" / "config.toml", f"{small}/", f"{new}/")
    edit(new / "run" / "config.toml", "log_every = 1", "log_every = 3")  # a matter of taste
    resume(new / "run")
    assert same(weights(new / "run"), weights(small / "unbroken"))


def test_a_run_without_a_record_is_accepted(small: Path, stopped: Path) -> None:
    for name in (RUN_FILE, PHOTOS_FILE):
        (stopped / name).unlink()
    swap_a_tag(small)
    resume(stopped)
    assert story(stopped)[-1]["event"] == "end"


def test_other_pretrained_weights_are_refused_before_the_first_checkpoint(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match="killed"):
        train(small_config(small), small / "run", progress=stopping_at(1, kill))
    assert not checkpoint.has_checkpoint(small / "run")
    build = runs.build_detector

    def other(config: Config, num_classes: int, *, pretrained: bool) -> torch.nn.Module:
        detector = build(config, num_classes, pretrained=pretrained)
        detector.backbone.conv.weight.data += 1
        return detector

    with monkeypatch.context() as patch:
        patch.setattr(runs, "build_detector", other)
        with pytest.raises(UserError, match=r"backbone\.weights: the pretrained weights are not those"):
            resume(small / "run")
    resume(small / "run")


def kill() -> None:
    raise RuntimeError("killed")


@pytest.mark.parametrize("name", [RUN_FILE, PHOTOS_FILE])
@pytest.mark.parametrize("text", [None, "", '{"format": 1, "photos": 3}'])
def test_a_damaged_record_is_refused_by_name(stopped: Path, name: str, text: str | None) -> None:
    content = (stopped / name).read_text() if text is None else text
    (stopped / name).write_text(content.replace("photo1", "photo7").replace("bar", "rab"))
    with pytest.raises(UserError, match=f"run/{name}: "):
        resume(stopped)


def test_a_record_of_wrong_types_is_refused_by_name(tmp_path: Path) -> None:
    good = {"format": 1, "settings": {}, "classes": ["a"], "digests": {"weights": "0"}}
    assert RunIdentity.read(tmp_path) is None
    for name, value in (("settings", 3), ("classes", None), ("digests", {}), ("digests", 3)):
        storage.write_checked_json(tmp_path / RUN_FILE, {**good, name: value})
        with pytest.raises(UserError, match=r"run\.json: field"):
            RunIdentity.read(tmp_path)
    storage.write_checked_json(tmp_path / RUN_FILE, good)
    identity = RunIdentity.read(tmp_path)
    assert identity is not None and identity.classes == ("a",)
    for photos in (3, {"a": 3}, {"a": [1, 2]}, {"a": ["1", 2, "s", "t", "b"]}):
        storage.write_checked_json(tmp_path / PHOTOS_FILE, {"format": 1, "photos": photos})
        with pytest.raises(UserError, match=r"photos\.json: "):
            identity.with_photos(tmp_path)


# ---------------------------------------------------------------- detecting and reporting


def test_detecting_and_reporting_refuse_edited_settings(small: Path, stopped: Path) -> None:
    change_a_setting(small)
    for use in (lambda: detect(stopped, [small / "photos"]), lambda: report([stopped], small / "report.html")):
        with pytest.raises(UserError, match=r"criterion\.contrast\.temperature was 0\.2"):
            use()
    assert not (small / "report.html").exists()


def test_an_unfinished_run_is_said_to_be_one(small: Path, stopped: Path) -> None:
    words = r"run: trained for 3 of 6 iterations; continue with `tag2box train --out .+run --resume`"
    with pytest.warns(UserWarning, match=words):
        detect(stopped, [small / "photos"])
    with pytest.warns(UserWarning, match=words):
        report([stopped], small / "report.html")


def test_a_report_repeats_what_training_warned_of(small: Path) -> None:
    train(small_config(small), small / "run")
    events.EventLog(small / "run").write("warning", {"iteration": 5, "problem": "the loss was 90 times its median"})
    with pytest.warns(UserWarning, match="run: iteration 5: the loss was 90 times its median"):
        report([small / "run"], small / "report.html")


# ---------------------------------------------------------------- one process per folder


def test_a_folder_is_claimed_before_anything_is_written(small: Path) -> None:
    (small / "run").mkdir()
    with locked(small / "run" / LOCK, "trains"):
        before = tree(small)
        with pytest.raises(Busy, match="run: another process trains here; wait until it is done"):
            train(small_config(small), small / "run")
        assert tree(small) == before
    train(small_config(small), small / "run")
    assert not (small / "run" / LOCK).exists()


def test_a_mistake_leaves_no_folder(small: Path) -> None:
    (small / "tags.csv").write_text("image,tags\nphoto0.jpg,\n")
    with pytest.raises(UserError, match="no photo has a tag"):
        train(small_config(small), small / "deep" / "down" / "run")
    assert not (small / "deep").exists()


def test_leftovers_of_killed_processes_are_removed(stopped: Path) -> None:
    owner = ".000000-1-00000000"
    for name in (f".checkpoint-000004{owner}", ".checkpoint-000004"):
        (stopped / name).mkdir()
        (stopped / name / "model.safetensors").write_bytes(b"half")
    (stopped / f".state.json{owner}").write_text("{")
    for path in stopped.glob(f".*{owner}"):
        os.utime(path, (0, 0))  # of another machine, long ago
    resume(stopped)
    assert not [path.name for path in stopped.iterdir() if path.name.startswith(".")]


def test_settings_of_a_run_are_compared_as_they_are_written(small: Path) -> None:
    config = small_config(small)
    train(config, small / "run")
    identity = RunIdentity.read(small / "run")
    assert identity is not None
    identity.check_settings(runs.read_config(small / "run"), Path("config.toml"))
    for change in ("plan.seed=1", "criterion.labeler.kind=oicr", "heads.stages=2", "proposals.max_boxes=13"):
        with pytest.raises(UserError, match=change.split("=")[0]):
            identity.check_settings(settings.load(Config, [], [change], base=config), Path("config.toml"))


def test_a_file_of_weights_counts_by_content_while_it_is_there(tmp_path: Path) -> None:
    file = tmp_path / "weights.pth"
    file.write_bytes(b"x")
    config = settings.load(Config, [], ["backbone.kind=vgg16", f"backbone.weights={file}"])
    identity = RunIdentity({"backbone.weights": f"sha256:{storage.file_digest(file)}"}, (), "", {})
    identity.check_settings(config, tmp_path)
    file.write_bytes(b"other")
    with pytest.raises(UserError, match=r"backbone\.weights was \"sha256:"):
        identity.check_settings(config, tmp_path)
    file.unlink()  # a checkpoint has all weights
    identity.check_settings(config, tmp_path)
