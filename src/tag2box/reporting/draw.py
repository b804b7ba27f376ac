"""Detections painted onto photos: what ``tag2box detect --draw`` writes."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from tag2box.types import Detections


def draw_detections(image: UInt8[Tensor, "3 H W"], found: Detections, classes: Sequence[str]) -> Image.Image:
    """The photo with every detection as a coloured box, labelled with its class and score."""
    picture = Image.fromarray(np.ascontiguousarray(image.permute(1, 2, 0).numpy()))
    pen = ImageDraw.Draw(picture)
    size = max(11, round(min(picture.size) / 36))
    font = ImageFont.load_default(size)
    for box, score, label in zip(found.boxes.tolist(), found.scores.tolist(), found.labels.tolist(), strict=True):
        colour = _colour(label, len(classes))
        pen.rectangle(box, outline=colour, width=max(2, size // 6))
        text = f"{classes[label]} {score:.2f}"
        left, top, right, bottom = pen.textbbox((box[0], box[1]), text, font=font)
        shift = min(0, picture.width - right), max(-(bottom - top) - 4, -top)  # above the box where there is room
        pen.rectangle((left + shift[0], top + shift[1], right + shift[0] + 3, bottom + shift[1] + 3), fill=colour)
        pen.text((box[0] + shift[0] + 1, box[1] + shift[1] + 1), text, fill="white", font=font)
    return picture


def _colour(label: int, count: int) -> tuple[int, int, int]:
    red, green, blue = colorsys.hsv_to_rgb(label / max(count, 1), 0.85, 0.72)
    return round(red * 255), round(green * 255), round(blue * 255)
