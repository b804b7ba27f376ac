"""Drawing primitives of generated scenes: anti-aliased sprites, paints, backgrounds and clutter."""

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from jaxtyping import Float, Float32

SUPERSAMPLE = 2  # sprites are drawn this many times larger, then averaged down
_SHIFT = 4  # fractional bits of OpenCV's polygon coordinates

ColourRgb = tuple[float, float, float]
PolygonPoints = Sequence[tuple[float, float]] | Float[np.ndarray, "n 2"]
Picture = Float32[np.ndarray, "H W 3"]  # RGB, 0 to 1
Mask = Float32[np.ndarray, "H W"]
Paint = ColourRgb | Picture


@dataclass(frozen=True, slots=True)
class Sprite:
    """A drawn object: its colours and its coverage of each pixel."""

    rgb: Picture
    alpha: Mask


class Canvas:
    """A sprite being drawn, in coordinates from -1 to 1 (y down) that are independent of its size and pose."""

    def __init__(self, size: float, *, turn: float = 0.0, stretch: float = 1.0, mirror: bool = False) -> None:
        self.size = int(np.ceil(size * 1.5 * max(stretch, 1 / stretch))) + 4
        side = self.size * SUPERSAMPLE
        self.unit = size * SUPERSAMPLE / 2  # pixels in one unit
        self.centre = side / 2
        cos, sin = np.cos(turn), np.sin(turn)
        scale = np.diag([np.sqrt(stretch) * (-1 if mirror else 1), 1 / np.sqrt(stretch)])
        self.pose = np.array([[cos, -sin], [sin, cos]]) @ scale
        self.rgb = np.zeros((side, side, 3), np.float32)
        self.alpha = np.zeros((side, side), np.float32)

    def fill(self, points: PolygonPoints, paint: Paint) -> None:
        """Paint the inside of a polygon."""
        at = self._pixels(points)
        mask = np.zeros(self.alpha.shape, np.uint8)
        cv2.fillPoly(mask, [at], 255, cv2.LINE_AA, _SHIFT)
        self._blend(mask, cv2.boundingRect(at >> _SHIFT), paint, margin=2)

    def line(self, points: PolygonPoints, width: float, paint: Paint) -> None:
        """Paint a line through the points; ``width`` in units."""
        at = self._pixels(points)
        thick = max(1, round(width * self.unit))
        mask = np.zeros(self.alpha.shape, np.uint8)
        cv2.polylines(mask, [at], False, 255, thick, cv2.LINE_AA, _SHIFT)
        self._blend(mask, cv2.boundingRect(at >> _SHIFT), paint, margin=thick + 2)

    def sprite(self) -> Sprite:
        """The finished sprite at its final size, with a darker rim that makes it look round."""
        soft = cv2.GaussianBlur(self.alpha, (0, 0), 0.045 * 2 * self.unit)
        rgb = self.rgb * np.clip(0.35 + 0.75 * soft, 0, 1)[..., None]
        size = (self.size, self.size)
        alpha = cv2.resize(self.alpha, size, interpolation=cv2.INTER_AREA)
        covered = cv2.resize(rgb * self.alpha[..., None], size, interpolation=cv2.INTER_AREA)
        return Sprite(covered / np.maximum(alpha, 1e-3)[..., None], alpha)

    def _pixels(self, points: PolygonPoints) -> np.ndarray:
        at = np.asarray(points, np.float64) @ self.pose.T * self.unit + self.centre
        return np.asarray(np.round(at * (1 << _SHIFT)), np.int32)

    def _blend(self, mask: np.ndarray, rect: Sequence[int], paint: Paint, *, margin: int) -> None:
        """Blend paint into the canvas through a mask, within a rectangle only: most marks are small."""
        x, y, w, h = rect
        rows, cols = slice(max(0, y - margin), y + h + margin), slice(max(0, x - margin), x + w + margin)
        cover = mask[rows, cols].astype(np.float32) / 255
        colour = paint[rows, cols] if isinstance(paint, np.ndarray) else np.array(paint, np.float32)
        self.rgb[rows, cols] += cover[..., None] * (colour - self.rgb[rows, cols])
        self.alpha[rows, cols] += cover * (1 - self.alpha[rows, cols])


