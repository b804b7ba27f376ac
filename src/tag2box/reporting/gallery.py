"""Photos with boxes over them. Pixels are embedded once a photo; boxes are page elements, sharp at any size."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TypeVar

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from tag2box.data.photos import photo_size, read_photo
from tag2box.errors import UserError
from tag2box.reporting.data import GalleryPhoto
from tag2box.reporting.matching import match
from tag2box.reporting.text import plural
from tag2box.types import Detections, Objects

THUMBNAIL = 480  # longest side of an embedded photo: enough for a sharp 320-pixel tile and a useful enlargement
QUALITY = 80

Item = TypeVar("Item")


def evenly_spaced(items: Sequence[Item], count: int) -> tuple[Item, ...]:
    """``count`` items at equal distances, the first and the last among them: a choice that cannot flatter."""
    if len(items) <= count:
        return tuple(items)
    if count == 1:
        return (items[0],)
    return tuple(items[round(k * (len(items) - 1) / (count - 1))] for k in range(count))


@dataclass(frozen=True, slots=True)
class Shot:
    """An embedded photo: the class that paints it, and the size of the original after EXIF rotation."""

    css: str
    width: int
    height: int


class Album:
    """The photos a page embeds, each once however often it is shown; ``longest`` is the longest side of the copies."""

    def __init__(self, longest: int = THUMBNAIL) -> None:
        self._longest = longest
        self._shots: dict[Path, Shot | None] = {}
        self._rules: list[str] = []

    def add(self, path: Path) -> Shot | None:
        """Embed a photo, or give None where it cannot be read."""
        if path not in self._shots:
            self._shots[path] = self._embed(path)
        return self._shots[path]

    def _embed(self, path: Path) -> Shot | None:
        try:
            width, height = photo_size(path)
            photo = Image.fromarray(read_photo(path, (self._longest, self._longest)).permute(1, 2, 0).numpy())
        except UserError:
            return None
        photo.thumbnail((self._longest, self._longest), reducing_gap=2.0)
        buffer = BytesIO()
        photo.save(buffer, "JPEG", quality=QUALITY, optimize=True)
        css = f"photo-{len(self._rules)}"
        data = base64.b64encode(buffer.getvalue()).decode("ascii")
        self._rules.append(
            f'.{css}{{background-image:url("data:image/jpeg;base64,{data}");aspect-ratio:{width}/{height}}}'
        )
        return Shot(css, width, height)

    @property
    def style(self) -> str:
        """The style rules that carry the pixels."""
        return "\n".join(self._rules)

    @property
    def unreadable(self) -> tuple[str, ...]:
        """Photos left out of the page because they are gone or damaged."""
        return tuple(path.name for path, shot in self._shots.items() if shot is None)


@dataclass(frozen=True, slots=True)
class DrawnBox:
    """A rectangle over a photo, in per cent of its sides."""

    kind: str  # right, wrong, missed, ignored, plain, pseudo or truth: sets colour and line
    left: float
    top: float
    width: float
    height: float
    label: str = ""
    score: str = ""
    hint: str = ""

    @property
    def place(self) -> str:
        """Where its label goes: above the box, missed ones below; inside at the photo's edge, flipped at the right."""
        if self.kind == "missed":  # the wrong box that took its place has its label above
            side = "floor" if self.top + self.height > 92 else "below"
        else:
            side = "inside" if self.top < 8 else "above"
        return f"{side} flip" if self.left > 66 else side


@dataclass(frozen=True, slots=True)
class Tile:
    """A photo with its boxes and a caption."""

    shot: Shot
    boxes: tuple[DrawnBox, ...]
    caption: str
    alt: str


def draw_box(
    shot: Shot, corners: Sequence[float], *, kind: str, name: str = "", score: float | None = None
) -> DrawnBox:
    """A box in photo pixels as a rectangle over the shot, cut at the photo's edges."""
    x1, x2 = (100 * min(max(x / shot.width, 0.0), 1.0) for x in (corners[0], corners[2]))
    y1, y2 = (100 * min(max(y / shot.height, 0.0), 1.0) for y in (corners[1], corners[3]))
    figure = "" if score is None else f"{score:.2f}"
    words = " ".join(part for part in (f"{kind}:", name, figure) if part)
    return DrawnBox(kind, x1, y1, max(x2 - x1, 0.0), max(y2 - y1, 0.0), label=name, score=figure, hint=words)


def class_name(classes: Sequence[str], label: int) -> str:
    """The name of a class, or its number where the list is too short."""
    return classes[label] if 0 <= label < len(classes) else f"class {label}"


def detection_tile(
    shot: Shot, found: Detections, objects: Objects | None, *, classes: Sequence[str], photo: str, min_score: float
) -> Tile:
    """Detections above ``min_score``: right, wrong and missed where the truth is known, plain boxes where it is not."""
    kept = found[found.scores >= min_score]
    kinds = ["plain"] * len(kept)
    boxes: list[DrawnBox] = []
    caption = plural(len(kept), "detection")
    if objects is not None:
        verdict = match(kept, objects)
        kinds = [
            "right" if right else "ignored" if ignored else "wrong"
            for right, ignored in zip(verdict.right.tolist(), verdict.ignored.tolist(), strict=True)
        ]
        boxes += _missed_boxes(shot, objects, verdict.missed, classes)
        counts = (kinds.count("right"), "right"), (kinds.count("wrong"), "wrong"), (len(boxes), "missed")
        caption = " · ".join(f"{count}\N{NO-BREAK SPACE}{word}" for count, word in counts)
    order = torch.argsort(kept.scores).tolist()  # the surest box is drawn last, on top
    rows = kept.boxes.tolist(), kept.labels.tolist(), kept.scores.tolist()
    for i in order:
        name = class_name(classes, rows[1][i])
        boxes.append(draw_box(shot, rows[0][i], kind=kinds[i], name=name, score=rows[2][i]))
    return Tile(shot, tuple(boxes), caption, f"Photo {photo}: {caption}")


def _missed_boxes(shot: Shot, objects: Objects, missed: Tensor, classes: Sequence[str]) -> list[DrawnBox]:
    rows = zip(objects.boxes[missed].tolist(), objects.labels[missed].tolist(), strict=True)
    return [draw_box(shot, corners, kind="missed", name=class_name(classes, label)) for corners, label in rows]


def pseudo_tile(
    shot: Shot, taught: GalleryPhoto, truth: Float[Tensor, "G 4"] | None, *, classes: Sequence[str], iteration: int
) -> Tile:
    """Pseudo ground truth at one moment of training, over the pale true boxes where these are known."""
    boxes = [draw_box(shot, corners, kind="truth") for corners in (truth.tolist() if truth is not None else [])]
    for corners, label, score in zip(taught.boxes, taught.labels, taught.scores, strict=True):
        boxes.append(draw_box(shot, corners, kind="pseudo", name=class_name(classes, label), score=score))
    caption = f"iteration {iteration} · {plural(len(taught.boxes), 'box')}"
    return Tile(shot, tuple(boxes), caption, f"Photo {taught.id}, {caption} of pseudo ground truth")
