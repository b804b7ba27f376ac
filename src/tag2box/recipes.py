"""``Config``, everything a run depends on, and the recipes: named functions that return a complete one."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from tag2box import errors, extend, images, paper_runs
from tag2box.formats.listing import DataSource
from tag2box.inference.predict import Inference, Predict
from tag2box.methods import oicr, wscl, wsddn
from tag2box.methods.discovery import Discovery
from tag2box.models import detector, lite0
from tag2box.models.augment import Augment
from tag2box.models.backbone import BackboneSettings
from tag2box.models.class_maps import Prior
from tag2box.models.context import Context
from tag2box.models.drop_block import DropBlock, RegularizerSettings
from tag2box.ops.superpixels import Superpixels
from tag2box.proposals import base, combined, selective_search
from tag2box.training import batches, dist, loop, optim
from tag2box.training.adaptation import Adaptation, Segmentation
from tag2box.training.criterion import Criterion


@dataclass(frozen=True, kw_only=True)
class Data:
    """Training data: photos and tags. Boxes of reviewed photos are a file of their own, never those of the dataset."""

    tags: Path | None = None
    """The tags: a CSV, a COCO file, a VOC folder or a tree of class folders."""
    photos: Path | None = None
    """Folder of the photos, if the dataset does not name it."""
    split: str | None = None
    """Image list: a name in ImageSets/Main of a VOC folder, or a text file with one id per line."""
    classes: tuple[str, ...] | None = None
    """Class names in order; default: those of the dataset."""
    format: str | None = None
    """Dataset format: a built-in name such as coco or yolo, or package.module:Name; default: recognised by the path."""
    skip_bad: bool = False
    """Skip photos that are missing or unreadable, instead of stopping at the first."""
    counts: Literal["given", "boxes"] = "given"
    """Source of object counts (C-WSL): the dataset, or, for experiments only, its boxes."""
    proposals: Path | None = None
    """Proposal store of these photos; built on first use. Default: inside the run."""
    boxes: Path | None = None
    """Reviewed boxes of some of these photos, which teach beside the tags: any format with boxes, or a label set."""

    def source(self) -> DataSource:
        """The dataset these settings describe."""
        if self.tags is None:
            raise errors.UserError(
                "data.tags: not set; name a dataset after `tag2box train`, or set it in the config file"
            )
        return DataSource(
            path=self.tags, photos=self.photos, split=self.split, classes=self.classes, format=self.format
        )


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a run depends on. Defaults are the paper's, on the light backbone."""

    RENAMED: ClassVar[dict[str, str]] = {
        "objective": "criterion",
        "feed.batch": "loader.batch_size",
        "feed.looks": "loader.views_per_image",
        "feed": "loader",
        "plan.optimiser": "plan.optimizer",
        "maps": "feature_cache",
        "maps_budget": "feature_cache_gb",
        "criterion.labeler.exclusive": "criterion.labeler.rule",
    }
    """Keys of earlier versions, still read, with a warning."""
    RENAMED_VALUES: ClassVar[dict[str, dict[object, str]]] = {
        "criterion.labeler.exclusive": {True: "exclusive", False: "paper"},
    }
    """Values of renamed keys that are spelt otherwise now."""
    CLEARS: ClassVar[dict[str, str]] = {"plan.iterations": "plan.epochs"}
    """A length given in iterations replaces one in epochs."""

    name: str = "OD-WSCL"
    """Name of the run in the report."""
    data: Data = Data()
    proposals: Annotated[base.ProposalMethod, extend.Plugin("proposal method")] = selective_search.SelectiveSearch()
    superpixels: Superpixels = Superpixels()
    backbone: Annotated[BackboneSettings, extend.Plugin("backbone")] = lite0.Lite0()
    adaptation: Adaptation = Adaptation()
    segmentation: Segmentation = Segmentation()
    heads: detector.Heads = detector.Heads()
    drop_block: Annotated[RegularizerSettings, extend.Plugin("regularizer")] = DropBlock()
    augment: Augment = Augment()
    criterion: Criterion = Criterion()
    loader: batches.Loader = batches.Loader()
    plan: loop.Plan = loop.Plan()
    warm_start: Path | None = None
    """A finished run of the same classes and architecture, with whose weights training begins; default: pretrained."""
    compute: dist.Compute = dist.Compute()
    inference: Inference = Inference()
    feature_cache: Path | None = None
    """Folder of the feature cache (RoI or trunk maps of a frozen network). Default: inside the run."""
    feature_cache_gb: Annotated[float, Field(ge=0)] = 8.0
    """Maximum size of the feature cache of a set of photos in gigabytes; larger features are not cached."""


def table_3a(config: Config, *, discovery: bool, contrast: bool) -> Config:
    """One row of the paper's table 3a: object discovery and WSCL, each on or off. Off and off is OICR+.

    A config whose labeler is discovery keeps the settings of it.
    """
    own = config.criterion.labeler
    name = {(0, 0): "OICR+", (1, 0): "OICR+ with OD", (0, 1): "OICR+ with WSCL", (1, 1): "OD-WSCL"}
    criterion = replace(
        config.criterion,
        labeler=(own if isinstance(own, Discovery) else Discovery()) if discovery else oicr.Oicr(),
        contrast=replace(config.criterion.contrast, enabled=contrast),
    )
    return replace(config, name=name[discovery, contrast], criterion=criterion)


def od_wscl() -> Config:
    """OD-WSCL with the paper's settings and schedule, on EfficientNet-lite0."""
    return Config()


