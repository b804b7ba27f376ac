"""The commands as a user types them: train, detect, evaluate, report; the demo; photos that have nothing to show."""

from __future__ import annotations

import json
import math
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
from PIL import Image
from pycocotools.coco import COCO

from tag2box.cli import main
from tag2box.cli.demo import demo
from tag2box.cli.detect import detect
from tag2box.cli.evaluate import evaluate
from tag2box.cli.train import train
from tag2box.errors import UserError
from tag2box.formats.csv_tags import write_tags
from tag2box.proposals.store import ProposalStore
from tiny_world import SCENES, TINY, Finished, call, one_worker, process, same, story, tree, weights

pytestmark = pytest.mark.usefixtures("alone")


def read(path: Path) -> dict:
    return json.loads(path.read_text())


# ---------------------------------------------------------------- one session at a terminal


def quiet(argv: list[str], patch: pytest.MonkeyPatch) -> Finished:
    """The command in this process, from a fixture that outlives a test's own capture."""
    patch.setattr(sys, "argv", ["tag2box", *argv])
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err, pytest.raises(SystemExit) as stop:
        main()
    return Finished(int(stop.value.code or 0), out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def session(world, tmp_path_factory) -> Path:
    """train and detect as processes, then evaluate and report; the report's baseline is trained beside them."""
    at = tmp_path_factory.mktemp("session")
    baseline = world.trained(
        "oicr-plus", "name=OICR+", "criterion.labeler.kind=oicr", "criterion.contrast.enabled=false"
    )
    truth = world.test / "truth.json"
    commands = (
        world.argv(at / "run"),
        ["detect", "run", f"{world.test / 'photos'}", "--out", "boxes.json", "--draw", "drawn", "--min-score", "0.01"],
        ["evaluate", "--truth", f"{truth}", "--detections", "boxes.json", "--json", "scores.json"],
        ["report", f"{baseline}", "run", "--out", "page.html", "--title", "Two runs", "--test-photos",
         f"{world.test / 'photos'}", "--test-truth", f"{truth}", "--train-truth",
         f"{world.tags.with_name('truth.json')}"],
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(at)
        one_worker(patch)
        for argv in commands:
            done = process(argv, at) if argv[0] in {"train", "detect"} else quiet(argv, patch)
            assert (done.code, done.complaints) == (0, []), argv
            assert done.out.strip()
    return at


def test_training_leaves_settings_events_and_a_checkpoint(session):
    assert {p.name for p in (session / "run").iterdir()} >= {"config.toml", "events.jsonl", "state.json"}
    events = story(session / "run")
    assert events[0]["name"] == "OD-WSCL"
    assert events[0]["classes"] == list(SCENES.classes)
    assert [e["iteration"] for e in events if e["event"] == "step"] == [1, 2, 3, 4]
    assert [e["event"] for e in events][-1] == "end"
    assert not list((session / "run").glob(".checkpoint*"))


def test_a_process_and_a_call_train_the_same(session, world):
    assert same(weights(session / "run"), weights(world.trained("od-wscl")))


def test_detections_are_a_coco_file_official_tools_read(session):
    content = read(session / "boxes.json")
    assert [image["file_name"] for image in content["images"]] == [f"test_{i:05d}.jpg" for i in range(SCENES.test)]
    assert [category["name"] for category in content["categories"]] == list(SCENES.classes)
    coco = COCO(str(session / "boxes.json"))
    rows = coco.loadAnns(coco.getAnnIds())
    assert len(rows) == len({row["id"] for row in rows}) > 0
    for row in rows:
        image = coco.imgs[row["image_id"]]
        x, y, width, height = row["bbox"]
        assert 0 <= x <= x + width <= image["width"] + 1e-3
        assert 0 <= y <= y + height <= image["height"] + 1e-3
        assert 0.01 <= row["score"] <= 1


def test_every_photo_is_drawn_once_at_its_own_size(session):
    drawn = sorted((session / "drawn").iterdir())
    assert [path.name for path in drawn] == [f"test_{i:05d}.jpg" for i in range(SCENES.test)]
    for path in drawn:
        with Image.open(path) as picture:
            picture.load()
            assert (picture.format, picture.size) == ("JPEG", (SCENES.width, SCENES.height))


def test_scores_have_one_object_per_metric_in_fractions(session):
    scores = read(session / "scores.json")
    assert list(scores) == [
        "voc07", "voc12", "corloc", "coco", "challenges", "errors", "breakdown", "intervals", "baselines", "verdicts"
    ]  # fmt: skip
    del scores["intervals"]
    assert scores["breakdown"].pop("objects") > 0
    for metric, mean in (("voc07", "mAP"), ("voc12", "mAP"), ("corloc", "mean")):
        assert set(scores[metric]) == {mean, "per_class"}
        assert set(scores[metric]["per_class"]) == set(SCENES.classes)
    assert set(scores["coco"]) >= {"AP", "AP50", "AP75", "APs", "AR1"}
    assert set(scores["challenges"]) >= {"found", "part", "grouped", "missed"}
    assert scores["errors"].pop("pairs") > 0
    numbers = [v for m in scores.values() for v in (*m.values(), *m.get("per_class", {}).values())]
    assert all(v is None or isinstance(v, dict) or 0 <= v <= 1 for v in numbers)
    assert math.isclose(sum(scores["challenges"].values()), 1)


def test_the_report_is_one_page_about_both_runs_that_loads_nothing(session, world):
    page = (session / "page.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html>")
    assert all(word in page for word in ("Two runs", "OICR+", "OD-WSCL", *SCENES.classes))
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)[^"']+""", page)
    assert not re.findall(r"@import|url\((?!['\"]?(?:data:|#))", page)
    assert "data:image/" in page
    assert "tag2box report" in page  # the command that repeats it
    for run in (session / "run", world.folder / "runs" / "oicr-plus"):
        assert set(read(run / "metrics.json")) == {"test", "train", "truth_boxes_per_class"}


def test_evaluate_prints_a_table_for_people(session, world, monkeypatch, capsys):
    argv = ["evaluate", "--truth", f"{world.test / 'truth.json'}", "--detections", f"{session / 'boxes.json'}"]
    done = call([*argv, "--metrics", "voc07, challenges"], monkeypatch, capsys)
    assert done.code == 0
    assert all(word in done.out for word in ("voc07", "challenges", "mean", "found", *SCENES.classes))
    assert "corloc" not in done.out


# ---------------------------------------------------------------- the demo


def lasting(folder: Path) -> dict[str, tuple[int, int]]:
    """All files but the two that every call writes again."""
    again = (f"{folder / 'report.html'}", f"{folder / 'summary.json'}")
    return {path: stat for path, stat in tree(folder).items() if path not in again}


STUDENT = ("student.plan.iterations=2", "student.augmentation.sides=[64]", "student.plan.batch_size=2",
           "student.inference.scales=[96]")  # fmt: skip


def test_demo_trains_both_methods_and_a_student_and_a_second_call_changes_nothing(tmp_path):
    summary = demo(tmp_path, world=SCENES, overrides=(*TINY, *STUDENT))
    assert read(tmp_path / "summary.json") == summary
    assert set(summary["methods"]) == set(summary["training_seconds"]) == {"oicr-plus", "od-wscl", "student"}  # type: ignore[call-overload]
    for metrics in summary["methods"].values():
        measured = {"voc07", "voc12", "coco", "challenges", "errors"}
        assert set(metrics["test"]) == {*measured, "breakdown", "intervals", "baselines", "verdicts", "extents"}
        assert metrics["train"]["corloc"]["mean"] is not None
    page = (tmp_path / "report.html").read_text()
    assert "OICR+" in page and "student of OD-WSCL" in page
    assert not (tmp_path / "maps").exists()  # half a gigabyte in earnest
    before = lasting(tmp_path)
    assert demo(tmp_path, world=SCENES, overrides=(*TINY, *STUDENT))["methods"] == summary["methods"]
    assert lasting(tmp_path) == before


def test_demo_refuses_a_folder_of_other_settings(tmp_path):
    folder = tmp_path / "demo"
    one = [*TINY, "plan.iterations=1", *STUDENT]
    demo(folder, world=SCENES, overrides=one)
    before = tree(folder)
    with pytest.raises(UserError, match="other settings"):
        demo(folder, world=SCENES, overrides=[*one, "plan.optimizer.lr=0.5"])
    with pytest.raises(UserError, match="student: holds a run with other settings"):
        demo(folder, world=SCENES, overrides=[*one, "student.plan.lr=0.5"])
    with pytest.raises(UserError, match=r"scenes\.json"):
        demo(folder, seed=1, overrides=one)
    assert tree(folder) == before


# ---------------------------------------------------------------- nothing to detect


def paint(folder: Path, name: str, *, side: int, busy: bool) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGB", (side, side), (90, 120, 110))
    if busy:
        image.paste((200, 40, 40), (10, 12, 50, 60))
        image.paste((30, 60, 200), (55, 30, 90, 80))
    image.save(folder / f"{name}.png")
    return folder / f"{name}.png"


def empty_photos(folder: Path) -> Path:
    """Photos with many proposals, one (a flat colour) and none (smaller than the smallest box)."""
    paint(folder, "many", side=96, busy=True)
    paint(folder, "one", side=96, busy=False)
    paint(folder, "none", side=12, busy=False)
    return folder


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([("many", "red;blue"), ("one", "red"), ("none", "blue"), ("many", "")], id="a photo of each kind"),
        pytest.param([("many", "red"), ("one", "")], id="one class"),
        pytest.param([("one", "red"), ("one", "red;blue")], id="fewer proposals than classes"),
    ],
)
@pytest.mark.parametrize("labeler", ["discovery", "oicr"])
def test_photos_without_proposals_or_tags_pass_through(tmp_path, world, rows, labeler):
    photos = tmp_path / "photos"
    pictures = empty_photos(tmp_path / "kinds")
    photos.mkdir()
    for i, (kind, _) in enumerate(rows):
        (photos / f"{i}.png").write_bytes((pictures / f"{kind}.png").read_bytes())
    write_tags(tmp_path / "tags.csv", [(f"{i}.png", tags.split(";")) for i, (_, tags) in enumerate(rows)])
    config = world.config(
        f"data.photos={photos}", f"data.tags={tmp_path / 'tags.csv'}", 'data.proposals=""', 'feature_cache=""',
        "plan.iterations=2", f"criterion.labeler.kind={labeler}",
    )  # fmt: skip
    train(config, tmp_path / "run")
    store = ProposalStore.open(tmp_path / "run" / "proposals")
    counts = {"many": lambda n: n > 1, "one": lambda n: n == 1, "none": lambda n: n == 0}
    assert all(counts[kind](len(store.boxes(f"{i}"))) for i, (kind, _) in enumerate(rows))
    assert all(torch.isfinite(value).all() for value in weights(tmp_path / "run").values())
    found = detect(tmp_path / "run", [pictures], tmp_path / "boxes.json", draw=tmp_path / "drawn", min_score=0)
    assert len(found["none"]) == 0
    assert len(found["one"]) >= 1
    assert len(list((tmp_path / "drawn").iterdir())) == 3


