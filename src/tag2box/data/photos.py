"""Photos on disk, read as the eye sees them: upright, eight bits a channel, RGB."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, ImageOps
from torch import Tensor

from tag2box.errors import UserError
from tag2box.types import Photo

# What Pillow raises on files that are not (whole) images; SyntaxError is how it reports a broken PNG chunk.
_UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError)
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
_ORIENTATION = 0x0112  # the EXIF tag; values 5 to 8 swap width and height


def read_photo(path: Path) -> UInt8[Tensor, "3 H W"]:
    """Decode a photo of any colour mode to upright 8-bit RGB; transparent pixels show white."""
    with _opened(path) as image:
        rgb = _to_rgb(ImageOps.exif_transpose(image))
    return torch.from_numpy(np.array(rgb).transpose(2, 0, 1).copy())


def photo_size(path: Path) -> tuple[int, int]:
    """Width and height of the upright photo, from its header alone."""
    with _opened(path) as image:
        width, height = image.size
        return (height, width) if image.getexif().get(_ORIENTATION, 1) in {5, 6, 7, 8} else (width, height)


def find_photos(places: Sequence[Path]) -> tuple[Photo, ...]:
    """The photos among files and folders, folders searched to their depths, in the order of their names."""
    files: list[Path] = []
    for place in places:
        inside = sorted(p for p in place.rglob("*") if p.suffix.lower() in SUFFIXES) if place.is_dir() else [place]
        if not inside:
            raise UserError(f"{place}: no photos in this folder; expected {', '.join(sorted(SUFFIXES))} files")
        files += [file for file in inside if file not in files]
    names = distinct_names([PurePosixPath(file.as_posix()) for file in files])
    return tuple(Photo(name, file, *photo_size(file)) for name, file in zip(names, files, strict=True))


def distinct_names(paths: Sequence[PurePosixPath]) -> list[str]:
    """The shortest of stem, path without suffix and whole path that tells all photos apart: their ids everywhere."""
    whole = [path.as_posix() for path in paths]
    candidates = ([path.stem for path in paths], [path.with_suffix("").as_posix() for path in paths], whole)
    return next((names for names in candidates if len(set(names)) == len(names)), whole)


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """Open an image file, turning all that can be wrong with one into a line for the user."""
    if not path.is_file():
        raise UserError(f"{path}: no such photo; check the name and the photos folder")
    if path.stat().st_size == 0:
        raise UserError(f"{path}: the file is empty (0 bytes); replace or remove this photo")
    try:
        with Image.open(path) as image:
            yield image
    except _UNREADABLE as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: not readable as a photo ({reason}); replace or remove it") from None


def _to_rgb(image: Image.Image) -> Image.Image:
    """Any Pillow mode to RGB. Pillow itself would clip 16-bit greys to white, and drop alpha onto hidden colours."""
    if image.mode.startswith("I") or image.mode == "F":
        grey = np.asarray(image, dtype=np.float64)
        scale = 1 / 257 if image.mode != "F" and grey.max(initial=0) > 255 else 1.0
        return Image.fromarray((grey * scale).round().clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode in {"RGBA", "LA", "PA", "RGBa", "La"} or "transparency" in image.info:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")
