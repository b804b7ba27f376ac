"""docs/adding-a-loss-term.md and examples/own_loop.py, executed on tiny photos."""

import json
import sys
from pathlib import Path

import pytest
import torch

from pages import DOCS, ROOT, blocks, load
from tag2box import settings
from tag2box.errors import UserError
from tag2box.extend import load_part
from tag2box.models.augment import Augment
from tag2box.models.drop_block import DropBlock
from tag2box.models.rng import StepRng
from tag2box.recipes import Config
from tag2box.training.criterion import Criterion
from tag2box.training.step import Step
from tag2box.types import Batch, Proposals
from tiny import tiny_detector
from tiny_world import call, small_data, small_network

GUIDE = DOCS / "adding-a-loss-term.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The reader's folder: the file of the guide."""
    (tmp_path / "my_losses.py").write_text(blocks(GUIDE, "python")[0], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_losses", raising=False)
    load_part.cache_clear()
    return tmp_path


def test_the_term_trains_resumes_and_detects(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small_data(folder)
    small_network(monkeypatch)
    (folder / "entropy.toml").write_text(blocks(GUIDE, "toml")[0], encoding="utf-8")
    for words in (
        ["train", "tags.csv", "--photos", "photos", "--out", "run", "--config", "entropy.toml",
         "--set", "plan.iterations=4", "--set", "plan.log_every=1", "--set", "proposals.max_boxes=10"],
        ["train", "--out", "run", "--resume"],
        ["detect", "run", "photos", "--out", "boxes.json"],
    ):  # fmt: skip
        done = call(words, monkeypatch, capsys)
        assert done.code == 0, done.err
    events = [json.loads(line) for line in (folder / "run/events.jsonl").read_text().splitlines()]
    losses = [event["losses"] for event in events if event["event"] == "step"]
    assert len(losses) == 4
    for terms in losses:
        weighted = terms["mil"] + terms["refine"] + terms["box"] + 0.03 * terms["contrast"] + 0.05 * terms["MilEntropy"]
        assert terms["MilEntropy"] > 0 and terms["total"] == pytest.approx(weighted, rel=1e-5)


def test_settings_check_its_bounds_and_write_it_back(folder: Path, tmp_path: Path) -> None:
    term = '{kind="my_losses:MilEntropy", weight=%s}'
    read = settings.load(Config, [], [f"criterion.extra=[{term % 0.2}]"])
    assert read.criterion.extra == (load_part("my_losses:MilEntropy")(weight=0.2),)
    (tmp_path / "again.toml").write_text(settings.dump(read), encoding="utf-8")
    assert settings.load(Config, [tmp_path / "again.toml"]) == read
    with pytest.raises(UserError, match="weight"):
        settings.load(Config, [], [f"criterion.extra=[{term % -1}]"])


@pytest.mark.parametrize("sizes", [(0,), (1,), (3, 0, 2)])
@pytest.mark.parametrize("memory", ["plain", "exact"])
def test_both_steps_give_its_gradient(folder: Path, sizes: tuple[int, ...], memory: str) -> None:
    term = load_part("my_losses:MilEntropy")
    grads = []
    for extra in ((), (term(weight=1.0),)):
        detector = tiny_detector(3, frozen=False).double()
        step = Step(detector, Criterion(extra=extra), DropBlock(), Augment(), memory)  # type: ignore[arg-type]
        corner = torch.rand(sum(sizes), 2, generator=torch.Generator().manual_seed(0)) * 20
        boxes = torch.cat([corner, corner + 10], dim=1).double()
        tags = torch.ones(len(sizes), 3, dtype=torch.bool)
        images = torch.rand(len(sizes), 3, 40, 40, generator=torch.Generator().manual_seed(1)).double() * 255
        batch = Batch(tuple(map(str, range(len(sizes)))), tags, Proposals(boxes, sizes), images=images)
        assert step(batch, StepRng(0, 0)).total.isfinite()
        grads.append(detector.mil.det.weight.grad)
    if sum(sizes) > 1:
        assert grads[0] is not None and grads[1] is not None and not torch.equal(grads[0], grads[1])


def test_a_loop_of_your_own_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_data(tmp_path)
    small_network(monkeypatch)
    losses = load(ROOT / "examples" / "own_loop.py").main(
        tmp_path / "tags.csv", tmp_path / "photos", tmp_path / "own", iterations=12
    )
    assert len(losses) == 12 and sum(losses[-3:]) < sum(losses[:3])
    assert (tmp_path / "own" / "detector.safetensors").exists()
