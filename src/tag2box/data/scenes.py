"""Generated scenes: a dataset without a download, with settings for the difficulties of weak supervision."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import cv2
import numpy as np
from jaxtyping import Bool, Int, UInt8
from PIL import Image
from pydantic import Field

from tag2box import errors, io
from tag2box.annotations import Objects, Truth
from tag2box.data import scene_art, scene_objects
from tag2box.formats import coco_boxes, csv_tags

Split = Literal["train", "test"]
Share = Annotated[float, Field(ge=0, le=1)]
_DRAWING = 1  # version; raise it if the same settings give other pictures, so that old folders are refused
_VISIBLE = 0.6  # smallest visible share of an object; a new object that would hide more is not placed


@dataclass(frozen=True, slots=True)
class DrawnScene:
    """One generated photo with its true objects."""

    image: UInt8[np.ndarray, "H W 3"]
    objects: Objects


@dataclass(frozen=True, kw_only=True)
class Scenes:
    """Settings of a generated dataset; every photo depends on them, its split and its number only."""

    kind: Literal["scenes"] = "scenes"
    seed: Annotated[int, Field(ge=0)] = 0
    train: Annotated[int, Field(ge=1)] = 300
    """Number of training photos."""
    test: Annotated[int, Field(ge=0)] = 100
    width: Annotated[int, Field(ge=64)] = 224
    height: Annotated[int, Field(ge=64)] = 192
    classes: tuple[str, ...] = scene_objects.OBJECT_CLASSES
    most_classes: Annotated[int, Field(ge=1)] = 3
    """Largest number of classes per photo."""
    most_instances: Annotated[int, Field(ge=1)] = 4
    """Largest number of objects per class and photo."""
    smallest: Annotated[float, Field(ge=12)] = 40.0
    """Length of the smallest object, in pixels."""
    largest: Annotated[float, Field(ge=12)] = 96.0
    part: Share = 0.7
    """Part domination: share of objects whose discriminative part stands out from the body."""
    touch: Share = 0.5
    """Grouped instances: probability that a further object of a class touches an earlier one."""
    crowd: Share = 0.6
    """Missing instances: probability of each further object of a class, up to ``most_instances``."""
    clutter: Share = 0.4
    """Amount of background clutter."""

    def draw(self, split: Split, index: int) -> DrawnScene:
        """Draw one photo."""
        rng = np.random.default_rng([self.seed, zlib.crc32(split.encode()), index])
        backdrop = scene_art.background(rng, (self.height, self.width))
        stage = _Stage(scene_art.add_clutter(rng, backdrop, int(rng.poisson(14 * self.clutter))))
        count = int(rng.integers(1, min(self.most_classes, len(self.classes)) + 1))
        for label in rng.permutation(len(self.classes))[:count].tolist():
            for nth in range(1 + int(rng.binomial(self.most_instances - 1, self.crowd))):
                self._add(rng, stage, label, is_touching=nth > 0 and bool(rng.random() < self.touch))
        return DrawnScene(_photograph(rng, stage.picture), stage.objects())

    def write(self, out: Path, *, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Write ``out/{train,test}/{photos/*.jpg, tags.csv, truth.json}`` and ``classes.txt``.

        A complete folder of the same settings is left unchanged, an interrupted one is completed; a folder of other
        settings, or with other files in it, is an error. ``truth.json`` (COCO) is for evaluation only.
        """
        self._check()
        if self._is_complete(out):
            return
        io.write_json(out / "scenes.json", self._manifest(is_complete=False))
        io.write_text(out / "classes.txt", "".join(f"{name}\n" for name in self.classes))
        done = 0
        splits: tuple[tuple[Split, int], ...] = (("train", self.train), ("test", self.test))
        for split, count in splits:
            drawn = []
            for index in range(count):
                scene = self.draw(split, index)
                _save(out / split / "photos" / _name(split, index), scene.image)
                drawn.append(scene.objects)
                done += 1
                if on_progress:
                    on_progress(done, self.train + self.test)
            self._write_labels(out / split, split, drawn)
        io.write_json(out / "scenes.json", self._manifest(is_complete=True))

    def _check(self) -> None:
        unknown = [name for name in self.classes if name not in scene_objects.OBJECT_CLASSES]
        if unknown or not self.classes:
            known = ", ".join(scene_objects.OBJECT_CLASSES)
            raise errors.UserError(f"scenes: classes: {unknown or 'none'} cannot be drawn; choose from {known}")
        if self.smallest > self.largest:
            raise errors.UserError(f"scenes: smallest: {self.smallest} is above largest ({self.largest}); swap them")

    def _add(self, rng: np.random.Generator, stage: _Stage, label: int, *, is_touching: bool) -> None:
        """Draw an object and place it; if the photo is full, it is dropped, unless it is the first."""
        size = float(np.exp(rng.uniform(np.log(self.smallest), np.log(self.largest))))
        size = min(size, 0.55 * min(self.width, self.height))
        mean = stage.picture.mean((0, 1)).tolist()
        loud = bool(rng.random() < self.part)
        sprite = scene_objects.draw_object(
            rng, self.classes[label], size, loud=loud, behind=(mean[0], mean[1], mean[2])
        )
        place = stage.beside(rng, sprite, label) if is_touching else None
        place = place or stage.apart(rng, sprite, label)
        if place:
            stage.add(sprite, place, label)

    def _write_labels(self, folder: Path, split: Split, drawn: list[Objects]) -> None:
        names = [_name(split, index) for index in range(len(drawn))]
        tags = [[self.classes[c] for c in sorted(set(objects.labels.tolist()))] for objects in drawn]
        (folder / "photos").mkdir(parents=True, exist_ok=True)
        csv_tags.write_tags(folder / "tags.csv", list(zip(names, tags, strict=True)))
        ids = tuple(Path(name).stem for name in names)
        truth = Truth(self.classes, ids, ((self.width, self.height),) * len(names), tuple(drawn))
        coco_boxes.write_coco_truth(folder / "truth.json", truth, dict(zip(ids, names, strict=True)))

    def _manifest(self, *, is_complete: bool) -> dict[str, object]:
        """The content of ``scenes.json``."""
        settings = {**asdict(self), "classes": list(self.classes)}
        return {"drawing": _DRAWING, "complete": is_complete, "settings": settings}

    def _is_complete(self, out: Path) -> bool:
        """Whether the folder is this dataset, complete."""
        if not (out / "scenes.json").exists():
            if out.exists() and (not out.is_dir() or any(out.iterdir())):
                raise errors.UserError(
                    f"{out}: holds other files; give an empty or new folder for the generated scenes"
                )
            return False
        manifest = io.read_json(out / "scenes.json", "the settings of generated scenes")
        whole = self._manifest(is_complete=True)
        if not isinstance(manifest, dict) or {**manifest, "complete": True} != whole:
            raise errors.UserError(
                f"{out / 'scenes.json'}: {_difference(manifest, whole)}; remove the folder or choose another"
            )
        photos = [
            out / s / "photos" / _name(s, i) for s, n in (("train", self.train), ("test", self.test)) for i in range(n)
        ]
        return manifest == whole and all(path.exists() for path in photos)


