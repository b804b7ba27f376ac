"""Labelers: strategies that turn teacher scores into instance-level pseudo labels. One file a strategy.

A labeler is a frozen dataclass whose fields are its settings and whose ``__call__`` does the work.
"""

from __future__ import annotations

from typing import Protocol

from tag2box.labelers.c_midn import CMidnLabeler
from tag2box.labelers.c_mil import CMilLabeler
from tag2box.labelers.c_wsl import CWsl
from tag2box.labelers.discovery import Discovery
from tag2box.labelers.mist import Mist
from tag2box.labelers.oicr import Oicr
from tag2box.labelers.oim import Oim
from tag2box.labelers.pcl import Pcl
from tag2box.labelers.slv import Slv
from tag2box.labelers.wsod2 import Wsod2
from tag2box.types import Labeling, Needs, Scene


class Labeler(Protocol):
    """What the objective asks of a labeler."""

    @property
    def needs(self) -> Needs:
        """What it reads of a scene beyond proposals, tags and scores."""
        ...

    def __call__(self, scene: Scene) -> Labeling:
        """Pseudo labels of K stages for a whole batch."""
        ...


BuiltIn = Oicr | Discovery | CMilLabeler | CMidnLabeler | Pcl | Mist | CWsl | Oim | Slv | Wsod2
"""The labelers that settings know, told apart by their ``kind``: a new one is added here."""

__all__ = [
    "BuiltIn",
    "CMidnLabeler",
    "CMilLabeler",
    "CWsl",
    "Discovery",
    "Labeler",
    "Mist",
    "Oicr",
    "Oim",
    "Pcl",
    "Slv",
    "Wsod2",
]
