"""The objects of generated scenes: each a body with its own outline, and a small discriminative part."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tag2box.data.scene_art import Canvas, ColourRgb, Paint, Picture, Sprite, box, hsv, mix, oval, textured

_DARK: ColourRgb = (0.1, 0.09, 0.12)
_LIGHT: ColourRgb = (0.98, 0.96, 0.9)


@dataclass(frozen=True, slots=True)
class ObjectStyle:
    """Paints of one object. The discriminative part is close to the body's colour, or stands out from it."""

    rng: np.random.Generator
    body: Picture
    trim: ColourRgb
    light: ColourRgb  # bright paint of the discriminative part
    dark: ColourRgb  # dark paint of the discriminative part


def _balloon(c: Canvas, style: ObjectStyle) -> None:
    def envelope(width: float) -> np.ndarray:
        top = oval(0, -0.33, 0.68 * width, 0.65, start=np.pi, stop=2 * np.pi)
        side = [(0.62 * width, -0.02), (0.4 * width, 0.3), (0.17 * width, 0.5)]
        return np.concatenate([top, side, [(-x, y) for x, y in reversed(side)]])

    for x in (-0.12, 0.12):
        c.line([(x, 0.45), (x * 0.9, 0.75)], 0.035, _DARK)
    paints: tuple[tuple[float, Paint], ...] = ((1.0, style.body), (0.66, style.trim), (0.28, style.body))
    for width, paint in paints:
        c.fill(envelope(width), paint)
    c.fill(box(-0.17, 0.7, 0.17, 0.98), style.dark)
    c.fill(box(-0.2, 0.68, 0.2, 0.77), style.light)
    for x in (-0.08, 0.02, 0.12):
        c.line([(x, 0.78), (x, 0.97)], 0.03, style.light)


def _car(c: Canvas, style: ObjectStyle) -> None:
    back = style.rng.uniform(-0.7, -0.35)  # from hatchback to saloon
    c.fill([(back - 0.12, -0.02), (back, -0.48), (0.2, -0.48), (0.52, -0.02)], style.trim)
    shell = [(-0.98, 0.24), (-0.95, -0.02), (-0.85, -0.08), (0.55, -0.08), (0.9, 0.0), (1.0, 0.12), (1.0, 0.3)]
    c.fill([*shell, (-0.96, 0.3)], style.body)
    glass = (0.72, 0.86, 0.93)
    c.fill([(back, -0.07), (back + 0.09, -0.4), (-0.1, -0.4), (-0.1, -0.07)], glass)
    c.fill([(-0.02, -0.07), (-0.02, -0.4), (0.16, -0.4), (0.4, -0.07)], glass)
    for x in (-0.55, 0.55):
        c.fill(oval(x, 0.3, 0.25, 0.25), style.dark)
        c.fill(oval(x, 0.3, 0.13, 0.13), style.light)
        c.fill(oval(x, 0.3, 0.05, 0.05), style.dark)
    c.fill(oval(0.92, 0.1, 0.07, 0.06), style.light)


def _clock(c: Canvas, style: ObjectStyle) -> None:
    wide = style.rng.uniform(0.42, 0.6)
    c.fill([(-wide, -0.8), (-0.2, -0.98), (0.2, -0.98), (wide, -0.8), (wide, 0.9), (-wide, 0.9)], style.body)
    c.fill(box(-wide - 0.08, 0.82, wide + 0.08, 0.98), style.trim)
    c.fill(box(-0.24, 0.1, 0.24, 0.72), style.trim)
    c.line([(0, 0.12), (0.06, 0.5)], 0.04, style.light)
    c.fill(oval(0.06, 0.54, 0.09, 0.09), style.light)
    y, reach = -0.42, 0.36
    c.fill(oval(0, y, reach + 0.05, reach + 0.05), style.dark)
    c.fill(oval(0, y, reach, reach), style.light)
    for angle in np.arange(12) * np.pi / 6:
        way = np.array([np.cos(angle), np.sin(angle)])
        c.line(np.outer((0.27, 0.33), way) + np.array([0, y]), 0.04, style.dark)
    for length, width in ((0.2, 0.06), (0.27, 0.04)):
        angle = style.rng.uniform(0, 2 * np.pi)
        c.line([(0, y), (length * np.cos(angle), y + length * np.sin(angle))], width, style.dark)


