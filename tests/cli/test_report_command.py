"""``report`` as a call: what it gathers, what it makes where it is missing, and what it refuses."""

from __future__ import annotations

import json
import shutil
from html import unescape
from pathlib import Path

import pytest

from tag2box.annotations import Objects, Photo, Truth
from tag2box.cli.evaluate import eval_set, truth_in_order, truth_source
from tag2box.cli.inputs import find_photos
from tag2box.cli.report import report
from tag2box.cli.train import train
from tag2box.errors import UserError
from tag2box.formats.coco_boxes import write_coco_truth
from tag2box.formats.listing import DataSource
from tiny_world import call, same, small_config, small_data, small_network, tree, weights

CLASSES = ("bar", "box", "disc")


def truth_of(ids: list[str], classes: tuple[str, ...] = CLASSES) -> Truth:
    objects = tuple(Objects.of([[4, 6, 21, 27 + i]], [i % len(classes)]) for i in range(len(ids)))
    return Truth(classes, tuple(ids), ((64, 44),) * len(ids), objects)


@pytest.fixture
def small(tmp_path, monkeypatch) -> Path:
    """Two runs of the tiny network; their training photos also serve as test photos."""
    small_network(monkeypatch)
    small_data(tmp_path)
    truth = truth_of([f"photo{i}" for i in range(4)])
    write_coco_truth(tmp_path / "truth.json", truth, {name: f"{name}.jpg" for name in truth.ids})
    train(small_config(tmp_path, "name=First", f"data.proposals={tmp_path / 'store'}"), tmp_path / "one")
    train(small_config(tmp_path, "name=Second", f"data.proposals={tmp_path / 'store'}"), tmp_path / "two")
    return tmp_path


def test_without_truth_the_page_shows_training_alone(small):
    before = tree(small / "one")
    report([small / "one"], small / "page.html", title="Only <training>")
    page = (small / "page.html").read_text()
    assert "Only &lt;training&gt;" in page
    assert "First" in page
    assert tree(small / "one") == before


def test_runs_are_assessed_once(small):
    given = {"test_photos": small / "photos", "test_truth": small / "truth.json", "train_truth": small / "truth.json"}
    report([small / "one", small / "two"], small / "page" / "page.html", **given)
    page = (small / "page" / "page.html").read_text()
    assert all(word in page for word in ("First", "Second", *CLASSES))
    metrics = json.loads((small / "two" / "metrics.json").read_text())
    assert set(metrics) == {"test", "train", "truth_boxes_per_class"}
    before = tree(small / "one", small / "two")
    report([small / "one", small / "two"], small / "page" / "page.html", **given)
    assert tree(small / "one", small / "two") == before


def test_metrics_of_an_older_version_gain_baselines_and_errors_and_keep_the_rest(small):
    given = {"test_photos": small / "photos", "test_truth": small / "truth.json", "train_truth": small / "truth.json"}
    report([small / "one"], small / "page.html", **given)
    place = small / "one" / "metrics.json"
    new = json.loads(place.read_text())
    assert {"voc07", "errors", "baselines", "verdicts", "extents"} <= set(new["test"])
    assert set(new["train"]) == {"corloc", "errors", "intervals", "baselines", "verdicts", "extents"}
    old = {
        split: {k: new[split][k] for k in ("voc07", "challenges", "corloc") if k in new[split]}
        for split in ("test", "train")
    }
    old["test"]["voc07"]["mAP"] = 0.123
    place.write_text(json.dumps(old))
    report([small / "one"], small / "page.html", **given)
    completed = json.loads(place.read_text())
    assert completed["test"]["voc07"]["mAP"] == 0.123
    assert completed["test"]["baselines"].keys() == new["test"]["baselines"].keys()
    assert completed["test"]["errors"]["pairs"] == new["test"]["errors"]["pairs"]
    assert list(completed["train"]["baselines"]) == ["centred box, tags known", "whole photo, tags known"]
    assert completed["train"]["verdicts"]["corloc"]["best"] == new["train"]["verdicts"]["corloc"]["best"]
    before = tree(small / "one")
    report([small / "one"], small / "page.html", **given)
    assert tree(small / "one") == before


@pytest.mark.parametrize("content", ["[]", "{}", '{"test": 3}', '{"test": {"voc07": null}, "train": {"corloc": null}}'])
def test_strange_metrics_are_no_traceback(small, content):
    (small / "one" / "metrics.json").write_text(content)
    given = {"test_photos": small / "photos", "test_truth": small / "truth.json", "train_truth": small / "truth.json"}
    try:
        report([small / "one"], small / "page.html", **given)
    except UserError as error:
        assert "metrics.json" in str(error)


