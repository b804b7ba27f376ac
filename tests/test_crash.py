"""Power cuts during storage actions, simulated: every state that may be left opens as the old or the new version."""

from __future__ import annotations

import functools
import random
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest
import torch

from crash_simulator import Recording, check, crash_states, record, write_tree
from tag2box import identity, io, runs, storage
from tag2box.annotations import Detections, Photo
from tag2box.cli.train import resume, train
from tag2box.formats.detection_log import DetectionLog
from tag2box.images import View
from tag2box.labels.journal import Journal, read_history
from tag2box.labels.label_set import LabelSet
from tag2box.labels.labelled import LabelBox, LabelledPhoto, LabelledPhotos
from tag2box.labels.reviews import Action as ReviewAction, BoxState
from tag2box.models.backbone import Preprocess
from tag2box.models.weights import state_dict, weight_cache
from tag2box.ops.superpixels import Superpixels
from tag2box.proposals import shards, store
from tag2box.proposals.base import Candidates
from tag2box.training import checkpoint, events
from tag2box.training.feature_cache import FeatureCache, RoiMaps
from tag2box.training.optim import Sgd
from tag2box.training.proposal_cache import build_superpixel_cache
from tiny import TinyBackbone, tiny_detector, tiny_photos, tiny_store
from tiny_world import same, small_config, small_data, small_network, weights

Done = Callable[[], None]


@dataclass(frozen=True)
class Action:
    """Something that is stored, in a folder: ``write`` calls its argument after each version."""

    prepare: Callable[[Path], object]
    write: Callable[[Path, Done], object]
    read: Callable[[Path], object]
    versions: tuple[object, ...]
    again: Callable[[Path], object] | None = None  # after a restart: writes the last version, removes leftovers

    def record(self, folder: Path) -> Recording:
        folder.mkdir()
        self.prepare(folder)
        return record(folder, lambda done: self.write(folder, done))


def nothing(folder: Path) -> None:
    """A folder that is empty before the action."""


def never() -> None:
    """Success that is reported to no one."""


# ---------------------------------------------------------------- files and folders


def write_values(folder: Path, done: Done) -> None:
    for value in (2, 3):
        io.write_json(folder / "results" / "a.json", {"value": value})
        done()


def read_value(folder: Path) -> object:
    path = folder / "results" / "a.json"
    return io.read_json(path, "a value")["value"] if path.exists() else None


def write_checked(folder: Path, done: Done) -> None:
    for value in (2, 3):
        storage.write_checked_json(folder / "state.json", {"format": 1, "value": value})
        done()


def read_checked(folder: Path) -> object:
    path = folder / "state.json"
    return storage.read_checked_json(path, "a state", "write it again")["value"] if path.exists() else None


def write_folder(folder: Path, done: Done) -> None:
    with io.replacing_folder(folder / "made" / "new") as temporary:
        (temporary / "a").write_text("first")
        (temporary / "b").write_text("second")
        storage.write_manifest(temporary)
    done()


def read_folder(folder: Path) -> object:
    made = folder / "made" / "new"
    if not made.exists():
        return None
    storage.verify_folder(made, "write it again")
    return {path.name: path.read_text() for path in made.iterdir() if path.name != storage.MANIFEST}


# ---------------------------------------------------------------- a run


@functools.cache
def weights_of(iteration: int) -> dict[str, torch.Tensor]:
    return tiny_detector(2, seed=iteration).state_dict()


DETECTOR = tiny_detector(2)  # weights are read into it, again and again


def save(folder: Path, iteration: int) -> None:
    detector = tiny_detector(2)
    detector.load_state_dict(weights_of(iteration))
    optimizer = Sgd().build(detector)
    checkpoint.save(folder / "run", detector, optimizer, iteration=iteration, classes=("a", "b"), seconds=0.5)


def save_two(folder: Path, done: Done) -> None:
    for iteration in (2, 3):  # two are kept: the second save removes the checkpoint of iteration 1
        save(folder, iteration)
        done()


def save_again(folder: Path) -> None:
    io.sweep(folder / "run")  # as a command does that claims the run
    save(folder, 3)