def oval(x: float, y: float, rx: float, ry: float, *, start: float = 0.0, stop: float = 2 * np.pi) -> np.ndarray:
    """Points of an ellipse, or of an arc of it; angles run clockwise from the right."""
    angle = np.linspace(start, stop, 40)
    return np.stack([x + rx * np.cos(angle), y + ry * np.sin(angle)], axis=1)


def box(x1: float, y1: float, x2: float, y2: float) -> np.ndarray:
    """Corners of a rectangle."""
    return np.array([[x1, y1], [x2, y1], [x2, y2], [x1, y2]])


def hsv(hue: float, saturation: float, value: float) -> ColourRgb:
    """A colour by hue (turns), saturation and value."""
    return colorsys.hsv_to_rgb(hue % 1.0, saturation, value)


def mix(a: ColourRgb, b: ColourRgb, share: float) -> ColourRgb:
    """Linear mixture of two colours: ``share`` of the second."""
    x, y = np.array(a), np.array(b)
    r, g, b_ = (x + share * (y - x)).tolist()
    return (r, g, b_)


def noise(rng: np.random.Generator, shape: tuple[int, int], *, coarse: int, octaves: int) -> Mask:
    """Smooth noise from 0 to 1: random grids of doubling frequency and halving amplitude."""
    height, width = shape
    total = np.zeros(shape, np.float32)
    for octave in range(octaves):
        cells = coarse * 2**octave
        grid = rng.random((cells + 1, cells + 1), dtype=np.float32)
        total += cv2.resize(grid, (width, height), interpolation=cv2.INTER_CUBIC) * np.float32(0.5**octave)
    low, high = float(total.min()), float(total.max())
    return np.asarray((total - low) / max(high - low, 1e-6), dtype=np.float32)


def textured(rng: np.random.Generator, side: int, colour: ColourRgb) -> Picture:
    """Body paint: a colour with stripes, checks, dots, noise or no pattern, lit from above."""
    ys, xs = np.mgrid[0:side, 0:side].astype(np.float32) / np.float32(side)
    light = np.float32(0.3) * (np.float32(0.5) - (xs * np.float32(rng.uniform(-0.5, 1)) + ys) / np.float32(1.5))
    value = 1 + np.float32(rng.uniform(0.05, 0.16)) * _pattern(rng, xs, ys) + light
    return np.asarray(np.clip(value[..., None] * np.array(colour, np.float32), 0, 1))


def _pattern(rng: np.random.Generator, xs: Mask, ys: Mask) -> Mask:
    """A random pattern of brightness, from -1 to 1."""
    kind = str(rng.choice(["plain", "stripes", "checks", "dots", "noise"]))
    angle, pitch = rng.uniform(0, np.pi), np.float32(rng.uniform(10, 22) * 2 * np.pi)
    if kind == "plain":
        return np.zeros_like(xs)
    if kind == "noise":
        return 2 * noise(rng, xs.shape, coarse=8, octaves=3) - 1
    cos, sin = np.float32(np.cos(angle)), np.float32(np.sin(angle))
    along = np.sin(pitch * (cos * xs + sin * ys))
    both = along * np.sin(pitch * (cos * ys - sin * xs))
    wave = {"stripes": 3 * along, "checks": 4 * both, "dots": 6 * (both - np.float32(0.5))}[kind]
    return np.asarray(np.clip(wave, -1, 1))