def test_proposals_of_test_photos_are_stored_in_the_given_folder_or_beside_the_page(small):
    given = {"test_photos": small / "photos", "test_truth": small / "truth.json"}
    report([small / "one"], small / "a" / "page.html", **given)
    assert (small / "a" / "test-proposals" / "index.json").exists()
    report([small / "one"], small / "b" / "page.html", test_proposals=small / "mine", **given)
    assert (small / "mine" / "index.json").exists()
    assert [path.name for path in (small / "b").iterdir()] == ["page.html"]


def test_the_command_that_repeats_it_is_on_the_page(small):
    report([small / "one"], small / "page.html", commands=["tag2box report one --title 'A & B'"])
    assert "A &amp; B" in (small / "page.html").read_text()


def test_commands_that_train_the_run_again_are_on_the_page_and_do(small, monkeypatch, capsys):
    page = small / "page.html"
    done = call(["report", f"{small / 'one'}", "--out", f"{page}", "--title", "My run"], monkeypatch, capsys)
    assert done.code == 0, done
    text = unescape(page.read_text())
    wanted = f"tag2box train --config {small / 'one' / 'config.toml'} --out {small / 'one'}-again"
    assert wanted in text and "--title 'My run'" in text
    assert call(wanted.split()[1:], monkeypatch, capsys).code == 0
    assert same(weights(small / "one-again"), weights(small / "one"))


def test_detections_on_photos_of_your_own(small, monkeypatch, capsys):
    folder = small / "holiday"
    folder.mkdir()
    for number, photo in enumerate((small / "photos").iterdir()):
        shutil.copy(photo, folder / f"day{number}{photo.suffix}")
    (folder / "broken.jpg").write_bytes(b"no photo")
    argv = ["report", f"{small / 'one'}", f"{small / 'two'}", "--photos", f"{folder}", "--out", f"{small / 'p.html'}"]
    assert call(argv, monkeypatch, capsys).code == 0
    section = (small / "p.html").read_text().split('<section id="photos">')[1].split("</section>")[0]
    assert "4 photos without ground truth" in section and section.count("data-score=") > 4
    assert all(f"day{number}" in section for number in range(4)) and "broken" not in section
    (small / "bad").mkdir()
    (small / "bad" / "broken.jpg").write_bytes(b"no photo")
    with pytest.raises(UserError, match="bad: no photo can be read"):
        report([small / "one"], small / "q.html", photos=small / "bad")


def test_no_runs_is_a_mistake(tmp_path):
    with pytest.raises(UserError, match="no runs given"):
        report([], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_a_page_is_not_half_written(small):
    (small / "page.html").write_text("the old page")
    (small / "two" / "metrics.json").write_text("{")
    with pytest.raises(UserError, match=r"metrics\.json"):
        report([small / "one", small / "two"], small / "page.html")
    assert (small / "page.html").read_text() == "the old page"


# ---------------------------------------------------------------- photos and truth brought together


def photo(name: str) -> Photo:
    return Photo(name, Path(f"{name}.jpg"), 64, 44)


@pytest.mark.parametrize("order", [[], ["b"], ["c", "a"], ["b", "c", "a"]])
def test_truth_is_put_in_the_photos_order(order):
    truth = truth_of(["a", "b", "c"])
    sorted_truth = truth_in_order(truth, [photo(name) for name in order], Path("truth.json"))
    assert sorted_truth.ids == tuple(order)
    for name, objects in zip(sorted_truth.ids, sorted_truth.objects, strict=True):
        assert objects is truth.objects[truth.ids.index(name)]


def test_a_photo_without_truth_is_named():
    with pytest.raises(UserError, match=r"truth\.json: no ground truth of photo x \(2 missing\)"):
        truth_in_order(truth_of(["a"]), [photo("a"), photo("x"), photo("y")], Path("truth.json"))


def test_an_exam_takes_the_photos_the_truth_speaks_of(tmp_path):
    small_data(tmp_path)
    got = eval_set(written(tmp_path, ["photo2", "photo0"]), tmp_path / "store")
    assert tuple(p.id for p in got.photos) == got.truth.ids == ("photo2", "photo0")
    assert len(find_photos([tmp_path / "photos"])) == 4


def test_truth_without_its_photo_is_named(tmp_path):
    small_data(tmp_path)
    with pytest.raises(UserError, match=r"no photo absent\.png in"):
        eval_set(written(tmp_path, ["photo1", "absent"]), tmp_path / "store")


def written(folder: Path, names: list[str]) -> DataSource:
    """A COCO file of the truth of some photos."""
    files = {name: next((p.name for p in (folder / "photos").glob(f"{name}.*")), f"{name}.png") for name in names}
    write_coco_truth(folder / "part.json", truth_of(names), files)
    return truth_source(folder / "part.json", photos=folder / "photos")
