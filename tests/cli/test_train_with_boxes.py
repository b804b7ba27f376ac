"""``train --boxes``, ``--warm-start``, ``label --reviewed``: what reviewed boxes change, what they do not, refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tag2box import io, settings, storage
from tag2box.cli.detect import detect
from tag2box.cli.label import label
from tag2box.cli.label_export import convert
from tag2box.cli.report import report
from tag2box.cli.train import prepare_training, resume, train
from tag2box.data.reviewed_boxes import read_reviewed
from tag2box.errors import Interrupted, UserError
from tag2box.formats.csv_tags import read_tags
from tag2box.formats.listing import DataSource
from tag2box.images import View
from tag2box.labels.journal import Journal
from tag2box.labels.label_set import LabelSet
from tag2box.labels.labelled import LabelBox, LabelledPhoto, LabelledPhotos
from tag2box.labels.reviews import Action, BoxState, ReviewedPhoto, Reviews
from tag2box.models.rng import StepRng
from tag2box.progress import Progress, silent
from tag2box.recipes import Config
from tag2box.student.student_training import StudentConfig
from tag2box.systems import SYSTEMS
from tag2box.training.batches import FeatureBatches
from tag2box.training.criterion import LossOutput
from tag2box.training.feature_cache import RoiMaps
from tag2box.training.reviewed import JoinedMaps
from tag2box.types import Batch
from tiny_world import call, same, small_config, small_data, small_network, stopping_at, story, weights

BOXES = {"photo1": [("box", [4, 7, 16, 20])], "photo2": [("bar", [4, 8, 16, 20]), ("bar", [30, 2, 9, 9])]}
"""Two of the four photos, in x, y, width and height."""
SIZES = {f"photo{i}": (48 + 8 * (i % 3), 40 + 4 * (i % 2)) for i in range(5)}
NAMES = ("disc", "bar", "box")  # another order than that of the dataset


def coco(path: Path, boxes: dict[str, list[tuple[str, list[float]]]] | None = None, **more: object) -> Path:
    """A COCO file with boxes of some photos."""
    found = BOXES if boxes is None else boxes
    images = [
        {"id": n, "file_name": f"{name}.jpg", "width": SIZES[name][0], "height": SIZES[name][1]}
        for n, name in enumerate(found, start=1)
    ]
    rows = [
        {"image_id": n, "category_id": 1 + NAMES.index(cls), "bbox": box, "area": box[2] * box[3]}
        for n, own in enumerate(found.values(), start=1)
        for cls, box in own
    ]
    annotations = [{"id": n, "iscrowd": 0, **row} for n, row in enumerate(rows, start=1)]
    categories = [{"id": n, "name": name} for n, name in enumerate(NAMES, start=1)]
    path.write_text(json.dumps({"images": images, "categories": categories, "annotations": annotations, **more}))
    return path


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_network(monkeypatch)
    small_data(tmp_path)
    return tmp_path


def config_of(folder: Path, *overrides: str, boxes: Path | None = None) -> Config:
    named = () if boxes is None else (f"data.boxes={boxes}",)
    return small_config(folder, f"data.proposals={folder / 'store'}", "plan.gallery=4", *named, *overrides)


def gallery(run: Path) -> dict[str, list[list[float]]]:
    """The pseudo boxes of each photo at the end of a run."""
    last = [event for event in story(run) if event["event"] == "gallery"][-1]
    return {photo["id"]: photo["boxes"] for photo in last["photos"]}  # type: ignore[attr-defined]


# ---------------------------------------------------------------- training


def test_the_command_trains_with_boxes_and_says_so(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    boxes, run = coco(small / "reviewed.json"), small / "run"
    flags = [word for o in ("proposals.max_boxes=12", "loader.batch_size=2", "loader.resize.scales=[48]",
                            "inference.scales=[48]", "plan.iterations=3", "heads.embed_dim=6", "plan.gallery=4",
                            "proposals.min_side=6", "criterion.contrast.enabled=false")
             for word in ("--set", o)]  # fmt: skip
    argv = ["train", f"{small / 'tags.csv'}", "--photos", f"{small / 'photos'}", "--out", f"{run}", "--recipe",
            "od-wscl", "--boxes", f"{boxes}", *flags]  # fmt: skip
    done = call(argv, monkeypatch, capsys)
    assert done.code == 0, done.err
    start = story(run)[0]
    assert (start["boxed_photos"], start["boxes"], start["train_photos"]) == (2, 3, 4)
    recorded = storage.read_checked_json(run / "run.json", "", "")["boxes"]
    assert (recorded["photos"], recorded["boxes"]) == (2, 3)
    assert recorded["file_sha256"] == storage.file_digest(boxes)
    shown = gallery(run)
    assert shown["photo1"] == [[4, 7, 20, 27]]
    assert sorted(shown["photo2"]) == [[4, 8, 20, 28], [30, 2, 39, 11]]
    report([run], run / "report.html")
    page = (run / "report.html").read_text()
    assert "trained with 3 reviewed boxes in 2 photos" in page and "tags alone" not in page


def first_step(config: Config, out: Path) -> tuple[Batch, LossOutput]:
    step, source = prepare_training(config, out)
    batch = source.batch(0)
    return batch, step(batch, StepRng(0, 0))


@pytest.mark.parametrize("memory", ["plain", "exact"])
def test_boxes_change_the_labels_of_their_photos_alone(small: Path, memory: str) -> None:
    given = ("criterion.labeler.kind=oicr", "loader.batch_size=4", "drop_block.drop=0", f"compute.memory={memory}")
    plain, before = first_step(config_of(small, *given), small / "a")
    boxed, after = first_step(config_of(small, *given, boxes=coco(small / "reviewed.json")), small / "b")
    assert plain.ids == boxed.ids
    for number, name in enumerate(plain.ids):
        was, now = plain.proposals.spans()[number], boxed.proposals.spans()[number]
        added = 9 * len(BOXES.get(name, ()))  # a box and 8 copies
        assert len(now) == len(was) + added
        for old, new in zip(before.labeling.stages, after.labeling.stages, strict=True):
            rows, more = slice(was.start, was.stop), slice(now.start, now.stop - added)
            is_near = torch.allclose(old.weight[rows], new.weight[more], atol=1e-6)  # other sums of matrix products
            assert (is_near and torch.equal(old.cls[rows], new.cls[more])) == (name not in BOXES)
            if name in BOXES:
                assert new.weight[now.start : now.stop].tolist() == [1.0] * len(now)
                assert set(new.cls[now.start + len(was) : now.stop].tolist()) >= {
                    ["bar", "box", "disc"].index(cls) for cls, _ in BOXES[name]
                }


def test_every_system_is_taught_by_boxes(small: Path) -> None:
    boxes, rows = coco(small / "reviewed.json"), (small / "tags.csv").read_text().splitlines()
    counted = [f"{row},{'disc:1' if 'disc' in row else ''}" for row in rows[1:]]  # which c-wsl requires
    (small / "tags.csv").write_text("\n".join([f"{rows[0]},counts", *counted]))
    kinds = {"wsddn": "edge_boxes", "wsrpn": "wsrpn"}
    for name, system in SYSTEMS.items():
        kind = kinds.get(name, "selective_search")
        own = ("loader.batch_size=4", f"data.proposals={small / kind}", f"feature_cache={small / 'maps'}")
        wanted = ("proposals.kind=edge_boxes", "proposals.min_side=6") if name == "wsddn" else ()
        config = system(small_config(small, *own, *wanted, f"data.boxes={boxes}"))
        batch, loss = first_step(config, small / name)
        codes = batch.side_info.reviewed
        assert codes is not None and loss.total.isfinite(), name
        for labels in loss.labeling.stages:
            assert set(labels.pseudo_boxes.rows.tolist()) >= set((codes >= 0).nonzero().flatten().tolist()), name
            assert torch.equal(labels.cls[codes >= 0], codes[codes >= 0]), name


def test_without_boxes_their_settings_change_nothing(small: Path) -> None:
    train(config_of(small), small / "a")
    train(config_of(small, "loader.box_copies=1", "criterion.reviewed_weight=9"), small / "b")
    assert same(weights(small / "a"), weights(small / "b"))
    assert "boxes" not in story(small / "a")[0]
    assert "boxes" not in storage.read_checked_json(small / "a" / "run.json", "", "")
    report([small / "a"], small / "report.html")
    assert "tags alone: no box was ever shown" in (small / "report.html").read_text()


@pytest.mark.parametrize(
    "views", [(), ("loader.resize.flip=0.5", "loader.views_per_image=2", "loader.max_proposals=9")]
)
def test_a_run_with_boxes_is_resumed_to_the_bit(small: Path, views: tuple[str, ...]) -> None:
    config = config_of(small, *views, boxes=coco(small / "reviewed.json"))
    train(config, small / "whole")
    with pytest.raises(Interrupted):
        train(config, small / "halves", progress=stopping_at(3))
    coco(small / "reviewed.json", info={"about": "written again"})  # the same boxes
    resume(small / "halves")
    assert same(weights(small / "whole"), weights(small / "halves"))


def test_other_boxes_than_those_of_the_run_are_refused(small: Path) -> None:
    with pytest.raises(Interrupted):
        train(config_of(small, boxes=coco(small / "reviewed.json")), small / "run", progress=stopping_at(3))
    coco(small / "reviewed.json", {"photo1": [("box", [4, 7, 16, 21])]})
    with pytest.raises(
        UserError, match=r"reviewed\.json: the reviewed boxes are not those .*now 1 in 1 photos, then 3"
    ):
        resume(small / "run")
    file = small / "run" / "config.toml"
    file.write_text("\n".join(line for line in file.read_text().splitlines() if not line.startswith("boxes = ")))
    for use in (lambda: resume(small / "run"), lambda: detect(small / "run", [small / "photos"])):
        with pytest.raises(UserError, match=r"config\.toml: data\.boxes was set .* is not set"):
            use()


def test_boxes_survive_the_preselection_by_class_maps(small: Path) -> None:
    adapted = ("adaptation.epochs=1", "adaptation.side=32", "adaptation.keep_boxes=2", "criterion.prior.evidence=1",
               "loader.batch_size=4", "loader.max_proposals=5", "loader.box_copies=1")  # fmt: skip
    config = config_of(small, *adapted, boxes=coco(small / "reviewed.json"))
    _, source = prepare_training(config, small / "run")
    batch = source.batch(0)
    codes, evidence = batch.side_info.reviewed, batch.side_info.class_evidence
    assert codes is not None and evidence is not None and evidence.shape == (len(codes), 3)
    sizes = dict(zip(batch.ids, batch.proposals.sizes, strict=True))
    assert sizes == {"photo0": 2, "photo1": 4, "photo2": 5, "photo3": 2}
    assert sorted(codes[codes >= 0].tolist()) == [0, 0, 1]  # bar, bar, box
    train(config, small / "whole")  # and all of it learns


def test_features_of_proposals_are_shared_with_runs_without_boxes(small: Path) -> None:
    """Of another round, only the maps of reviewed boxes are computed; they are those of all boxes together."""
    shared, rows = (f"feature_cache={small / 'maps'}", "loader.resize.flip=0"), (small / "tags.csv").read_text()
    train(config_of(small, *shared), small / "tags")
    (own,) = (small / "maps").glob("*.f16")
    before = own.stat().st_mtime_ns
    boxes = coco(small / "reviewed.json", {**BOXES, "photo3": []})
    (small / "tags.csv").write_text("\n".join([*rows.splitlines()[:-1], "photo3.jpg,"]))  # shows nothing
    train(config_of(small, *shared, boxes=boxes), small / "boxed")
    (added,) = set((small / "maps").glob("*.f16")) - {own}
    assert own.stat().st_mtime_ns == before and added.stat().st_size < 2 * own.stat().st_size
    assert story(small / "boxed")[0]["boxed_photos"] == 3
    step, source = prepare_training(config_of(small, *shared, boxes=boxes), small / "again")
    assert isinstance(source, FeatureBatches) and isinstance(source.features, JoinedMaps)
    whole = RoiMaps(step.detector.backbone, source.photos.photos, source.store)
    for index in range(4):
        view = View(48)
        assert torch.equal(source.features.get(index, view), whole.get(index, view))


# ---------------------------------------------------------------- tags and boxes


def test_a_box_of_another_class_adds_its_tag_and_tags_without_a_box_are_named(small: Path) -> None:
    photos = read_tags(small / "tags.csv", small / "photos")
    boxes = {"photo0": [("bar", [1, 1, 9, 9])], "photo1": [("box", [1, 1, 9, 9])], "photo3": []}
    with pytest.warns(UserWarning) as said:
        tagged, reviewed = read_reviewed(coco(small / "reviewed.json", boxes), photos)
    lines = [str(one.message) for one in said]
    assert [line.split(": ", 1)[1] for line in lines] == [
        "photo0: bar: boxed, but no tag of the photo; the tag is added",
        "photo0: box (and 1 more): a tag of a reviewed photo, but not boxed; remove the tag if the object is not there",
        "photo3: tagged, but without any box there; it counts as not reviewed",
    ]
    assert tagged.classes == ("bar", "box", "disc")
    assert tagged.tags.tolist()[0] == [True, True, True] and photos.tags.tolist()[0] == [False, True, True]
    assert torch.equal(tagged.tags[1:], photos.tags[1:])
    assert list(reviewed.photos) == ["photo0", "photo1"] and reviewed.count == 2
    assert reviewed.photos["photo1"].labels.tolist() == [1]  # by name, not by number


def test_difficult_objects_and_crowds_are_ignore_regions(small: Path) -> None:
    photos, path = read_tags(small / "tags.csv", small / "photos"), coco(small / "reviewed.json")
    content = json.loads(path.read_text())
    content["annotations"][1]["iscrowd"] = 1
    path.write_text(json.dumps(content))
    _, reviewed = read_reviewed(path, photos)
    assert reviewed.photos["photo2"].boxes.tolist() == [[30, 2, 39, 11]]
    assert reviewed.photos["photo2"].ignore.tolist() == [[4, 8, 20, 28]]


@pytest.mark.parametrize("kind", ["cvat", "voc", "yolo", "csv", "labelstudio", "xanylabeling"])
def test_boxes_of_any_format_teach_alike(small: Path, kind: str) -> None:
    photos, path = read_tags(small / "tags.csv", small / "photos"), coco(small / "reviewed.json")
    suffix = {"cvat": ".xml", "csv": ".csv", "labelstudio": ".json"}.get(kind, "")
    out = small / f"other{suffix}"
    convert(DataSource(path=path, photos=small / "photos"), out, export=kind)
    _, wanted = read_reviewed(path, photos)
    file = {"cvat": out / "annotations.xml", "labelstudio": out / "tasks.json"}.get(kind, out)
    for root in (None, small / "photos"):
        _, found = read_reviewed(file if file.exists() else out, photos, root)
    assert found.photos.keys() == wanted.photos.keys()
    for name, own in wanted.photos.items():
        assert torch.allclose(found.photos[name].boxes, own.boxes, atol=1e-4)
        assert torch.equal(found.photos[name].labels, own.labels)


def label_set(folder: Path, root: Path) -> None:
    """A label set of three photos: photo1 was reviewed before, the others were not."""
    reviewed = LabelBox((4, 7, 20, 27), "box", why="reviewed", source="review")
    found = LabelBox((1, 1, 9, 9), "bar", 0.5, why="best of its tag", source="label")
    photos = [
        LabelledPhoto(name, f"{name}.jpg", *SIZES[name], tags, boxes)
        for name, tags, boxes in (
            ("photo0", ("disc",), (found,)),
            ("photo1", ("box",), (reviewed,)),
            ("photo2", ("bar",), (found, reviewed)),
        )
    ]
    LabelSet(LabelledPhotos(root, ("bar", "box", "disc"), tuple(photos))).write(folder)


def test_of_a_label_set_only_reviewed_photos_teach(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photos = read_tags(small / "tags.csv", small / "photos")
    label_set(small / "labels", small / "photos")
    _, before = read_reviewed(small / "labels", photos)
    assert list(before.photos) == ["photo1"]
    done = {"photo0": ReviewedPhoto("photo0", (), ()),
            "photo2": ReviewedPhoto("photo2", (LabelBox((2, 2, 8, 8), "bar", source="review"),), ())}  # fmt: skip
    monkeypatch.setattr("tag2box.data.reviewed_boxes.read_reviews", lambda *_: Reviews("", done))
    with pytest.warns(UserWarning, match="photo0: box .and 1 more.: a tag of a reviewed photo, but not boxed"):
        _, after = read_reviewed(small / "labels", photos)
    assert {name: own.boxes.tolist() for name, own in after.photos.items()} == {
        "photo1": [[4, 7, 20, 27]],
        "photo0": [],  # a reviewer has finished it: there is nothing
        "photo2": [[2, 2, 8, 8]],
    }


# ---------------------------------------------------------------- refusals


def without_reviews(at: Path) -> Path:
    label_set(at / "labels", at / "photos")
    content = LabelSet.open(at / "labels").content
    LabelSet(LabelledPhotos(content.root, content.classes, content.photos[:1])).write(at / "new")
    return at / "new"


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no file": (lambda at: at / "gone.json", r"gone\.json: no such file or folder; expected reviewed boxes"),
    "no boxes": (lambda at: at / "tags.csv", r"tags\.csv: .* has no boxes"),
    "nothing": (lambda at: coco(at / "r.json", {}), r"r\.json: no reviewed photo has a box"),
    "no box at all": (lambda at: coco(at / "r.json", {"photo1": []}), r"r\.json: no reviewed photo has a box"),
    "another photo": (
        lambda at: coco(at / "r.json", {"photo4": [("box", [1, 1, 9, 9])]}),
        r"r\.json: photo photo4 is not in the dataset; add it there, or remove it here",
    ),
    "another size": (
        lambda at: coco(at / "r.json", images=[{"id": 1, "file_name": "photo1.jpg", "width": 9, "height": 9}],
                        annotations=[]),
        r"r\.json: photo photo1 is 9 x 9 pixels there, 56 x 44 in the dataset",
    ),
    "another class": (
        lambda at: coco(at / "r.json", categories=[{"id": n, "name": f"boxer{n}"} for n in (1, 2, 3)]),
        r"r\.json: 'boxer3' is not a class of the dataset; did you mean 'box'\?",
    ),
    "no area": (
        lambda at: coco(at / "r.json", {"photo1": [("box", [500, 1, 9, 9])]}),
        r"r\.json: photo photo1: a box of 'box' has no area in the photo; correct or remove it",
    ),
    "label set without reviews": (without_reviews, r"new: no photo of this label set is reviewed"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_boxes_that_cannot_teach_are_refused_in_one_line(small: Path, name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(UserError, match=message) as error:
        train(config_of(small, boxes=make(small)), small / "run")
    assert "\n" not in str(error.value) and not (small / "run").exists()


# ---------------------------------------------------------------- warm start

ADAPTED = ("adaptation.epochs=1", "adaptation.side=32", "criterion.prior.evidence=1")


def without_adaptation(title: str, total: int, done: int = 0) -> object:
    assert title != "adaptation"
    return silent(title, total, done)


@pytest.mark.parametrize("adapted", [(), ADAPTED])
def test_a_warm_start_has_the_weights_and_the_adaptation_of_the_earlier_run(small: Path, adapted) -> None:
    train(config_of(small, *adapted, boxes=coco(small / "reviewed.json")), small / "first")
    still = ("plan.optimizer.lr=1e-30", "plan.optimizer.weight_decay=0", "plan.seed=5")
    config = config_of(small, *adapted, *still, f"warm_start={small / 'first'}", f"feature_cache={small / 'new'}")
    progress: Progress = without_adaptation  # type: ignore[assignment]
    train(config, small / "second", progress=progress)
    assert same(weights(small / "first"), weights(small / "second"))
    recorded = storage.read_checked_json(small / "second" / "run.json", "", "")
    assert recorded["warm_start"]["run_json"] == storage.file_digest(small / "first" / "run.json")
    assert recorded["warm_start"]["boxes"] == 3 and "boxes" not in recorded
    report([small / "second"], small / "report.html")
    page = (small / "report.html").read_text()
    assert "started from a run trained with 3 reviewed boxes" in page and "tags alone" not in page


def test_a_warm_start_is_resumed_to_the_bit_and_the_earlier_run_may_not_change(small: Path) -> None:
    train(config_of(small), small / "first")
    config = config_of(small, f"warm_start={small / 'first'}", boxes=coco(small / "reviewed.json"))
    train(config, small / "whole")
    with pytest.raises(Interrupted):
        train(config, small / "halves", progress=stopping_at(3))
    resume(small / "halves")
    assert same(weights(small / "whole"), weights(small / "halves"))
    with pytest.raises(RuntimeError, match="killed"):
        train(config, small / "begun", progress=stopping_at(1, killed))  # before its first checkpoint
    shutil.rmtree(small / "first")
    train(config_of(small, "plan.seed=8"), small / "first")
    with pytest.raises(UserError, match="warm_start: its weights are not those with which the run was started"):
        resume(small / "begun")


def killed() -> None:
    raise RuntimeError("killed")


def unfinished(at: Path) -> Config:
    with pytest.raises(Interrupted):
        train(config_of(at), at / "half", progress=stopping_at(3))
    return config_of(at, f"warm_start={at / 'half'}")


COLD: dict[str, tuple[Callable[[Path], Config], str]] = {
    "no run": (lambda at: config_of(at, f"warm_start={at / 'photos'}"), r"photos: no run here"),
    "unfinished": (unfinished, r"half: trained for 3 of 6 iterations; finish it"),
    "more classes": (
        lambda at: config_of(at, f"warm_start={at / 'first'}", 'data.classes=["bar", "box", "disc", "ring"]'),
        r"first: cannot start from it: only the dataset has class 'ring'",
    ),
    "another order": (
        lambda at: config_of(at, f"warm_start={at / 'first'}", 'data.classes=["disc", "box", "bar"]'),
        r"first: cannot start from it: its classes are in another order; give --classes bar,box,disc",
    ),
    "other heads": (
        lambda at: config_of(at, f"warm_start={at / 'first'}", "heads.stages=2"),
        r"first: cannot start from it: heads\.stages differs; set it as in that run's config\.toml",
    ),
    "adaptation": (
        lambda at: config_of(at, f"warm_start={at / 'first'}", "adaptation.epochs=1"),
        r"first: cannot start from it: adaptation\.epochs, which is 0 in one of both, differs",
    ),
}


@pytest.mark.parametrize("name", COLD)
def test_runs_that_cannot_be_started_from_are_refused_in_one_line(small: Path, name: str) -> None:
    make, message = COLD[name]
    train(config_of(small), small / "first")
    with pytest.raises(UserError, match=message) as error:
        train(make(small), small / "run")
    assert "\n" not in str(error.value) and not (small / "run").exists()


def test_a_student_is_refused_as_a_start_before_proposals_are_made(small: Path) -> None:
    io.write_text(small / "student" / "config.toml", settings.dump(StudentConfig(labels=small / "labels")))
    config = config_of(small, f"warm_start={small / 'student'}", f"data.proposals={small / 'boxes'}")
    with pytest.raises(UserError, match="student: a student run; expected one of `tag2box train`"):
        train(config, small / "run")
    assert not (small / "boxes").exists() and not (small / "run").exists()


# ---------------------------------------------------------------- label --reviewed


def test_a_photo_whose_review_left_no_box_stays_reviewed_in_the_next_label_set(small: Path) -> None:
    train(config_of(small), small / "run")
    data = DataSource(path=small / "tags.csv", photos=small / "photos")
    label(small / "run", data, small / "labels")
    first = LabelSet.open(small / "labels")
    emptied, other = (photo for photo in first.content.photos if photo.id in ("photo1", "photo2"))
    with Journal(small / "labels", first) as journal:
        states = {number: BoxState(box.box, box.name, "rejected") for number, box in enumerate(emptied.boxes)}
        journal.append(emptied.id, Action("reject", states), based_on=0, key="1")
        journal.append(emptied.id, Action("done"), based_on=1, key="2")
        journal.append(other.id, Action("done"), based_on=0, key="3")
    with pytest.warns(UserWarning, match="a tag of a reviewed photo, but not boxed"):
        label(small / "run", data, small / "labels-2", reviewed=small / "labels")
    again = LabelSet.open(small / "labels-2")
    assert {photo.id for photo in again.content.photos if photo.is_reviewed} == {"photo1", "photo2"}
    assert emptied.tags and next(photo for photo in again.content.photos if photo.id == emptied.id).boxes == ()
    with pytest.warns(UserWarning, match="a tag of a reviewed photo, but not boxed"):
        _, taught = read_reviewed(small / "labels-2", read_tags(small / "tags.csv", small / "photos"))
    assert set(taught.photos) == {emptied.id, other.id} and len(taught.photos[emptied.id].boxes) == 0


def test_reviewed_photos_keep_their_boxes_and_the_others_are_labelled(small: Path) -> None:
    boxes = {"photo1": [("disc", [4.25, 7, 16, 20.5])], "photo2": BOXES["photo2"]}
    train(config_of(small), small / "run")
    data = DataSource(path=small / "tags.csv", photos=small / "photos")
    with pytest.warns(UserWarning, match="photo1: disc: boxed, but no tag"):
        made = label(small / "run", data, small / "labels", reviewed=coco(small / "reviewed.json", boxes))
    photos = {photo.id: photo for photo in made.content.photos}
    assert [(b.box, b.name, b.why, b.source, b.score) for b in photos["photo1"].boxes] == [
        ((4.25, 7.0, 20.25, 27.5), "disc", "reviewed", "review", None)
    ]
    assert photos["photo1"].tags == ("box", "disc")
    assert {box.source for name in ("photo0", "photo3") for box in photos[name].boxes} == {"label"}
    assert photos["photo0"].labels and photos["photo3"].labels
    again = label(small / "run", data, small / "labels-2", reviewed=small / "labels", rule="auto")
    assert [p.boxes for p in again.content.photos if p.id in boxes] == [photos[name].boxes for name in boxes]


def test_if_all_photos_are_reviewed_nothing_is_detected(small: Path) -> None:
    train(config_of(small), small / "run")
    boxes = {f"photo{i}": [("bar", [1, 1, 9, 9])] for i in range(4)}
    data = DataSource(path=small / "tags.csv", photos=small / "photos")
    with pytest.warns(UserWarning, match="boxed, but no tag"):
        made = label(small / "run", data, small / "labels", reviewed=coco(small / "reviewed.json", boxes), rule="auto")
    assert [len(photo.boxes) for photo in made.content.photos] == [1] * 4
