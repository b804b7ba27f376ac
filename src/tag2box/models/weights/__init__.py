"""Pretrained weights: read safely, recognised, checked, stored with their provenance, loaded only where they fit."""

from __future__ import annotations

from tag2box.models.weights.architectures import PREPROCESS, Weights
from tag2box.models.weights.state_dict import load_into, read_state_dict
from tag2box.models.weights.weight_cache import find_weights
from tag2box.models.weights.zoo import LITE0_PACKAGE, lite0_weights

__all__ = ["LITE0_PACKAGE", "PREPROCESS", "Weights", "find_weights", "lite0_weights", "load_into", "read_state_dict"]
