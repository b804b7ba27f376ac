"""Small truths and detections the evaluation tests share."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

from tag2box.annotations import Detections, Objects, Truth


def detections(rows: list[tuple[float, ...]]) -> Detections:
    """Rows of (x1, y1, x2, y2, score, label)."""
    table = torch.tensor(rows, dtype=torch.float64).reshape(-1, 6)
    return Detections(table[:, :4], table[:, 4], table[:, 5].long())


def objects(rows: list[tuple[float, ...]]) -> Objects:
    """Rows of (x1, y1, x2, y2, label, difficult, crowd)."""
    table = torch.tensor(rows, dtype=torch.float64).reshape(-1, 7)
    return Objects(table[:, :4], table[:, 4].long(), table[:, 5].bool(), table[:, 6].bool())


def truth_of(*images: list[tuple[float, ...]], classes: tuple[str, ...] = ("cat", "dog")) -> Truth:
    ids = tuple(f"im{i}" for i in range(len(images)))
    return Truth(classes, ids, ((100, 100),) * len(images), tuple(objects(rows) for rows in images))


def random_world(seed: int, *, images: int = 6, classes: int = 3) -> tuple[Truth, dict[str, Detections]]:
    """Objects, and detections that are jittered objects, duplicates and noise; scores are coarse, so ties occur."""
    draw = np.random.default_rng(seed)
    truths, found = [], {}
    for image in range(images):
        count = int(draw.integers(0, 5))
        corner, side = draw.integers(0, 60, (count, 2)), draw.integers(4, 60, (count, 2))
        boxes = np.concatenate([corner, corner + side], axis=1).astype(float)
        labels = draw.integers(0, classes, count)
        flags = draw.random((count, 2)) < 0.15
        truths.append(np.concatenate([boxes, labels[:, None], flags], axis=1).tolist())
        rows = []
        for box, label in zip(boxes, labels, strict=True):
            for _ in range(int(draw.integers(0, 4))):
                jitter = box + draw.integers(-6, 7, 4)
                jitter[2:] = np.maximum(jitter[2:], jitter[:2] + 1)
                other = label if draw.random() < 0.8 else draw.integers(0, classes)
                rows.append((*jitter, round(float(draw.random()), 1), float(other)))
        rows += [(5, 5, 40, 50, round(float(draw.random()), 1), float(draw.integers(0, classes)))]
        found[f"im{image}"] = detections(rows if draw.random() < 0.9 else [])
    return truth_of(*truths, classes=tuple("abcdefgh"[:classes])), found


worlds = st.builds(random_world, st.integers(0, 10_000), images=st.integers(0, 6), classes=st.integers(1, 4))
