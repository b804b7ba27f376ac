"""The objective and its parts, one file each; ``whole.py`` puts them together."""

from __future__ import annotations

from tag2box.objective.contrast import Contrast, first_seen, grown
from tag2box.objective.refine import Refine
from tag2box.objective.sampling import Sampling, instance_difficulty, no_exemplars
from tag2box.objective.whole import Objective, Outcome, label, teachers

__all__ = [
    "Contrast",
    "Objective",
    "Outcome",
    "Refine",
    "Sampling",
    "first_seen",
    "grown",
    "instance_difficulty",
    "label",
    "no_exemplars",
    "teachers",
]
