"""Pretrained weights: read safely, recognised, checked, stored with their provenance, loaded only if they fit."""

from tag2box.models.weights.state_dict import PREPROCESS, Weights, load_into, read_state_dict
from tag2box.models.weights.weight_cache import absolute_weights, find_weights
from tag2box.models.weights.zoo import LITE0_PACKAGE, lite0_weights

__all__ = [
    "LITE0_PACKAGE",
    "PREPROCESS",
    "Weights",
    "absolute_weights",
    "find_weights",
    "lite0_weights",
    "load_into",
    "read_state_dict",
]
