"""``tag2box label``: a box for every tag, resumed after a stop, and one line about bad input."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fake_sam import use_fake_sam
from tag2box.cli.detect import detect
from tag2box.cli.label import label
from tag2box.cli.label_export import convert
from tag2box.cli.label_trust import trust
from tag2box.cli.train import train
from tag2box.errors import Interrupted, UserError
from tag2box.formats.csv_tags import write_tags
from tag2box.formats.listing import DataSource
from tag2box.labels.journal import Journal
from tag2box.labels.label_set import LabelSet
from tag2box.labels.quality import SIGNS_FILE, read_signs
from tag2box.labels.reviews import Action, BoxState
from tag2box.labels.trust import TRUST_FILE, Trust
from tag2box.parallel.pool import LocalPool
from tag2box.progress import Bar, Progress
from tag2box.training import dist
from tiny_world import call, make_world, small_config, small_data, small_network


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    small_data(folder, 6)
    with pytest.MonkeyPatch.context() as patch:
        small_network(patch)
        train(small_config(folder, "plan.iterations=1"), folder / "run")
    return folder


@pytest.fixture
def world(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    small_network(monkeypatch)
    return trained


def source(world: Path) -> DataSource:
    return DataSource(path=world / "tags.csv", photos=world / "photos")


def stopping(title: str, after: int, seen: list[str]) -> Progress:
    class Counter:
        def __init__(self, name: str) -> None:
            self.name, self.done = name, 0

        def advance(self, note: str = "") -> None:
            self.done += 1
            seen.append(self.name)
            if self.name == title and self.done == after:
                raise KeyboardInterrupt

    @contextmanager
    def progress(name: str, total: int, done: int = 0) -> Iterator[Bar]:
        yield Counter(name)

    return progress  # type: ignore[return-value]


def test_every_tag_has_a_box_and_no_other_class(world: Path, tmp_path: Path) -> None:
    made = label(world / "run", source(world), tmp_path / "labels")
    found = LabelSet.open(tmp_path / "labels")
    found.verify()
    assert found.content == made.content and len(found.content) == 6
    for photo in found.content.photos:
        assert photo.tags and not photo.unboxed_tags
        assert {box.name for box in photo.boxes} <= set(photo.tags)
        assert all(box.source == "label" and box.score is not None for box in photo.boxes)
    assert found.rule["relative"] == 0.5 and found.run["run_json"]
    assert not list(tmp_path.glob(".*"))


def test_signs_of_quality_are_written_beside_the_labels_and_into_the_run(world: Path, tmp_path: Path) -> None:
    made = label(world / "run", source(world), tmp_path / "labels")
    signs = read_signs(tmp_path / "labels" / SIGNS_FILE)
    assert signs == read_signs(world / "run" / SIGNS_FILE)
    assert {name: own.score for name, own in signs.classes.items()} == pytest.approx(made.content.best_scores())
    assert all(own.margin is not None for own in signs.classes.values())
    assert signs.stages is not None and 0 <= signs.stages <= 1 and signs.stability is None  # one moment only
    part = tmp_path / "tags.csv"
    rows = [line.split(",") for line in (world / "tags.csv").read_text().splitlines()[1:]]
    write_tags(part, [(name, [tag]) for name, tag in rows[:3]])
    (world / "run" / SIGNS_FILE).unlink()
    label(world / "run", DataSource(path=part, photos=world / "photos"), tmp_path / "part")
    assert (tmp_path / "part" / SIGNS_FILE).exists()
    assert not (world / "run" / SIGNS_FILE).exists(), "those of some photos are not those of the run"


def test_a_stop_anywhere_changes_nothing(world: Path, tmp_path: Path) -> None:
    label(world / "run", source(world), tmp_path / "whole")
    for pool in (None, LocalPool(1)):
        seen: list[str] = []
        out = tmp_path / f"labels{pool is None}"
        with pytest.raises(Interrupted, match="rerun the same command to resume"):
            label(world / "run", source(world), out, pool=pool, progress=stopping("detecting", 2, seen))
        assert not out.exists()
        label(world / "run", source(world), out, pool=pool, progress=stopping("", 0, seen))
        assert seen.count("detecting") == 6, "finished photos are not detected again"
        assert (out / "labels.json").read_bytes() == (tmp_path / "whole" / "labels.json").read_bytes()


def test_other_tags_do_not_reuse_finished_photos(world: Path, tmp_path: Path) -> None:
    seen: list[str] = []
    with pytest.raises(Interrupted):
        label(world / "run", source(world), tmp_path / "labels", progress=stopping("detecting", 6, seen))
    lines = (world / "tags.csv").read_text().splitlines()
    name = lines[1].split(",")[0]
    write_tags(tmp_path / "tags.csv", [(name, ["disc", "box", "bar"])])
    one = DataSource(path=tmp_path / "tags.csv", photos=world / "photos")
    made = label(world / "run", one, tmp_path / "labels")
    assert [photo.unboxed_tags for photo in made.content.photos] == [()]


def test_the_rule_can_be_set_or_chosen(world: Path, tmp_path: Path) -> None:
    one = label(world / "run", source(world), tmp_path / "one", overrides=["rule.relative=1", "rule.doubtful=1"])
    assert {len(photo.boxes) - len(photo.tags) for photo in one.content.photos} == {0}
    auto = label(world / "run", source(world), tmp_path / "auto", rule="auto")
    assert 0.2 <= float(str(auto.rule["relative"])) <= 0.95
    others = label(
        world / "run", source(world), tmp_path / "others",
        overrides=["rule.other_classes=true", "rule.other_min_score=0"],
    )  # fmt: skip
    assert any(not box.is_tag for photo in others.content.photos for box in photo.boxes)
    with pytest.raises(UserError, match=r"rule\.relativ"):
        label(world / "run", source(world), tmp_path / "typo", overrides=["rule.relativ=1"])


def test_precision_and_engine_of_a_run_can_be_set(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "has_bf16", lambda: True)  # without the instructions torch computes the same slowly
    half = label(world / "run", source(world), tmp_path / "half", overrides=["compute.precision=bf16"])
    whole = label(world / "run", source(world), tmp_path / "whole")
    assert half.run["settings"] != whole.run["settings"]
    assert [photo.tags for photo in half.content.photos] == [photo.tags for photo in whole.content.photos]
    with pytest.raises(UserError, match=r"compute\.precision"):
        label(world / "run", source(world), tmp_path / "typo", overrides=["compute.precision=half"])


def test_bad_input_is_one_line(world: Path, tmp_path: Path) -> None:
    tags, photos = tmp_path / "tags.csv", world / "photos"
    name = next(photos.iterdir()).name
    for rows, message in (
        ([(name, ["dics"])], r"class 'dics' is not one of the run's classes; did you mean 'disc'\?"),
        ([(name, [])], r"no photo has a tag; use `tag2box detect`"),
        ([("gone.jpg", ["disc"]), (name, ["disc"])], r"no photo gone\.jpg"),
    ):
        write_tags(tags, rows)
        with pytest.raises(UserError, match=message):
            label(world / "run", DataSource(path=tags, photos=photos), tmp_path / "labels")
        assert not (tmp_path / "labels").exists() and not list(tmp_path.glob(".labels*"))
    skipped: list[str] = []
    made = label(world / "run", DataSource(path=tags, photos=photos), tmp_path / "labels", skipped=skipped)
    assert len(made.content) == 1 and "gone.jpg" in skipped[0]
    with pytest.raises(UserError, match="labels: already holds a label set"):
        label(world / "run", source(world), tmp_path / "labels")


def test_trust_from_reviews_changes_labels_and_detections(world: Path, tmp_path: Path) -> None:
    made = label(world / "run", source(world), tmp_path / "labels")
    convert(tmp_path / "labels", tmp_path / "all.json", export="coco")  # a reviewer who accepts everything
    rule = ["precision=0.5", "least=2", "use_from=0.2"]
    found = trust(tmp_path / "labels", reviewed=tmp_path / "all.json", overrides=rule)
    place = tmp_path / "labels" / TRUST_FILE
    assert Trust.read(place) == found and found.overall.precision.share == 1
    again = label(world / "run", source(world), tmp_path / "again", trust=place)
    assert again.run["trust"] == found.labels_digest
    for before, after in zip(made.content.photos, again.content.photos, strict=True):
        assert [box.box for box in before.boxes] == [box.box for box in after.boxes]
        for own, other in zip(before.boxes, after.boxes, strict=True):
            assert own.score is not None
            assert other.score == pytest.approx(found.of(own.name).calibration.one(own.score))
    photos = [world / "photos"]
    plain, kept = (detect(world / "run", photos, min_score=0.0, **how) for how in ({}, {"trust": place}))
    name = next(iter(plain))
    assert kept[name].scores.tolist() == pytest.approx(found.detections(plain[name], made.classes).scores.tolist())
    assert sum(map(len, detect(world / "run", photos, trust=place).values())) <= sum(map(len, kept.values()))
    with pytest.raises(UserError, match="of a run with other settings"):
        detect(world / "run", photos, trust=place, overrides=["inference.scales=[40]"])
    trust(tmp_path / "again", reviewed=tmp_path / "all.json", overrides=rule)
    with pytest.raises(UserError, match="had calibrated scores"):
        label(world / "run", source(world), tmp_path / "third", trust=tmp_path / "again" / TRUST_FILE)


def test_trust_that_leaves_no_label_says_why(world: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    made, folder = label(world / "run", source(world), tmp_path / "labels"), tmp_path / "labels"
    with Journal(folder, LabelSet.open(folder)) as journal:
        for photo in made.content.photos:
            gone = {number: BoxState(box.box, box.name, "rejected") for number, box in enumerate(photo.boxes)}
            journal.append(photo.id, Action("reject", gone), based_on=0, key=f"{photo.id} 1")
            journal.append(photo.id, Action("done"), based_on=1, key=f"{photo.id} 2", is_sampled=True)
    trust(folder)
    argv = ["label", f"{world / 'run'}", f"{world / 'tags.csv'}", "--photos", f"{world / 'photos'}"]
    argv += ["--out", f"{tmp_path / 'again'}", "--trust", f"{folder / TRUST_FILE}"]
    done = call(argv, monkeypatch, capsys)
    assert done.code == 0 and "0 boxes in 6 photos" in done.out
    assert "no class reaches the wanted precision; review more" in done.err


def test_the_command_prints_a_line_per_class(world: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    out = tmp_path / "labels"
    argv = ["label", f"{world / 'run'}", f"{world / 'tags.csv'}", "--photos", f"{world / 'photos'}", "--out", f"{out}",
            "--rule", "auto", "--boxes-of-other-classes"]  # fmt: skip
    done = call(argv, monkeypatch, capsys)
    assert done.code == 0, done
    assert all(
        text in done.out for text in ("tags without box", "boxes in 6 photos", "rule.relative=", "next: tag2box review")
    )
    assert LabelSet.open(out).rule["other_classes"] is True


# ---------------------------------------------------------------- trimming and snapping


def test_boxes_can_be_trimmed_with_class_maps(trained: Path, tmp_path: Path, monkeypatch) -> None:
    small_network(monkeypatch)
    train(small_config(trained, "plan.iterations=1", "adaptation.epochs=1", "adaptation.side=32"), tmp_path / "run")
    plain = label(tmp_path / "run", source(trained), tmp_path / "plain")
    how = ["trim.on=true", "trim.least_left=0"]
    trimmed = label(tmp_path / "run", source(trained), tmp_path / "trimmed", overrides=how)
    assert "trim" not in plain.run and LabelSet.open(tmp_path / "trimmed").run["trim"]["sure"] == 0.9
    pairs = [(a.labels[0], b.labels[0]) for a, b in zip(plain.content.photos, trimmed.content.photos, strict=True)]
    assert [a.score for a, _ in pairs] == [b.score for _, b in pairs]
    assert any(a.box != b.box for a, b in pairs)
    assert all(b.box[i] >= a.box[i] and b.box[i + 2] <= a.box[i + 2] for a, b in pairs for i in (0, 1))


def test_snapped_labels_have_other_boxes_and_say_what_they_use(trained: Path, tmp_path: Path, monkeypatch) -> None:
    small_network(monkeypatch)
    use_fake_sam(monkeypatch)
    train(small_config(trained, "plan.iterations=1", "adaptation.epochs=1", "adaptation.side=32"), tmp_path / "run")
    plain = label(tmp_path / "run", source(trained), tmp_path / "plain")
    how = {"snap": True, "overrides": ["snap.own_quality=0"]}
    snapped = label(tmp_path / "run", source(trained), tmp_path / "snapped", **how)
    assert "uses" not in plain.run and LabelSet.open(tmp_path / "snapped").run["uses"] == "SA-1B masks"
    pairs = zip(plain.content.photos, snapped.content.photos, strict=True)
    assert any(a.labels[0].box != b.labels[0].box for a, b in pairs)
    assert not any(photo.unboxed_tags for photo in snapped.content.photos)
    seen: list[str] = []
    with pytest.raises(Interrupted):
        label(tmp_path / "run", source(trained), tmp_path / "again", **how, progress=stopping("detecting", 3, seen))
    assert label(tmp_path / "run", source(trained), tmp_path / "again", **how).content == snapped.content


def test_trimming_and_snapping_need_class_maps(world: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--snap: .* has no class maps; label with a run"):
        label(world / "run", source(world), tmp_path / "labels", snap=True)
    with pytest.raises(UserError, match=r"^trim.on: .* has no class maps; label with a run"):
        label(world / "run", source(world), tmp_path / "labels", overrides=["trim.on=true"])
    assert not (tmp_path / "labels").exists()


def test_training_photos_are_labelled_from_the_feature_cache(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tag2box.storage._SETTLED", 0)  # photos of this very second are remembered
    world = make_world(tmp_path_factory.getbasetemp())
    maps = tmp_path / "maps"
    adapted = ("adaptation.epochs=1", "adaptation.side=64", "adaptation.keep_boxes=8", f"feature_cache={maps}")
    train(world.config(*adapted, "inference.prior.evidence=1", "inference.mirror=false"), tmp_path / "run")
    photos = DataSource(path=world.tags, photos=world.photos)
    with monkeypatch.context() as patched:
        patched.setattr("tag2box.training.feature_cache.RoiMaps.passes", None)  # what computing would call
        cached = label(tmp_path / "run", photos, tmp_path / "cached")
    shutil.rmtree(maps)
    assert label(tmp_path / "run", photos, tmp_path / "computed").content == cached.content
    assert not maps.exists()
