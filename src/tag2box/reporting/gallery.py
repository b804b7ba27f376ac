"""Photos with boxes: embedded photos, tiles, runs side by side, drawn detections."""

import base64
import colorsys
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from tag2box import annotations, errors, images, io, storage
from tag2box.metrics.challenges import BoxMatching, match_boxes
from tag2box.reporting import formatting as fmt, records, run_figures
from tag2box.training.events import Gallery, GalleryPhoto

THUMBNAIL = 480  # longest side of an embedded photo: sharp as a 320-pixel tile, useful when enlarged
JPEG_QUALITY = 80
TEST_PHOTOS = 12  # test photos on which the runs are compared
OWN_PHOTOS = 24  # photos without ground truth that are shown
SLIDER_FLOOR = 0.05  # least score of a box on a page with a score slider
MOST_BOXES = 40  # of a photo, from which a score slider selects

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


def gallery_photos(galleries: Iterable[Gallery], available: Container[str]) -> tuple[str, ...]:
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
    from_score: float | None = None  # score slider: shown up to this score
    until_score: float | None = None  # score slider: shown above this score, at which the object is found
    is_hidden: bool = False  # until the slider is moved

    @property
    def place(self) -> str:
        """CSS class of the label's position: above the box or below it; inside only if both sides lack room."""
        has_room = self.top >= 8, self.top + self.height <= 92
        if self.kind == "missed":  # a wrong box on the same object has its label above
            side = "below" if has_room[1] else "floor"
        else:
            side = "above" if has_room[0] else "below" if has_room[1] else "inside"
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
    floor: float | None = None,
) -> Tile:
    """Detections above ``min_score``: right, wrong and missed if ``objects`` are known, else plain boxes.

    Args:
        floor: detections from this score on, and found objects, are there but hidden: for a score slider.
    """
    best = found[torch.argsort(found.scores, descending=True, stable=True)[:MOST_BOXES]] if floor is not None else found
    kept = best[best.scores >= (min_score if floor is None else min(floor, min_score))]
    kinds = ["plain"] * len(kept)
    boxes: list[DrawnBox] = []
    is_shown = (kept.scores >= min_score).tolist()
    caption = fmt.plural(sum(is_shown), "detection")
    if objects is not None:
        matching = match_boxes(kept, objects)
        kinds = [
            "right" if right else "ignored" if ignored else "wrong"
            for right, ignored in zip(matching.right.tolist(), matching.ignored.tolist(), strict=True)
        ]
        boxes = _missed_boxes(shot, objects, matching, kept.scores, classes=classes, min_score=min_score)
        boxes = boxes if floor is not None else [box for box in boxes if not box.is_hidden]
        shown = [kind for kind, is_there in zip(kinds, is_shown, strict=True) if is_there]
        missed = sum(not box.is_hidden for box in boxes)
        counts = (shown.count("right"), "right"), (shown.count("wrong"), "wrong"), (missed, "missed")
        caption = " · ".join(f"{count}\N{NO-BREAK SPACE}{word}" for count, word in counts)
    order = torch.argsort(kept.scores, stable=True).tolist()  # the highest score is drawn last, on top
    rows = kept.boxes.tolist(), kept.labels.tolist(), kept.scores.tolist()
    for i in order:
        name = class_name(classes, rows[1][i])
        drawn = draw_box(shot, rows[0][i], kind=kinds[i], name=name, score=rows[2][i])
        slider = None if floor is None else rows[2][i]
        boxes.append(replace(drawn, from_score=slider, is_hidden=not is_shown[i]))
    return Tile(shot, tuple(boxes), caption, f"Photo {photo}: {caption}")