class _Stage:
    """A photo being composed, with the object that each pixel shows."""

    def __init__(self, picture: scene_art.Picture) -> None:
        self.picture = picture
        self.owner: Int[np.ndarray, "H W"] = np.full(picture.shape[:2], -1)
        self.labels: list[int] = []
        self.areas: list[int] = []  # pixels of each object, hidden ones included

    def beside(self, rng: np.random.Generator, sprite: scene_art.Sprite, label: int) -> tuple[int, int] | None:
        """A place at which the sprite touches an earlier object of its class, hardly covering it."""
        earlier = [i for i, other in enumerate(self.labels) if other == label]
        solid = sprite.alpha > 0.5
        for _ in range(12 if earlier else 0):
            ys, xs = np.nonzero(self.owner == rng.choice(earlier))
            if len(xs) == 0:
                continue
            start = np.array([ys.mean(), xs.mean()]) - np.array(solid.shape) / 2
            angle = rng.uniform(0, 2 * np.pi)
            way = np.array([np.sin(angle), np.cos(angle)])
            for step in range(8, 2 * solid.shape[0], 2):
                y, x = np.round(start + step * way).astype(int).tolist()
                shown = self._shown(solid, (y, x))
                if (self.owner[shown] >= 0).sum() > 0.04 * solid.sum():
                    continue
                if self._fits(shown, solid):
                    return (y, x)
                break
        return None

    def apart(self, rng: np.random.Generator, sprite: scene_art.Sprite, label: int) -> tuple[int, int] | None:
        """A place clear of its own class that hardly covers other objects."""
        solid = sprite.alpha > 0.5
        dilated = cv2.dilate(solid.astype(np.uint8), np.ones((7, 7), np.uint8)) > 0
        height, width = self.owner.shape
        rows, cols = np.nonzero(solid.any(1))[0], np.nonzero(solid.any(0))[0]
        same_class = np.isin(self.owner, [i for i, other in enumerate(self.labels) if other == label])
        for _ in range(30):
            y = int(rng.integers(-4, max(1, height - len(rows) + 4))) - int(rows[0])
            x = int(rng.integers(-4, max(1, width - len(cols) + 4))) - int(cols[0])
            shown = self._shown(solid, (y, x))
            is_clear = (self.owner[shown] >= 0).sum() <= 0.1 * solid.sum() and not same_class[
                self._shown(dilated, (y, x))
            ].any()
            if is_clear and self._fits(shown, solid):
                return (y, x)
        return None

    def add(self, sprite: scene_art.Sprite, place: tuple[int, int], label: int) -> None:
        """Draw a sprite over the photo, with a faint shadow."""
        alpha = self._lay(sprite.alpha, place)
        shadow = np.roll(cv2.GaussianBlur(alpha, (0, 0), 3), (2, 2), (0, 1)) * 0.22
        under = self.picture * (1 - shadow[..., None])
        self.picture = under + alpha[..., None] * (self._lay(sprite.rgb, place) - under)
        self.owner[self._shown(sprite.alpha > 0.5, place)] = len(self.labels)
        self.labels.append(label)
        self.areas.append(int((sprite.alpha > 0.5).sum()))

    def objects(self) -> Objects:
        """Tight boxes around the visible part of each object."""
        boxes = []
        for i in range(len(self.labels)):
            ys, xs = np.nonzero(self.owner == i)
            boxes.append([float(v) for v in (xs.min(), ys.min(), xs.max() + 1, ys.max() + 1)])
        return Objects.of(boxes, self.labels)

    def _fits(self, shown: Bool[np.ndarray, "H W"], solid: Bool[np.ndarray, "h w"]) -> bool:
        """Whether enough of the new object, and of each earlier one under it, stays visible."""
        if shown.sum() < 0.85 * solid.sum():
            return False
        hidden = np.unique(self.owner[shown])
        left = ((self.owner == i) & ~shown for i in hidden[hidden >= 0])
        return all(m.sum() >= _VISIBLE * self.areas[i] for i, m in zip(hidden[hidden >= 0], left, strict=True))

    def _shown(self, mask: Bool[np.ndarray, "h w"], place: tuple[int, int]) -> Bool[np.ndarray, "H W"]:
        return np.asarray(self._lay(mask, place), bool)

    def _lay(self, patch: np.ndarray, place: tuple[int, int]) -> np.ndarray:
        """A patch on an empty photo, cropped at the edges; ``place`` is its top and left."""
        (top, left), (height, width) = place, self.owner.shape
        whole = np.zeros((height, width, *patch.shape[2:]), patch.dtype)
        y1, x1 = max(top, 0), max(left, 0)
        y2, x2 = min(top + patch.shape[0], height), min(left + patch.shape[1], width)
        if y1 < y2 and x1 < x2:
            whole[y1:y2, x1:x2] = patch[y1 - top : y2 - top, x1 - left : x2 - left]
        return whole


