"""What a student sees: labels with weights and regions without a loss, and batches of pictures with them.

Labels of a teacher are noisy, so each has a weight, and where the teacher is in doubt a class is neither right nor
wrong. Classes that are not tags are certain: they are background everywhere.

Photos are resized, cropped, flipped, coloured and put together (mosaics, pasted boxes). A batch is a function of its
iteration's number: each photo has random streams of its own, so that resumed runs and several ranks see the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor
from torch.nn.functional import interpolate

from tag2box import images
from tag2box.annotations import Photo
from tag2box.labels.labelled import LabelBox, LabelledPhoto
from tag2box.ops.boxes import areas
from tag2box.training.batches import epoch_order

_Share = Annotated[float, Field(ge=0, le=1)]
_MULTIPLE = 32  # sides of pictures are multiples of the coarsest stride
_PASTED_WEIGHT = 0.8  # least weight of a label that is pasted
_SQUARE_ROOMS = ((0, 0), (0, 1), (1, 0), (1, 1))
_TOP_SCORES = 0.9  # quantile of the best scores of a class that counts as certain


@dataclass(frozen=True, kw_only=True)
class Noise:
    """Treatment of labels as noisy ones; reviewed boxes and those of other tools, which have no score, are certain."""

    weights: Literal["none", "score", "class"] = "class"
    """Loss weight of a label: 1, its score, or its score relative to the best ones of its class in the label set."""
    min_weight: _Share = 0.2
    """Smallest weight of a label."""
    threshold: _Share = 0.3
    """Labels with less than this share of a reference score become ignore regions; 0: none."""
    threshold_of: Literal["class", "photo"] = "class"
    """The reference: the best scores of the class in the label set, or the range of its scores in the photo (WeakSAM).

    That range is the largest minus the smallest score of the boxes of a tag: no more than its best score.
    """
    drop: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the labels of a batch, those with the largest loss, that are ignore regions; 0: none.

    In the first third of a round nothing is dropped. Boxes without a score never are.
    """
    doubtful: _Share = 0.0
    """Doubtful boxes with less than this share of the best score of their tag in the photo are background; 0: none."""
    ignore: bool = True
    """No loss for the class of a doubtful box inside it; false: doubtful boxes are background."""
    open_tags: bool = True
    """A tag without a certain label: no loss for its class inside its doubtful boxes, enlarged, or anywhere."""
    enlarge: Annotated[float, Field(ge=1, le=10)] = 1.5
    """Factor by which the sides of such boxes are enlarged."""


@dataclass(frozen=True, slots=True)
class PhotoLabels:
    """Labels of one photo, or of a part of it, and regions in which one class has no loss."""

    boxes: Float[Tensor, "G 4"]
    labels: Int[Tensor, " G"]
    weights: Float[Tensor, " G"]
    certain: Bool[Tensor, " G"]  # no detector gave them a score: reviewed ones, or those of another tool
    regions: Float[Tensor, "I 4"]
    region_labels: Int[Tensor, " I"]

    @classmethod
    def joined(cls, parts: Sequence[PhotoLabels]) -> PhotoLabels:
        """The labels of several photos in one picture."""
        return cls(*(torch.cat(column) for column in zip(*(part.columns() for part in parts), strict=True)))

    def to(self, device: torch.device) -> PhotoLabels:
        """The same on a device."""
        return PhotoLabels(*(column.to(device) for column in self.columns()))

    def columns(self) -> tuple[Tensor, ...]:
        """The tensors in the order of the fields."""
        return self.boxes, self.labels, self.weights, self.certain, self.regions, self.region_labels

    def picked(self, rows: Bool[Tensor, " G"]) -> PhotoLabels:
        """Some of the labels, and all regions."""
        own = (self.boxes[rows], self.labels[rows], self.weights[rows], self.certain[rows])
        return PhotoLabels(*own, self.regions, self.region_labels)

    def with_regions(self, rows: Bool[Tensor, " G"]) -> PhotoLabels:
        """The boxes of some labels as further regions."""
        regions = torch.cat([self.regions, self.boxes[rows]])
        return replace(self, regions=regions, region_labels=torch.cat([self.region_labels, self.labels[rows]]))

    def __len__(self) -> int:
        return len(self.boxes)


