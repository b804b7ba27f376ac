"""tag2box: object detectors from image-level tags alone.

Every command is one call: ``tag2box.propose``, ``train``, ``detect``, ``evaluate``, ``report`` and others.
They are loaded on first use, so ``import tag2box`` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tag2box.commands.data_check import data_check
    from tag2box.commands.data_stats import stats
    from tag2box.commands.demo import demo
    from tag2box.commands.detect import detect
    from tag2box.commands.evaluate import evaluate
    from tag2box.commands.import_proposals import import_proposals
    from tag2box.commands.propose import propose
    from tag2box.commands.recall import recall
    from tag2box.commands.report import report
    from tag2box.commands.train import resume, train
    from tag2box.doctor import diagnose
    from tag2box.formats.listing import DataSource
    from tag2box.recipes import RECIPES, Config

_HOMES = {
    "data_check": "tag2box.commands.data_check",
    "stats": "tag2box.commands.data_stats",
    "import_proposals": "tag2box.commands.import_proposals",
    "propose": "tag2box.commands.propose",
    "recall": "tag2box.commands.recall",
    "DataSource": "tag2box.formats.datasets",
    "demo": "tag2box.commands.demo",
    "detect": "tag2box.commands.detect",
    "evaluate": "tag2box.commands.evaluate",
    "report": "tag2box.commands.report",
    "resume": "tag2box.commands.train",
    "train": "tag2box.commands.train",
    "diagnose": "tag2box.doctor",
    "RECIPES": "tag2box.recipes",
    "Config": "tag2box.recipes",
}

__all__ = [
    "RECIPES", "Config", "DataSource", "data_check", "demo", "detect", "diagnose", "evaluate", "import_proposals",
    "propose", "recall", "report", "resume", "stats", "train",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'tag2box' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