def _fish(c: Canvas, style: ObjectStyle) -> None:
    deep = style.rng.uniform(0.36, 0.52)
    c.fill([(0.45, 0), (1.0, -0.45), (0.86, 0), (1.0, 0.45)], style.trim)
    c.fill([(-0.35, -deep * 0.8), (0.05, -deep - 0.2), (0.35, -deep * 0.6)], style.trim)
    c.fill([(-0.1, deep * 0.8), (0.15, deep + 0.15), (0.25, deep * 0.7)], style.trim)
    x = np.linspace(-1, 0.65, 30)
    half = deep * np.sin(np.pi * ((x + 1) / 1.65) ** 0.8) + 0.02
    c.fill(np.concatenate([np.stack([x, -half], 1), np.stack([x, half], 1)[::-1]]), style.body)
    c.line(oval(-0.62, 0, 0.24, deep * 0.75, start=-1.1, stop=1.1), 0.05, style.trim)
    c.fill([(-0.08, 0.02), (0.22, -0.12), (0.22, 0.18)], style.trim)
    c.fill(oval(-0.64, -0.1, 0.13, 0.13), style.light)
    c.fill(oval(-0.66, -0.1, 0.065, 0.065), style.dark)
    c.line([(-0.97, 0.06), (-0.78, 0.12)], 0.04, style.dark)


def _flower(c: Canvas, style: ObjectStyle) -> None:
    green = hsv(style.rng.uniform(0.24, 0.42), 0.6, style.rng.uniform(0.35, 0.65))
    c.line([(0, -0.3), (0.04, 0.3), (0, 0.98)], 0.1, green)
    for side in (-1, 1):
        c.fill([(0, 0.75), (side * 0.2, 0.45), (side * 0.55, 0.38), (side * 0.3, 0.7)], green)
    petals = int(style.rng.integers(5, 9))
    width = 1.5 / petals
    for i, angle in enumerate(np.arange(petals) * 2 * np.pi / petals):
        cos, sin = np.cos(angle), np.sin(angle)
        petal = oval(0.36, 0, 0.27, width) @ np.array([[cos, sin], [-sin, cos]]) + (0, -0.36)
        c.fill(petal, style.body if i % 2 else mix(style.trim, _mean(style.body), 0.5))
    c.fill(oval(0, -0.36, 0.2, 0.2), style.dark)
    c.fill(oval(0, -0.36, 0.15, 0.15), style.light)
    for angle in np.arange(6) * np.pi / 3:
        c.fill(oval(0.08 * np.cos(angle), -0.36 + 0.08 * np.sin(angle), 0.03, 0.03), style.dark)


def _house(c: Canvas, style: ObjectStyle) -> None:
    peak = style.rng.uniform(-0.95, -0.7)
    c.fill(box(0.3, peak, 0.5, -0.2), style.trim)
    c.fill(box(-0.72, -0.2, 0.72, 0.85), style.body)
    c.fill([(-0.92, -0.15), (0, peak), (0.92, -0.15)], style.trim)
    c.fill(box(0.12, 0.22, 0.46, 0.85), mix(style.trim, _DARK, 0.5))
    c.fill(oval(0.39, 0.55, 0.04, 0.04), style.light)
    c.fill(box(-0.54, 0.08, -0.08, 0.52), style.dark)
    c.fill(box(-0.49, 0.13, -0.13, 0.47), style.light)
    c.line([(-0.31, 0.1), (-0.31, 0.5)], 0.05, style.dark)
    c.line([(-0.52, 0.3), (-0.1, 0.3)], 0.05, style.dark)


def _ladybird(c: Canvas, style: ObjectStyle) -> None:
    for y in (-0.25, 0.15, 0.5):
        for side in (-1, 1):
            c.line([(side * 0.5, y), (side * 0.78, y + 0.05), (side * 0.86, y + 0.2)], 0.07, _DARK)
    for side in (-1, 1):
        c.line([(side * 0.12, -0.7), (side * 0.3, -0.97)], 0.06, _DARK)
    c.fill(oval(0, -0.58, 0.36, 0.28), style.dark)
    c.fill(oval(0, 0.16, 0.66, 0.76), style.body)
    c.line([(0, -0.55), (0, 0.9)], 0.06, style.trim)
    spots = [(0.33, -0.2), (0.36, 0.25), (0.22, 0.62)][: int(style.rng.integers(2, 4))]
    for x, y in spots:
        for side in (-1, 1):
            c.fill(oval(side * x, y, 0.13, 0.14), style.trim)
    for side in (-1, 1):
        c.fill(oval(side * 0.2, -0.66, 0.1, 0.09), style.light)


def _mug(c: Canvas, style: ObjectStyle) -> None:
    tall = style.rng.uniform(0.62, 0.85)
    c.line(oval(0.52, 0, 0.34, 0.42 * tall / 0.7, start=-1.5, stop=1.5), 0.15, style.trim)
    foot = oval(-0.15, tall - 0.05, 0.58, 0.14, start=0, stop=np.pi)
    c.fill(np.concatenate([[(-0.77, -tall), (0.47, -tall)], foot]), style.body)
    c.fill(oval(-0.15, -tall, 0.62, 0.15), style.trim)
    c.fill(oval(-0.15, -tall, 0.52, 0.1), (0.3, 0.18, 0.1))
    t = np.linspace(0, 2 * np.pi, 40)
    heart = np.stack([np.sin(t) ** 3, -(13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t)) / 16], 1)
    c.fill(heart * 0.32 + (-0.15, 0.08), style.dark)
    c.fill(heart * 0.25 + (-0.15, 0.08), style.light)


