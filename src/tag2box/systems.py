"""The systems the paper compares with, by name: each a small change of any settings, so that all else is equal.

Backbone, proposals, schedule, batch and evaluator are those of the settings that are changed. What a system is made of
(its MIL strategy, its labeler, what its losses weigh) is set; box regression and DropBlock are on where the authors had
them. Stage 1 counts as in the settings, three times by default, whatever the authors had.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from tag2box.errors import UserError
from tag2box.methods import BuiltInLabeler
from tag2box.methods.base import TagLoss
from tag2box.methods.c_midn import CMidn, CMidnLabeler
from tag2box.methods.c_mil import CMil, CMilLabeler
from tag2box.methods.c_wsl import CWsl
from tag2box.methods.casd import Attention
from tag2box.methods.mist import Mist
from tag2box.methods.oicr import Oicr
from tag2box.methods.oim import Oim
from tag2box.methods.pcl import Pcl
from tag2box.methods.slv import Slv
from tag2box.methods.wsddn import Spatial
from tag2box.methods.wsod2 import Wsod2
from tag2box.methods.wsrpn import Rescore
from tag2box.models.drop_block import ConcreteDropBlock, DropBlock
from tag2box.paper_runs import NOTHING, PAPER_RUNS, PaperFigures
from tag2box.proposals.early_responses import Wsrpn
from tag2box.proposals.importers.proposal_files import Imported
from tag2box.recipes import Config, table_3a
from tag2box.settings.schema import toml

Change = Callable[[Config], Config]


@dataclass(frozen=True, kw_only=True)
class System:
    """A named system: what it changes, and what the paper reports of it."""

    name: str
    title: str
    year: int
    idea: str
    """What it does that those before it did not, in a few words."""
    change: Change
    figures: Mapping[str, PaperFigures] = field(default_factory=dict)
    """What the paper reports, by the names of ``paper.DATASETS``: VGG16, the proposals its source names."""

    def reported(self, dataset: str) -> float | None:
        """Its mAP50 on a dataset (COCO's AP50 on COCO), in per cent; None where the paper has none."""
        figures = self.figures.get(dataset, NOTHING)
        return figures.mAP50 if figures.AP50 is None else figures.AP50

    def __call__(self, config: Config) -> Config:
        """The system on these settings."""
        return replace(self.change(config), name=self.title)


# ---------------------------------------------------------------- the changes


def to_oicr_plus(config: Config) -> Config:
    """OICR with box regression and DropBlock, as the paper's table 3a has it."""
    return table_3a(config, discovery=False, contrast=False)


def to_od_wscl(config: Config) -> Config:
    """Discovery and the contrastive loss on top of OICR+."""
    return table_3a(config, discovery=True, contrast=True)


def labelled(config: Config, labeler: BuiltInLabeler) -> Config:
    """OICR+ with another labeler, without DropBlock."""
    plus = to_oicr_plus(config)
    criterion = replace(plus.criterion, labeler=labeler)
    return replace(plus, criterion=criterion, drop_block=DropBlock(drop=0.0))


def unregressed(config: Config) -> Config:
    """Without box regression."""
    return replace(config, heads=replace(config.heads, regress=False))


def oicr(config: Config) -> Config:
    """The top proposal of each tag is its object; no box regression."""
    plus = to_oicr_plus(config)
    return unregressed(replace(plus, drop_block=DropBlock(drop=0.0)))


def wsddn(config: Config) -> Config:
    """The MIL head alone, with its temperature and its spatial regulariser; labels are looked at, not learnt."""
    plain = oicr(config)
    heads = replace(plain.heads, stages=0, mil_temperature=2.0)
    return replace(plain, heads=heads, criterion=replace(plain.criterion, spatial=Spatial(weight=1e-4)))


def pcl(config: Config) -> Config:
    """Clusters of proposals, and their loss."""
    return _refining(unregressed(labelled(config, Pcl())), over="clusters")


def c_wsl(config: Config) -> Config:
    """As many boxes as somebody counted objects."""
    return labelled(config, CWsl())


def _tag_loss(config: Config) -> dict[str, Any]:
    """The settings of the image-level loss, which every built-in MIL head has."""
    mil = config.criterion.mil
    return {field.name: getattr(mil, field.name) for field in fields(TagLoss)} if isinstance(mil, TagLoss) else {}


def c_mil(config: Config) -> Config:
    """Bags of merged boxes, and labels that follow their continuation."""
    merged = CMil(**_tag_loss(config))
    plain = unregressed(labelled(config, CMilLabeler()))
    return replace(plain, criterion=replace(plain.criterion, mil=merged))


def c_midn(config: Config) -> Config:
    """Two coupled MIL heads, and labels from both."""
    coupled = CMidn(**_tag_loss(config))
    plain = unregressed(labelled(config, CMidnLabeler()))
    heads = replace(plain.heads, mil_heads=2)
    return replace(plain, heads=heads, criterion=replace(plain.criterion, mil=coupled))


def wsod2(config: Config) -> Config:
    """Superpixels weigh what is taught."""
    return labelled(config, Wsod2())


def oim(config: Config) -> Config:
    """Instances by their look, and the loss that weighs them anew."""
    return _refining(unregressed(labelled(config, Oim())), reweight=True)


def slv(config: Config) -> Config:
    """A fourth stage that is taught by votes of the three before it."""
    voted = labelled(config, Slv())
    heads = replace(voted.heads, stages=voted.heads.stages + 1)
    return _refining(replace(voted, heads=heads), last_teacher="mean")


def mist(config: Config) -> Config:
    """All good proposals that lie apart, and an adversary that drops what the detector leans on."""
    return replace(labelled(config, Mist()), drop_block=ConcreteDropBlock(hidden=64))


def wsrpn(config: Config) -> Config:
    """OICR on boxes around what early layers respond to, of which the better half by the MIL head stays.

    As many and as small boxes as the settings have them.
    """
    own, plain = config.proposals, oicr(config)
    halved = replace(plain, criterion=replace(plain.criterion, rescore=Rescore(keep=0.5)))
    if isinstance(own, Imported):  # nothing is known of how many there are
        return replace(halved, proposals=Wsrpn())
    boxes = Wsrpn(short_side=own.short_side, max_boxes=own.max_boxes, min_side=own.min_side)
    return replace(halved, proposals=boxes)


def casd(config: Config) -> Config:
    """Several looks at a photo, drawn to where any of them looks, and so for layers where the backbone shows two."""
    plain, resize = labelled(config, Oicr()), config.loader.resize
    resize = resize if 0 < resize.flip < 1 else replace(resize, flip=0.5)
    loader = replace(plain.loader, resize=resize, views_per_image=min(4, len(resize.views())))
    attention = Attention(input_weight=0.1, layer_weight=0.1 if config.backbone.layers > 1 else 0.0)
    return replace(plain, loader=loader, criterion=replace(plain.criterion, attention=attention))


def _refining(config: Config, **changes: str | bool) -> Config:
    refine = replace(config.criterion.refine, **changes)  # type: ignore[arg-type]
    return replace(config, criterion=replace(config.criterion, refine=refine))


# ---------------------------------------------------------------- what the paper reports (tables 1 and 2)


def _reported(voc07: float, voc12: float | None = None, coco14: PaperFigures | None = None) -> dict[str, PaperFigures]:
    voc = {"voc07": voc07, "voc12": voc12}
    found = {name: PaperFigures(source="table 2", mAP50=value) for name, value in voc.items() if value is not None}
    return found | ({} if coco14 is None else {"coco14": coco14})


def _coco(ap: float, ap50: float) -> PaperFigures:
    return PaperFigures(source="table 1", AP=ap, AP50=ap50)


_MIST_COCO = PaperFigures(
    source="table 1", AP=11.4, AP50=24.3, AP75=9.4, APs=3.6, APm=12.2, APl=17.6,
    AR1=13.5, AR10=22.6, AR100=23.9, ARs=8.5, ARm=25.4, ARl=38.3,
)  # fmt: skip
_OD_WSCL = {run.partition("-")[0]: run for run in ("voc07-ss-vgg16", "voc12-ss-vgg16", "coco14-mcg-vgg16")}

_ALL = (
    System(
        name="wsddn", title="WSDDN", year=2016, change=wsddn, figures=_reported(34.8),
        idea="which class a proposal shows times which proposal shows the class; tags teach the sum",
    ),
    System(
        name="oicr", title="OICR", year=2017, change=oicr, figures=_reported(41.2, 37.9),
        idea="three stages, each taught by the top proposal of the one before",
    ),
    System(
        name="pcl", title="PCL", year=2018, change=pcl, figures=_reported(43.5, 40.6, _coco(8.5, 19.4)),
        idea="centres of clusters of good proposals, and one loss a cluster",
    ),
    System(
        name="c-wsl", title="C-WSL", year=2018, change=c_wsl, figures=_reported(46.8, 43.0),
        idea="as many boxes as somebody counted objects; needs counts",
    ),
    System(
        name="wsrpn", title="WSRPN", year=2018, change=wsrpn, figures=_reported(47.9, 43.4),
        idea="OICR on boxes that early layers respond to, sifted by the MIL head",
    ),
    System(
        name="c-mil", title="C-MIL", year=2019, change=c_mil, figures=_reported(50.5, 46.7),
        idea="boxes judged in bags that fall apart while training goes on",
    ),
    System(
        name="c-midn", title="C-MIDN", year=2019, change=c_midn, figures=_reported(52.6, 50.2, _coco(9.6, 21.4)),
        idea="a second head must find the class where the first did not look",
    ),
    System(
        name="wsod2", title="WSOD2", year=2019, change=wsod2, figures=_reported(53.6, 47.2, _coco(10.8, 22.7)),
        idea="boxes that keep to the photo's superpixels count more, at first",
    ),
    System(
        name="oim", title="OIM", year=2020, change=oim, figures=_reported(50.1, 45.3),
        idea="what looks like the top proposal elsewhere in the photo is an object too",
    ),
    System(
        name="slv", title="SLV", year=2020, change=slv, figures=_reported(53.5, 49.2),
        idea="all good boxes vote, and what they agree on is the object",
    ),
    System(
        name="mist", title="MIST", year=2020, change=mist, figures=_reported(54.9, 52.1, _MIST_COCO),
        idea="every good proposal that hardly overlaps a better one is an object",
    ),
    System(
        name="casd", title="CASD", year=2020, change=casd, figures=_reported(56.8, 53.6, _coco(12.8, 26.4)),
        idea="several looks at a photo learn to look where any of them does",
    ),
    System(
        name="oicr-plus", title="OICR+", year=2022, change=to_oicr_plus,
        figures={"voc07": PaperFigures(source="table 3", mAP50=52.3)},
        idea="OICR with box regression and DropBlock: where OD-WSCL starts",
    ),
    System(
        name="od-wscl", title="OD-WSCL", year=2022, change=to_od_wscl,
        figures={dataset: PAPER_RUNS[run].figures for dataset, run in _OD_WSCL.items()},
        idea="objects that look like the top one of any photo, in an embedding learnt for it",
    ),
)  # fmt: skip
SYSTEMS: dict[str, System] = {system.name: system for system in _ALL}
"""By the names ``tag2box compare`` and ``train --system`` know, oldest first."""


def find_system(name: str) -> System:
    """A system by its name."""
    if name not in SYSTEMS:
        near = difflib.get_close_matches(name.lower(), SYSTEMS, 1, 0.0)[0]
        raise UserError(f"{name}: no system of this name; did you mean {near}? `tag2box systems` lists all")
    return SYSTEMS[name]


# ---------------------------------------------------------------- a change in words


def changes(before: object, after: object, prefix: str = "") -> Iterator[str]:
    """What differs between two settings, as ``--set`` takes it; what a run is called left out."""
    if not (is_dataclass(before) and is_dataclass(after)) or isinstance(after, type):
        if before != after:
            yield f"{prefix}={_word(after)}"
        return
    if type(before) is not type(after):  # another member of a union: its kind, and what is not at its defaults
        yield f"{prefix}.kind={_word(getattr(after, 'kind', ''))}"
        before = type(after)()
    for part in fields(after):
        key = f"{prefix}.{part.name}".lstrip(".")
        if key != "name":
            yield from changes(getattr(before, part.name), getattr(after, part.name), key)


def _word(value: object) -> str:
    return value if isinstance(value, str) and re.fullmatch(r"[a-z][a-z0-9_]*", value) else toml(value)
