"""Photos with boxes: matching of detections to objects, embedded photos, tiles, runs side by side, drawn detections."""

import base64
import colorsys
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from tag2box import annotations, errors, images, io, storage
from tag2box.ops.boxes import areas, intersections, iou
from tag2box.reporting import formatting as fmt, records, run_figures

THUMBNAIL = 480  # longest side of an embedded photo: sharp as a 320-pixel tile, useful when enlarged
JPEG_QUALITY = 80
TEST_PHOTOS = 12  # test photos on which the runs are compared


@dataclass(frozen=True, slots=True)
class BoxMatching:
    """Matched detections of one photo. A detection that is neither right nor ignored is wrong."""

    right: Bool[Tensor, " B"]  # detections
    ignored: Bool[Tensor, " B"]  # detections of difficult objects or inside crowds
    missed: Bool[Tensor, " G"]  # objects

    @property
    def wrong(self) -> Bool[Tensor, " B"]:
        """Detections of nothing, of a part, of a group, or of an object already found."""
        return ~(self.right | self.ignored)


def match_boxes(found: annotations.Detections, objects: annotations.Objects, *, min_iou: float = 0.5) -> BoxMatching:
    """Match detections, best score first: right if IoU >= ``min_iou`` with an unmatched object of the same class.

    Of several such objects the one with the largest IoU is matched. Difficult objects and crowds do not count: a
    detection that only overlaps one of those is ignored, and they are never missed.
    """
    counts = ~(objects.difficult | objects.crowd)  # (G,)
    same = found.labels[:, None] == objects.labels[None, :]  # (B, G)
    overlap = iou(found.boxes, objects.boxes) * same
    free = counts.clone()
    right = torch.zeros(len(found), dtype=torch.bool)
    for row in torch.argsort(found.scores, descending=True, stable=True).tolist():
        candidates = torch.where(free, overlap[row], torch.zeros_like(overlap[row]))
        if len(candidates) and float(candidates.max()) >= min_iou:
            right[row] = True
            free[int(candidates.argmax())] = False
    excused = torch.where(objects.crowd, _share_inside(found.boxes, objects.boxes) * same, overlap)
    ignored = ((excused >= min_iou) & ~counts).any(dim=1) & ~right
    return BoxMatching(right, ignored, free)


def _share_inside(boxes: Float[Tensor, "B 4"], regions: Float[Tensor, "G 4"]) -> Float[Tensor, "B G"]:
    """Share of each box's area inside each region: COCO's overlap with crowds."""
    return intersections(boxes, regions) / areas(boxes).clamp(min=1e-6)[:, None]


# ---------------------------------------------------------------- choosing photos

PSEUDO_PHOTOS, MOMENTS = 8, 4  # photos, and iterations of each, whose pseudo labels are shown
_Item = TypeVar("_Item")


def evenly_spaced(items: Sequence[_Item], count: int) -> tuple[_Item, ...]:
    """``count`` items at equal distances, including the first and the last: a choice without bias."""
    if len(items) <= count:
        return tuple(items)
    if count == 1:
        return (items[0],)
    return tuple(items[round(k * (len(items) - 1) / (count - 1))] for k in range(count))


def gallery_photos(galleries: Iterable[records.Gallery], available: Container[str]) -> tuple[str, ...]:
    """The photos to show of some galleries: those available, evenly spaced in order of appearance."""
    ids = dict.fromkeys(photo.id for gallery in galleries for photo in gallery.photos)
    return evenly_spaced([photo for photo in ids if photo in available], PSEUDO_PHOTOS)


# ---------------------------------------------------------------- embedded photos


@dataclass(frozen=True, slots=True)
class Shot:
    """An embedded photo: its CSS class, and the size of the original after EXIF rotation."""

    css: str
    width: int
    height: int


