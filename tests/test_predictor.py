"""``tag2box.load``: a run that stays in memory, called with images of every kind."""

from __future__ import annotations

import rlcompleter
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

import tag2box
from tag2box import predictor, runs
from tag2box.annotations import Detections, Photo
from tag2box.cli.detect import detect
from tag2box.cli.student import train_student
from tag2box.cli.train import train
from tag2box.errors import UserError
from tag2box.images import View, load_view, read_photo
from tag2box.predictor import Prediction, Predictor, to_pixels
from tiny import tiny_photos
from tiny_student import SMALL, tiny_labels
from tiny_world import small_config, small_data, small_network


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with class maps that choose among its proposals."""
    folder = tmp_path_factory.mktemp("trained")
    small_data(folder)
    tiny_photos(folder / "new", 5)
    with pytest.MonkeyPatch.context() as patch:
        small_network(patch)
        more = ("adaptation.epochs=1", "adaptation.side=32", "adaptation.keep_boxes=6", "plan.iterations=1",
                "inference.prior.evidence=1.0")  # fmt: skip
        train(small_config(folder, *more), folder / "run")
    return folder


@pytest.fixture
def model(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Predictor:
    small_network(monkeypatch)
    return tag2box.load(trained / "run")


@pytest.fixture
def photos(trained: Path) -> list[Path]:
    return sorted((trained / "new" / "photos").iterdir())


def same(a: Detections, b: Detections) -> bool:
    return all(torch.equal(getattr(a, name), getattr(b, name)) for name in ("boxes", "scores", "labels"))


def test_a_file_gives_the_boxes_of_the_command(model, trained, photos):
    found = detect(trained / "run", photos, min_score=0.05)
    batch = model(photos, min_score=0.05)
    assert sum(map(len, batch)) > 0
    assert [one.photo.path for one in batch] == photos
    assert all(same(one.detections, found[path.stem]) for one, path in zip(batch, photos, strict=True))
    assert same(model(str(photos[1]), min_score=0.05).detections, found[photos[1].stem])


def pixels(path: Path) -> np.ndarray:
    return read_photo(path).permute(1, 2, 0).numpy()


KINDS: dict[str, Callable[[Path], object]] = {
    "path": lambda path: path,
    "text": str,
    "PIL": Image.open,
    "array": pixels,
    "read-only array": lambda path: np.broadcast_to(pixels(path), pixels(path).shape),
    "array with alpha": lambda path: np.dstack([pixels(path), np.full(pixels(path).shape[:2], 255, np.uint8)]),
    "array of floats": lambda path: pixels(path) / 255,
    "tensor": read_photo,
    "tensor of floats": lambda path: read_photo(path) / 255,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_image_gives_the_same_boxes(kind, model, photos):
    image = KINDS[kind](photos[0])
    found = model(image, min_score=0)
    assert len(found) > 0
    assert same(found.detections, model(photos[0], min_score=0).detections)
    (in_batch,) = model((image,), min_score=0)
    assert same(in_batch.detections, found.detections)


def test_a_student_gives_the_boxes_of_the_command(tmp_path):
    train_student(tiny_labels(tmp_path), tmp_path / "run", overrides=(*SMALL, "plan.iterations=1"))
    photos = sorted((tmp_path / "photos").iterdir())
    student, found = tag2box.load(tmp_path / "run"), detect(tmp_path / "run", photos, min_score=0)
    for path, one in zip(photos, student(photos, min_score=0), strict=True):
        assert len(one) > 0 and same(one.detections, found[path.stem])
        assert same(student(pixels(path), min_score=0).detections, found[path.stem])
    assert student([]) == [] and student.classes == runs.open_run(tmp_path / "run").classes


def test_no_images_give_no_predictions(model):
    assert model([]) == []


def test_a_large_image_in_memory_gives_the_boxes_of_its_lossless_file(model, tmp_path):
    """Both are reduced before they are resized; in full, they would give others."""
    rng = np.random.default_rng(0)
    large = np.asarray(Image.fromarray(rng.integers(0, 255, (30, 40, 3), dtype=np.uint8)).resize((640, 480), 0))
    Image.fromarray(large).save(tmp_path / "large.png")
    found = model(large, min_score=0)
    assert len(found) > 0
    assert same(found.detections, model(tmp_path / "large.png", min_score=0).detections)
    whole = Photo("large", tmp_path / "large.png", 640, 480)
    small = predictor.as_photo(large)
    assert torch.equal(load_view(whole, View(48)), load_view(small, View(48)))


GREY = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (GREY, GREY),
        (GREY[..., None], GREY),
        (torch.from_numpy(GREY), GREY),
        (torch.from_numpy(GREY)[None], GREY),
        (GREY.astype(np.uint16) * 257, GREY),
        (GREY / 255, GREY),
        (Image.fromarray(GREY), GREY),
        (np.zeros((2, 3, 4), np.uint8), np.full((2, 3), 255)),  # all transparent
        (torch.zeros(4, 2, 3, dtype=torch.uint8), np.full((2, 3), 255)),
        (torch.ones(3, 2, 3, dtype=torch.float64), np.full((2, 3), 255)),
        (torch.ones(3, 2, 3, requires_grad=True), np.full((2, 3), 255)),
    ],
)
def test_pixels_of_grey_and_transparent_images(given, expected):
    made = to_pixels(given)
    assert made.dtype == torch.uint8
    assert all(np.array_equal(channel.numpy(), expected) for channel in made)


def test_rotation_of_a_pil_image_is_the_callers_business_that_of_a_file_is_ours(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 20)).save(tmp_path / "turned.jpg", exif=exif)
    with Image.open(tmp_path / "turned.jpg") as image:
        held, file = predictor.as_photo(image), predictor.as_photo(tmp_path / "turned.jpg")
    assert (held.width, held.height) == (40, 20)
    assert (file.width, file.height) == (20, 40)


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (np.zeros((0, 4, 3), np.uint8), "4x0 pixels"),
        (np.zeros((2, 4, 4, 3), np.uint8), "several images are a list"),
        (torch.zeros(2, 3, 4, 4), "several images are a list"),
        (np.zeros((3, 8, 9), np.uint8), r"an array of shape \(3, 8, 9\): expected \(H, W, 3\)"),
        (torch.zeros(8, 9, 3), r"a tensor of shape \(8, 9, 3\): expected \(3, H, W\)"),
        (np.full((4, 4, 3), 255.0), "values outside 0 to 1"),
        (np.full((4, 4, 3), np.nan), "values outside 0 to 1"),
        (np.zeros((4, 4, 3), np.int64), "int64: expected bytes"),
        (np.zeros((4, 4, 3), np.uint16), "uint16: expected bytes"),
        (b"photo.jpg", "bytes: no image; expected a path"),
        (None, "NoneType: no image"),
    ],
)
def test_what_is_no_image_is_refused(image, words):
    with pytest.raises(UserError, match=words):
        predictor.as_photo(image)


def test_mistakes_are_one_line(model, trained, photos, tmp_path):
    with pytest.raises(UserError, match=r"no such photo; did you mean photo1\.jpg"):
        model(photos[1].with_suffix(".png"))
    with pytest.raises(UserError, match="is a folder; give a list of photos"):
        model(photos[0].parent)
    with pytest.raises(UserError, match="min_score 30: expected a number from 0 to 1"):
        model(photos[0], min_score=30)
    with pytest.raises(UserError, match="no run here"):
        tag2box.load(tmp_path / "nothing")
    cut = tmp_path / "cut.jpg"
    cut.write_bytes(photos[0].read_bytes()[:700])
    with pytest.raises(UserError, match="not readable as a photo"):
        model(cut)


def test_weights_are_loaded_once(trained, photos, monkeypatch):
    small_network(monkeypatch)
    loaded = []
    real = runs.load_run
    monkeypatch.setattr(runs, "load_run", lambda folder: loaded.append(folder) or real(folder))
    model = tag2box.load(trained / "run")
    model(photos[0])
    model(photos[:2])
    assert len(loaded) == 1


def test_a_run_with_imported_proposals_says_at_once_that_it_cannot(trained, monkeypatch):
    small_network(monkeypatch)
    from tag2box.proposals.importers.proposal_files import Imported

    run = runs.load_run(trained / "run")
    monkeypatch.setattr(runs, "load_run", lambda _: replace(run, config=replace(run.config, proposals=Imported())))
    with pytest.raises(UserError, match="boxes are not made here"):
        tag2box.load(trained / "run")


# ---------------------------------------------------------------- predictions

BOXES = torch.tensor([[0.0, 0, 10, 10], [2, 2, 20, 12], [5, 5, 9, 9]])


@pytest.fixture
def found(tmp_path: Path) -> Prediction:
    Image.new("RGB", (32, 24), "white").save(tmp_path / "white.png")
    detections = Detections(BOXES, torch.tensor([0.9, 0.5, 0.2]), torch.tensor([1, 0, 1]))
    return Prediction(detections, ("apple", "pear"), Photo("white", tmp_path / "white.png", 32, 24))


def nothing(found: Prediction) -> Prediction:
    return found[:0]


def test_a_prediction_without_boxes(found):
    none = nothing(found)
    assert len(none) == 0
    assert none.boxes.shape == (0, 4)
    assert (list(none), none.names, none.to_coco()) == ([], [], [])
    assert repr(none) == "Prediction(white.png, 32x24, 0 boxes)"
    assert none.min_score(0.5).only("pear").plot().size == (32, 24)


def test_a_prediction_has_arrays_and_names(found):
    assert isinstance(found.boxes, np.ndarray)
    assert np.array_equal(found.boxes, BOXES.numpy())
    assert found.scores.dtype == np.float32
    assert found.labels.tolist() == [1, 0, 1]
    assert found.names == ["pear", "apple", "pear"]
    assert found.size == (32, 24)
    assert repr(found) == "Prediction(white.png, 32x24, 3 boxes: 2 pear, 1 apple; best score 0.90)"


def test_a_prediction_is_a_sequence_of_boxes(found):
    first, *others = found
    assert first == found[0] == ((0.0, 0.0, 10.0, 10.0), pytest.approx(0.9), 1, "pear")
    assert (first.name, first.label) == ("pear", 1)
    assert found[-1] == others[-1] == found[np.argmin(found.scores)]
    with pytest.raises(IndexError):
        found[3]


def test_predictions_are_filtered(found):
    assert found.min_score(0.5).names == ["pear", "apple"]  # the limit included
    assert found.only("pear").scores.tolist() == pytest.approx([0.9, 0.2])
    assert found.only().names == []
    assert found[found.scores < 0.6].names == ["apple", "pear"]
    assert found[torch.tensor([2, 0])].names == ["pear", "pear"]
    assert found[1:].names == ["apple", "pear"]
    assert found[np.argsort(found.scores)[::-1]].scores.tolist() == found.scores.tolist()
    with pytest.raises(UserError, match="class 'plum': unknown; the classes are apple, pear"):
        found.only("plum")


def test_coco_entries_are_those_of_the_command(model, trained, photos, tmp_path):
    import json

    detect(trained / "run", photos[:1], tmp_path / "boxes.json", min_score=0.05)
    written = json.loads((tmp_path / "boxes.json").read_text())["annotations"]
    made = model(photos[0], min_score=0.05).to_coco(image_id=1)
    assert len(made) > 0
    assert all(entry.pop("file_name") == photos[0].name for entry in made)
    assert made == [{key: entry[key] for key in made[0]} for entry in written]


def test_plot_draws_the_boxes_on_the_image(found):
    drawn = np.asarray(found.plot())
    assert drawn.shape == (24, 32, 3)
    assert (drawn != 255).any()
    in_memory = Prediction(found.detections, found.classes, predictor.as_photo(np.full((24, 32, 3), 255, np.uint8)))
    assert np.array_equal(np.asarray(in_memory.plot()), drawn)


def test_to_supervision_has_names(found, monkeypatch):
    """A stand-in for the package, which need not be installed."""
    monkeypatch.setitem(sys.modules, "supervision", SimpleNamespace(Detections=lambda **given: given))
    made = found.to_supervision()
    assert made["data"]["class_name"].tolist() == ["pear", "apple", "pear"]
    assert np.array_equal(made["xyxy"], found.boxes)


def test_what_a_model_says_of_itself(model, trained):
    assert model.classes == ("bar", "box", "disc")
    assert model.names == {0: "bar", 1: "box", 2: "disc"}
    assert repr(model) == f"Predictor({str(trained / 'run')!r}, 3 classes: bar, box, disc)"


def test_tab_completion_lists_what_there_is(model, photos):
    completer = rlcompleter.Completer({"tag2box": tag2box, "model": model, "found": model(photos[0])})

    def completed(text: str) -> set[str]:
        numbers = count()
        matches = iter(lambda: completer.complete(text, next(numbers)), None)
        return {match.rstrip("()").removeprefix(text.rpartition(".")[0] + ".") for match in matches}

    assert {"load", "load_run"} <= completed("tag2box.l")
    assert {"classes", "names", "folder"} <= completed("model.")
    wanted = {"boxes", "scores", "labels", "names", "plot", "only", "min_score", "to_coco", "to_supervision"}
    assert wanted <= completed("found.")


# ---------------------------------------------------------------- other kinds of runs


@dataclass(frozen=True)
class OneBox:
    """A detector without proposals."""

    classes: tuple[str, ...] = ("thing",)

    def predict(self, photos: Sequence[Photo], /) -> list[Detections]:
        means = [load_view(photo, View(16)).mean().item() / 255 for photo in photos]
        return [Detections(BOXES[:1], torch.tensor([mean]), torch.tensor([0])) for mean in means]


def test_load_takes_another_kind_of_run(tmp_path, monkeypatch):
    monkeypatch.setattr(predictor.runs, "open_run", lambda folder: OneBox())
    model = tag2box.load(tmp_path)
    white, black = model([np.full((20, 20), 255, np.uint8), np.zeros((20, 20), np.uint8)], min_score=0.5)
    assert (white.names, black.names) == (["thing"], [])
