"""The objective and its parts, one file each; ``whole.py`` puts them together."""

from __future__ import annotations

from tag2box.objective.attention import Attention
from tag2box.objective.contrast import Contrast, first_seen, grown
from tag2box.objective.refine import Refine
from tag2box.objective.sampling import Sampling, instance_difficulty, no_exemplars
from tag2box.objective.spatial import Spatial
from tag2box.objective.whole import Objective, Outcome, label, over_looks, teachers

__all__ = [
    "Attention",
    "Contrast",
    "Objective",
    "Outcome",
    "Refine",
    "Sampling",
    "Spatial",
    "first_seen",
    "grown",
    "instance_difficulty",
    "label",
    "no_exemplars",
    "over_looks",
    "teachers",
]