def _mushroom(c: Canvas, style: ObjectStyle) -> None:
    stalk = style.rng.uniform(0.16, 0.28)
    c.fill([(-stalk, -0.1), (stalk, -0.1), (stalk * 1.4, 0.85), (0, 0.95), (-stalk * 1.4, 0.85)], _LIGHT)
    c.fill(oval(0, 0.05, stalk + 0.16, 0.12), mix(style.trim, _LIGHT, 0.6))
    top = oval(0, -0.05, 0.9, style.rng.uniform(0.7, 0.88), start=np.pi, stop=2 * np.pi)
    c.fill(np.concatenate([top, oval(0, -0.05, 0.9, 0.14, start=0, stop=np.pi)]), style.body)
    for x, y, r in ((-0.45, -0.3, 0.15), (0.08, -0.52, 0.17), (0.5, -0.22, 0.12), (-0.05, -0.14, 0.1)):
        c.fill(oval(x, y, r + 0.03, (r + 0.03) * 0.85), style.dark)
        c.fill(oval(x, y, r, r * 0.85), style.light)


def _umbrella(c: Canvas, style: ObjectStyle) -> None:
    c.line([(0, -0.95), (0, 0.75)], 0.07, _DARK)
    hook = oval(0.15, 0.75, 0.15, 0.2, start=np.pi, stop=0)
    c.line(hook, 0.13, style.dark)
    c.line(hook, 0.07, style.light)
    ribs = np.linspace(-0.98, 0.98, 6)
    top = oval(0, 0.02, 0.98, 0.88, start=np.pi, stop=2 * np.pi)
    hem = [oval((a + b) / 2, 0.02, (b - a) / 2, 0.13, start=0, stop=-np.pi) for a, b in itertools.pairwise(ribs)]
    c.fill(np.concatenate([top, *hem[::-1]]), style.body)
    for i in (1, 3):
        a, b = ribs[i], ribs[i + 1]
        arc = oval((a + b) / 2, 0.02, (b - a) / 2, 0.13, start=-np.pi, stop=0)
        left = oval(0, 0.02, a, 0.86, start=-np.pi / 2, stop=0)
        right = oval(0, 0.02, b, 0.86, start=0, stop=-np.pi / 2)
        c.fill(np.concatenate([left, arc, right]), style.trim)


_DRAW: dict[str, Callable[[Canvas, ObjectStyle], None]] = {
    "balloon": _balloon,
    "car": _car,
    "clock": _clock,
    "fish": _fish,
    "flower": _flower,
    "house": _house,
    "ladybird": _ladybird,
    "mug": _mug,
    "mushroom": _mushroom,
    "umbrella": _umbrella,
}
OBJECT_CLASSES: tuple[str, ...] = tuple(_DRAW)
"""The classes that can be drawn."""


def draw_object(rng: np.random.Generator, name: str, size: float, *, loud: bool, behind: ColourRgb) -> Sprite:
    """Draw one object of about ``size`` pixels, in colours that differ from the background.

    Args:
        loud: whether the discriminative part stands out from the body.
        behind: mean colour of the background.
    """
    canvas = Canvas(
        size,
        turn=np.deg2rad(rng.uniform(-20, 20)),
        stretch=float(np.exp(rng.uniform(-0.22, 0.22))),
        mirror=bool(rng.random() < 0.5),
    )
    body = _body_colour(rng, OBJECT_CLASSES.index(name) / len(OBJECT_CLASSES), behind)
    other = hsv(rng.random(), rng.uniform(0.3, 0.9), rng.uniform(0.3, 0.9))
    trim = mix(mix(body, _DARK, rng.uniform(0.25, 0.5)), other, rng.uniform(0.1, 0.6))
    light = _LIGHT if rng.random() < 0.7 else (1.0, 0.86, 0.35)
    quiet = 0.0 if loud else 0.75
    body_paint = textured(rng, canvas.alpha.shape[0], body)
    _DRAW[name](canvas, ObjectStyle(rng, body_paint, trim, mix(light, body, quiet), mix(_DARK, body, quiet)))
    return canvas.sprite()


def _body_colour(rng: np.random.Generator, typical: float, behind: ColourRgb) -> ColourRgb:
    """In half the draws near the typical hue of the class, else any; distinct from the background."""
    colour: ColourRgb = (0.0, 0.0, 0.0)
    for _ in range(8):
        hue = rng.normal(typical, 0.08) if rng.random() < 0.5 else rng.random()
        colour = hsv(hue, rng.uniform(0.35, 0.95), rng.uniform(0.4, 0.97))
        if np.linalg.norm(np.subtract(colour, behind)) > 0.45:
            break
    return colour


def _mean(paint: Picture) -> ColourRgb:
    r, g, b = paint.mean((0, 1)).tolist()
    return (r, g, b)
