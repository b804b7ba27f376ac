"""No dead switches: every setting of a run is shown to change what the run does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image, ImageOps

from settings_seen import (
    boxes_of_a_photo,
    built_lite0,
    built_resnet_ws,
    built_vgg16,
    model_wanted,
    orders,
    readers,
    weights_wanted,
)
from settings_table import EDGES, LITE0, RESNET, TABLE, VGG16
from tag2box import settings
from tag2box.cli.detect import detect
from tag2box.cli.train import train
from tag2box.errors import UserError
from tag2box.recipes import Config
from tag2box.training import checkpoint
from tiny_world import small_config, small_data, small_network, story, weights


@dataclass(frozen=True)
class Bench:
    """Runs of the tiny network in a folder."""

    folder: Path
    patch: pytest.MonkeyPatch
    known: dict[Config, object]

    def config(self, overrides: Sequence[str]) -> Config:
        short = ("plan.iterations=4", "plan.gallery=1", "plan.schedule.warmup=1")
        store = f"data.proposals={self.folder / 'proposals'}"
        if "proposals.kind=imported" in overrides:  # has no settings of a search
            return settings.load(Config, [], overrides)
        return small_config(self.folder, store, *short, *(o.format(bench=self.folder) for o in overrides))

    def run_once(self, config: Config) -> object:
        """The results of a run, cached by its settings."""
        if config not in self.known:
            self.known[config] = self.run(config)
        return self.known[config]

    def run(self, config: Config) -> object:
        """Train and detect; all results on disk and on the way, without the settings themselves."""
        out = self.folder / f"run{len(list(self.folder.glob('run*')))}"
        saves: list[int] = []
        real = checkpoint.save

        def counted(run, detector, optimizer, *, iteration, **more):
            saves.append(iteration)
            real(run, detector, optimizer, iteration=iteration, **more)

        with self.patch.context() as patch:
            patch.setattr(checkpoint, "save", counted)
            train(config, out)
        echoes = {"seed", "iterations", "lr"}  # settings that a run merely repeats
        events = [{k: v for k, v in e.items() if k not in echoes} for e in story(out)]
        tensors = {name: value.flatten().tolist() for name, value in weights(out).items()}
        found = detect(out, [self.folder / "photos" / "photo0.jpg"], min_score=0)
        seen = {name: (d.boxes.tolist(), d.scores.tolist(), d.labels.tolist()) for name, d in found.items()}
        stored = sorted(path.name for path in self.folder.glob("stored*"))
        inside = sorted(path.name for path in out.iterdir() if path.is_dir())
        return events, tensors, seen, saves, stored, inside


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    folder = tmp_path_factory.mktemp("bench")
    small_data(folder)
    (folder / "dark").mkdir()
    for path in (folder / "photos").iterdir():
        with Image.open(path) as photo:
            ImageOps.invert(photo).save(folder / "dark" / path.name)
    shutil.copy(folder / "photos" / "photo0.jpg", folder / "dark")  # in the store of proposals, which takes the others
    rows = (folder / "tags.csv").read_text().splitlines()
    (folder / "fewer.csv").write_text("\n".join([*rows[:-1], rows[-1].split(",")[0] + ","]) + "\n")
    (folder / "gone.csv").write_text("\n".join([*rows, "gone.jpg,disc"]) + "\n")
    (folder / "two.txt").write_text("photo0\nphoto1\n")
    image = {"id": 1, "file_name": "photo0.jpg", "width": 48, "height": 40, "counts": {"disc": 7}}
    disc = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, 4, 4], "area": 16}
    boxes = {"images": [image], "categories": [{"id": 1, "name": "disc"}], "annotations": [disc]}
    (folder / "boxes.json").write_text(json.dumps(boxes))
    with pytest.MonkeyPatch.context() as patch:
        small_network(patch)
        train(small_config(folder, f"data.proposals={folder / 'proposals'}", "plan.seed=1"), folder / "earlier")
        yield Bench(folder, patch, {})


def test_the_table_covers_every_setting_there_is():
    settable = [(s.key, s.kind) for s in settings.describe(Config)]
    assert sorted((r.key, r.kind) for r in TABLE) == sorted(settable)


NUMBERS = {(s.key, s.kind): "[{}]" if s.type.startswith("list") else "{}"
           for s in settings.describe(Config) if "int" in s.type or "float" in s.type}  # fmt: skip


@pytest.mark.parametrize("number", ["nan", "inf", "1e30"])
def test_every_number_is_finite_and_has_bounds(number):
    rows = [entry for entry in TABLE if (entry.key, entry.kind) in NUMBERS]
    for entry in rows:
        change = f"{entry.key}={NUMBERS[entry.key, entry.kind].format(number)}"
        given = [part for part in entry.given if "{bench}" not in part]
        with pytest.raises(UserError) as error:
            settings.load(Config, [], [*given, change])
        assert entry.key in str(error.value) and "\n" not in str(error.value)
    assert len(rows) > 90


@pytest.mark.parametrize("entry", TABLE, ids=lambda r: f"{r.key}[{r.kind}]" if r.kind else r.key)
def test_changing_a_setting_changes_what_happens(bench, entry):
    see = entry.seen or bench.run_once
    before, after = bench.config(entry.given), bench.config((*entry.given, entry.change))
    assert see(before) != see(after)


def test_the_same_settings_give_the_same_results(bench):
    """Otherwise the test above would prove nothing."""
    assert bench.run(bench.config(())) == bench.run(bench.config(()))
    views = ((built_lite0, LITE0), (built_vgg16, VGG16), (weights_wanted, VGG16), (boxes_of_a_photo, ()))
    more = ((built_resnet_ws, RESNET), (boxes_of_a_photo, EDGES), (orders, ()), (readers, ()), (model_wanted, EDGES))
    for see, given in (*views, *more):
        assert see(bench.config(given)) == see(bench.config(given))