def background(rng: np.random.Generator, shape: tuple[int, int]) -> Picture:
    """A background: three colours mixed by noise, bands, patches, planks or a horizon."""
    base, value = rng.random(), rng.uniform(0.35, 0.85)
    colours = [
        np.array(
            hsv(base + rng.normal(0, 0.09), rng.uniform(0.08, 0.5), np.clip(value + rng.normal(0, 0.1), 0.2, 0.95))
        )
        for _ in range(3)
    ]
    share = _SHARES[int(rng.integers(len(_SHARES)))](rng, shape)[..., None]
    picture = colours[0] + share * (colours[1] - colours[0])
    haze = noise(rng, shape, coarse=2, octaves=2)[..., None]
    grain = noise(rng, shape, coarse=12, octaves=4)[..., None]
    picture = picture + 0.35 * haze * (colours[2] - picture)
    return np.asarray(np.clip(picture * (0.88 + 0.24 * grain), 0, 1), np.float32)


def _cloud(rng: np.random.Generator, shape: tuple[int, int]) -> Mask:
    return noise(rng, shape, coarse=int(rng.integers(2, 5)), octaves=4)


def _horizon(rng: np.random.Generator, shape: tuple[int, int]) -> Mask:
    ys = np.linspace(0, 1, shape[0], dtype=np.float32)[:, None]
    edge = rng.uniform(0.35, 0.75) + 0.15 * (noise(rng, shape, coarse=3, octaves=2)[0] - 0.5)
    step = 1 / (1 + np.exp(-60 * (ys - edge[None])))
    return np.asarray(0.8 * step + 0.2 * ys, np.float32)


def _bands(rng: np.random.Generator, shape: tuple[int, int]) -> Mask:
    ys, xs = np.mgrid[0 : shape[0], 0 : shape[1]].astype(np.float32) / shape[1]
    angle, pitch = rng.uniform(0, np.pi), rng.uniform(3, 8)
    wave = np.sin(2 * np.pi * pitch * (np.cos(angle) * xs + np.sin(angle) * ys))
    return np.asarray(0.5 + 0.5 * np.clip(rng.uniform(1, 5) * wave, -1, 1), np.float32)


def _patches(rng: np.random.Generator, shape: tuple[int, int]) -> Mask:
    """Voronoi cells of random points, each with its own shade."""
    ys, xs = np.mgrid[0 : shape[0], 0 : shape[1]].astype(np.float32)
    points = rng.random((int(rng.integers(5, 14)), 2)) * np.array(shape)
    distance = (ys[..., None] - points[:, 0]) ** 2 + (xs[..., None] - points[:, 1]) ** 2
    return np.asarray(rng.random(len(points))[distance.argmin(-1)], np.float32)


def _planks(rng: np.random.Generator, shape: tuple[int, int]) -> Mask:
    count = int(rng.integers(4, 9))
    rows = np.arange(shape[0]) * count // shape[0]
    grain = noise(rng, (shape[0], 8), coarse=20, octaves=2).mean(1)
    shade = 0.7 * rng.random(count)[rows] + 0.3 * grain
    return np.asarray(np.broadcast_to(shade[:, None], shape), np.float32)


_SHARES = (_cloud, _horizon, _bands, _patches, _planks)


def add_clutter(rng: np.random.Generator, picture: Picture, count: int) -> Picture:
    """The picture with lines, triangles and blobs of no class drawn over it."""
    canvas = (picture * 255).astype(np.uint8)
    height, width = canvas.shape[:2]
    for _ in range(count):
        centre = rng.random(2) * (width, height)
        reach = rng.uniform(6, 26)
        colour = [int(255 * v) for v in hsv(rng.random(), rng.uniform(0.1, 0.7), rng.uniform(0.2, 0.95))]
        corners = int(rng.choice([2, 3, 4, 7]))
        angle = np.sort(rng.uniform(0, 2 * np.pi, corners))
        ring = np.stack([np.cos(angle), np.sin(angle)], 1) * rng.uniform(0.5, 1, (corners, 1)) * reach
        at = np.round((centre + ring) * (1 << _SHIFT)).astype(np.int32)
        if len(at) > 2:
            cv2.fillPoly(canvas, [at], colour, cv2.LINE_AA, _SHIFT)
        else:
            cv2.polylines(canvas, [at], False, colour, int(rng.integers(1, 4)), cv2.LINE_AA, _SHIFT)
    return canvas.astype(np.float32) / 255