# ---------------------------------------------------------------- from a label set to weights and regions


def top_scores(photos: Sequence[LabelledPhoto], classes: Sequence[str]) -> dict[str, float]:
    """Per class, a high quantile of the scores of the best labels of its tags; 1 without scores."""
    best: dict[str, list[float]] = {name: [] for name in classes}
    for photo in photos:
        for name, scores in class_scores(photo.labels).items():
            best[name].append(max(scores))
    return {name: _quantile(scores) for name, scores in best.items()}


def _quantile(scores: Sequence[float]) -> float:
    ranked = sorted(scores)
    return max(ranked[int(_TOP_SCORES * (len(ranked) - 1))], 1e-6) if ranked else 1.0


def label_weight(box: LabelBox, noise: Noise, top: Mapping[str, float]) -> float:
    """The loss weight of a label; 1 if no detector gave it a score.

    >>> label_weight(LabelBox((0, 0, 1, 1), "cat", 0.2), Noise(weights="class"), {"cat": 0.4})
    0.5
    """
    if box.score is None or noise.weights == "none":
        return 1.0
    share = box.score / top[box.name] if noise.weights == "class" else box.score
    return min(1.0, max(noise.min_weight, share))


def least_scores(boxes: Sequence[LabelBox], noise: Noise, top: Mapping[str, float]) -> dict[str, float]:
    """Per class with a score in a photo, the least score of a label.

    ``class``: threshold * top score of the class. ``photo``: threshold * (max - min) of the scores of its boxes in the
    photo (adaptive thresholds of WeakSAM, Zhu et al., ACM MM 2024).

    >>> boxes = [LabelBox((0, 0, 1, 1), "cat", score) for score in (0.9, 0.5)]
    >>> least_scores(boxes, Noise(threshold=0.5, threshold_of="photo"), {"cat": 1.0})
    {'cat': 0.2}
    """
    scores = class_scores(boxes)
    if noise.threshold_of == "class":
        return {name: noise.threshold * top[name] for name in scores}
    return {name: noise.threshold * (max(own) - min(own)) for name, own in scores.items()}


def class_scores(boxes: Sequence[LabelBox]) -> dict[str, list[float]]:
    """The scores of the boxes of each class that has any."""
    found: dict[str, list[float]] = {}
    for box in boxes:
        if box.score is not None:
            found.setdefault(box.name, []).append(box.score)
    return found


def is_learned(box: LabelBox, least: Mapping[str, float]) -> bool:
    """Whether a box is a label to learn from: not doubtful, and not below the least score of its class."""
    return not box.is_doubtful and (box.score is None or box.score >= least[box.name])


def prepare_labels(photo: LabelledPhoto, classes: Sequence[str], noise: Noise, top: Mapping[str, float]) -> PhotoLabels:
    """Labels with weights, and regions without a loss, of one photo.

    * Boxes that are neither doubtful nor below the threshold are labels.
    * Other boxes are regions, with ``noise.ignore``; doubtful ones below ``noise.doubtful`` are not.
    * A tag without a label has enlarged regions, or, without any box, the whole photo, with
      ``noise.open_tags``. So has an unsure tag: the whole photo.
    * The labels of a reviewed photo are complete: whatever its tags, a class is background where it has no box.
    """
    whole = (0.0, 0.0, float(photo.width), float(photo.height))
    least, scores = least_scores(photo.boxes, noise, top), class_scores(photo.boxes)
    faint = {name: noise.doubtful * max(own) for name, own in scores.items()}
    sure = [box for box in photo.boxes if is_learned(box, least)]
    rest = [box for box in photo.boxes if not (is_learned(box, least) or _is_faint(box, faint))]
    settled, unsure = {box.name for box in sure}, () if photo.is_reviewed else photo.unsure
    has_open_tags = noise.open_tags and not photo.is_reviewed
    is_open = {tag for tag in photo.tags if tag not in settled} if has_open_tags else set()
    regions = [(box.name, _enlarged(box.box, noise.enlarge) if box.name in is_open else box.box) for box in rest]
    regions = regions if noise.ignore else [own for own in regions if own[0] in is_open]
    seen = {box.name for box in rest}
    regions += [(name, whole) for name in (*unsure, *(tag for tag in photo.tags if tag in is_open - seen))]
    index = {name: number for number, name in enumerate(classes)}
    return PhotoLabels(
        torch.tensor([box.box for box in sure], dtype=torch.float32).reshape(-1, 4),
        torch.tensor([index[box.name] for box in sure], dtype=torch.long),
        torch.tensor([label_weight(box, noise, top) for box in sure], dtype=torch.float32),
        torch.tensor([box.score is None for box in sure], dtype=torch.bool),
        torch.tensor([box for _, box in regions], dtype=torch.float32).reshape(-1, 4),
        torch.tensor([index[name] for name, _ in regions], dtype=torch.long),
    )