def read_checkpoint(folder: Path) -> object:
    """The iteration whose weights a run has; all files of the checkpoint are read."""
    run = folder / "run"
    if not checkpoint.has_checkpoint(run):
        return None
    state = checkpoint.read_state(run)
    checkpoint.load_model(run, state, DETECTOR)
    checkpoint.load_optimizer(run, state, Sgd().build(DETECTOR))
    expected = weights_of(state.iteration)
    assert all(torch.equal(value, expected[name]) for name, value in DETECTOR.state_dict().items()), "mixed weights"
    return state.iteration


def write_events(folder: Path, done: Done) -> None:
    log = events.EventLog(folder / "run")
    for number in range(3):
        log.write("step", {"number": number})
        done()


def read_log(folder: Path) -> object:
    if not (folder / "run" / events.EVENTS_FILE).exists():
        return ()
    return tuple(event["number"] for event in events.read_events(folder / "run"))


# ---------------------------------------------------------------- proposals

PHOTOS = [Photo(f"photo{i}", Path(f"photo{i}.jpg"), 40, 30) for i in range(3)]
SOURCE = {"kind": "tiny"}


def boxes_of(version: int, photo: int) -> Candidates:
    corner = torch.tensor([[version, photo, version + 5.0, photo + 7.0]]).repeat(photo + 1, 1)
    return Candidates(corner, torch.full((photo + 1,), float(version)))


def write_proposals(folder: Path, version: int) -> None:
    store.write_store(folder / "store", SOURCE, PHOTOS, (boxes_of(version, i) for i in range(len(PHOTOS))))


def write_two_stores(folder: Path, done: Done) -> None:
    for version in (2, 3):
        write_proposals(folder, version)
        done()


def write_proposals_again(folder: Path) -> None:
    io.sweep(folder / "store")  # as `propose` does
    write_proposals(folder, 3)


def read_proposals(folder: Path) -> object:
    """The version of a store, all of whose boxes are read."""
    if not store.ProposalStore.exists(folder / "store"):
        return None
    opened = store.ProposalStore.open(folder / "store")
    version = int(opened.scores(PHOTOS[0].id)[0])
    for i, photo in enumerate(PHOTOS):
        assert torch.equal(opened.boxes(photo.id), boxes_of(version, i).boxes), "mixed boxes"
        assert torch.equal(opened.scores(photo.id), boxes_of(version, i).scores), "mixed scores"
    return version


def write_shards(folder: Path, done: Done) -> None:
    parts = shards.Shards.open(folder / "store" / "parts", SOURCE)
    for i in range(2):
        parts.add(store.StoreEntry(f"photo{i}", 40, 30), boxes_of(1, i))
        parts.flush()
        done()


def read_shards(folder: Path) -> object:
    """How many photos need no search after a restart."""
    parts = shards.Shards.open(folder / "store" / "parts", SOURCE)
    for photo in parts.entries:
        assert torch.equal(parts.candidates(photo).boxes, boxes_of(1, int(photo[-1])).boxes), "mixed boxes"
    return len(parts.entries)


# ---------------------------------------------------------------- features, weights


def features_action(outside: Path, _: pytest.MonkeyPatch) -> Action:
    """The file of one view, then that of another; photos and proposals are elsewhere, on a disk that is not cut off."""
    tagged = tiny_photos(outside, 2)
    boxes = tiny_store(outside, tagged.photos)
    torch.manual_seed(3)
    maps = RoiMaps(TinyBackbone(), tagged.photos, boxes)
    views = (View(48), View(40, flip=True))
    expected = {view: [maps.get(i, view) for i in range(2)] for view in views}

    def write(folder: Path, done: Done) -> None:
        cache = FeatureCache(maps, folder / "maps")
        for view in views:
            cache.build([view])
            done()
        cache.close()

    def read(folder: Path) -> object:
        """How many views need no computation after a restart."""
        cache = FeatureCache(maps, folder / "maps")
        stored = [path for path in folder.glob("maps/*") if not path.name.startswith(".") and path.suffix == ".f16"]
        for view in views:
            for i, features in enumerate(expected[view]):
                assert torch.equal(cache.get(i, view), features), "wrong features"
        cache.close()
        return len(stored)

    return Action(nothing, write, read, (0, 1, 2), lambda folder: write(folder, never))


