"""Proposal methods: their base class, the boxes they return, and how a method is built from its name or its record."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, get_type_hints

import cv2
import numpy as np
import torch
from jaxtyping import Float, Float32, Int, UInt8
from pydantic import Field, TypeAdapter, ValidationError

from tag2box.errors import UserError, printable
from tag2box.extend import Plugin

DEFAULT_KIND = "selective_search"
"""Method of `tag2box propose` and of the trial search of `tag2box data check`."""

DEFAULT_SHORT_SIDE = 200
"""Working resolution of people's own photos: a search then takes a fraction of a second per photo."""

_MAX_ASPECT = 8  # a working copy's long side is at most this many short sides, so that extreme strips stay affordable
_FILE = re.compile(r".+ sha256:[0-9a-f]{64}")  # a file setting, as ``source`` records it

SNAPPED = "snapped"
"""Kind of stores with boxes snapped from others; ``proposals`` in their source is that of the boxes they began with."""

ProposalSource = Mapping[str, object]
"""Provenance of a store's boxes, as JSON: a ``kind``, and the settings that affect the result."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """Proposals of one photo, with scores; all scores are zero if the source does not rank its boxes."""

    boxes: Float32[torch.Tensor, "P 4"]
    scores: Float32[torch.Tensor, " P"]

    def __post_init__(self) -> None:
        if self.boxes.shape != (len(self.scores), 4) or self.scores.ndim != 1:
            raise ValueError(f"boxes {tuple(self.boxes.shape)} do not match scores {tuple(self.scores.shape)}")

    def __len__(self) -> int:
        return len(self.scores)

    @classmethod
    def unranked(cls, boxes: Float32[torch.Tensor, "P 4"]) -> "Candidates":
        """Boxes of a source that does not rank."""
        return cls(boxes, torch.zeros(len(boxes)))


@dataclass(frozen=True, slots=True)
class FoundBoxes:
    """Raw result of a search, in pixels of the searched image: xyxy, right and bottom exclusive."""

    corners: Float[np.ndarray, "n 4"]
    scores: Float[np.ndarray, " n"]


@dataclass(frozen=True, kw_only=True)
class ProposalMethod:
    """Base class of proposal methods: the fields are the settings, a subclass implements ``search``."""

    kind: str = ""
    uses: ClassVar[str] = ""  # boxes or masks that the method was trained on: named wherever its results are shown
    unrecorded: ClassVar[Mapping[str, object]] = {}
    """Settings that are younger than some stores, with the values that those were made with. Such a value is not
    recorded, so that an old store and one made alike have the same source; a store without the setting has it."""
    short_side: Annotated[int, Field(ge=32, le=20_000)] | None = None
    """Short side to which photos are resized for the search; None searches them at full size."""
    max_boxes: Annotated[int, Field(ge=1)] | None = 2000
    """Maximum number of boxes per photo."""
    min_side: Annotated[int, Field(ge=0)] = 20
    """Boxes with a shorter side, in pixels of the original photo, are dropped."""

    def search(self, bgr: UInt8[np.ndarray, "h w 3"], min_side: float) -> FoundBoxes:
        """Find the boxes of an image; boxes with a side below ``min_side`` of its pixels may be omitted."""
        raise NotImplementedError

    def order(self, boxes: Float32[np.ndarray, "n 4"], scores: Float32[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Row indices in storage order: highest score first, ties from left to right. ``max_boxes`` cuts the end."""
        return np.argsort(-scores, kind="stable")

    def ready(self) -> None:
        """Raise a UserError if a file required by the search is missing or unusable."""

    def source(self) -> dict[str, object]:
        """The settings as a store records them; a file is recorded by name and content hash, not by path."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.init}
        values = {name: v for name, v in values.items() if name not in self.unrecorded or v != self.unrecorded[name]}
        values["kind"] = Plugin("proposal method").kind_of(self)
        values |= {"uses": self.uses} if self.uses else {}
        return {name: _file_identity(v) if isinstance(v, Path) else v for name, v in values.items()}

    def working_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Width and height at which a photo of this width and height is searched."""
        if self.short_side is None:
            return size
        scale = min(self.short_side / min(size), _MAX_ASPECT * self.short_side / max(size))
        return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))

    def smallest_side(self, size: tuple[int, int]) -> float:
        """The shortest side that a box may have, in pixels of a photo of this width and height."""
        return self.min_side

    def __call__(self, image: UInt8[torch.Tensor, "3 H W"], size: tuple[int, int] | None = None) -> Candidates:
        """Propose boxes for a photo: search, rescale, clip, drop duplicates and small boxes, order, cap.

        Args:
            size: width and height of the original photo, whose pixels the boxes refer to, if ``image`` is a smaller
                copy of it.
        """
        width, height = size or (image.shape[2], image.shape[1])
        cols, rows = self.working_size((width, height))
        bgr = np.ascontiguousarray(image.permute(1, 2, 0).numpy()[..., ::-1])
        smallest = self.smallest_side((width, height))
        found = self.search(resized_pixels(bgr, cols, rows), smallest * cols / width)
        boxes = found.corners * np.array([width / cols, height / rows] * 2)
        boxes = boxes.clip(0, [width, height, width, height]).astype(np.float32)
        is_big = ((boxes[:, 2:] - boxes[:, :2]) >= max(smallest, 1e-3)).all(1)
        boxes, scores = _distinct(boxes[is_big], found.scores[is_big].astype(np.float32))
        kept = self.order(boxes, scores)[: self.max_boxes]
        return Candidates(torch.from_numpy(boxes[kept]), torch.from_numpy(scores[kept]))

    def propose(
        self, photo_id: str, image: UInt8[torch.Tensor, "3 H W"], size: tuple[int, int] | None = None
    ) -> Candidates:
        """Propose boxes for a photo of a dataset; a method that knows more of it than its pixels overrides this."""
        return self(image, size)


