"""Batches of a student: photos with their labels, resized, cropped, flipped, coloured and put together (mosaic).

A batch is a function of its iteration's number: each photo of it has a random stream of its own, so that a resumed run
and several ranks see the same pictures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor
from torch.nn.functional import interpolate

from tag2box import images
from tag2box.annotations import Photo
from tag2box.ops.boxes import areas
from tag2box.student.targets import PhotoLabels
from tag2box.training.batches import epoch_order

_Share = Annotated[float, Field(ge=0, le=1)]
_MULTIPLE = 32  # sides of pictures are multiples of the coarsest stride
_SQUARE_ROOMS = ((0, 0), (0, 1), (1, 0), (1, 1))


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
    plain_end: _Share = 0.15
    """Last share of the iterations, without mosaics: the student ends on pictures like those it will see."""
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
        is_plain = iteration % self.iterations >= (1 - how.plain_end) * self.iterations
        return [
            self._picture(order[place], side, 0.0 if is_plain else how.mosaic, [self.seed, iteration, place])
            for place in (range(len(order)) if part is None else part)
        ]

    def _picture(self, index: int, side: int, mosaic: float, seed: Sequence[int]) -> TrainingPicture:
        rng = np.random.default_rng([*seed, 1])
        if rng.random() >= mosaic:
            return coloured(self._placed(index, (side, side), rng), self.augmentation.colour, rng)
        others = rng.integers(len(self.photos), size=3).tolist()
        cut = [round(side * share / _MULTIPLE) * _MULTIPLE for share in rng.uniform(0.35, 0.65, size=2)]
        rows, columns = ((cut[0], side - cut[0]), (cut[1], side - cut[1]))
        canvas, parts = torch.empty(3, side, side), []
        for own, (down, across) in zip((index, *others), _SQUARE_ROOMS, strict=True):
            part = self._placed(own, (rows[down], columns[across]), rng)
            top, left = down * cut[0], across * cut[1]
            canvas[:, top : top + rows[down], left : left + columns[across]] = part.pixels
            parts.append(moved(part.labels, left, top))
        return coloured(TrainingPicture(canvas, PhotoLabels.joined(parts)), self.augmentation.colour, rng)

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
    return PhotoLabels(
        boxes[kept],
        labels.labels[kept],
        labels.weights[kept],
        torch.cat([regions[there], boxes[rest]]),
        torch.cat([labels.region_labels[there], labels.labels[rest]]),
    )


def coloured(picture: TrainingPicture, most: float, rng: np.random.Generator) -> TrainingPicture:
    """A picture with a random change of brightness, contrast and saturation."""
    brightness, contrast, saturation = rng.uniform(1 - most, 1 + most, size=3).tolist()
    pixels = picture.pixels * brightness
    grey = pixels.mean(dim=0, keepdim=True)
    pixels = grey + (pixels - grey) * saturation
    mean = pixels.mean()
    return replace(picture, pixels=(mean + (pixels - mean) * contrast).clamp(0, 255))
