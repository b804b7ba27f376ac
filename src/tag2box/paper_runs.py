"""The runs of the OD-WSCL paper: four datasets, three proposal methods, three backbones, and all its figures.

The parts of a run are here; ``recipes.paper`` builds a whole config from them. Batch, learning rate, iterations, decay,
scales, lambda, thresholds and K are the paper's (section 5.1). Not stated in the paper, and our choice:

- the warm-up (200 iterations from a third), the steps of the learning rate, momentum and the rules for biases: as the
  published code is described;
- a background column in the MIL head, weight 3 of stage 1, L_reg over all proposals: likewise, because the published
  figures come from it;
- dropout of 0.5 after each linear layer, for the ResNets as for VGG16;
- selective search: the fast mode of OpenCV's definition, at most 2,000 boxes, none with a side below 20 pixels;
- test scales: also 800, and horizontal flips;
- MCG for the figures of its table 3b ("We use MCG for the rest of the experiments").

Some of the 36 combinations are not in the paper: they have a recipe, and no figures.
"""

from dataclasses import dataclass, fields
from itertools import product

from tag2box.images import Resize
from tag2box.inference.predict import Inference
from tag2box.models import resnet_ws, vgg16
from tag2box.proposals.importers.proposal_files import Imported
from tag2box.proposals.selective_search import SelectiveSearch
from tag2box.training import batches, loop, optim


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperDataset:
    """A dataset of the paper, and its schedule."""

    title: str
    classes: int
    photos: int
    """Training photos."""
    split: str | None
    """Image list of the training photos, if the format has lists."""
    iterations: int
    steps: tuple[float, ...]
    """Steps of the learning rate, as fractions of the run."""
    contrast_weight: float
    """lambda."""


def _voc(title: str, photos: int, iterations: int) -> PaperDataset:
    return PaperDataset(
        title=title,
        classes=20,
        photos=photos,
        split="trainval",
        iterations=iterations,
        steps=(2 / 3, 0.89),
        contrast_weight=0.03,
    )


def _coco(title: str, photos: int) -> PaperDataset:
    return PaperDataset(
        title=title,
        classes=80,
        photos=photos,
        split=None,
        iterations=130_000,
        steps=(9 / 13, 12 / 13),
        contrast_weight=0.01,
    )


