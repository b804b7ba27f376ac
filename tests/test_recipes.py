"""Recipes, and no dead switches: every setting of a run is shown to change what the run does (style rule R8)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageOps

from tag2box import settings
from tag2box.commands.detect import detect
from tag2box.commands.train import read_training, train
from tag2box.engine import checkpoint
from tag2box.engine.loader import count_workers
from tag2box.engine.source import PhotoSource
from tag2box.errors import UserError
from tag2box.labelers import Discovery, Oicr
from tag2box.model.luck import Dice, Luck, Purpose
from tag2box.model.resnet_ws import ResNetWs, ResNetWsBackbone
from tag2box.model.vgg16 import Vgg16, Vgg16Backbone
from tag2box.proposals.selective_search import SelectiveSearch
from tag2box.recipes import RECIPES, Config, table_3a
from tag2box.types import Photo, TaggedPhotos
from tiny_world import small_config, small_data, small_network, story, weights

# ---------------------------------------------------------------- what can be seen of a run


@dataclass(frozen=True)
class Bench:
    """Where runs of the tiny network happen."""

    folder: Path
    patch: pytest.MonkeyPatch
    known: dict[Config, object]

    def config(self, overrides: Sequence[str]) -> Config:
        short = ("plan.iterations=4", "plan.gallery=1", "plan.schedule.warmup=1")
        store = f"data.proposals={self.folder / 'proposals'}"
        if "proposals.kind=imported" in overrides:  # which knows none of the settings of a search
            return settings.load(Config, [], overrides)
        return small_config(self.folder, store, *short, *(o.format(bench=self.folder) for o in overrides))

    def look(self, config: Config) -> object:
        """A run, or what was seen of the same settings before."""
        if config not in self.known:
            self.known[config] = self.run(config)
        return self.known[config]

    def run(self, config: Config) -> object:
        """Train and detect; everything that is then on disk or was on the way, but for the settings themselves."""
        out = self.folder / f"run{len(list(self.folder.glob('run*')))}"
        saves: list[int] = []
        real = checkpoint.save

        def counted(run, detector, optimiser, *, iteration, classes, seconds):
            saves.append(iteration)
            real(run, detector, optimiser, iteration=iteration, classes=classes, seconds=seconds)

        with self.patch.context() as patch:
            patch.setattr(checkpoint, "save", counted)
            train(config, out)
        echoes = {"seed", "iterations", "lr"}  # settings that a run merely repeats
        events = [{k: v for k, v in e.items() if k not in echoes} for e in story(out)]
        tensors = {name: value.flatten().tolist() for name, value in weights(out).items()}
        found = detect(out, [self.folder / "photos" / "photo0.jpg"], min_score=0)
        seen = {name: (d.boxes.tolist(), d.scores.tolist(), d.labels.tolist()) for name, d in found.items()}
        kept = sorted(path.name for path in self.folder.glob("kept*"))
        inside = sorted(path.name for path in out.iterdir() if path.is_dir())
        return events, tensors, seen, saves, kept, inside


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Bench:
    folder = tmp_path_factory.mktemp("bench")
    small_data(folder)
    (folder / "dark").mkdir()
    for path in (folder / "photos").iterdir():
        with Image.open(path) as photo:
            ImageOps.invert(photo).save(folder / "dark" / path.name)
    rows = (folder / "tags.csv").read_text().splitlines()
    (folder / "fewer.csv").write_text("\n".join([*rows[:-1], rows[-1].split(",")[0] + ","]) + "\n")
    (folder / "gone.csv").write_text("\n".join([*rows, "gone.jpg,disc"]) + "\n")
    (folder / "two.txt").write_text("photo0\nphoto1\n")
    with pytest.MonkeyPatch.context() as patch:
        small_network(patch)
        yield Bench(folder, patch, {})


def dice() -> Dice:
    return Luck(0, 0).dice(Purpose.NECK, torch.zeros(1, dtype=torch.long))


def computed(config: Config) -> object:
    """How a step would be run, or why it could not be."""
    memory = config.compute.memory_for(keeps_maps=True)
    try:
        return memory, config.compute.place(), config.compute.precision
    except UserError as error:
        return str(error)


def built_lite0(config: Config) -> object:
    """What the lite0 settings make: sizes, pooling, what learns, and what dropout does to a vector."""
    torch.manual_seed(0)
    network = config.backbone.build(pretrained=False).train()
    vector = network.neck(5 * torch.randn(1, network.channels, 2, 2), dice())
    learns = [name for name, p in network.named_parameters() if p.requires_grad]
    return network.pool, network.map_size, network.frozen_maps, learns, (vector == 0).sum().item()


def built_vgg16(config: Config) -> object:
    """Likewise, narrow: all of VGG16's fc6 would take seconds."""
    assert isinstance(config.backbone, Vgg16)
    torch.manual_seed(0)
    network = Vgg16Backbone(config.backbone, vector_size=64).train()
    vector = network.neck(torch.rand(1, network.channels, 7, 7), dice())
    learns = [name for name, p in network.named_parameters() if p.requires_grad]
    return network.preprocess(torch.full((1, 3, 2, 2), 99.0)).tolist(), vector.tolist(), learns


