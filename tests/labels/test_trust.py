"""Trust in label sets: verdicts from reviews, files that are refused, labels and detections after calibration."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from tag2box.annotations import Detections
from tag2box.cli.label_trust import read_trust, selected, trust
from tag2box.errors import UserError
from tag2box.formats.export import export_labels
from tag2box.labels.calibration import Calibration
from tag2box.labels.label_set import LabelSet
from tag2box.labels.labelled import LabelBox, LabelledPhoto, LabelledPhotos
from tag2box.labels.reviews import Reviews, Verdict, compared_reviews
from tag2box.labels.trust import TRUST_FILE, Trust, TrustRule, advice
from tag2box.labels.trust_measure import measure_trust
from tag2box.reporting.sections import render_page
from tag2box.reporting.trust_page import build_trust_page
from tag2box.storage import write_checked_json
from tiny_world import call

CLASSES = ("cat", "dog", "cow", "yak")
PRECISION = {"cat": 0.95, "dog": 0.5, "cow": 0.1}
RUN = {"folder": "runs/mine", "weights": "w", "settings": "s"}
IDENTITY = {"weights": "w", "settings": "s"}


def box(name: str, left: float, score: float | None = None, **more) -> LabelBox:
    return LabelBox((left, 0.0, left + 10, 10.0), name, score, **more)


def world(photos: int = 60, root: Path = Path()) -> tuple[LabelSet, LabelledPhotos]:
    """A label set of three classes of known precision (the fourth has no label), and the truth."""
    generator = torch.Generator().manual_seed(0)
    made, true = [], []
    for number in range(photos):
        labels, objects = [], [box("cat", 200)]  # a cat that every photo's labels miss
        for place, (name, precision) in enumerate(PRECISION.items()):
            score = float(torch.rand((), generator=generator, dtype=torch.float64)) * 0.8 + 0.1
            right = float(torch.rand((), generator=generator)) < precision
            labels.append(box(name, 50 * place, score, why="best of its tag", margin=0.05, source="label"))
            objects += [box(name, 50 * place + (1 if right else 20))]
        photo = LabelledPhoto(f"p{number}", f"p{number}.png", 240, 40, tuple(PRECISION), tuple(labels))
        made.append(photo)
        true.append(replace(photo, boxes=tuple(objects)))
    content = LabelledPhotos(root, CLASSES, tuple(made))
    return LabelSet(content, RUN, {}, {}, "d" * 64), LabelledPhotos(root, CLASSES, tuple(true))


@pytest.fixture(scope="module")
def found() -> Trust:
    labels, true = world()
    return measure_trust(labels, compared_reviews(labels.content, labels.digest, true))


# ---------------------------------------------------------------- reviews


def test_nothing_reviewed_says_so() -> None:
    labels, true = world(3)
    reviews = compared_reviews(labels.content, labels.digest, true)
    hard = {name: replace(photo, is_sampled=False) for name, photo in reviews.photos.items()}
    for photos, message in (({}, "no photo is reviewed"), (hard, "3 photos are reviewed, none of the random sample")):
        with pytest.raises(UserError, match=message):
            measure_trust(labels, Reviews(labels.digest, photos))
    with pytest.raises(UserError, match="belong to other labels"):
        measure_trust(labels, Reviews("e" * 64, reviews.photos))


def test_hard_photos_do_not_count() -> None:
    labels, true = world(40)
    reviews = compared_reviews(labels.content, labels.digest, true)
    wrong = {
        name: replace(photo, is_sampled=False, verdicts=tuple(replace(v, is_right=False) for v in photo.verdicts))
        for name, photo in list(reviews.photos.items())[20:]
    }
    both = measure_trust(labels, Reviews(labels.digest, {**reviews.photos, **wrong}))
    alone = measure_trust(labels, Reviews(labels.digest, dict(list(reviews.photos.items())[:20])))
    assert (both.photos, both.sampled) == (40, 20)
    assert both.classes == alone.classes


def test_corrected_boxes_match_one_to_one() -> None:
    labels = (box("cat", 0, 0.4), box("cat", 1, 0.9), box("dog", 50, 0.8), box("cow", 100, 0.7), box("cat", 150, 0.5))
    photo = LabelledPhoto("a", "a.png", 240, 40, (), (*labels, box("cat", 220, 0.3, is_doubtful=True)))
    truth = (box("cat", 1), box("cat", 50), box("cow", 102), box("cat", 150, is_doubtful=True))
    reviews = compared_reviews(
        LabelledPhotos(Path(), CLASSES, (photo,)), "d", LabelledPhotos(Path(), CLASSES, (replace(photo, boxes=truth),))
    )
    verdicts = {v.box: (v.decision, v.is_right) for v in reviews.verdicts()}
    assert verdicts == {
        labels[0]: ("rejected", False),  # its object has a label of a higher score
        labels[1]: ("accepted", True),
        labels[2]: ("rejected", False),  # another class
        labels[3]: ("corrected", True),
    }, "a label on an ignore region has no verdict"


# ---------------------------------------------------------------- verdicts


def test_classes_are_judged_by_their_intervals(found: Trust) -> None:
    verdicts = {name: own.verdict for name, own in found.classes.items()}
    assert verdicts == {"cat": "use", "dog": "review more", "cow": "do not use", "yak": "review more"}
    cat, yak = found.classes["cat"], found.classes["yak"]
    assert cat.precision.share is not None and cat.precision.share > 0.9 and cat.precision.interval.low >= 0.7
    assert cat.recall.count == 120 and cat.recall.hits == cat.precision.hits, "every photo has a cat without label"
    assert cat.threshold is not None and cat.more == 0
    assert yak.precision.share is None and not yak.labels
    assert found.overall.precision.count == 180
    words = " ".join(advice(found))
    assert "cow: do not use" in words and "yak: no labels" in words and "dog: " in words and "cat: " not in words


def test_the_rule_decides(found: Trust) -> None:
    labels, true = world()
    reviews = compared_reviews(labels.content, labels.digest, true)
    other = measure_trust(labels, reviews, TrustRule(use_from=0.3, refuse_below=0.05, precision=0.4))
    assert {other.classes[name].verdict for name in ("cat", "dog")} == {"use"}
    assert other.classes["cow"].verdict == "review more"
    assert other.classes["dog"].threshold is not None and found.classes["dog"].threshold is None
    strict = measure_trust(labels, reviews, TrustRule(threshold_by="lower bound", precision=0.99))
    assert strict.classes["cat"].threshold is None
    few = measure_trust(labels, reviews, TrustRule(least=61))
    assert {own.verdict for own in few.classes.values()} == {"review more"}


def test_a_class_with_few_reviews_gets_the_calibration_of_all_shifted_to_it() -> None:
    labels, true = world(20)
    own = measure_trust(labels, compared_reviews(labels.content, labels.digest, true)).classes
    assert not own["cat"].is_own
    assert own["cat"].calibration.one(0.5) > own["dog"].calibration.one(0.5) > own["cow"].calibration.one(0.5)


def test_more_reviews_are_asked_for_only_if_there_are_labels() -> None:
    labels, true = world(12)
    own = measure_trust(labels, compared_reviews(labels.content, labels.digest, true)).classes["dog"]
    assert own.verdict == "review more" and own.more is None, "twelve labels cannot decide"
    found = measure_trust(labels, compared_reviews(labels.content, labels.digest, true))
    assert "dog: no sample decides: correct all of its 12 labels" in advice(found), "and there is no threshold to name"
    few = replace(true, photos=true.photos[:4])
    found = measure_trust(labels, compared_reviews(labels.content, labels.digest, few))
    assert "dog: review 6 more labels, then ask again" in advice(found), "four are no reason to give up on a class"
    wide, part = world(400)[0], world(400)[1]
    sample = replace(part, photos=part.photos[:30])
    own = measure_trust(wide, compared_reviews(wide.content, wide.digest, sample)).classes["dog"]
    assert own.more is not None and 30 < own.more < 370


# ---------------------------------------------------------------- files


def test_a_round_trip_and_what_is_refused(found: Trust, tmp_path: Path) -> None:
    path = tmp_path / TRUST_FILE
    found.write(path)
    assert Trust.read(path) == found
    assert read_trust(path, IDENTITY) == found
    for name in ("weights", "settings"):
        with pytest.raises(UserError, match=f"of a run with other {name}"):
            read_trust(path, {**IDENTITY, name: "other"})
    replace(found, run={**RUN, "trust": "d"}).write(path)
    with pytest.raises(UserError, match="had calibrated scores"):
        read_trust(path, IDENTITY)
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"photos": 1}))
    with pytest.raises(UserError, match="damaged"):
        Trust.read(path)
    labels = replace(world(1)[0], digest="other")
    with pytest.raises(UserError, match="belongs to other labels"):
        found.check_labels(labels, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "checkpoint"}, "expected a file of `tag2box trust`"),
        ({"format": 99}, "expected a file of `tag2box trust`"),
        ({"photos": "many"}, "photos: "),
        ({"rule": {"precision": 7}}, "rule.precision: "),
        ({"classes": {"cat": {}}}, "classes.cat."),
        ({"overall": None}, "overall: "),
    ],
)
def test_a_file_of_something_else_is_one_line(found: Trust, tmp_path: Path, change, message) -> None:
    path = tmp_path / TRUST_FILE
    found.write(path)
    content = json.loads(path.read_text())
    content.pop("sha256")
    write_checked_json(path, content | change)
    with pytest.raises(UserError) as error:
        Trust.read(path)
    assert message in str(error.value) and len(str(error.value).splitlines()) == 1


# ---------------------------------------------------------------- applied


def test_labels_below_the_threshold_become_ignore_regions_and_none_is_lost(found: Trust) -> None:
    cat = found.classes["cat"]
    half = replace(cat, threshold=0.5, calibration=Calibration("beta", slopes=(2.0, 1.0, 0.0)))
    changed = replace(found, classes={**found.classes, "cat": half})
    boxes = (
        box("cat", 0, 0.4, why="best of its tag", margin=0.1),
        box("cat", 50, 0.5),
        box("cow", 100, 0.99, why="best of its tag"),
        box("dog", 150, 0.9),  # 90 % are not reached at any score
        box("cat", 200, None),
    )
    made = changed.label_boxes(boxes)
    assert [own.is_doubtful for own in made] == [True, False, True, True, False]
    assert [own.box for own in made] == [own.box for own in boxes]
    assert made[0].score == pytest.approx(half.calibration.one(0.4)) and made[4].score is None
    assert made[0].margin == pytest.approx(half.calibration.one(0.4) - half.calibration.one(0.3))
    dropping = replace(changed, rule=TrustRule(unusable="drop"))
    assert [own.name for own in dropping.label_boxes(boxes)] == ["cat", "cat", "dog", "cat"]


def test_detections_get_probabilities_and_the_threshold_of_their_class(found: Trust) -> None:
    half = replace(found.classes["cat"], threshold=0.5, calibration=Calibration("beta", slopes=(2.0, 1.0, 0.0)))
    changed = replace(found, classes={**found.classes, "cat": half})
    scores = torch.tensor([0.49, 0.5, 0.9, 0.9])
    given = {"a": Detections(torch.rand(4, 4), scores, torch.tensor([0, 0, 2, 1])), "empty": Detections.empty()}
    every, kept = selected(given, CLASSES, changed, None)
    assert every["a"].scores[:2].tolist() == pytest.approx([half.calibration.one(0.49), half.calibration.one(0.5)])
    assert every["a"].scores.dtype == torch.float32
    assert kept["a"].labels.tolist() == [0] and kept["a"].scores.tolist() == pytest.approx([half.calibration.one(0.5)])
    assert len(every["empty"]) == len(kept["empty"]) == 0
    assert len(selected(given, CLASSES, changed, 0.0)[1]["a"]) == 4
    plain, best = selected(given, CLASSES, None, None)
    assert plain == given and len(best["a"]) == 4
    assert len(selected(given, CLASSES, None, 0.6)[1]["a"]) == 2


# ---------------------------------------------------------------- the page and the command


def test_the_page_shows_every_class_and_is_complete(found: Trust) -> None:
    page = render_page(build_trust_page(found, "labels <1>"))
    assert "labels &lt;1&gt;" in page
    ids, links = (set(re.findall(pattern, page)) for pattern in (r'<section id="([a-z]+)"', r'href="#([a-z]+)"'))
    assert links <= ids and {"verdicts", "next", "scores", "thresholds", "method"} <= ids
    for words in (*CLASSES, "do not use", "review more", "not reached", "Clopper and Pearson", "calibration error"):
        assert words in page
    assert page.count('class="whisker"') == len(CLASSES) + 1


def test_a_page_of_almost_nothing() -> None:
    labels, true = world(1)
    empty = {name: replace(photo, verdicts=(), boxes=()) for name, photo in
             compared_reviews(labels.content, labels.digest, true).photos.items()}  # fmt: skip
    found = measure_trust(labels, Reviews(labels.digest, empty))
    assert "Too few reviews" in render_page(build_trust_page(found, "labels"))
    assert {own.verdict for own in found.classes.values()} == {"review more"}
    unscored = tuple(Verdict(replace(box("cat", 0)), "accepted") for _ in range(12))
    found = measure_trust(labels, Reviews(labels.digest, {k: replace(v, verdicts=unscored) for k, v in empty.items()}))
    assert found.classes["cat"].precision.hits == 12 and found.classes["cat"].curve == ()


def test_the_command_reads_boxes_corrected_elsewhere(tmp_path: Path, monkeypatch, capsys) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    labels, true = world(30, photos)
    for photo in labels.content.photos:
        Image.new("RGB", (240, 40)).save(photos / photo.file)
    labels.write(tmp_path / "labels")
    export_labels("coco", tmp_path / "corrected.json", replace(true, photos=true.photos[:25]))
    done = call(
        ["trust", f"{tmp_path / 'labels'}", "--reviewed", f"{tmp_path / 'corrected.json'}", "--precision", "0.8",
         "--set", "use_from=0.6", "--out", f"{tmp_path / 'trust.html'}"],
        monkeypatch, capsys,
    )  # fmt: skip
    assert done.code == 0, done
    assert "80 % from" in done.out and "25 photos of the random sample count" in done.out
    assert (tmp_path / "trust.html").read_text().startswith("<!doctype html>")
    found = Trust.read(tmp_path / "labels" / TRUST_FILE)
    assert (found.rule.use_from, found.rule.precision, found.sampled) == (0.6, 0.8, 25)
    found.check_labels(LabelSet.open(tmp_path / "labels"), tmp_path)
    replace(found, labels_digest="other").write(tmp_path / "labels" / TRUST_FILE)
    with pytest.raises(UserError, match="belongs to other labels than those beside it"):
        read_trust(tmp_path / "labels" / TRUST_FILE, IDENTITY)


def test_bad_input_of_the_command_is_one_line(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    labels, true = world(2, photos)
    for photo in labels.content.photos:
        Image.new("RGB", (240, 40)).save(photos / photo.file)
        Image.new("RGB", (240, 40)).save(photos / f"other-{photo.file}")
    labels.write(tmp_path / "labels")
    others = tuple(replace(photo, id=f"other-{photo.id}", file=f"other-{photo.file}") for photo in true.photos)
    export_labels("coco", tmp_path / "others.json", replace(true, photos=others))
    with pytest.raises(UserError, match="none of its 2 photos is one of the label set"):
        trust(tmp_path / "labels", reviewed=tmp_path / "others.json")
    renamed = replace(true, classes=("cats", *CLASSES[1:]), photos=tuple(replace(p, tags=(), boxes=()) for p in others))
    export_labels("coco", tmp_path / "renamed.json", renamed)
    with pytest.raises(UserError, match="class 'cats' is not one of the classes of the label set; did you mean 'cat'"):
        trust(tmp_path / "labels", reviewed=tmp_path / "renamed.json")
    with pytest.raises(UserError, match="use_form"):
        trust(tmp_path / "labels", reviewed=tmp_path / "others.json", overrides=["use_form=0.8"])
    with pytest.raises(UserError, match=r"no reviews|no photo is reviewed"):
        trust(tmp_path / "labels")
    assert not (tmp_path / "labels" / TRUST_FILE).exists()