PAPER_DATASETS = {
    "voc07": _voc("VOC07", 5_011, 30_000),
    "voc12": _voc("VOC12", 11_540, 60_000),
    "coco14": _coco("COCO14", 82_783),
    "coco17": _coco("COCO17", 118_287),
}
PAPER_PROPOSALS: dict[str, SelectiveSearch | Imported] = {
    "ss": SelectiveSearch(),
    "mcg": Imported(method="mcg"),
    "cob": Imported(method="cob"),
}
PAPER_BACKBONES: dict[str, vgg16.Vgg16 | resnet_ws.ResNetWs] = {
    "vgg16": vgg16.Vgg16(weights="vgg16"),
    "r50-ws": resnet_ws.ResNetWs(depth=50, weights="r50-ws"),
    "r101-ws": resnet_ws.ResNetWs(depth=101, weights="r101-ws"),
}
LEARNING_RATES = {"vgg16": 0.01, "r50-ws": 0.02, "r101-ws": 0.02}
PAPER_LOADER = batches.Loader(
    batch_size=8, resize=Resize(scales=(480, 576, 688, 864, 1000, 1200), long_max=2000, flip=0.5)
)
PAPER_INFERENCE = Inference(scales=(480, 576, 688, 800, 864, 1000, 1200), long_max=2000, mirror=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperFigures:
    """Figures of a run in the paper, in per cent; None if not reported. ``source`` is the table."""

    source: str
    mAP50: float | None = None
    CorLoc: float | None = None
    AP: float | None = None
    AP50: float | None = None
    AP75: float | None = None
    APs: float | None = None
    APm: float | None = None
    APl: float | None = None
    AR1: float | None = None
    AR10: float | None = None
    AR100: float | None = None
    ARs: float | None = None
    ARm: float | None = None
    ARl: float | None = None

    def reported(self) -> dict[str, float]:
        """The reported figures by name, in the paper's order."""
        names = [field.name for field in fields(self) if field.name != "source"]
        return {name: value for name in names if (value := getattr(self, name)) is not None}


NOTHING = PaperFigures(source="not in the paper")


@dataclass(frozen=True, slots=True)
class PaperRun:
    """One combination, by the names of ``PAPER_DATASETS``, ``PAPER_PROPOSALS`` and ``PAPER_BACKBONES``."""

    dataset: str
    proposals: str
    backbone: str

    @property
    def name(self) -> str:
        """The recipe's name."""
        return f"{self.dataset}-{self.proposals}-{self.backbone}"

    @property
    def title(self) -> str:
        """The run's name in reports."""
        return f"{PAPER_DATASETS[self.dataset].title}, {self.proposals.upper()}, {self.backbone.upper()}"

    @property
    def plan(self) -> loop.Plan:
        """Its iterations, optimizer and schedule."""
        data = PAPER_DATASETS[self.dataset]
        optimizer = optim.Sgd(lr=LEARNING_RATES[self.backbone], momentum=0.9, weight_decay=1e-4)
        schedule = loop.Schedule(warmup=200, warmup_from=1 / 3, steps=data.steps, gamma=0.1)
        return loop.Plan(iterations=data.iterations, optimizer=optimizer, schedule=schedule)

    @property
    def figures(self) -> PaperFigures:
        """Its figures in the paper."""
        return _FIGURES.get(self.name, NOTHING)


def _coco12(source: str, *values: float) -> PaperFigures:
    """COCO's twelve numbers, or the first of them."""
    names = [field.name for field in fields(PaperFigures)][3:]
    return PaperFigures(source=source, **dict(zip(names, values, strict=False)))


_FIGURES = {
    "voc07-ss-vgg16": PaperFigures(source="table 2 and appendix A", mAP50=56.1, CorLoc=69.8),
    "voc07-mcg-vgg16": PaperFigures(source="tables 2 and 3a", mAP50=58.7),
    "voc07-cob-vgg16": PaperFigures(source="appendix B", mAP50=61.8),
    "voc07-mcg-r50-ws": PaperFigures(source="table 3b", mAP50=56.6),
    "voc07-mcg-r101-ws": PaperFigures(source="table 3b", mAP50=56.5),
    "voc12-ss-vgg16": PaperFigures(source="table 2 and appendix A", mAP50=54.6, CorLoc=71.2),
    "voc12-mcg-vgg16": PaperFigures(source="table 2", mAP50=56.2),
    "coco14-mcg-vgg16": _coco12("table 1", 13.7, 27.7, 11.9, 4.4, 14.5, 21.2, 14.7, 24.8, 26.9, 8.8, 27.8, 44.0),
    "coco14-mcg-r50-ws": _coco12("table 1", 13.9, 29.1, 11.8, 4.9, 16.8, 22.3, 15.5, 26.1, 28.0, 9.0, 31.8, 46.6),
    "coco14-mcg-r101-ws": _coco12("table 1", 14.4, 29.0, 12.4, 4.8, 17.3, 23.8, 15.8, 27.0, 30.0, 9.2, 33.6, 51.0),
    "coco14-cob-vgg16": _coco12("appendix B", 15.1, 29.3, 13.8, 4.5, 15.9, 23.4, 16.0, 26.5, 28.2, 8.9, 29.5, 46.5),
    "coco14-cob-r50-ws": _coco12("appendix B", 15.4, 30.4, 14.0, 4.8, 18.0, 24.6, 16.9, 29.2, 31.4, 9.4, 35.1, 53.1),
    "coco14-cob-r101-ws": _coco12("appendix B", 16.2, 31.6, 14.8, 5.0, 18.7, 26.4, 17.5, 29.6, 31.9, 10.0, 35.4, 53.5),
    "coco17-mcg-vgg16": _coco12("table 1", 13.6, 27.4, 12.2, 4.9, 15.5, 21.6, 14.6, 24.8, 26.8, 9.2, 28.7, 43.8),
    "coco17-mcg-r50-ws": _coco12("table 1", 13.8, 27.8, 12.1, 5.7, 17.7, 23.8, 15.1, 26.6, 29.7, 10.1, 33.7, 50.7),
    "coco17-mcg-r101-ws": _coco12("table 1", 14.4, 28.7, 12.6, 5.4, 17.9, 25.5, 15.4, 26.8, 29.6, 10.0, 33.3, 50.6),
    "coco17-cob-vgg16": _coco12("appendix B", 15.6, 29.9, 14.3, 5.1, 17.2, 25.1, 16.4, 27.1, 28.7, 9.8, 30.5, 47.8),
    "coco17-cob-r50-ws": _coco12("appendix B", 16.0, 30.5, 14.9, 5.4, 19.0, 27.2, 17.0, 29.1, 31.4, 10.4, 35.2, 53.3),
    "coco17-cob-r101-ws": _coco12("appendix B", 16.5, 31.6, 15.2, 5.7, 19.6, 28.2, 17.4, 29.7, 31.9, 11.3, 35.5, 54.2),
}
PAPER_RUNS = {
    run.name: run for run in (PaperRun(*parts) for parts in product(PAPER_DATASETS, PAPER_PROPOSALS, PAPER_BACKBONES))
}
"""All 36 runs by name."""


# ---------------------------------------------------------------- figures of the compared systems, with VGG16


def _reported(voc07: float, voc12: float | None = None, *coco14: float) -> dict[str, PaperFigures]:
    """mAP50 on VOC07 and VOC12, and COCO's numbers on COCO14 (tables 1 and 2)."""
    voc = {"voc07": voc07, "voc12": voc12}
    found = {name: PaperFigures(source="table 2", mAP50=value) for name, value in voc.items() if value is not None}
    return found | ({"coco14": _coco12("table 1", *coco14)} if coco14 else {})


SYSTEM_FIGURES: dict[str, dict[str, PaperFigures]] = {
    "wsddn": _reported(34.8),
    "oicr": _reported(41.2, 37.9),
    "pcl": _reported(43.5, 40.6, 8.5, 19.4),
    "c-wsl": _reported(46.8, 43.0),
    "wsrpn": _reported(47.9, 43.4),
    "c-mil": _reported(50.5, 46.7),
    "c-midn": _reported(52.6, 50.2, 9.6, 21.4),
    "wsod2": _reported(53.6, 47.2, 10.8, 22.7),
    "oim": _reported(50.1, 45.3),
    "slv": _reported(53.5, 49.2),
    "mist": _reported(54.9, 52.1, 11.4, 24.3, 9.4, 3.6, 12.2, 17.6, 13.5, 22.6, 23.9, 8.5, 25.4, 38.3),
    "casd": _reported(56.8, 53.6, 12.8, 26.4),
    "oicr-plus": {"voc07": PaperFigures(source="table 3", mAP50=52.3)},
    "od-wscl": {
        dataset: PAPER_RUNS[f"{dataset}-{proposals}-vgg16"].figures
        for dataset, proposals in (("voc07", "ss"), ("voc12", "ss"), ("coco14", "mcg"))
    },
}
"""Figures of the systems, by their names and those of ``PAPER_DATASETS``."""
