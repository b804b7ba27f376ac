"""The paper's recipes: its numbers are in them, requirements are reported in time, and each builds its network."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from tag2box.cli.train import train
from tag2box.errors import UserError
from tag2box.methods.discovery import Discovery
from tag2box.metrics.coco_ap import CocoScores
from tag2box.models.detector import Detector
from tag2box.models.resnet_ws import ResNetWs
from tag2box.models.vgg16 import Vgg16
from tag2box.paper_runs import NOTHING, PAPER_BACKBONES, PAPER_DATASETS, PAPER_PROPOSALS, PAPER_RUNS, PaperFigures
from tag2box.proposals.base import Candidates
from tag2box.proposals.importers.proposal_files import Imported
from tag2box.proposals.selective_search import SelectiveSearch
from tag2box.proposals.store import write_store
from tag2box.recipes import RECIPES, Config, Data
from tag2box.training.optim import Sgd
from tiny import tiny_boxes, tiny_photos
from tiny_world import small_data

# dataset: iterations, steps of the learning rate, lambda, classes, photos
FACTS = {
    "voc07": (30_000, (20_000, 26_700), 0.03, 20, 5_011),
    "voc12": (60_000, (40_000, 53_400), 0.03, 20, 11_540),
    "coco14": (130_000, (90_000, 120_000), 0.01, 80, 82_783),
    "coco17": (130_000, (90_000, 120_000), 0.01, 80, 118_287),
}


def test_there_are_36_and_all_are_recipes() -> None:
    assert len(PAPER_RUNS) == 4 * 3 * 3
    assert all(PAPER_RUNS[name].name == name for name in PAPER_RUNS)
    assert set(PAPER_RUNS) < set(RECIPES)
    assert {"voc07-ss-vgg16", "voc12-mcg-r50-ws", "coco14-cob-r101-ws", "coco17-mcg-vgg16"} <= set(PAPER_RUNS)


@pytest.mark.parametrize("name", PAPER_RUNS)
def test_the_papers_numbers_are_in_it(name: str) -> None:
    config, run = RECIPES[name](), PAPER_RUNS[name]
    iterations, cuts, weight, classes, photos = FACTS[run.dataset]
    plan, criterion = config.plan, config.criterion
    assert plan.iterations == iterations
    moments = [i for cut in cuts for i in (cut - 1, cut)]
    assert [plan.schedule.cuts(i, iterations) for i in moments] == [0, 1, 1, 2]
    assert plan.optimizer == Sgd(lr=0.01 if run.backbone == "vgg16" else 0.02, momentum=0.9, weight_decay=1e-4)
    assert (plan.schedule.warmup, plan.schedule.warmup_from, plan.schedule.gamma) == (200, 1 / 3, 0.1)
    assert (config.loader.batch_size, config.loader.resize.scales) == (8, (480, 576, 688, 864, 1000, 1200))
    assert (config.loader.resize.long_max, config.loader.resize.flip, config.loader.max_proposals) == (2000, 0.5, None)
    assert set(config.inference.scales) == {*config.loader.resize.scales, 800} and config.inference.mirror
    assert (criterion.contrast.weight, criterion.contrast.temperature, config.heads.stages) == (weight, 0.2, 3)
    assert isinstance(criterion.labeler, Discovery) and criterion.labeler.nms_iou == 0.1
    assert (criterion.sampling.iou_threshold, config.augment.drop, config.inference.predict.nms_iou) == (0.5, 0.3, 0.4)
    assert config.heads.mil_background and config.heads.regress
    assert (PAPER_DATASETS[run.dataset].classes, PAPER_DATASETS[run.dataset].photos) == (classes, photos)
    assert config.data == Data(split="trainval" if classes == 20 else None)
    assert config.compute.memory_for(has_cached_maps=False) == "exact"


@pytest.mark.parametrize("name", PAPER_RUNS)
def test_its_network_and_boxes_are_those_of_its_name(name: str) -> None:
    config, run = RECIPES[name](), PAPER_RUNS[name]
    assert config.backbone == PAPER_BACKBONES[run.backbone]
    assert isinstance(config.backbone, Vgg16 | ResNetWs) and config.backbone.weights == run.backbone
    if run.proposals == "ss":
        assert config.proposals == SelectiveSearch(max_boxes=2000, min_side=20)
    else:
        assert config.proposals == Imported(method=run.proposals)  # type: ignore[arg-type]
    assert config.name == f"OD-WSCL, {run.title}"


@pytest.mark.parametrize(("name", "channels"), [("vgg16", 512), ("r50-ws", 2048), ("r101-ws", 2048)])
def test_every_network_builds_at_full_size(name: str, channels: int) -> None:
    with torch.device("meta"):
        detector = Detector(PAPER_BACKBONES[name].build(pretrained=False), 20, RECIPES[f"voc07-ss-{name}"]().heads)
    backbone = detector.backbone
    assert (backbone.channels, backbone.vector_size, backbone.stride, backbone.map_size) == (channels, 4096, 8, 7)
    assert detector.mil.cls.out_features == 21


# ---------------------------------------------------------------- figures


def test_figures_are_named_as_the_metrics_are() -> None:
    names = [field.name for field in fields(PaperFigures)]
    assert names == ["source", "mAP50", "CorLoc", *(field.name for field in fields(CocoScores))]
    assert NOTHING.reported() == {}


def test_the_figures_stand_with_their_recipes() -> None:
    reported = {name: run.figures.reported() for name, run in PAPER_RUNS.items() if run.figures is not NOTHING}
    assert {name: list(found.values()) for name, found in reported.items() if name.startswith("voc")} == {
        "voc07-ss-vgg16": [56.1, 69.8], "voc07-mcg-vgg16": [58.7], "voc07-cob-vgg16": [61.8],
        "voc07-mcg-r50-ws": [56.6], "voc07-mcg-r101-ws": [56.5], "voc12-ss-vgg16": [54.6, 71.2],
        "voc12-mcg-vgg16": [56.2],
    }  # fmt: skip
    coco = {name: found for name, found in reported.items() if name.startswith("coco")}
    assert len(coco) == 2 * 2 * 3 and not any("-ss-" in name for name in coco)
    assert {name: (found["AP"], found["AP50"], found["ARl"]) for name, found in coco.items() if "r101" in name} == {
        "coco14-mcg-r101-ws": (14.4, 29.0, 51.0), "coco14-cob-r101-ws": (16.2, 31.6, 53.5),
        "coco17-mcg-r101-ws": (14.4, 28.7, 50.6), "coco17-cob-r101-ws": (16.5, 31.6, 54.2),
    }  # fmt: skip
    assert all(len(found) == 12 for found in coco.values())


@pytest.mark.parametrize("name", [name for name, run in PAPER_RUNS.items() if run.figures.AP is not None])
def test_cocos_figures_are_in_the_order_that_figures_must_have(name: str) -> None:
    f = PAPER_RUNS[name].figures.reported()
    assert f["AP75"] < f["AP"] < f["AP50"] and f["APs"] < f["APm"] < f["APl"]
    assert f["AR1"] < f["AR10"] < f["AR100"] and f["ARs"] < f["ARm"] < f["ARl"]


# ---------------------------------------------------------------- what a recipe needs


def on_tiny_photos(folder: Path, name: str) -> Config:
    """A recipe on four photos; training ends at the missing weights."""
    small_data(folder)
    tags, photos = folder / "tags.csv", folder / "photos"
    return replace(RECIPES[name](), data=Data(tags=tags, photos=photos, proposals=folder / "store"))


@pytest.mark.parametrize("name", ["voc07-mcg-vgg16", "coco17-cob-r50-ws"])
def test_a_recipe_with_imported_boxes_fails_before_training_without_them(name: str, tmp_path: Path) -> None:
    config = on_tiny_photos(tmp_path, name)
    with pytest.raises(UserError) as error:
        train(config, tmp_path / "run")
    message = str(error.value)
    assert (
        PAPER_RUNS[name].proposals.upper() in message and "tag2box proposals import" in message and "\n" not in message
    )
    assert not (tmp_path / "run").exists() and not (tmp_path / "store").exists()


def test_with_a_store_the_next_error_is_about_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAG2BOX_HOME", str(tmp_path / "home"))
    config = on_tiny_photos(tmp_path, "voc07-mcg-r50-ws")
    photos, g = tiny_photos(tmp_path, 4).photos, torch.Generator().manual_seed(0)
    boxes = [Candidates.unranked(tiny_boxes(photo, 5, g)) for photo in photos]
    write_store(tmp_path / "store", {"kind": "imported"}, photos, boxes)
    with pytest.raises(UserError, match="r50-ws: no weights of this name"):
        train(config, tmp_path / "run")


def test_names_of_datasets_proposals_and_backbones() -> None:
    assert list(PAPER_DATASETS) == ["voc07", "voc12", "coco14", "coco17"]
    assert list(PAPER_PROPOSALS) == ["ss", "mcg", "cob"]
    assert list(PAPER_BACKBONES) == ["vgg16", "r50-ws", "r101-ws"]
