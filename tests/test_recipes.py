"""Recipes, and no dead switches: every setting of a run is shown to change what the run does (style rule R8)."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageOps

from strategies import make_scene, random_boxes
from tag2box import settings
from tag2box.commands.detect import detect
from tag2box.commands.train import read_training, train
from tag2box.engine import checkpoint
from tag2box.engine.loader import count_workers
from tag2box.engine.optim import Rival
from tag2box.engine.source import PhotoSource
from tag2box.engine.step import Step
from tag2box.errors import UserError
from tag2box.labelers import Discovery, Oicr
from tag2box.model.luck import Dice, Luck, Purpose
from tag2box.model.mask_net import ConcreteDropBlock
from tag2box.model.resnet_ws import ResNetWs, ResNetWsBackbone
from tag2box.model.vgg16 import Vgg16, Vgg16Backbone
from tag2box.model.views import Augment
from tag2box.objective import Contrast, Objective
from tag2box.proposals.selective_search import SelectiveSearch
from tag2box.recipes import RECIPES, Config, table_3a
from tag2box.types import Batch, Clues, Facts, Photo, Proposals, StageScores, TaggedPhotos
from tiny import tiny_detector
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

        def counted(run, detector, optimiser, *, iteration, **more):
            saves.append(iteration)
            real(run, detector, optimiser, iteration=iteration, **more)

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
    image = {"id": 1, "file_name": "photo0.jpg", "width": 48, "height": 40, "counts": {"disc": 7}}
    disc = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [0, 0, 4, 4], "area": 16}
    boxes = {"images": [image], "categories": [{"id": 1, "name": "disc"}], "annotations": [disc]}
    (folder / "boxes.json").write_text(json.dumps(boxes))
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


def picture() -> torch.Tensor:
    """Structure at several sizes."""
    rows, cols = torch.meshgrid(torch.arange(80), torch.arange(100), indexing="ij")
    return torch.stack([(rows // 9 * 37 + cols // 13 * 51) % 256, rows * 3 % 256, cols * 2 % 256]).to(torch.uint8)


def boxes_of_a_photo(config: Config) -> object:
    """Proposals of one picture."""
    found = config.proposals(picture())
    return found.boxes.tolist(), found.scores.tolist()


def superpixels_of_a_photo(config: Config) -> object:
    """How one picture is cut up."""
    return config.superpixels(picture()).tolist()


def counts_read(config: Config) -> object:
    """How many objects a run is told of."""
    counts = read_training(config).counts
    return None if counts is None else counts.tolist()


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


def labels_of_a_scene(config: Config) -> object:
    """What the labeler makes of many random proposals, whose objects somebody counted."""
    scene = make_scene((80, 60), [[1, 0, 1], [0, 1, 1]], seed=1)
    labels = config.objective.labeler(replace(scene, clues=Clues(counts=torch.full((2, 3), 3)))).stages
    return [(x.cls.tolist(), x.weight.tolist(), x.seeds.rows.tolist()) for x in labels]


def labels_on_the_way(config: Config) -> object:
    """What the labeler makes of random proposals with feature vectors and evidence, early and late in training."""
    scene = make_scene((80, 60), [[1, 0, 1], [0, 1, 1]], seed=1)
    evidence = torch.rand(140, generator=torch.Generator().manual_seed(1))
    scene = replace(scene, vectors=scene.embed, clues=Clues(evidence=evidence))
    stages = [x for p in (0.3, 0.9) for x in config.objective.labeler(replace(scene, progress=p)).stages]
    seeds = [x.seeds.placed(scene.proposals).tolist() for x in stages]
    return seeds, [(x.cls.tolist(), x.weight.tolist()) for x in stages]


def scored_scene(config: Config) -> object:
    """What the MIL strategy makes of random logits of many proposals, with two heads."""
    scene = make_scene((30,) * 4, [[1, 1, 1]] * 4)
    logits = torch.randn(4, 120, 3, generator=torch.Generator().manual_seed(0))
    scores = StageScores(logits[0], logits[1], (), (), (logits[2], logits[3]))
    result = config.objective.mil(scores, Facts(scene.proposals, scene.tags), 0.01)
    return result.scores.tolist(), None if result.second is None else result.second.tolist()


def coupled_scene(config: Config) -> object:
    """What the labeler makes of many random proposals, of which two MIL heads think differently."""
    scene = make_scene((30,) * 4, [[1, 1, 1]] * 4)
    labels = config.objective.labeler(replace(scene, second=scene.probs[1], progress=0.01)).stages
    return [(x.cls.tolist(), x.weight.tolist(), x.seeds.rows.tolist()) for x in labels]


def opposed(config: Config) -> object:
    """What a mask net drops, and where a step against the detector takes it."""
    assert isinstance(config.drop_block, ConcreteDropBlock)
    net, luck, g = config.drop_block.build(5, 0), Luck(0, 0), torch.Generator().manual_seed(0)
    images, maps = torch.zeros(60, dtype=torch.long), torch.rand(60, 5, 3, 3, generator=g)
    factors = net.factors(net.draw(luck, images, 3), maps, images)
    boxes = random_boxes(60, g)
    batch = Batch(("a",), torch.ones(1, 3, dtype=torch.bool), Proposals(boxes, (60,)), maps=maps)
    plain = Objective(labeler=Oicr(), contrast=Contrast(enabled=False))
    Step(tiny_detector(3), plain, net, Augment()).oppose(batch, luck)
    Rival.of(net).learn(cuts=1)
    return factors.tolist(), [p.tolist() for p in net.parameters()]


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
MIL, C_MIL, TWO_HEADS = "objective.mil", ("objective.mil.kind=c_mil",), ("heads.mil_heads=2",)
C_MIDN = (*TWO_HEADS, "objective.mil.kind=c_midn")
PCL, MIST, C_WSL = ((f"{LABELER}.kind={kind}",) for kind in ("pcl", "mist", "c_wsl"))
OIM, SLV, WSOD2 = ((f"{LABELER}.kind={kind}",) for kind in ("oim", "slv", "wsod2"))
STEPS = ("plan.schedule.steps=[0.5]",)
EDGES, SEARCH = ("proposals.kind=edge_boxes",), "selective_search"
WSRPN = ("proposals.kind=wsrpn", "proposals.short_side=80")
ADAM, VGG16, LITE0 = ("plan.optimiser.kind=adam",), ("backbone.kind=vgg16",), ("backbone.pool_size=4",)
RESNET = ("backbone.kind=resnet_ws",)
CONCRETE = ("drop_block.kind=concrete",)
SOFT = (*CONCRETE, "drop_block.temperature=1", "drop_block.drop=1")


def row(key: str, value: str, *given: str, kind: str = "", seen: Callable[[Config], object] | None = None) -> Row:
    return Row(key, f"{key}={value}", given, kind, seen)


TABLE = [
    row("name", "Mine"),
    row("data.photos", "{bench}/dark"),
    row("data.tags", "{bench}/fewer.csv"),
    row("data.split", "{bench}/two.txt"),
    row("data.skip_bad", "true", "data.tags={bench}/gone.csv", seen=photos_read),
    row("data.classes", '["disc", "box", "bar", "more"]'),
    row("data.counts", "boxes", f"{LABELER}.kind=c_wsl", "data.tags={bench}/boxes.json", seen=counts_read),
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
    row("proposals.kind", "wsrpn", kind="wsrpn", seen=boxes_of_a_photo),
    row("proposals.short_side", "40", *WSRPN, kind="wsrpn", seen=boxes_of_a_photo),
    row("proposals.max_boxes", "3", *WSRPN, kind="wsrpn", seen=boxes_of_a_photo),
    row("proposals.min_side", "30", *WSRPN, kind="wsrpn", seen=boxes_of_a_photo),
    row("proposals.layers", "1", *WSRPN, kind="wsrpn", seen=boxes_of_a_photo),
    row("proposals.smoothing", "0.5", *WSRPN, kind="wsrpn", seen=boxes_of_a_photo),
    row("proposals.alpha", "0.9", *WSRPN, kind="wsrpn", seen=boxes_of_a_photo),
    row("proposals.beta", "0.3", *WSRPN, kind="wsrpn", seen=boxes_of_a_photo),
    row("superpixels.short_side", "32", seen=superpixels_of_a_photo),
    row("superpixels.sigma", "3", seen=superpixels_of_a_photo),
    row("superpixels.scale", "9", seen=superpixels_of_a_photo),
    row("superpixels.min_size", "3000", seen=superpixels_of_a_photo),
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
    row("heads.mil_temperature", "2"),
    row("drop_block.kind", "plain", *CONCRETE, kind="plain"),
    row("drop_block.block", "1", kind="plain"),
    row("drop_block.drop", "0", kind="plain"),
    row("drop_block.kind", "concrete", kind="concrete"),
    row("drop_block.block", "1", *CONCRETE, kind="concrete", seen=opposed),
    row("drop_block.drop", "0", *CONCRETE, kind="concrete", seen=opposed),
    row("drop_block.hidden", "3", *CONCRETE, kind="concrete", seen=opposed),
    row("drop_block.temperature", "0.5", *CONCRETE, kind="concrete", seen=opposed),
    row("drop_block.weight", "1", *SOFT, kind="concrete", seen=opposed),
    row("drop_block.lr", "0.01", *SOFT, kind="concrete", seen=opposed),
    row("drop_block.weight_decay", "0.1", *SOFT, kind="concrete", seen=opposed),
    row("drop_block.lr_growth", "1", *SOFT, kind="concrete", seen=opposed),
    row("augment.mask", "false"),
    row("augment.drop", "0.8"),
    row("augment.rescale_mask", "true"),
    row("augment.noise", "false"),
    row("augment.noise_per_channel", "true"),
    row(f"{MIL}.kind", "wsddn", *C_MIL, kind="wsddn"),
    row(f"{MIL}.weight", "2", kind="wsddn"),
    row(f"{MIL}.over_classes", "sum", kind="wsddn"),
    row(f"{MIL}.kind", "c_mil", kind="c_mil"),
    row(f"{MIL}.weight", "2", *C_MIL, kind="c_mil"),
    row(f"{MIL}.over_classes", "sum", *C_MIL, kind="c_mil"),
    row(f"{MIL}.steepness", "5", *C_MIL, kind="c_mil", seen=scored_scene),
    row(f"{MIL}.top", "20", *C_MIL, kind="c_mil", seen=scored_scene),
    row(f"{MIL}.window", "5", *C_MIL, kind="c_mil", seen=scored_scene),
    row(f"{MIL}.share", "all", *C_MIL, kind="c_mil", seen=scored_scene),
    row(f"{MIL}.kind", "c_midn", *TWO_HEADS, kind="c_midn"),
    row(f"{MIL}.weight", "2", *C_MIDN, kind="c_midn"),
    row(f"{MIL}.over_classes", "sum", *C_MIDN, kind="c_midn"),
    row(f"{MIL}.removed_iou", "0.1", *C_MIDN, kind="c_midn", seen=scored_scene),
    row(f"{MIL}.covered", "0.1", *C_MIDN, kind="c_midn", seen=scored_scene),
    row(f"{MIL}.mask", "0.95", *C_MIDN, kind="c_midn", seen=scored_scene),
    row(f"{MIL}.cell", "30", *C_MIDN, kind="c_midn", seen=scored_scene),
    row(f"{LABELER}.kind", "oicr", kind="oicr"),
    row(f"{LABELER}.foreground_iou", "0.2", f"{LABELER}.kind=oicr", kind="oicr"),
    row(f"{LABELER}.kind", "discovery", f"{LABELER}.kind=oicr", kind="discovery"),
    row(f"{LABELER}.criterion", "score_adaptive", kind="discovery"),
    row(f"{LABELER}.score_threshold", "0.05", *FIXED, kind="discovery"),
    row(f"{LABELER}.exclusive", "false", kind="discovery"),
    row(f"{LABELER}.nms_iou", "0.9", kind="discovery"),
    row(f"{LABELER}.foreground_iou", "0.2", kind="discovery"),
    row(f"{LABELER}.begin", "0.9", kind="discovery"),
    row(f"{LABELER}.kind", "pcl", kind="pcl"),
    row(f"{LABELER}.groups", "9", *PCL, kind="pcl", seen=labels_of_a_scene),
    row(f"{LABELER}.graph_iou", "0.05", *PCL, kind="pcl", seen=labels_of_a_scene),
    row(f"{LABELER}.leave", "40", *PCL, kind="pcl", seen=labels_of_a_scene),
    row(f"{LABELER}.max_centres", "1", *PCL, kind="pcl", seen=labels_of_a_scene),
    row(f"{LABELER}.foreground_iou", "0.2", *PCL, kind="pcl", seen=labels_of_a_scene),
    row(f"{LABELER}.ignore_below", "0.3", *PCL, kind="pcl", seen=labels_of_a_scene),
    row(f"{LABELER}.kind", "mist", kind="mist"),
    row(f"{LABELER}.share", "0.5", *MIST, kind="mist", seen=labels_of_a_scene),
    row(f"{LABELER}.apart", "0.9", *MIST, kind="mist", seen=labels_of_a_scene),
    row(f"{LABELER}.foreground_iou", "0.2", *MIST, kind="mist", seen=labels_of_a_scene),
    row(f"{LABELER}.kind", "c_wsl", kind="c_wsl", seen=labels_of_a_scene),
    row(f"{LABELER}.overlap", "0.9", *C_WSL, kind="c_wsl", seen=labels_of_a_scene),
    row(f"{LABELER}.openers", "1", *C_WSL, kind="c_wsl", seen=labels_of_a_scene),
    row(f"{LABELER}.foreground_iou", "0.2", *C_WSL, kind="c_wsl", seen=labels_of_a_scene),
    row(f"{LABELER}.kind", "oim", kind="oim"),
    row(f"{LABELER}.reach", "1", *OIM, kind="oim", seen=labels_on_the_way),
    row(f"{LABELER}.late_reach", "9", *OIM, kind="oim", seen=labels_on_the_way),
    row(f"{LABELER}.late_from", "0.1", *OIM, kind="oim", seen=labels_on_the_way),
    row(f"{LABELER}.apart_iou", "0.4", *OIM, kind="oim", seen=labels_on_the_way),
    row(f"{LABELER}.foreground_iou", "0.2", *OIM, kind="oim", seen=labels_on_the_way),
    row(f"{LABELER}.kind", "slv", kind="slv"),
    row(f"{LABELER}.min_score", "0.9", *SLV, kind="slv", seen=labels_on_the_way),
    row(f"{LABELER}.threshold", "0.8", *SLV, kind="slv", seen=labels_on_the_way),
    row(f"{LABELER}.cell", "9", *SLV, kind="slv", seen=labels_on_the_way),
    row(f"{LABELER}.ramp", "0.5", *SLV, kind="slv", seen=labels_on_the_way),
    row(f"{LABELER}.weights", "score", *SLV, kind="slv", seen=labels_on_the_way),
    row(f"{LABELER}.foreground_iou", "0.2", *SLV, kind="slv", seen=labels_on_the_way),
    row(f"{LABELER}.kind", "wsod2", kind="wsod2"),
    row(f"{LABELER}.near_best", "0.5", *WSOD2, kind="wsod2", seen=labels_on_the_way),
    row(f"{LABELER}.nms_iou", "0.1", *WSOD2, kind="wsod2", seen=labels_on_the_way),
    row(f"{LABELER}.fade", "0.5", *WSOD2, kind="wsod2", seen=labels_on_the_way),
    row(f"{LABELER}.belief", "score", *WSOD2, kind="wsod2", seen=labels_on_the_way),
    row(f"{LABELER}.foreground_iou", "0.2", *WSOD2, kind="wsod2", seen=labels_on_the_way),
    row(f"{LABELER}.kind", "c_mil", kind="c_mil"),
    row(f"{LABELER}.steepness", "5", f"{LABELER}.kind=c_mil", kind="c_mil", seen=coupled_scene),
    row(f"{LABELER}.kind", "c_midn", *C_MIDN, kind="c_midn"),
    row(f"{LABELER}.apart", "0.9", f"{LABELER}.kind=c_midn", kind="c_midn", seen=coupled_scene),
    row(f"{LABELER}.mask", "0.95", f"{LABELER}.kind=c_midn", kind="c_midn", seen=coupled_scene),
    row(f"{LABELER}.cell", "60", f"{LABELER}.kind=c_midn", kind="c_midn", seen=coupled_scene),
    row(f"{LABELER}.foreground_iou", "0.2", f"{LABELER}.kind=c_midn", kind="c_midn", seen=coupled_scene),
    row("objective.attention.input_weight", "1", "feed.looks=2"),
    row("objective.attention.layer_weight", "1"),
    row("objective.attention.ramp", "0", "feed.looks=2", "objective.attention.input_weight=1"),
    row("objective.spatial.weight", "1"),
    row("objective.spatial.iou", "0.1", "objective.spatial.weight=1"),
    row("objective.spatial.neighbours", "1", "objective.spatial.weight=1", "objective.spatial.iou=0"),
    row("objective.sampling.iou", "false"),
    row("objective.sampling.iou_threshold", "0.1"),
    row("objective.contrast.enabled", "false"),
    row("objective.contrast.weight", "0.5"),
    row("objective.contrast.temperature", "0.5"),
    row("objective.contrast.positives", "inside"),
    row("objective.refine.first_stage", "1"),
    row("objective.refine.box_divisor", "pseudo_boxes"),
    row("objective.refine.over", "clusters"),
    row("objective.refine.reweight", "true"),
    row("objective.refine.hard_gain", "0.9", "objective.refine.reweight=true"),
    row("objective.refine.seed_cut", "0.9", "objective.refine.reweight=true"),
    row("objective.refine.last_teacher", "mean"),
    row("feed.batch", "3"),
    row("feed.resize.scales", "[64]"),
    row("feed.resize.long_max", "40"),
    row("feed.resize.flip", "1"),
    row("feed.looks", "2"),
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