def built_resnet_ws(config: Config) -> object:
    """Likewise, with few channels."""
    assert isinstance(config.backbone, ResNetWs)
    torch.manual_seed(0)
    network = ResNetWsBackbone(config.backbone, width=2, neck=(64, 64)).train()
    vector = network.neck(torch.rand(1, network.channels, 7, 7), dice())
    return len(network.res4), network.preprocess(torch.full((1, 3, 2, 2), 99.0)).tolist(), vector.tolist()


def weights_wanted(config: Config) -> object:
    """Which file the network asks for."""
    with pytest.raises(UserError) as error:
        config.backbone.build(pretrained=True)
    return str(error.value)


def kind_of_backbone(config: Config) -> object:
    return type(config.backbone)


def boxes_of_a_photo(config: Config) -> object:
    """Proposals of one picture with structure at several sizes."""
    rows, cols = torch.meshgrid(torch.arange(80), torch.arange(100), indexing="ij")
    image = torch.stack([(rows // 9 * 37 + cols // 13 * 51) % 256, rows * 3 % 256, cols * 2 % 256]).to(torch.uint8)
    found = config.proposals(image)
    return found.boxes.tolist(), found.scores.tolist()


def readers(config: Config) -> object:
    """How many processes would read photos."""
    return count_workers(config.feed.workers, batch_bytes=1000)


def orders(config: Config) -> object:
    """Which photos share a batch."""
    photos = TaggedPhotos(
        (), tuple(Photo(f"{i}", Path(), 9 + i % 2, 10 - i % 2) for i in range(8)), torch.ones(8, 0) > 0
    )
    source = PhotoSource(photos, NoBoxes(), config.feed, seed=0)
    return [[turn.index for turn in source.turns(iteration)] for iteration in range(4)]


class NoBoxes:
    def boxes(self, photo_id: str, /) -> torch.Tensor:
        return torch.zeros(0, 4)


def model_wanted(config: Config) -> object:
    """Which structured forest the search asks for."""
    try:
        config.proposals.ready()
    except UserError as error:
        return str(error)
    return "none"


def photos_read(config: Config) -> object:
    """The outcome of reading a dataset of which a photo is missing."""
    try:
        return len(read_training(config))
    except UserError as error:
        return str(error)


# ---------------------------------------------------------------- the table: every setting, and a change that shows


@dataclass(frozen=True)
class Row:
    """``change`` on top of ``given`` must show in ``seen`` (None: in a whole run)."""

    key: str
    change: str
    given: tuple[str, ...] = ()
    kind: str = ""
    seen: Callable[[Config], object] | None = None


LABELER, OPTIMISER = "objective.labeler", "plan.optimiser"
FIXED = (f"{LABELER}.criterion=score_fixed",)
STEPS = ("plan.schedule.steps=[0.5]",)
EDGES, SEARCH = ("proposals.kind=edge_boxes",), "selective_search"
ADAM, VGG16, LITE0 = ("plan.optimiser.kind=adam",), ("backbone.kind=vgg16",), ("backbone.pool_size=4",)
RESNET = ("backbone.kind=resnet_ws",)


def row(key: str, value: str, *given: str, kind: str = "", seen: Callable[[Config], object] | None = None) -> Row:
    return Row(key, f"{key}={value}", given, kind, seen)


TABLE = [
    row("name", "Mine"),
    row("data.photos", "{bench}/dark"),
    row("data.tags", "{bench}/fewer.csv"),
    row("data.split", "{bench}/two.txt"),
    row("data.skip_bad", "true", "data.tags={bench}/gone.csv", seen=photos_read),
    row("data.classes", '["disc", "box", "bar", "more"]'),
    row("data.proposals", "{bench}/kept-proposals"),
    row("maps", "{bench}/kept-maps"),
    row("maps_budget", "0"),
    row("proposals.kind", "selective_search", *EDGES, kind=SEARCH, seen=boxes_of_a_photo),
    row("proposals.mode", "quality", kind=SEARCH, seen=boxes_of_a_photo),
    row("proposals.short_side", "40", kind=SEARCH, seen=boxes_of_a_photo),
    row("proposals.max_boxes", "3", kind=SEARCH, seen=boxes_of_a_photo),
    row("proposals.min_side", "30", kind=SEARCH, seen=boxes_of_a_photo),
    row("proposals.seed", "1", kind=SEARCH, seen=boxes_of_a_photo),
    row("proposals.kind", "edge_boxes", kind="edge_boxes", seen=boxes_of_a_photo),
    row("proposals.short_side", "40", *EDGES, kind="edge_boxes", seen=boxes_of_a_photo),
    row("proposals.max_boxes", "3", *EDGES, kind="edge_boxes", seen=boxes_of_a_photo),
    row("proposals.min_side", "30", *EDGES, kind="edge_boxes", seen=boxes_of_a_photo),
    row("proposals.alpha", "0.9", *EDGES, kind="edge_boxes", seen=boxes_of_a_photo),
    row("proposals.beta", "0.3", *EDGES, kind="edge_boxes", seen=boxes_of_a_photo),
    row("proposals.smoothing", "0", *EDGES, kind="edge_boxes", seen=boxes_of_a_photo),
    row("proposals.model", "forest.yml.gz", *EDGES, kind="edge_boxes", seen=model_wanted),
    row("proposals.kind", "imported", kind="imported", seen=model_wanted),
    row("proposals.method", "cob", "proposals.kind=imported", kind="imported", seen=model_wanted),
    row("backbone.kind", "lite0", *VGG16, kind="lite0", seen=kind_of_backbone),
    row("backbone.pooling", "max", *LITE0, kind="lite0", seen=built_lite0),
    row("backbone.pool_size", "6", *LITE0, kind="lite0", seen=built_lite0),
    row("backbone.train_tail", "true", *LITE0, kind="lite0", seen=built_lite0),
    row("backbone.train_neck", "false", *LITE0, kind="lite0", seen=built_lite0),
    row("backbone.dropout", "0.5", *LITE0, kind="lite0", seen=built_lite0),
    row("backbone.kind", "vgg16", kind="vgg16", seen=kind_of_backbone),
    row("backbone.weights", "nowhere.safetensors", *VGG16, kind="vgg16", seen=weights_wanted),
    row("backbone.preprocess", "caffe", *VGG16, kind="vgg16", seen=built_vgg16),
    row("backbone.dropout", "0.1", *VGG16, kind="vgg16", seen=built_vgg16),
    row("backbone.train_trunk", "false", *VGG16, kind="vgg16", seen=built_vgg16),
    row("compute.memory", "exact", seen=computed),
    row("compute.precision", "bf16", seen=computed),
    row("compute.device", "cpu" if torch.cuda.is_available() else "cuda", seen=computed),
    row("backbone.kind", "resnet_ws", kind="resnet_ws", seen=kind_of_backbone),
    row("backbone.depth", "101", *RESNET, kind="resnet_ws", seen=built_resnet_ws),
    row("backbone.weights", "nowhere.safetensors", *RESNET, kind="resnet_ws", seen=weights_wanted),
    row("backbone.preprocess", "caffe", *RESNET, kind="resnet_ws", seen=built_resnet_ws),
    row("backbone.dropout", "0.1", *RESNET, kind="resnet_ws", seen=built_resnet_ws),
    row("heads.stages", "2"),
    row("heads.regress", "false"),
    row("heads.embed_dim", "5"),
    row("heads.mil_background", "true"),
    row("heads.mil_heads", "2"),
    row("drop_block.block", "1"),
    row("drop_block.drop", "0"),
    row("augment.mask", "false"),
    row("augment.drop", "0.8"),
    row("augment.rescale_mask", "true"),
    row("augment.noise", "false"),
    row("augment.noise_per_channel", "true"),
    row("objective.mil.weight", "2"),
    row("objective.mil.over_classes", "sum"),
    row(f"{LABELER}.kind", "oicr", kind="oicr"),
    row(f"{LABELER}.foreground_iou", "0.2", f"{LABELER}.kind=oicr", kind="oicr"),
    row(f"{LABELER}.kind", "discovery", f"{LABELER}.kind=oicr", kind="discovery"),
    row(f"{LABELER}.criterion", "score_adaptive", kind="discovery"),
    row(f"{LABELER}.score_threshold", "0.05", *FIXED, kind="discovery"),
    row(f"{LABELER}.exclusive", "false", kind="discovery"),
    row(f"{LABELER}.nms_iou", "0.9", kind="discovery"),
    row(f"{LABELER}.foreground_iou", "0.2", kind="discovery"),
    row("objective.sampling.iou", "false"),
    row("objective.sampling.iou_threshold", "0.1"),
    row("objective.contrast.enabled", "false"),
    row("objective.contrast.weight", "0.5"),
    row("objective.contrast.temperature", "0.5"),
    row("objective.contrast.positives", "inside"),
    row("objective.refine.first_stage", "1"),
    row("objective.refine.box_divisor", "pseudo_boxes"),
    row("feed.batch", "3"),
    row("feed.resize.scales", "[64]"),
    row("feed.resize.long_max", "40"),
    row("feed.resize.flip", "1"),
    row("feed.max_proposals", "2"),
    row("feed.group_aspect", "true", "feed.batch=4", seen=orders),
    row("feed.workers", "3", seen=readers),
    row("plan.iterations", "5"),
    row("plan.seed", "1"),
    row(f"{OPTIMISER}.kind", "sgd", *ADAM, kind="sgd"),
    row(f"{OPTIMISER}.lr", "0.02", kind="sgd"),
    row(f"{OPTIMISER}.momentum", "0.5", kind="sgd"),
    row(f"{OPTIMISER}.weight_decay", "0.1", kind="sgd"),
    row(f"{OPTIMISER}.bias_lr", "1", kind="sgd"),
    row(f"{OPTIMISER}.rescale_momentum", "false", *STEPS, kind="sgd"),
    row(f"{OPTIMISER}.kind", "adam", kind="adam"),
    row(f"{OPTIMISER}.lr", "0.02", *ADAM, kind="adam"),
    row(f"{OPTIMISER}.weight_decay", "0.1", *ADAM, kind="adam"),
    row(f"{OPTIMISER}.bias_lr", "1", *ADAM, kind="adam"),
    row("plan.schedule.warmup", "0"),
    row("plan.schedule.warmup_from", "0.9"),
    row("plan.schedule.steps", "[0.3]"),
    row("plan.schedule.gamma", "0.5", *STEPS),
    row("plan.log_every", "3"),
    row("plan.checkpoint_every", "3"),
    row("plan.gallery", "2"),
    row("inference.scales", "[64]"),
    row("inference.long_max", "40"),
    row("inference.mirror", "false"),
    row("inference.predict.nms_iou", "0.9"),
    row("inference.predict.score_threshold", "0.4"),
    row("inference.predict.max_detections", "1"),
]


def test_the_table_covers_every_setting_there_is():
    settable = [(s.key, s.kind) for s in settings.describe(Config)]
    assert sorted((r.key, r.kind) for r in TABLE) == sorted(settable)


@pytest.mark.parametrize("entry", TABLE, ids=lambda r: f"{r.key}[{r.kind}]" if r.kind else r.key)
def test_changing_a_setting_changes_what_happens(bench, entry):
    see = entry.seen or bench.look
    before, after = bench.config(entry.given), bench.config((*entry.given, entry.change))
    assert see(before) != see(after)


def test_the_same_settings_look_the_same(bench):
    """Otherwise the test above would say nothing."""
    assert bench.run(bench.config(())) == bench.run(bench.config(()))
    views = ((built_lite0, LITE0), (built_vgg16, VGG16), (weights_wanted, VGG16), (boxes_of_a_photo, ()))
    more = ((built_resnet_ws, RESNET), (boxes_of_a_photo, EDGES), (orders, ()), (readers, ()), (model_wanted, EDGES))
    for see, given in (*views, *more):
        assert see(bench.config(given)) == see(bench.config(given))


# ---------------------------------------------------------------- recipes


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_survives_its_own_file(name, tmp_path):
    config = RECIPES[name]()
    (tmp_path / "config.toml").write_text(settings.dump(config))
    assert settings.load(Config, [tmp_path / "config.toml"]) == config


@pytest.mark.parametrize("name", RECIPES)
def test_an_override_starts_from_the_recipe(name):
    base = RECIPES[name]()
    changed = settings.load(Config, [], ["plan.iterations=7"], base=base)
    assert changed == replace(base, plan=replace(base.plan, iterations=7))


def test_the_defaults_are_the_papers():
    config = Config()
    labeler, objective = config.objective.labeler, config.objective
    assert isinstance(labeler, Discovery)
    assert (objective.sampling.iou_threshold, config.augment.drop, labeler.nms_iou) == (0.5, 0.3, 0.1)
    assert (objective.contrast.weight, objective.contrast.temperature, config.heads.stages) == (0.03, 0.2, 3)
    assert (labeler.criterion, objective.sampling.iou, config.augment.mask, config.augment.noise) == (
        "similarity", True, True, True,
    )  # fmt: skip
    assert (config.drop_block.block, config.drop_block.drop, config.feed.batch) == (3, 0.3, 8)


@pytest.mark.parametrize(
    ("discovery", "contrast", "name", "labeler"),
    [
        (False, False, "OICR+", Oicr), (True, False, "OICR+ with OD", Discovery),
        (False, True, "OICR+ with WSCL", Oicr), (True, True, "OD-WSCL", Discovery),
    ],
)  # fmt: skip
def test_table_3a_is_nothing_but_settings(discovery, contrast, name, labeler):
    config = table_3a(Config(), discovery=discovery, contrast=contrast)
    assert (config.name, type(config.objective.labeler)) == (name, labeler)
    assert config.objective.contrast.enabled is contrast
    back = replace(config, name="OD-WSCL", objective=Config().objective)
    assert back == Config()


def test_od_wscl_is_the_last_row_and_oicr_plus_the_first():
    assert RECIPES["od-wscl"]() == table_3a(Config(), discovery=True, contrast=True)
    assert RECIPES["oicr-plus"]() == table_3a(Config(), discovery=False, contrast=False)
    assert isinstance(RECIPES["scenes"]().proposals, SelectiveSearch)