@pytest.mark.parametrize("objects", [0, 1])
def test_a_test_photo_without_objects_is_evaluated(tmp_path, objects):
    boxes = [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [10, 10, 20, 20], "area": 400, "iscrowd": 0}][:objects]
    images = [{"id": i, "file_name": f"{i}.jpg", "width": 96, "height": 96} for i in (1, 2)]
    truth = {"images": images, "categories": [{"id": 1, "name": "red"}], "annotations": boxes}
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    found = [{"image_id": 2, "category_id": 1, "bbox": [0, 0, 5, 5], "score": 0.5}]
    (tmp_path / "found.json").write_text(json.dumps(found))
    result = evaluate(tmp_path / "truth.json", tmp_path / "found.json", json=tmp_path / "scores.json")
    scores = read(tmp_path / "scores.json")
    assert scores == result.to_json()
    assert scores["voc07"]["mAP"] == (0.0 if objects else None)
    assert scores["challenges"]["missed"] == (1.0 if objects else None)


def test_detecting_nothing_writes_a_valid_file(tmp_path, world):
    photo = paint(tmp_path, "none", side=12, busy=False)
    detect(world.trained("od-wscl"), [photo], tmp_path / "boxes.json")
    content = read(tmp_path / "boxes.json")
    assert content["annotations"] == []
    assert [image["file_name"] for image in content["images"]] == ["none.png"]


