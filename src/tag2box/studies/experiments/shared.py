"""What several experiments say in the same words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tag2box.paper import PAPER_RUNS
from tag2box.studies.experiment import Row, unchanged
from tag2box.systems import SYSTEMS, Change, System

OURS = ("oicr-plus", "od-wscl")
"""Systems whose rows experiments write themselves."""

NETS = {"VGG16": "vgg16", "R50-WS": "r50-ws", "R101-WS": "r101-ws"}
"""What the paper calls a backbone -> its part in the names of ``paper.PAPER_RUNS``."""


def reported(run: str) -> dict[str, float]:
    """What the paper reports of a run of its own, as ``voc07-mcg-vgg16``."""
    return PAPER_RUNS[run].figures.reported()


KINDS = {
    "VGG16": ("vgg16", "vgg16", ()),
    "VGG16, convolutions alone": ("vgg16-conv", "vgg16", ("backbone.train_trunk=false",)),
    "R50-WS": ("r50-ws", "resnet_ws", ("backbone.depth=50",)),
    "R101-WS": ("r101-ws", "resnet_ws", ("backbone.depth=101",)),
}
"""Backbone -> the weights it needs, its kind among the settings, and what else is set."""


def compared(dataset: str) -> tuple[System, ...]:
    """The systems before OD-WSCL for which the paper reports figures on a dataset, oldest first."""
    return tuple(system for name, system in SYSTEMS.items() if name not in OURS and dataset in system.figures)


def backbones(
    method: str,
    settings: Sequence[str],
    paper: Mapping[str, Mapping[str, float]],
    *,
    change: Change = unchanged,
) -> tuple[Row, ...]:
    """A method on each backbone the paper has a figure for; rows whose weights are not stored here are left out."""
    rows = []
    for name, figures in paper.items():
        weights, kind, more = KINDS[name]
        changes = (*settings, f"backbone.kind={kind}", f"backbone.weights={weights}", *more)
        rows.append(Row(label=f"{method}, {name}", settings=changes, change=change, paper=figures, weights=weights))
    return tuple(rows)