def _photograph(rng: np.random.Generator, picture: scene_art.Picture) -> UInt8[np.ndarray, "H W 3"]:
    """Simulate a modest camera: slight blur, varying exposure, noise."""
    blurred = cv2.GaussianBlur(picture, (0, 0), rng.uniform(0.3, 0.7))
    exposed = blurred * rng.uniform(0.88, 1.08) + rng.normal(0, rng.uniform(0.004, 0.018), picture.shape)
    return np.asarray((exposed.clip(0, 1) * 255).round(), np.uint8)


def _name(split: str, index: int) -> str:
    return f"{split}_{index:05d}.jpg"


def _save(path: Path, image: UInt8[np.ndarray, "H W 3"]) -> None:
    with io.replacing(path) as temporary:
        Image.fromarray(image).save(temporary, format="JPEG", quality=92)


def _difference(manifest: object, whole: dict[str, object]) -> str:
    """The first setting in which a folder differs from the wanted one."""
    have = manifest.get("settings") if isinstance(manifest, dict) else None
    wanted = whole["settings"]
    if isinstance(have, dict) and isinstance(wanted, dict):
        for name, value in wanted.items():
            if have.get(name) != value:
                return f"made with {name} = {have.get(name)}, not {value}"
    return "made by another version of the drawing"
