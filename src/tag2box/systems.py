"""Named systems: OD-WSCL and the systems it is compared with, each as a function that changes a config.

A system sets its own parts: MIL strategy, labeler, loss weights, and box regression and DropBlock as its authors used
them; OICR+ and OD-WSCL have those of the config. Backbone, proposals, schedule, batch, evaluator and the weight of
stage 1 stay those of the config, so that systems on one config are compared on equal terms. Two systems are about one
of these: WSRPN makes its own proposals, and CASD shapes RoI maps, so that it has four views of a photo, and trains the
last block of lite0, which is frozen otherwise.
"""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from tag2box import errors, paper_runs, recipes
from tag2box.methods import c_midn, c_mil, c_wsl, casd, mist, oicr, oim, pcl, protocols, slv, wsddn, wsod2, wsrpn
from tag2box.models import lite0
from tag2box.models.adversary import ConcreteDropBlock
from tag2box.models.drop_block import DropBlock, InvertedAttention
from tag2box.proposals.early_responses import NETWORKS, Wsrpn
from tag2box.proposals.importers.proposal_files import Imported
from tag2box.settings.schema import toml

Change = Callable[[recipes.Config], recipes.Config]
Part = tuple[Callable[[recipes.Config], bool], str]
"""Whether a config has a part of a system, and the words if it has not, in which ``{0}`` is the config."""
MASK_NET = 512
"""Published width of the mask net of Concrete DropBlock (MIST), in channels."""


@dataclass(frozen=True, kw_only=True)
class System:
    """A named system: its change of a config, the parts it consists of, and its figures in the OD-WSCL paper."""

    name: str
    title: str
    year: int
    idea: str
    """Its contribution, in a few words."""
    change: Change
    parts: tuple[Part, ...] = ()
    """What a config can lack of its paper."""

    @property
    def figures(self) -> Mapping[str, paper_runs.PaperFigures]:
        """The paper's figures with VGG16, by the names of ``PAPER_DATASETS``."""
        return paper_runs.SYSTEM_FIGURES.get(self.name, {})

    def state(self, config: recipes.Config) -> str:
        """``whole``, or ``reduced`` with the reasons, of a config of the system."""
        lacking = [words.format(config) for has_part, words in self.parts if not has_part(config)]
        return f"reduced: {'; '.join(lacking)}" if lacking else "whole"

    def reported(self, dataset: str) -> float | None:
        """Its mAP50 on a dataset (AP50 on COCO), in per cent; None if the paper has none."""
        figures = self.figures.get(dataset, paper_runs.NOTHING)
        return figures.mAP50 if figures.AP50 is None else figures.AP50

    def __call__(self, config: recipes.Config) -> recipes.Config:
        """A config of the system, from any config."""
        return replace(self.change(config), name=self.title)


# ---------------------------------------------------------------- changes of a config


def to_oicr_plus(config: recipes.Config) -> recipes.Config:
    """OICR with the config's box regression and DropBlock, the baseline of the paper's table 3a."""
    return recipes.table_3a(config, discovery=False, contrast=False)


def to_od_wscl(config: recipes.Config) -> recipes.Config:
    """OICR+ with object discovery and the contrastive loss."""
    return recipes.table_3a(config, discovery=True, contrast=True)


def with_labeler(config: recipes.Config, labeler: protocols.Labeler) -> recipes.Config:
    """OICR+ with another labeler, without DropBlock."""
    plus = to_oicr_plus(config)
    criterion = replace(plus.criterion, labeler=labeler)
    return replace(plus, criterion=criterion, drop_block=DropBlock(drop=0.0))


def without_regression(config: recipes.Config) -> recipes.Config:
    """Without box regression."""
    return replace(config, heads=replace(config.heads, regress=False))


def to_oicr(config: recipes.Config) -> recipes.Config:
    """OICR: the top proposal per tag is the pseudo box; no box regression."""
    plus = to_oicr_plus(config)
    return without_regression(replace(plus, drop_block=DropBlock(drop=0.0)))


def to_wsddn(config: recipes.Config) -> recipes.Config:
    """WSDDN: the MIL head alone, with its temperature and its spatial regularizer; labels are recorded, not learned."""
    plain = to_oicr(config)
    heads = replace(plain.heads, stages=0, mil_temperature=2.0)
    return replace(plain, heads=heads, criterion=replace(plain.criterion, spatial=wsddn.Spatial(weight=1e-4)))


def to_pcl(config: recipes.Config) -> recipes.Config:
    """PCL: clusters of proposals, and the loss over clusters."""
    return _with_refine(without_regression(with_labeler(config, pcl.Pcl())), over="clusters")


