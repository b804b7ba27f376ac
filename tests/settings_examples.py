"""Settings to be read, refused, written and described in tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


def no_spaces(text: str) -> str:
    if " " in text:
        raise ValueError("must not contain spaces")
    return text


@dataclass(frozen=True, kw_only=True)
class Oicr:
    kind: Literal["oicr"] = "oicr"
    fg_iou: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """A proposal joins its nearest seed
    above this IoU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Discovery:
    kind: Literal["discovery"] = "discovery"
    nms_iou: Annotated[float, Field(gt=0, lt=1)] = 0.3
    fg_iou: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Mist:
    kind: Literal["mist"] = "mist"
    share: float


@dataclass(frozen=True, kw_only=True)
class Train:
    iterations: Annotated[int, Field(ge=1)] = 100
    """How long."""
    rate: Annotated[float | None, Field(gt=0)] = 0.01
    scales: tuple[int, ...] = (480, 576)
    window: tuple[float, float] = (0.0, 1.0)
    amp: bool = False

    def __post_init__(self) -> None:
        if self.window[0] > self.window[1]:
            raise ValueError("window must not end before it begins")


@dataclass(frozen=True, kw_only=True)
class Base:
    name: Annotated[str, AfterValidator(no_spaces)] = "run"
    """What the run is called."""


@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    labeler: Oicr | Discovery | Mist = Discovery(nms_iou=0.4)
    """How pseudo boxes are chosen."""
    train: Train = field(default_factory=Train)
    weights: Path | None = None
    mode: Literal["fast", "exact"] = "fast"
    colour: Colour = Colour.RED
    seed: int | Literal["random"] = 0
    extra: Mist | None = None
    parts: tuple[Oicr | Discovery, ...] = ()
    names: dict[str, int] = field(default_factory=dict)
    stamp: int = field(default=7, init=False)


@dataclass(frozen=True, kw_only=True)
class Needy:
    root: Path
    train: Train
    labeler: Oicr | Mist


@dataclass(frozen=True)
class Nothing:
    pass