def uses_of(source: ProposalSource) -> str:
    """The boxes or masks that a store's method was trained on; empty for most."""
    return printable(str(source.get("uses") or ""), 60)


def default_method(kind: str) -> ProposalMethod:
    """The method of a kind for people's own photos: its defaults, and a ``short_side`` of 200 if it sets none."""
    cls = _method_class(kind)
    method: ProposalMethod = cls()
    can_resize = any(field.name == "short_side" and field.init for field in fields(cls))
    return cls(short_side=DEFAULT_SHORT_SIDE) if can_resize and method.short_side is None else method


def method_from_source(source: ProposalSource) -> ProposalMethod:
    """The method that a store was made with, built from the store's ``source``."""
    kind = str(source.get("kind"))
    cls = _method_class(kind)
    hints = get_type_hints(cls, include_extras=True)
    known = {field.name for field in fields(cls) if field.init} - {"kind"}
    values: dict[str, Any] = dict(cls.unrecorded)
    for name, value in source.items():
        if name in {"kind", "uses"}:
            continue
        if isinstance(value, str) and _FILE.fullmatch(value):
            raise UserError(f"made with {value}; name this file with --set proposals.{name}=FILE")
        if name not in known:
            raise UserError(f"made with {name} {json.dumps(value)}, which {kind} does not have; make the store again")
        try:
            # JSON mode: strict about types, yet lists become tuples.
            values[name] = TypeAdapter(hints[name]).validate_json(json.dumps(value), strict=True)
        except ValidationError:
            raise UserError(f"made with {name} {json.dumps(value)}, which {kind} does not accept") from None
    method: ProposalMethod = cls(**values)
    return method


def unrecorded_settings(source: ProposalSource) -> Mapping[str, object]:
    """Settings that a source of this kind leaves out, with their values; none if the kind is unknown."""
    try:
        settings: Mapping[str, object] = _method_class(str(source.get("kind"))).unrecorded
    except UserError:
        return {}
    return settings


def _method_class(kind: str) -> Any:
    cls = Plugin("proposal method").find(kind)
    if not issubclass(cls, ProposalMethod):
        raise UserError(f'"{kind}": expected a subclass of tag2box.proposals.base.ProposalMethod')
    return cls


def resized_pixels(bgr: UInt8[np.ndarray, "H W 3"], cols: int, rows: int) -> UInt8[np.ndarray, "h w 3"]:
    """Pixels at another size: means of areas if it is smaller."""
    if bgr.shape[:2] == (rows, cols):
        return bgr
    interpolation = cv2.INTER_AREA if rows * cols < bgr.shape[0] * bgr.shape[1] else cv2.INTER_LINEAR
    return np.asarray(cv2.resize(bgr, (cols, rows), interpolation=interpolation))


def resized_image(image: UInt8[torch.Tensor, "3 H W"], cols: int, rows: int) -> UInt8[torch.Tensor, "3 h w"]:
    """An image at another size."""
    pixels = resized_pixels(np.ascontiguousarray(image.permute(1, 2, 0).numpy()), cols, rows)
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _distinct(
    boxes: Float32[np.ndarray, "n 4"], scores: Float32[np.ndarray, " n"]
) -> tuple[Float32[np.ndarray, "m 4"], Float32[np.ndarray, " m"]]:
    """The boxes without exact duplicates, sorted, each with the highest of its scores."""
    single, owner = np.unique(boxes, axis=0, return_inverse=True)
    best = np.full(len(single), -np.inf, np.float32)
    np.maximum.at(best, owner.reshape(-1), scores)
    return single, best


def _file_identity(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return f"{path.name} sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    except OSError as error:
        raise UserError(f"{path}: not readable ({error.strerror}); expected a file that proposals need") from None