def oicr_plus() -> Config:
    """OICR with box regression and DropBlock: the paper's baseline."""
    return table_3a(Config(), discovery=False, contrast=False)


def scenes() -> Config:
    """A small schedule for the generated scenes: minutes on two cores.

    Learning rate, dropout and length were chosen on other scenes (seed 123), not on the demo's test split.
    """
    return Config(
        proposals=selective_search.SelectiveSearch(short_side=144, min_side=16, max_boxes=200),
        backbone=lite0.Lite0(pool_size=8, dropout=0.5),
        criterion=Criterion(labeler=Discovery(rule="exclusive")),
        loader=batches.Loader(batch_size=8, resize=images.Resize(scales=(384,), flip=0.0)),
        plan=loop.Plan(
            iterations=150,
            optimizer=optim.Adam(lr=3e-4),
            schedule=loop.Schedule(warmup=20),
            log_every=5,
            checkpoint_every=50,
        ),
        inference=Inference(scales=(384,), mirror=False),
    )


def photos() -> Config:
    """For your own photos: hundreds of them, on an ordinary CPU, in less than an hour.

    The backbone learns the tags first; its class maps say which proposals to look at and how well a box fits the
    evidence; heads on frozen, pooled features then learn in minutes. Labels are those of OICR+, which no other labeler
    beats on training photos. See docs/real-photos.md for what each part adds.
    """
    frozen = table_3a(photos_frozen(), discovery=False, contrast=False)
    return replace(
        frozen,
        backbone=lite0.Lite0(pool_size=8, dropout=0.5, train_neck=False, pooled=True),
        adaptation=Adaptation(epochs=10, keep_boxes=240),
        heads=detector.Heads(context=Context(on="both")),
        drop_block=DropBlock(drop=0.0),
        augment=Augment(mask=False, noise_per_channel=True),
        criterion=replace(frozen.criterion, prior=Prior(evidence=1.0, area=0.3)),
        plan=replace(
            frozen.plan,
            iterations=500,
            epochs=9.0,  # 500 iterations for the 447 photos on which the recipe was chosen
            least_iterations=300,
            most_iterations=6000,
            optimizer=optim.Adam(lr=1e-3),
            checkpoint_every=100,
        ),
        inference=replace(
            frozen.inference,
            prior=Prior(evidence=1.5, area=0.4, straddling=1.5),
            regression=0.5,
            predict=Predict(vote_iou=0.5),
        ),
    )


def inspection() -> Config:
    """For small or faint things, such as defects, on photos of which some show none.

    Like ``photos``, with candidate boxes of several sources (``combined``), down to 1.5 % of a side, more of which are
    kept, and with class maps of single cells of the frozen network, which are finer and weigh more.
    """
    config = photos()
    return replace(
        config,
        proposals=combined.Combined(),
        adaptation=replace(config.adaptation, part="cells", side=320, epochs=24, keep_boxes=300),
        criterion=replace(config.criterion, prior=Prior(evidence=3.0, area=1.3, straddling=0.75)),
        inference=replace(
            config.inference,
            prior=Prior(evidence=4.0, area=1.8, straddling=0.5),
            predict=Predict(vote_iou=0.7),
        ),
    )


def photos_frozen() -> Config:
    """The recipe of ``compare`` and ``reproduce`` on photos: features of a frozen network, without adaptation.

    Selective search on a copy with a short side of 200 pixels, one scale, cached RoI maps, of which the systems can
    drop and mask cells, and a random subset of the proposals per iteration.
    """
    return Config(
        proposals=selective_search.SelectiveSearch(short_side=200),
        backbone=lite0.Lite0(pool_size=8, dropout=0.5),
        criterion=Criterion(mil=wsddn.Wsddn(over_classes="sum"), labeler=Discovery(rule="exclusive")),
        loader=batches.Loader(batch_size=8, max_proposals=128, resize=images.Resize(scales=(480,), flip=0.0)),
        plan=loop.Plan(
            iterations=400,
            optimizer=optim.Adam(lr=3e-4),
            schedule=loop.Schedule(warmup=20),
            log_every=10,
            checkpoint_every=50,
        ),
        inference=Inference(scales=(480,), mirror=False),
    )


def paper(run: paper_runs.PaperRun) -> Config:
    """OD-WSCL as trained in the paper; ``tag2box.paper_runs`` lists what the paper states and what it leaves out."""
    data = paper_runs.PAPER_DATASETS[run.dataset]
    return Config(
        name=f"OD-WSCL, {run.title}",
        data=Data(split=data.split),
        proposals=paper_runs.PAPER_PROPOSALS[run.proposals],
        backbone=paper_runs.PAPER_BACKBONES[run.backbone],
        heads=detector.Heads(mil_background=True),
        criterion=Criterion(contrast=wscl.Contrast(weight=data.contrast_weight, temperature=0.2)),
        loader=paper_runs.PAPER_LOADER,
        plan=run.plan,
        inference=paper_runs.PAPER_INFERENCE,
    )


RECIPES: dict[str, Callable[[], Config]] = {
    "photos": photos,
    "inspection": inspection,
    "photos-frozen": photos_frozen,
    "od-wscl": od_wscl,
    "oicr-plus": oicr_plus,
    "scenes": scenes,
    **{name: partial(paper, run) for name, run in paper_runs.PAPER_RUNS.items()},
}
"""Named configurations that a config file or ``--set`` starts from."""