def to_c_wsl(config: recipes.Config) -> recipes.Config:
    """C-WSL: as many pseudo boxes as annotated counts."""
    return with_labeler(config, c_wsl.CWsl())


def _tag_loss(config: recipes.Config) -> dict[str, Any]:
    """The settings of the image-level loss, which every built-in MIL strategy has."""
    mil = config.criterion.mil
    return (
        {field.name: getattr(mil, field.name) for field in fields(protocols.TagLoss)}
        if isinstance(mil, protocols.TagLoss)
        else {}
    )


def to_c_mil(config: recipes.Config) -> recipes.Config:
    """C-MIL: subsets of boxes with the hinge loss, and the labeler that follows their continuation."""
    merged = c_mil.CMil(**_tag_loss(config), loss="hinge", subset_score="mean")
    plain = without_regression(with_labeler(config, c_mil.CMilLabeler(positives="subset")))
    return replace(plain, criterion=replace(plain.criterion, mil=merged))


def to_c_midn(config: recipes.Config) -> recipes.Config:
    """C-MIDN: two coupled MIL heads guided by a segmentation branch, and pseudo labels from both."""
    coupled = c_midn.CMidn(**_tag_loss(config), guide="segmentation")
    plain = without_regression(with_labeler(config, c_midn.CMidnLabeler(guide="segmentation")))
    heads = replace(plain.heads, mil_heads=2)
    return replace(plain, heads=heads, criterion=replace(plain.criterion, mil=coupled))


def to_wsod2(config: recipes.Config) -> recipes.Config:
    """WSOD2: superpixel evidence of the regressed boxes weights the pseudo labels, and gives way to their scores."""
    return with_labeler(config, wsod2.Wsod2(evidence_of="regressed", belief="score"))


def to_oim(config: recipes.Config) -> recipes.Config:
    """OIM: instances from appearance and spatial graphs, and the reweighted loss."""
    return _with_refine(without_regression(with_labeler(config, oim.Oim())), reweight=True)


def to_slv(config: recipes.Config) -> recipes.Config:
    """SLV: a fourth stage with pseudo labels from votes of the three before it."""
    voted = with_labeler(config, slv.Slv())
    heads = replace(voted.heads, stages=voted.heads.stages + 1)
    return _with_refine(replace(voted, heads=heads), last_teacher="mean")


def to_mist(config: recipes.Config) -> recipes.Config:
    """MIST: all top proposals that do not overlap, and an adversary that drops discriminative features.

    The adversary's mask net has the published width if the whole backbone is trained, as in the paper's recipes; on a
    frozen one, for CPUs, it would take most of a step.
    """
    backbone = config.backbone
    is_light = isinstance(backbone, lite0.Lite0) or not getattr(backbone, "train_trunk", True)
    adversary = ConcreteDropBlock(hidden=64 if is_light else MASK_NET)
    return replace(with_labeler(config, mist.Mist()), drop_block=adversary)


def to_wsrpn(config: recipes.Config) -> recipes.Config:
    """WSRPN: OICR on windows from responses of early layers, of which a region classifier keeps the better half.

    Resolution, number and minimum size of the windows are those of the config's proposals.
    """
    own, plain, backbone = config.proposals, to_oicr(config), config.backbone
    rescored = replace(
        plain,
        heads=replace(plain.heads, region=True),
        criterion=replace(plain.criterion, rescore=wsrpn.Rescore(keep=0.5)),
    )
    weights = getattr(backbone, "weights", None)
    network = backbone.title if backbone.title in NETWORKS else "lite0"
    windows = Wsrpn(network=network, weights=weights)  # type: ignore[arg-type]
    if not isinstance(own, Imported):  # imported proposals have no such settings
        share = getattr(own, "min_share", 0.0)
        windows = replace(
            windows, short_side=own.short_side, max_boxes=own.max_boxes, min_side=own.min_side, min_share=share
        )
    return replace(rescored, proposals=windows)