def _missed_boxes(
    shot: Shot,
    objects: annotations.Objects,
    matching: BoxMatching,
    scores: Float[Tensor, " B"],
    *,
    classes: Sequence[str],
    min_score: float,
) -> list[DrawnBox]:
    """Objects that no detection finds, or only one of a lower score; hidden ones are found."""
    found = []
    columns = (objects.boxes, objects.labels, matching.finders, matching.missed)
    for corners, label, finder, is_missed in zip(*(column.tolist() for column in columns), strict=True):
        if is_missed or finder >= 0:
            until = float(scores[finder]) if finder >= 0 else None
            drawn = draw_box(shot, corners, kind="missed", name=class_name(classes, label))
            found.append(replace(drawn, until_score=until, is_hidden=until is not None and until >= min_score))
    return found


def pseudo_tile(
    shot: Shot,
    taught: GalleryPhoto,
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
    ids = [photo for photo in list_test_photos(runs, inputs.test_truth) if photo in inputs.test_photos]
    found = {run.name: run.record.test_detections for run in runs if run.record.test_detections is not None}
    photos = {photo: inputs.test_photos[photo] for photo in evenly_spaced(ids, TEST_PHOTOS)}
    return _compare(runs, found, photos, inputs.test_truth, album=album, min_score=inputs.draw_score)


def compare_own(
    runs: Sequence[run_figures.NamedRun], inputs: records.ReportInputs, album: Album
) -> tuple[Comparison, ...]:
    """Detections of every run on photos without ground truth."""
    found = {run.name: run.record.own_detections for run in runs if run.record.own_detections is not None}
    return _compare(runs, found, inputs.own_photos, None, album=album, min_score=inputs.draw_score)


def _compare(
    runs: Sequence[run_figures.NamedRun],
    found: Mapping[str, Mapping[str, annotations.Detections]],
    photos: Mapping[str, Path],
    truth: annotations.Truth | None,
    *,
    album: Album,
    min_score: float,
) -> tuple[Comparison, ...]:
    objects, out = _objects(truth), []
    for photo, path in photos.items() if found else ():
        shot = album.add(path)
        if shot is None:
            continue
        columns = []
        for run in (run for run in runs if run.name in found):
            own = found[run.name].get(photo, annotations.Detections.empty())
            classes = truth.classes if truth else run.record.start.classes
            tile = detection_tile(
                shot, own, objects.get(photo), classes=classes, photo=photo, min_score=min_score, floor=SLIDER_FLOOR
            )
            columns.append(ComparisonColumn(run.name, run.css, (tile,)))
        out.append(Comparison(photo, tuple(columns)))
    return tuple(out)


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
    moments: Sequence[Gallery],
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


def draw_photo(photo: annotations.Photo, found: annotations.Detections, classes: Sequence[str]) -> Image.Image:
    """A photo with its detections, at full size unless it is very large."""
    view = images.View(min(photo.width, photo.height), long_max=_MAX_DRAWN_SIDE)
    boxes = images.boxes_in_view(view, found.boxes, (photo.height, photo.width))
    return draw_detections(images.load_view(photo, view).round().byte(), replace(found, boxes=boxes), classes)


def write_drawn(
    photos: Sequence[annotations.Photo],
    found: Mapping[str, annotations.Detections],
    classes: Sequence[str],
    folder: Path,
    skipped: list[str] | None = None,
) -> None:
    """Write a JPEG of every photo with its detections; with ``skipped``, unreadable ones are left out and named."""
    files = storage.distinct_file_names(photo.id for photo in photos)
    for photo in photos:
        try:
            picture = draw_photo(photo, found[photo.id], classes)
        except errors.UserError as error:  # without proposals it was not read before
            if skipped is None:
                raise
            skipped.append(f"{error}; not drawn")
            continue
        with io.replacing(folder / f"{files[photo.id]}.jpg") as temporary:
            picture.save(temporary, format="JPEG", quality=92)


def _colour(label: int, count: int) -> tuple[int, int, int]:
    red, green, blue = colorsys.hsv_to_rgb(label / max(count, 1), 0.85, 0.72)
    return round(red * 255), round(green * 255), round(blue * 255)