class Album:
    """Photos embedded in a page, each once; ``longest`` is the longest side of the copies."""

    def __init__(self, longest: int = THUMBNAIL) -> None:
        self._longest = longest
        self._shots: dict[Path, Shot | None] = {}
        self._rules: list[str] = []

    def add(self, path: Path) -> Shot | None:
        """Embed a photo; None if it cannot be read."""
        if path not in self._shots:
            self._shots[path] = self._embed(path)
        return self._shots[path]

    def _embed(self, path: Path) -> Shot | None:
        try:
            width, height = images.photo_size(path)
            photo = Image.fromarray(images.read_photo(path, (self._longest, self._longest)).permute(1, 2, 0).numpy())
        except errors.UserError:
            return None
        photo.thumbnail((self._longest, self._longest), reducing_gap=2.0)
        buffer = BytesIO()
        photo.save(buffer, "JPEG", quality=JPEG_QUALITY, optimize=True)
        css = f"photo-{len(self._rules)}"
        data = base64.b64encode(buffer.getvalue()).decode("ascii")
        self._rules.append(
            f'.{css}{{background-image:url("data:image/jpeg;base64,{data}");aspect-ratio:{width}/{height}}}'
        )
        return Shot(css, width, height)

    @property
    def style(self) -> str:
        """CSS rules that hold the pixels."""
        return "\n".join(self._rules)

    @property
    def unreadable(self) -> tuple[str, ...]:
        """Photos left out of the page because they are missing or damaged."""
        return tuple(path.name for path, shot in self._shots.items() if shot is None)


# ---------------------------------------------------------------- tiles


@dataclass(frozen=True, slots=True)
class DrawnBox:
    """A rectangle over a photo, in per cent of its sides."""

    kind: str  # right, wrong, missed, ignored, plain, pseudo or truth: CSS class of colour and line
    left: float
    top: float
    width: float
    height: float
    label: str = ""
    score: str = ""
    hint: str = ""

    @property
    def place(self) -> str:
        """CSS class of the label's position: above the box, below a missed one, inside or flipped near an edge."""
        if self.kind == "missed":  # a wrong box on the same object has its label above
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
    """A box in photo pixels as a rectangle over the shot, clipped at the photo's edges."""
    x1, x2 = (100 * min(max(x / shot.width, 0.0), 1.0) for x in (corners[0], corners[2]))
    y1, y2 = (100 * min(max(y / shot.height, 0.0), 1.0) for y in (corners[1], corners[3]))
    figure = "" if score is None else f"{score:.2f}"
    words = " ".join(part for part in (f"{kind}:", name, figure) if part)
    return DrawnBox(kind, x1, y1, max(x2 - x1, 0.0), max(y2 - y1, 0.0), label=name, score=figure, hint=words)


def class_name(classes: Sequence[str], label: int) -> str:
    """The name of a class, or its number if the list is too short."""
    return classes[label] if 0 <= label < len(classes) else f"class {label}"


def detection_tile(
    shot: Shot,
    found: annotations.Detections,
    objects: annotations.Objects | None,
    *,
    classes: Sequence[str],
    photo: str,
    min_score: float,
) -> Tile:
    """Detections above ``min_score``: right, wrong and missed if ``objects`` are known, else plain boxes."""
    kept = found[found.scores >= min_score]
    kinds = ["plain"] * len(kept)
    boxes: list[DrawnBox] = []
    caption = fmt.plural(len(kept), "detection")
    if objects is not None:
        matching = match_boxes(kept, objects)
        kinds = [
            "right" if right else "ignored" if ignored else "wrong"
            for right, ignored in zip(matching.right.tolist(), matching.ignored.tolist(), strict=True)
        ]
        boxes += _missed_boxes(shot, objects, matching.missed, classes)
        counts = (kinds.count("right"), "right"), (kinds.count("wrong"), "wrong"), (len(boxes), "missed")
        caption = " · ".join(f"{count}\N{NO-BREAK SPACE}{word}" for count, word in counts)
    order = torch.argsort(kept.scores).tolist()  # the highest score is drawn last, on top
    rows = kept.boxes.tolist(), kept.labels.tolist(), kept.scores.tolist()
    for i in order:
        name = class_name(classes, rows[1][i])
        boxes.append(draw_box(shot, rows[0][i], kind=kinds[i], name=name, score=rows[2][i]))
    return Tile(shot, tuple(boxes), caption, f"Photo {photo}: {caption}")