def to_casd(config: recipes.Config) -> recipes.Config:
    """CASD: attention distilled between four views (two scales and their flips) and between layers, at every stage.

    A recipe with one scale gets a second one, 5/6 of it. What attention cannot be trained without is turned on in
    lite0: RoI maps with cells, a trainable block 15, which makes them, and head convolution.
    """
    plain, resize, backbone = with_labeler(config, oicr.Oicr()), config.loader.resize, config.backbone
    ratios = (1.0, 5 / 6) if len(resize.scales) == len(resize.ratios) == 1 else resize.ratios
    resize = replace(resize, ratios=ratios, flip=resize.flip if 0 < resize.flip < 1 else 0.5)
    if isinstance(backbone, lite0.Lite0):
        trained = backbone.train_blocks if backbone.train_tail else 1
        backbone = replace(backbone, pooled=False, train_tail=True, train_blocks=trained, train_neck=True)
    has_layers = backbone.layers + backbone.early_layers > 1
    attention = casd.Attention(input_weight=0.1, layer_weight=0.1 if has_layers else 0.0)
    return replace(
        plain,
        backbone=backbone,
        heads=replace(plain.heads, early_layers=backbone.early_layers),
        drop_block=InvertedAttention(),
        loader=replace(plain.loader, resize=resize, views_per_image=4),
        criterion=replace(plain.criterion, attention=attention),
    )


def _with_refine(config: recipes.Config, **changes: str | bool) -> recipes.Config:
    refine = replace(config.criterion.refine, **changes)  # type: ignore[arg-type]
    return replace(config, criterion=replace(config.criterion, refine=refine))


# ---------------------------------------------------------------- all systems


def _is(part: object, **settings: object) -> bool:
    """Whether a part of a config, which may be a plug-in of any kind, has these settings."""
    return all(getattr(part, name, None) == value for name, value in settings.items())


def _drops(config: recipes.Config, *kinds: type) -> bool:
    return isinstance(config.drop_block, kinds) and not _is(config.drop_block, drop=0)


def _labels(kind: str) -> Part:
    return lambda c: _is(c.criterion.labeler, kind=kind), "labels of another labeler"


_BOXES: Part = (lambda c: c.heads.regress, "no box regression")
_DROP_BLOCK: Part = (lambda c: _drops(c, DropBlock, ConcreteDropBlock), "no DropBlock")
_CELLS: Part = (
    lambda c: not (_is(c.backbone, pooled=True) and _drops(c, DropBlock, ConcreteDropBlock)),
    "RoI maps of one cell, so that DropBlock drops whole proposals",
)

