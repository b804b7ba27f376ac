"""The page of recipes is up to date, and the guide "Adding a backbone" works from end to end."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch

from pages import DOCS, blocks, load
from tag2box import settings
from tag2box.cli.detect import detect
from tag2box.cli.train import resume, train
from tag2box.errors import Interrupted, UserError
from tag2box.extend import load_part
from tag2box.models.augment import Augment
from tag2box.models.detector import Detector, Heads
from tag2box.models.drop_block import DropBlock
from tag2box.models.rng import StepRng
from tag2box.recipes import Config
from tag2box.runs import load_run, read_config
from tag2box.training.criterion import Criterion
from tag2box.training.step import Step
from tag2box.types import Batch, Proposals
from tiny_world import call, same, small_config, small_data, weights


@pytest.fixture
def recipes() -> ModuleType:
    return load(DOCS / "make_recipes.py")


def test_the_page_of_recipes_is_up_to_date(recipes: ModuleType) -> None:
    assert recipes.PAGE.read_text(encoding="utf-8") == recipes.page(), "run python docs/make_recipes.py"


def test_the_cost_is_stated_if_it_was_measured(
    recipes: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipes, "STEPS", tmp_path / "none.json")
    assert list(recipes._cost()) == ["Not measured yet.\n"]
    done = {"family": "voc-vgg16", "batch": 8, "seconds": [30.4, 99.6], "peak_mb": 4321.5, "fits": True}
    done["padded"] = [[480, 640], [1200, 1600]]
    measured = {
        "machine": {"cpu": "a CPU", "threads": 2, "memory_gb": 23.5, "gemm_gflops": 66.0},
        "steps": [done, {"family": "voc-r101-ws", "batch": 8, "fits": False}],
        "runs": [
            {"recipe": "voc07-ss-vgg16", "iterations": 30_000, "days": 34.7},
            {"recipe": "voc07-ss-r101-ws", "iterations": 30_000, "days": None},
        ],
    }
    (tmp_path / "steps.json").write_text(json.dumps(measured))
    monkeypatch.setattr(recipes, "STEPS", tmp_path / "steps.json")
    text = "\n".join(recipes._cost())
    assert "| voc-vgg16 | 8 | 480 x 640 and 1200 x 1600 | 30 and 100 | 4,322 MB |" in text
    assert "| voc-r101-ws | 8 | - | - | more than there was |" in text
    assert "| `voc07-ss-vgg16` | 30,000 | 35 days |" in text and "not measured" in text


# ---------------------------------------------------------------- the guide "Adding a backbone"

GUIDE = DOCS / "backbones.md"


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The guide's file in a folder of the reader, on Python's path."""
    code = next(text for text in blocks(GUIDE, "python") if "class Plain" in text)
    assert len(code.splitlines()) <= 65
    (tmp_path / "my_backbones.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield importlib.import_module("my_backbones")
    del sys.modules["my_backbones"]
    load_part.cache_clear()


def plain_config(folder: Path, plain: ModuleType, *overrides: str) -> Config:
    """A short run of the guide's backbone on tiny photos."""
    if not (folder / "plain.pth").exists():
        small_data(folder)
        torch.save(plain.PlainBackbone().state_dict(), folder / "plain.pth")
    chosen = ("backbone.kind=my_backbones:Plain", "backbone.weights=plain.pth", "backbone.dropout=0.25")
    return small_config(folder, *chosen, *overrides)


@contextmanager
def killed_in_training(title: str, total: int, done: int = 0) -> Iterator[Killed]:
    yield Killed(after=3 if title == "training" else total + 1)


class Killed:
    """A progress bar that ends the process in the middle of the work."""

    def __init__(self, after: int) -> None:
        self.left = after

    def advance(self, note: str = "") -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


@pytest.mark.parametrize("size", [(1, 1), (7, 9), (64, 33)])
def test_the_backbone_of_the_guide_meets_its_requirements(plain: ModuleType, size: tuple[int, int]) -> None:
    backbone = plain.Plain().build(pretrained=False)
    features = backbone.trunk(torch.rand(2, 3, *size) * 255)
    assert features.shape == (2, 64, -(-size[0] // 8), -(-size[1] // 8))
    for sizes in ((0, 0), (1, 2)):
        boxes = torch.tensor([[0.0, 0.0, 8.0, 8.0]]).repeat(sum(sizes), 1)
        maps = backbone.roi_maps(features, Proposals(boxes, sizes))
        assert maps.shape == (sum(sizes), backbone.channels, backbone.map_size, backbone.map_size)
        assert backbone.neck(maps).shape == (sum(sizes), backbone.vector_size)
    assert backbone.frozen_trunk and not backbone.frozen_roi_maps


def test_the_backbone_of_the_guide_learns_in_an_exact_step(plain: ModuleType) -> None:
    detector = Detector(plain.Plain().build(pretrained=False), 2, Heads(embed_dim=4)).train()
    boxes = torch.tensor([[0.0, 0, 30, 30], [4, 4, 28, 30], [20, 20, 40, 40]]).repeat(2, 1)
    images = torch.rand(2, 3, 40, 48) * 255
    batch = Batch(("a", "b"), torch.eye(2, dtype=torch.bool), Proposals(boxes, (3, 3)), images=images)
    Step(detector, Criterion(), DropBlock(), Augment(), "exact")(batch, StepRng(0, 0))
    assert detector.backbone.tail.weight.grad.any()  # type: ignore[union-attr]
    assert detector.backbone.body[0].weight.grad is None  # type: ignore[index, union-attr]


def test_the_backbone_of_the_guide_loads_its_file_or_names_it(plain: ModuleType, tmp_path: Path) -> None:
    donor = plain.PlainBackbone()
    torch.save(donor.state_dict(), tmp_path / "plain.pth")
    built = plain.Plain(weights=tmp_path / "plain.pth").build()
    assert torch.equal(built.tail.weight, donor.tail.weight)
    with pytest.raises(UserError, match=r"gone\.pth: no such file"):
        plain.Plain(weights=tmp_path / "gone.pth").build()


@pytest.mark.usefixtures("alone")
def test_the_backbone_of_the_guide_trains_resumes_and_detects(
    plain: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = plain_config(tmp_path, plain)
    assert isinstance(config.backbone, plain.Plain)
    train(config, tmp_path / "whole")
    with pytest.raises((KeyboardInterrupt, Interrupted)):
        train(config, tmp_path / "interrupted", progress=killed_in_training)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # the weight file is found by its absolute path
    resume(tmp_path / "interrupted")
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "interrupted"))
    assert 'kind = "my_backbones:Plain"' in (tmp_path / "whole" / "config.toml").read_text(encoding="utf-8")
    assert read_config(tmp_path / "whole").backbone == plain.Plain(weights=tmp_path / "plain.pth", dropout=0.25)

    (tmp_path / "plain.pth").unlink()  # detection needs the class alone
    assert isinstance(load_run(tmp_path / "whole").detector.backbone, plain.PlainBackbone)
    found = detect(tmp_path / "whole", [tmp_path / "photos"], min_score=0.0)
    assert len(found) == 4 and any(len(boxes.boxes) for boxes in found.values())


@pytest.mark.usefixtures("alone")
def test_the_commands_of_the_guide_run(
    plain: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = plain_config(tmp_path, plain)
    (tmp_path / "short.toml").write_text(settings.dump(config), encoding="utf-8")
    (command,) = [text for text in blocks(GUIDE, "") if "tag2box train" in text]
    words = command.replace("\\\n", " ").partition("tag2box ")[2].split()
    for argv in (
        [*words, "--config", "short.toml"],
        ["train", "--out", "runs/plain", "--resume"],
        ["detect", "runs/plain", "photos", "--out", "found.json"],
        ["report", "runs/plain"],
    ):
        done = call(argv, monkeypatch, capsys)
        assert done.code == 0, done.err
    assert (tmp_path / "found.json").exists()


@pytest.mark.usefixtures("alone")
def test_a_class_that_cannot_be_imported_is_one_line(plain: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"backbone\.kind=my_backbones:Pain: .*has no attribute Pain"):
        plain_config(tmp_path, plain, "backbone.kind=my_backbones:Pain")
    with pytest.raises(UserError, match=r"cannot be imported .*PYTHONPATH"):
        plain_config(tmp_path, plain, "backbone.kind=no_such_module:Plain")
