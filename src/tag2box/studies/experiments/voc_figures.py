"""The paper's figures of each VOC class (appendix A, selective search, VGG16)."""

from __future__ import annotations

CLASSES = (
    "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog",
    "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor", "mean",
)  # fmt: skip


def _by_class(*figures: float) -> dict[str, float]:
    return dict(zip(CLASSES, figures, strict=True))


AP: dict[str, dict[str, float]] = {
    "OICR, VOC07": _by_class(
        58.0, 62.4, 31.1, 19.4, 13.0, 65.1, 62.2, 28.4, 24.8, 44.7, 30.6, 25.3, 37.8, 65.5, 15.7, 24.1, 41.7, 46.9,
        64.3, 62.6, 41.2,
    ),
    "OD-WSCL, VOC07": _by_class(
        65.8, 79.5, 58.1, 23.7, 28.6, 71.2, 75.0, 71.7, 31.7, 69.8, 45.2, 55.7, 57.2, 75.7, 29.6, 24.3, 61.0, 55.3,
        71.7, 72.0, 56.1,
    ),
    "OICR, VOC12": _by_class(
        67.7, 61.2, 41.5, 25.6, 22.2, 54.6, 49.7, 25.4, 19.9, 47.0, 18.1, 26.0, 38.9, 67.7, 2.0, 22.6, 41.1, 34.3,
        37.9, 55.3, 37.9,
    ),
    "OD-WSCL, VOC12": _by_class(
        73.8, 74.7, 61.3, 32.9, 40.0, 64.6, 59.8, 68.1, 26.3, 67.5, 23.0, 67.1, 62.8, 80.6, 17.3, 34.1, 63.4, 44.4,
        66.2, 64.9, 54.6,
    ),
}  # fmt: skip
CORLOC: dict[str, dict[str, float]] = {
    "OICR, VOC07": _by_class(
        81.7, 80.4, 48.7, 49.5, 32.8, 81.7, 85.4, 40.1, 40.6, 79.5, 35.7, 33.7, 60.5, 88.8, 21.8, 57.9, 76.3, 59.9,
        75.3, 81.4, 60.6,
    ),
    "OD-WSCL, VOC07": _by_class(
        86.3, 87.8, 74.5, 47.3, 43.9, 85.8, 84.6, 78.2, 49.1, 83.6, 49.4, 61.6, 74.5, 92.4, 42.2, 46.9, 80.4, 62.1,
        82.9, 82.8, 69.8,
    ),
    "OICR, VOC12": {"mean": 62.1},
    "OD-WSCL, VOC12": _by_class(
        88.2, 88.3, 75.0, 59.7, 58.9, 89.3, 73.2, 57.8, 53.4, 88.0, 48.7, 67.5, 78.3, 94.0, 34.8, 61.6, 91.7, 59.4,
        70.9, 84.4, 71.2,
    ),
}  # fmt: skip