def _missed_boxes(shot: Shot, objects: annotations.Objects, missed: Tensor, classes: Sequence[str]) -> list[DrawnBox]:
    rows = zip(objects.boxes[missed].tolist(), objects.labels[missed].tolist(), strict=True)
    return [draw_box(shot, corners, kind="missed", name=class_name(classes, label)) for corners, label in rows]


def pseudo_tile(
    shot: Shot,
    taught: records.GalleryPhoto,
    truth: Float[Tensor, "G 4"] | None,
    *,
    classes: Sequence[str],
    iteration: int,
) -> Tile:
    """Pseudo labels at one iteration of training, over the pale true boxes if these are known."""
    boxes = [draw_box(shot, corners, kind="truth") for corners in (truth.tolist() if truth is not None else [])]
    for corners, label, score in zip(taught.boxes, taught.labels, taught.scores, strict=True):
        boxes.append(draw_box(shot, corners, kind="pseudo", name=class_name(classes, label), score=score))
    caption = f"iteration {iteration} · {fmt.plural(len(taught.boxes), 'box')}"
    return Tile(shot, tuple(boxes), caption, f"Photo {taught.id}, {caption} of pseudo ground truth")


# ---------------------------------------------------------------- runs side by side


@dataclass(frozen=True, slots=True)
class ComparisonColumn:
    """One run's tiles of one photo."""

    name: str
    css: str
    tiles: tuple[Tile, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One photo, with a column per run."""

    photo: str
    columns: tuple[ComparisonColumn, ...]


def list_test_photos(runs: Sequence[run_figures.NamedRun], truth: annotations.Truth | None) -> tuple[str, ...]:
    """The test photos in the order of the truth or, without it, of the runs' detections."""
    if truth is not None:
        return truth.ids
    return tuple(dict.fromkeys(photo for run in runs for photo in run.record.test_detections or {}))


def compare_detections(
    runs: Sequence[run_figures.NamedRun], inputs: records.ReportInputs, album: Album
) -> tuple[Comparison, ...]:
    """Detections of every run on photos evenly spaced through the test list."""
    shown = [run for run in runs if run.record.test_detections is not None]
    ids = [photo for photo in list_test_photos(runs, inputs.test_truth) if photo in inputs.test_photos]
    objects = _objects(inputs.test_truth)
    out = []
    for photo in evenly_spaced(ids, TEST_PHOTOS) if shown else ():
        shot = album.add(inputs.test_photos[photo])
        if shot is not None:
            columns = (_detections(run, shot, photo, objects.get(photo), inputs=inputs) for run in shown)
            out.append(Comparison(photo, tuple(columns)))
    return tuple(out)


def _detections(
    run: run_figures.NamedRun,
    shot: Shot,
    photo: str,
    objects: annotations.Objects | None,
    *,
    inputs: records.ReportInputs,
) -> ComparisonColumn:
    found = (run.record.test_detections or {}).get(photo, annotations.Detections.empty())
    classes = inputs.test_truth.classes if inputs.test_truth else run.record.start.classes
    tile = detection_tile(shot, found, objects, classes=classes, photo=photo, min_score=inputs.draw_score)
    return ComparisonColumn(run.name, run.css, (tile,))


def compare_pseudo(
    runs: Sequence[run_figures.NamedRun], inputs: records.ReportInputs, album: Album
) -> tuple[Comparison, ...]:
    """Pseudo labels of every run on the same training photos, at up to four iterations."""
    shown = [(run, evenly_spaced(run.record.galleries, MOMENTS)) for run in runs if run.record.galleries]
    objects = _objects(inputs.train_truth)
    out = []
    for photo in gallery_photos((moment for _, moments in shown for moment in moments), inputs.train_photos):
        shot = album.add(inputs.train_photos[photo])
        if shot is not None:
            columns = (_pseudo(run, shot, photo, moments, objects=objects.get(photo)) for run, moments in shown)
            out.append(Comparison(photo, tuple(columns)))
    return tuple(out)


def _pseudo(
    run: run_figures.NamedRun,
    shot: Shot,
    photo: str,
    moments: Sequence[records.Gallery],
    *,
    objects: annotations.Objects | None,
) -> ComparisonColumn:
    true_boxes = None if objects is None else objects.boxes
    classes = run.record.start.classes
    tiles = [
        pseudo_tile(shot, taught, true_boxes, classes=classes, iteration=moment.iteration)
        for moment in moments
        for taught in moment.of(photo)
    ]
    return ComparisonColumn(run.name, run.css, tuple(tiles))


def _objects(truth: annotations.Truth | None) -> Mapping[str, annotations.Objects]:
    return dict(zip(truth.ids, truth.objects, strict=True)) if truth else {}


# ---------------------------------------------------------------- picture files

_MAX_DRAWN_SIDE = 4096  # longest side of a picture with boxes; larger photos are drawn smaller


def draw_detections(
    image: UInt8[Tensor, "3 H W"], found: annotations.Detections, classes: Sequence[str]
) -> Image.Image:
    """The photo with every detection as a coloured box, labelled with class and score."""
    picture = Image.fromarray(np.ascontiguousarray(image.permute(1, 2, 0).numpy()))
    pen = ImageDraw.Draw(picture)
    size = max(11, round(min(picture.size) / 36))
    font = ImageFont.load_default(size)
    for box, score, label in zip(found.boxes.tolist(), found.scores.tolist(), found.labels.tolist(), strict=True):
        colour = _colour(label, len(classes))
        pen.rectangle(box, outline=colour, width=max(2, size // 6))
        text = f"{classes[label]} {score:.2f}"
        left, top, right, bottom = pen.textbbox((box[0], box[1]), text, font=font)
        shift = min(0, picture.width - right), max(-(bottom - top) - 4, -top)  # above the box if there is room
        pen.rectangle((left + shift[0], top + shift[1], right + shift[0] + 3, bottom + shift[1] + 3), fill=colour)
        pen.text((box[0] + shift[0] + 1, box[1] + shift[1] + 1), text, fill="white", font=font)
    return picture


def write_drawn(
    photos: Sequence[annotations.Photo],
    found: Mapping[str, annotations.Detections],
    classes: Sequence[str],
    folder: Path,
    skipped: list[str] | None = None,
) -> None:
    """Write a JPEG of every photo with its detections drawn.

    Args:
        skipped: if given, photos that cannot be read are left out, and a line about each is added to it.
    """
    files = storage.distinct_file_names(photo.id for photo in photos)
    for photo in photos:
        view = images.View(min(photo.width, photo.height), long_max=_MAX_DRAWN_SIDE)
        boxes = images.boxes_in_view(view, found[photo.id].boxes, (photo.height, photo.width))
        shown = replace(found[photo.id], boxes=boxes)
        try:
            pixels = images.load_view(photo, view).round().byte()
        except errors.UserError as error:  # without proposals it was not read before
            if skipped is None:
                raise
            skipped.append(f"{error}; not drawn")
            continue
        with io.replacing(folder / f"{files[photo.id]}.jpg") as temporary:
            draw_detections(pixels, shown, classes).save(temporary, format="JPEG", quality=92)


def _colour(label: int, count: int) -> tuple[int, int, int]:
    red, green, blue = colorsys.hsv_to_rgb(label / max(count, 1), 0.85, 0.72)
    return round(red * 255), round(green * 255), round(blue * 255)