def _is_faint(box: LabelBox, limits: Mapping[str, float]) -> bool:
    return box.is_doubtful and box.score is not None and box.score < limits[box.name]


def _enlarged(box: Sequence[float], factor: float) -> tuple[float, float, float, float]:
    x1, y1, x2, y2 = box
    across, down = (x2 - x1) * (factor - 1) / 2, (y2 - y1) * (factor - 1) / 2
    return x1 - across, y1 - down, x2 + across, y2 + down


# ---------------------------------------------------------------- pictures


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Random changes of training photos."""

    sides: Annotated[tuple[Annotated[int, Field(ge=32, le=4096, multiple_of=32)], ...], Field(min_length=1)] = (
        288,
        320,
        352,
    )
    """Sides of the square pictures, of which each batch draws one."""
    zoom: tuple[Annotated[float, Field(gt=0, le=10)], Annotated[float, Field(gt=0, le=10)]] = (0.6, 1.5)
    """Range of the long side of a photo relative to the picture; parts that do not fit are cut off."""
    stretch: Annotated[float, Field(ge=1, le=4)] = 1.2
    """Largest change of the aspect ratio."""
    flip: _Share = 0.5
    """Probability of a horizontal flip."""
    colour: _Share = 0.3
    """Largest change of brightness, contrast and saturation, as a share."""
    mosaic: _Share = 0.3
    """Probability that a picture shows four photos instead of one."""
    copy_paste: _Share = 0.0
    """Probability that a box of high weight of another photo is pasted into a picture."""
    plain_end: _Share = 0.15
    """Last share of the iterations, without mosaic and pasting: the student ends on pictures like those it will see."""
    least_visible: _Share = 0.3
    """A label of which less than this share is left after a cut becomes an ignore region."""


@dataclass(frozen=True, slots=True)
class TrainingPicture:
    """A training picture: raw RGB pixels 0 .. 255 and the labels in it."""

    pixels: Float[Tensor, "3 S S"]
    labels: PhotoLabels


@dataclass(frozen=True)
class StudentBatches:
    """The batches of a round; iterations are counted over all rounds."""

    photos: Sequence[Photo]
    labels: Sequence[PhotoLabels]
    augmentation: Augmentation
    batch_size: int
    seed: int
    iterations: int  # of a round
    colour: tuple[float, float, float]  # of the space around photos

    def order(self, iteration: int) -> list[int]:
        """The photos of a batch: consecutive ones of an endless sequence of epochs, each in a random order."""
        count, first = len(self.photos), iteration * self.batch_size
        places = range(first, first + self.batch_size)
        epochs = {place // count for place in places}
        orders = {epoch: epoch_order(count, self.seed, epoch) for epoch in epochs}
        return [orders[place // count][place % count] for place in places]

    def batch(self, iteration: int, part: range | None = None) -> list[TrainingPicture]:
        """The pictures of an iteration, or those of one rank."""
        order, how = self.order(iteration), self.augmentation
        side = how.sides[int(np.random.default_rng([self.seed, iteration]).integers(len(how.sides)))]
        if iteration % self.iterations >= (1 - how.plain_end) * self.iterations:
            how = replace(how, mosaic=0.0, copy_paste=0.0)
        return [
            self._picture(order[place], side, how, [self.seed, iteration, place])
            for place in (range(len(order)) if part is None else part)
        ]

    @cached_property
    def _pasted_photos(self) -> list[int]:
        """The photos with a label of high weight."""
        return [index for index, own in enumerate(self.labels) if bool((own.weights >= _PASTED_WEIGHT).any())]

    def _picture(self, index: int, side: int, how: Augmentation, seed: Sequence[int]) -> TrainingPicture:
        rng, pasting = np.random.default_rng([*seed, 1]), np.random.default_rng([*seed, 2])
        is_mosaic = rng.random() < how.mosaic
        picture = self._mosaic(index, side, rng) if is_mosaic else self._placed(index, (side, side), rng)
        if pasting.random() < how.copy_paste and self._pasted_photos:
            other = self._pasted_photos[int(pasting.integers(len(self._pasted_photos)))]
            picture = pasted(picture, self._placed(other, (side, side), pasting), how.least_visible, pasting)
        return coloured(picture, how.colour, rng)

    def _mosaic(self, index: int, side: int, rng: np.random.Generator) -> TrainingPicture:
        others = rng.integers(len(self.photos), size=3).tolist()
        cut = [round(side * share / _MULTIPLE) * _MULTIPLE for share in rng.uniform(0.35, 0.65, size=2)]
        rows, columns = ((cut[0], side - cut[0]), (cut[1], side - cut[1]))
        canvas, parts = torch.empty(3, side, side), []
        for own, (down, across) in zip((index, *others), _SQUARE_ROOMS, strict=True):
            part = self._placed(own, (rows[down], columns[across]), rng)
            top, left = down * cut[0], across * cut[1]
            canvas[:, top : top + rows[down], left : left + columns[across]] = part.pixels
            parts.append(moved(part.labels, left, top))
        return TrainingPicture(canvas, PhotoLabels.joined(parts))

    def _placed(self, index: int, room: tuple[int, int], rng: np.random.Generator) -> TrainingPicture:
        """A photo at a random scale, aspect ratio, place and orientation in a room of a height and width."""
        photo, how = self.photos[index], self.augmentation
        zoom, stretch = rng.uniform(*how.zoom), math.exp(rng.uniform(-1, 1) * math.log(how.stretch))
        scale = zoom * min(room[0] / photo.height, room[1] / photo.width)
        size = tuple(
            max(1, round(whole * scale * factor))
            for whole, factor in ((photo.height, stretch**0.5), (photo.width, stretch**-0.5))
        )
        decoded = images.load_image(photo, [images.View(max(1, min(size)))])
        pixels = interpolate(decoded.pixels[None].float(), size, mode="bilinear", align_corners=False, antialias=True)
        flip = bool(rng.random() < how.flip)
        shifts = [math.floor(rng.random() * (abs(space - own) + 1)) for space, own in zip(room, size, strict=True)]
        top, left = (shift if space >= own else -shift for shift, space, own in zip(shifts, room, size, strict=True))
        canvas = torch.tensor(self.colour).view(3, 1, 1).expand(3, *room).clone()
        shown = pixels[0].flip(2) if flip else pixels[0]
        rows, columns = (
            slice(max(0, at), min(space, at + own)) for at, space, own in zip((top, left), room, size, strict=True)
        )
        canvas[:, rows, columns] = shown[
            :, rows.start - top : rows.stop - top, columns.start - left : columns.stop - left
        ]
        factors = (size[1] / photo.width, size[0] / photo.height)
        labels = scaled(self.labels[index], factors, size[1] if flip else None)
        return TrainingPicture(canvas, cut_to(moved(labels, left, top), room, how.least_visible))


# ---------------------------------------------------------------- labels in a picture


def scaled(labels: PhotoLabels, factors: tuple[float, float], flip_width: float | None = None) -> PhotoLabels:
    """Labels of a photo that is resized by factors across and down, and flipped if its new width is given."""
    by = torch.tensor(factors * 2)
    boxes, regions = labels.boxes * by, labels.regions * by
    if flip_width is not None:
        boxes, regions = images.flip_boxes(boxes, flip_width), images.flip_boxes(regions, flip_width)
    return replace(labels, boxes=boxes, regions=regions)


def moved(labels: PhotoLabels, left: float, top: float) -> PhotoLabels:
    """Labels of a photo that is moved."""
    by = torch.tensor([left, top, left, top], dtype=torch.float32)
    return replace(labels, boxes=labels.boxes + by, regions=labels.regions + by)


def cut_to(labels: PhotoLabels, room: tuple[int, int], least_visible: float) -> PhotoLabels:
    """Labels cut at the borders of a room (height, width); what is left of a label may be too little to learn from.

    Such a rest becomes a region without a loss. What lies outside is dropped.
    """
    limit = torch.tensor([room[1], room[0]] * 2, dtype=torch.float32)
    boxes, regions = (torch.minimum(own.clamp(min=0), limit) for own in (labels.boxes, labels.regions))
    shares = areas(boxes) / areas(labels.boxes).clamp(min=1e-9)
    kept, rest = shares >= max(least_visible, 1e-6), (shares > 0) & (shares < least_visible)
    there = areas(regions) > 0
    cut = replace(labels, boxes=boxes, regions=regions[there], region_labels=labels.region_labels[there])
    return cut.with_regions(rest).picked(kept)


def pasted(
    picture: TrainingPicture, source: TrainingPicture, least_visible: float, rng: np.random.Generator
) -> TrainingPicture:
    """A picture with one of the source's boxes of high weight, if it has any, pasted in at the same place.

    Labels and regions of the source come along, cut to that box: its class is there, whatever the picture's tags, and
    around it background as before. A label of which the box leaves too little becomes a region, or, with nothing left,
    is dropped; regions stay.
    """
    rows = (source.labels.weights >= _PASTED_WEIGHT).nonzero().flatten().tolist()
    if not rows:
        return picture
    box = source.labels.boxes[rows[int(rng.integers(len(rows)))]]
    left, top, right, bottom = (int(x) for x in (*box[:2].floor().tolist(), *box[2:].ceil().tolist()))
    pixels = picture.pixels.clone()
    pixels[:, top:bottom, left:right] = source.pixels[:, top:bottom, left:right]
    shown = cut_to(moved(source.labels, -left, -top), (bottom - top, right - left), least_visible)
    parts = [covered(picture.labels, box, least_visible), moved(shown, left, top)]
    return TrainingPicture(pixels, PhotoLabels.joined(parts))


def covered(labels: PhotoLabels, cover: Float[Tensor, " 4"], least_visible: float) -> PhotoLabels:
    """The labels that a box in front of them leaves visible; too small rests are regions."""
    first, last = torch.maximum(labels.boxes[:, :2], cover[:2]), torch.minimum(labels.boxes[:, 2:], cover[2:])
    left = 1 - areas(torch.cat([first, last], dim=1)) / areas(labels.boxes).clamp(min=1e-9)
    return labels.with_regions((left > 1e-6) & (left < least_visible)).picked(left >= max(least_visible, 1e-6))


def coloured(picture: TrainingPicture, most: float, rng: np.random.Generator) -> TrainingPicture:
    """A picture with a random change of brightness, contrast and saturation."""
    brightness, contrast, saturation = rng.uniform(1 - most, 1 + most, size=3).tolist()
    pixels = picture.pixels * brightness
    grey = pixels.mean(dim=0, keepdim=True)
    pixels = grey + (pixels - grey) * saturation
    mean = pixels.mean()
    return replace(picture, pixels=(mean + (pixels - mean) * contrast).clamp(0, 255))