_ALL = (
    System(
        name="wsddn", title="WSDDN", year=2016, change=to_wsddn,
        idea="softmax over classes times softmax over proposals, summed and trained with tags",
        parts=((lambda c: c.criterion.spatial.weight > 0, "no spatial regularizer"),),
    ),
    System(
        name="oicr", title="OICR", year=2017, change=to_oicr,
        idea="three stages, each trained with the top proposal of the stage before",
        parts=(_labels("oicr"),),
    ),
    System(
        name="pcl", title="PCL", year=2018, change=to_pcl,
        idea="centres of clusters of top proposals, and one loss per cluster",
        parts=(
            _labels("pcl"),
            (lambda c: c.criterion.refine.over == "clusters", "a loss over proposals, not over clusters"),
        ),
    ),
    System(
        name="c-wsl", title="C-WSL", year=2018, change=to_c_wsl,
        idea="as many pseudo boxes as annotated counts; needs counts",
        parts=(_labels("c_wsl"), _BOXES),
    ),
    System(
        name="wsrpn", title="WSRPN", year=2018, change=to_wsrpn,
        idea="OICR on windows from early layers that a region classifier keeps",
        parts=(
            (lambda c: _is(c.proposals, network=c.backbone.title), "windows of another network than the backbone"),
            (lambda c: not c.adaptation.epochs or c.adaptation.part == "cells", "windows from before the adaptation"),
            (lambda c: c.heads.region, "no region classifier of its own"),
            (lambda c: c.criterion.rescore.keep < 1, "windows that are not filtered"),
            (lambda c: c.backbone.trains_responses, "convolutions that are all frozen"),
        ),
    ),
    System(
        name="c-mil", title="C-MIL", year=2019, change=to_c_mil,
        idea="bags of proposals that are split step by step during training",
        parts=(
            (lambda c: _is(c.criterion.mil, loss="hinge"), "cross-entropy, not the hinge loss"),
            (lambda c: _is(c.criterion.mil, subset_score="mean"), "subsets scored by merged logits"),
            (lambda c: _is(c.criterion.labeler, positives="subset"), "positives around the top box alone"),
        ),
    ),
    System(
        name="c-midn", title="C-MIDN", year=2019, change=to_c_midn,
        idea="a second MIL head on what the first one did not select",
        parts=(
            (lambda c: c.heads.mil_heads == 2, "one MIL head, not two"),
            (
                lambda c: all(_is(part, guide="segmentation") for part in (c.criterion.mil, c.criterion.labeler)),
                "class masks without a segmentation branch",
            ),
        ),
    ),
    System(
        name="wsod2", title="WSOD2", year=2019, change=to_wsod2,
        idea="proposals that follow superpixel edges weigh more, at first",
        parts=(
            (
                lambda c: c.heads.regress and _is(c.criterion.labeler, evidence_of="regressed"),
                "evidence of proposals, not of regressed boxes",
            ),
            (lambda c: _is(c.criterion.labeler, belief="score"), "weights that end at 1, not at the score"),
        ),
    ),
    System(
        name="oim", title="OIM", year=2020, change=to_oim,
        idea="proposals similar to the top one in the same photo are objects too",
        parts=(_labels("oim"), (lambda c: c.criterion.refine.reweight, "no reweighted loss")),
    ),
    System(
        name="slv", title="SLV", year=2020, change=to_slv,
        idea="pseudo boxes from the spatial votes of all good proposals",
        parts=(
            _labels("slv"),
            _BOXES,
            (lambda c: c.criterion.refine.last_teacher == "mean", "votes of one stage, not of the mean of all"),
        ),
    ),
    System(
        name="mist", title="MIST", year=2020, change=to_mist,
        idea="every top proposal that hardly overlaps a better one is an object",
        parts=(
            _labels("mist"),
            _BOXES,
            (lambda c: _drops(c, ConcreteDropBlock), "no Concrete DropBlock"),
            (
                lambda c: getattr(c.drop_block, "hidden", MASK_NET) >= MASK_NET,
                f"mask net of {{0.drop_block.hidden}} channels, not {MASK_NET}",
            ),
            _CELLS,
        ),
    ),
    System(
        name="casd", title="CASD", year=2020, change=to_casd,
        idea="attention distilled between four views of a photo and between layers",
        parts=(
            _BOXES,
            (lambda c: c.loader.views_per_image >= 4, "{0.loader.views_per_image} views, not 4"),
            (lambda c: c.criterion.attention.input_weight > 0, "no attention between views"),
            (lambda c: c.criterion.attention.layer_weight > 0, "no attention between layers"),
            (lambda c: c.heads.early_layers > 0, "no early layers"),
            (lambda c: c.backbone.trains_responses, "attention on frozen layers"),
            (lambda c: _drops(c, InvertedAttention), "no inverted attention"),
        ),
    ),
    System(
        name="oicr-plus", title="OICR+", year=2022, change=to_oicr_plus,
        idea="OICR with box regression and DropBlock: the baseline of OD-WSCL",
        parts=(_labels("oicr"), _BOXES, _DROP_BLOCK, _CELLS),
    ),
    System(
        name="od-wscl", title="OD-WSCL", year=2022, change=to_od_wscl,
        idea="objects similar to the top ones of all photos, in an embedding learned for it",
        parts=(
            (lambda c: _is(c.criterion.labeler, criterion="similarity"), "no object discovery by similarity"),
            (lambda c: c.criterion.contrast.enabled, "no contrastive loss"),
            _BOXES,
            _DROP_BLOCK,
            _CELLS,
        ),
    ),
)  # fmt: skip
SYSTEMS: dict[str, System] = {system.name: system for system in _ALL}
"""Systems by the names of ``tag2box compare`` and ``train --system``, oldest first."""


def find_system(name: str) -> System:
    """A system by its name."""
    if name not in SYSTEMS:
        near = difflib.get_close_matches(name.lower(), SYSTEMS, 1, 0.0)[0]
        raise errors.UserError(f"{name}: no system of this name; did you mean {near}? `tag2box systems` lists all")
    return SYSTEMS[name]


# ---------------------------------------------------------------- changes as --set


def changes(before: object, after: object, prefix: str = "") -> Iterator[str]:
    """The differences between two configs in the form of ``--set``, without the name of the run."""
    if not (is_dataclass(before) and is_dataclass(after)) or isinstance(after, type):
        if before != after:
            yield f"{prefix}={_word(after)}"
        return
    if type(before) is not type(after):  # another plug-in: its kind, and its settings that differ from the defaults
        yield f"{prefix}.kind={_word(getattr(after, 'kind', ''))}"
        before = type(after)()
    for part in fields(after):
        key = f"{prefix}.{part.name}".lstrip(".")
        if key != "name":
            yield from changes(getattr(before, part.name), getattr(after, part.name), key)


def _word(value: object) -> str:
    return value if isinstance(value, str) and re.fullmatch(r"[a-z][a-z0-9_]*", value) else toml(value)
