"""The pages on recipes and backbones tell the truth."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from pages import DOCS, blocks, load
from tag2box.errors import UserError
from tag2box.models.augment import Augment
from tag2box.models.detector import Detector, Heads
from tag2box.models.drop_block import DropBlock
from tag2box.models.rng import StepRng
from tag2box.training.criterion import Criterion
from tag2box.training.step import Step
from tag2box.types import Batch, Proposals


@pytest.fixture
def recipes() -> ModuleType:
    return load(DOCS / "make_recipes.py")


def test_the_page_of_recipes_is_up_to_date(recipes: ModuleType) -> None:
    assert recipes.PAGE.read_text(encoding="utf-8") == recipes.page(), "run python docs/make_recipes.py"


def test_the_cost_is_told_where_it_was_measured(
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


# ---------------------------------------------------------------- the backbone of the guide


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    code = next(text for text in blocks(DOCS / "backbones.md", "python") if "class Plain" in text)
    assert len(code.splitlines()) <= 60
    file = tmp_path_factory.mktemp("guide") / "backbone_of_the_docs.py"
    file.write_text(code, encoding="utf-8")
    return load(file)


@pytest.mark.parametrize("size", [(1, 1), (7, 9), (64, 33)])
def test_the_backbone_of_the_guide_keeps_its_promises(plain: ModuleType, size: tuple[int, int]) -> None:
    backbone = plain.Plain().build(pretrained=False)
    features = backbone.trunk(torch.rand(2, 3, *size) * 255)
    assert features.shape == (2, 64, -(-size[0] // 8), -(-size[1] // 8))
    for sizes in ((0, 0), (1, 2)):
        boxes = torch.tensor([[0.0, 0.0, 8.0, 8.0]]).repeat(sum(sizes), 1)
        maps = backbone.roi_maps(features, Proposals(boxes, sizes))
        assert maps.shape == (sum(sizes), backbone.channels, backbone.map_size, backbone.map_size)
        assert backbone.neck(maps).shape == (sum(sizes), backbone.vector_size)
    assert not backbone.frozen_roi_maps


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