def weights_action(_: Path, monkeypatch: pytest.MonkeyPatch) -> Action:
    tensors = {"a": torch.arange(6.0), "b": torch.ones(2, 2)}
    preprocess = Preprocess(order="rgb", scale=1.0, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    weights = state_dict.Weights("lite0", preprocess, tensors)

    def write(folder: Path, done: Done) -> None:
        monkeypatch.setenv("TAG2BOX_HOME", f"{folder}")
        weight_cache.store("mine", weights, weight_cache.Origin("a file", "MIT", "0" * 64))
        done()

    def read(folder: Path) -> object:
        monkeypatch.setenv("TAG2BOX_HOME", f"{folder}")
        path = weight_cache.stored_path("mine")
        if not path.exists():
            return None
        weight_cache.verify(path)
        stored = state_dict.read_state_dict(path)
        return {name: value.tolist() for name, value in stored.items()}

    stored = {name: value.tolist() for name, value in tensors.items()}
    return Action(nothing, write, read, (None, stored), lambda folder: write(folder, never))


def superpixels_action(outside: Path, _: pytest.MonkeyPatch) -> Action:
    tagged = tiny_photos(outside, 2)
    boxes = tiny_store(outside, tagged.photos)
    arguments = (tagged.photos, boxes, Superpixels(min_size=20))
    expected = build_superpixel_cache(*arguments, outside / "scores", workers=1)

    def write(folder: Path, done: Done) -> None:
        build_superpixel_cache(*arguments, folder / "scores", workers=1)
        done()

    def read(folder: Path) -> object:
        """Whether nothing needs to be computed after a restart."""
        stored = [path for path in folder.glob("scores/[!.]*") if path.suffix in {".npy", ".json"}]
        is_stored = len(stored) == 2
        cache = build_superpixel_cache(*arguments, folder / "scores", workers=1)
        for photo in tagged.photos:
            assert torch.equal(cache(photo.id), expected(photo.id)), "wrong scores"
        return is_stored

    return Action(nothing, write, read, (False, True), lambda folder: write(folder, never))


def detections_action(outside: Path, _: pytest.MonkeyPatch) -> Action:
    """The log of an unfinished `detect`."""
    tagged = tiny_photos(outside, 3)
    boxes = tiny_store(outside, tagged.photos)
    found = [Detections(torch.full((i, 4), 1.5), torch.rand(i), torch.arange(i)) for i in range(3)]

    def write(folder: Path, done: Done) -> None:
        log = DetectionLog(folder / "log")
        log.open({"weights": "a"})
        for photo, detections in zip(tagged.photos, found, strict=True):
            log.add(photo, boxes, detections)
            log.flush()
            done()
        log.close()

    def read(folder: Path) -> object:
        """How many photos need no detection after a restart."""
        log = DetectionLog(folder / "log")
        log.open({"weights": "a"})
        finished = log.finished(tagged.photos, boxes)
        for i, name in enumerate(finished):
            assert name == tagged.photos[i].id
            assert torch.equal(finished[name].scores, found[i].scores), "wrong detections"
        return len(finished)

    return Action(nothing, write, read, (0, 1, 2, 3))


def write_identity(folder: Path, done: Done) -> None:
    stamp = storage.FileStamp(10, 20, "0" * 64)
    photos = {"photo0": identity.PhotoIdentity(stamp, "tags", "boxes")}
    identity.RunIdentity({"plan.seed": "0"}, ("a", "b"), "weights", photos).write(folder / "run")
    done()


def read_identity(folder: Path) -> object:
    found = identity.RunIdentity.read(folder / "run")
    return None if found is None else list(found.with_photos(folder / "run").photos)


# ---------------------------------------------------------------- a review

REVIEWED = ("photo0", "photo1")


def make_labels(folder: Path) -> None:
    photos = tuple(
        LabelledPhoto(name, f"{name}.jpg", 40, 30, ("a",), (LabelBox((1, 2, 9, 9), "a", 0.5, source="label"),))
        for name in REVIEWED
    )
    LabelSet(LabelledPhotos(folder, ("a",), photos)).write(folder / "labels")


def review_photos(folder: Path, done: Done) -> None:
    """Two photos, of each the box is rejected, then the photo is done: success is reported after each action."""
    labels = LabelSet.open(folder / "labels")
    with Journal(folder / "labels", labels) as journal:
        for name in REVIEWED:
            rejected = ReviewAction("reject", {0: BoxState((1, 2, 9, 9), "a", "rejected")})
            for revision, action in enumerate((rejected, ReviewAction("done"))):
                if journal.history.state(name).revision == revision:
                    journal.append(name, action, based_on=revision, key=f"{name} {revision}")
                    done()


def read_review(folder: Path) -> object:
    """How many actions of each photo are stored; a photo that is done has no box left."""
    labels = LabelSet.open(folder / "labels")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a line that was cut short
        history = read_history(folder / "labels", labels)
    assert all(photo.boxes == () for photo in history.reviews().photos.values()), "another review"
    return tuple(history.state(name).revision for name in REVIEWED)


# ---------------------------------------------------------------- the tests

ACTIONS = {
    "JSON file": Action(nothing, write_values, read_value, (None, 2, 3)),
    "checked JSON file": Action(nothing, write_checked, read_checked, (None, 2, 3)),
    "folder": Action(nothing, write_folder, read_folder, (None, {"a": "first", "b": "second"})),
    "checkpoints": Action(lambda folder: save(folder, 1), save_two, read_checkpoint, (1, 2, 3), save_again),
    "events": Action(nothing, write_events, read_log, ((), (0,), (0, 1), (0, 1, 2))),
    "store": Action(
        lambda folder: write_proposals(folder, 1),
        write_two_stores,
        read_proposals,
        (1, 2, 3),
        write_proposals_again,
    ),
    "shards": Action(nothing, write_shards, read_shards, (0, 1, 2), lambda folder: write_shards(folder, never)),
    "identity of a run": Action(nothing, write_identity, read_identity, (None, ["photo0"])),
    "reviews": Action(
        make_labels,
        review_photos,
        read_review,
        ((0, 0), (1, 0), (2, 0), (2, 1), (2, 2)),
        lambda folder: review_photos(folder, never),
    ),
    "features": features_action,
    "superpixels": superpixels_action,
    "detections": detections_action,
    "weights": weights_action,
}


@pytest.fixture
def action(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Action:
    """An action by its name."""
    known = ACTIONS[request.param]
    return known if isinstance(known, Action) else known(tmp_path, monkeypatch)


@pytest.mark.parametrize("action", ACTIONS, indirect=True)
def test_every_state_opens_as_the_old_or_the_new_version(action: Action, tmp_path: Path) -> None:
    recording = action.record(tmp_path / "written")
    assert action.read(tmp_path / "written") == action.versions[-1]
    report = check(recording, action.read, action.versions, then=action.again)
    assert report.states > len(action.versions)
    assert not report.broken, "\n".join(report.broken[:3])


@pytest.mark.parametrize("action", ACTIONS, indirect=True)
def test_without_fsync_the_simulator_finds_broken_states(
    action: Action, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(io, "sync", lambda path: None)
        recording = action.record(tmp_path / "written")
    assert action.read(tmp_path / "written") == action.versions[-1]
    assert check(recording, action.read, action.versions, stop_at_first=True).broken


@pytest.mark.parametrize("name", ["JSON file", "checked JSON file"])
def test_each_single_fsync_is_needed(name: str, tmp_path: Path) -> None:
    action = ACTIONS[name]
    recording = action.record(tmp_path / "written")
    for position in recording.syncs:
        report = check(recording.without(position), action.read, action.versions, stop_at_first=True)
        assert report.broken, f"{recording.log[position]} ({position}) could be left out"


def test_a_training_resumes_after_a_power_cut_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of the states of a whole command: the weights are those of the undisturbed run."""
    small_network(monkeypatch)
    small_data(tmp_path / "data")
    config = small_config(tmp_path / "data", "plan.iterations=4", "plan.gallery=0")
    disk = tmp_path / "disk"
    disk.mkdir()
    recording = record(disk, lambda done: (train(config, disk / "run"), done()))
    expected, rng = weights(disk / "run"), random.Random(0)
    for position in sorted(rng.sample(range(len(recording.log) + 1), 24)):
        state = rng.choice(list(islice(crash_states(recording, position), 40)))
        shutil.rmtree(disk)
        write_tree(state, disk)
        resume(disk / "run") if runs.has_run(disk / "run") else train(config, disk / "run")
        assert same(weights(disk / "run"), expected), f"power cut after {recording.log[position - 1]}"
        assert not list(disk.rglob(".*"))