def test_files_for_vocs_server_have_the_boxes_of_all_scores(tmp_path, world):
    run, photos = world.trained("od-wscl"), world.test / "photos"
    kept = detect(run, [photos], tmp_path / "all.json", voc=tmp_path / "voc", min_score=0)
    none = detect(run, [photos], voc=tmp_path / "again", min_score=1)
    assert sum(map(len, none.values())) == 0 < sum(map(len, kept.values()))
    files = sorted((tmp_path / "voc").iterdir())
    assert [file.read_text() for file in files] == [file.read_text() for file in sorted((tmp_path / "again").iterdir())]
    assert all(re.fullmatch(r"comp4_det_test_\w+\.txt", file.name) for file in files)
    assert sum(len(file.read_text().splitlines()) for file in files) == sum(map(len, kept.values()))
    scores = [
        evaluate(world.test / "truth.json", tmp_path / name, metrics=("voc12",)).to_json()
        for name in ("all.json", "voc")
    ]
    assert scores[0]["voc12"]["mAP"] == pytest.approx(scores[1]["voc12"]["mAP"], abs=1e-6)


def test_inference_settings_of_a_run_can_be_overridden(tmp_path, world):
    run, photos = world.trained("od-wscl"), world.test / "photos"
    plain = detect(run, [photos], min_score=0)
    again = detect(run, [photos], min_score=0, overrides=["inference.mirror=false"])
    few = detect(run, [photos], min_score=0, overrides=["inference.predict.max_detections=1"])
    assert all(torch.equal(plain[name].scores, again[name].scores) for name in plain)
    assert {len(found) for found in few.values()} <= {0, 1} and max(len(found) for found in plain.values()) > 1
