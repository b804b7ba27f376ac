"""Photo decoding: any common file to upright 8-bit RGB, reduced while decoding if only a smaller view is needed."""

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import BmpImagePlugin, GifImagePlugin, Image, JpegImagePlugin, PngImagePlugin, TiffImagePlugin, WebPImagePlugin
from PIL.ImageFile import ImageFile
from torch import Tensor

from tag2box.annotations import Photo
from tag2box.data.transforms import View, render_view, view_size
from tag2box.errors import UserError

MAX_PIXELS = 2**29 // 3
"""Largest decoded photo: half a gigabyte of RGB."""
SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})

# Chosen by the first bytes instead of Image.open, which refuses large photos before they can be reduced (unless a
# global of Pillow is changed) and admits formats whose readers start other programs.
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_READERS: dict[tuple[bytes, ...], type[ImageFile]] = {
    (b"\xff\xd8\xff",): JpegImagePlugin.JpegImageFile,  # of an MPO, the first frame
    (b"\x89PNG\r\n\x1a\n",): PngImagePlugin.PngImageFile,
    (b"RIFF",): WebPImagePlugin.WebPImageFile,
    (b"BM",): BmpImagePlugin.BmpImageFile,
    (b"GIF87a", b"GIF89a"): GifImagePlugin.GifImageFile,
    _TIFF: TiffImagePlugin.TiffImageFile,
}
# What Pillow raises on files that are not (whole) images; SyntaxError reports a broken PNG chunk.
_UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, MemoryError, struct.error, Image.DecompressionBombError)
_BROKEN_EXIF = (*_UNREADABLE, LookupError, TypeError, AttributeError, ArithmeticError)

_ORIENTATION = 0x0112  # the EXIF tag
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ON_THEIR_SIDE = frozenset({5, 6, 7, 8})  # these swap width and height


def read_photo(path: Path, at_least: tuple[int, int] | None = None) -> UInt8[Tensor, "3 H W"]:
    """Decode a photo of any colour mode to upright 8-bit RGB; transparent pixels show white.

    Args:
        at_least: (width, height) needed of the upright photo. A much larger photo is then reduced by a power of two, to
            at least twice that size, so that the resize that follows still determines the result.
    """
    with _opened(path) as (image, turn):
        factor = 1 if at_least is None else reduction(_upright(image.size, turn), at_least)
        rest = factor // _draft(image, factor)
        _refuse_above(path, image.size)
        rgb = _to_rgb(image)
        small = rgb.reduce(rest) if rest > 1 else rgb
        pixels = np.asarray(small.transpose(_TURNS[turn]) if turn in _TURNS else small)
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy())


def photo_size(path: Path) -> tuple[int, int]:
    """Width and height of the upright photo, from its header alone."""
    with _opened(path) as (image, turn):
        return _upright(image.size, turn)


def reduction(size: tuple[int, int], at_least: tuple[int, int]) -> int:
    """The largest power of two that leaves both sides of a photo at least twice as long as needed; 1 if none does."""
    room = min(side // (2 * max(1, wanted)) for side, wanted in zip(size, at_least, strict=True))
    return 1 << (room.bit_length() - 1) if room else 1


def find_photos(places: Sequence[Path]) -> tuple[Photo, ...]:
    """The photos among files and folders; folders are searched recursively, in the order of names."""
    files: list[Path] = []
    for place in places:
        inside = sorted(p for p in place.rglob("*") if p.suffix.lower() in SUFFIXES) if place.is_dir() else [place]
        if not inside:
            raise UserError(f"{place}: no photos in this folder; expected {', '.join(sorted(SUFFIXES))} files")
        files += [file for file in inside if file not in files]
    names = distinct_names([PurePosixPath(file.as_posix()) for file in files])
    return tuple(Photo(name, file, *photo_size(file)) for name, file in zip(names, files, strict=True))


def distinct_names(paths: Sequence[PurePosixPath]) -> list[str]:
    """Photo ids: the shortest of stem, path without suffix and whole path that is different for all photos."""
    whole = [path.as_posix() for path in paths]
    candidates = ([path.stem for path in paths], [path.with_suffix("").as_posix() for path in paths], whole)
    return next((names for names in candidates if len(set(names)) == len(names)), whole)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[ImageFile, int]]:
    """A photo with its header read, and its EXIF orientation; every decoding error becomes a ``UserError``."""
    if not path.is_file():
        raise UserError(f"{path}: no such photo; check the name and the photos folder")
    if path.stat().st_size == 0:
        raise UserError(f"{path}: the file is empty (0 bytes); replace or remove this photo")
    try:
        with path.open("rb") as file:
            reader = _reader(path, file.read(16))
            file.seek(0)
            image = reader(file)
            if not _decodes_by_rows(image, file):
                _refuse_above(path, image.size)
            yield image, _orientation(image, file)
    except _UNREADABLE as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: not readable as a photo ({reason}); replace or remove it") from None


def _reader(path: Path, start: bytes) -> type[ImageFile]:
    found = next((reader for starts, reader in _READERS.items() if start.startswith(starts)), None)
    if found is None or (start.startswith(b"RIFF") and start[8:12] != b"WEBP"):
        raise UserError(
            f"{path}: not readable as a photo (expected JPEG, PNG, WebP, BMP, GIF or TIFF); convert or remove it"
        )
    return found


def _decodes_by_rows(image: ImageFile, file: BinaryIO) -> bool:
    """Whether memory grows with the reduced photo only: a JPEG whose single scan has all components.

    For progressive JPEGs, and those with one scan per component, libjpeg keeps every coefficient in memory.
    """
    if not isinstance(image, JpegImagePlugin.JpegImageFile) or "progressive" in image.info:
        return False
    header = 2 * image.layers + 6  # of the scan; Pillow has just read past it
    file.seek(-header, 1)
    return file.read(3) == bytes([0, header, image.layers])


def _refuse_above(path: Path, size: tuple[int, int]) -> None:
    if size[0] * size[1] > MAX_PIXELS:
        raise UserError(
            f"{path}: {size[0]}x{size[1]} pixels, more than {MAX_PIXELS // 10**6} million; save a smaller copy of it"
        )


def _orientation(image: ImageFile, file: BinaryIO) -> int:
    """The EXIF orientation, 1 to 8. Broken EXIF is ignored, as in viewers."""
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        return 1  # Pillow rotates these itself, and gives the upright size
    try:
        if isinstance(image, PngImagePlugin.PngImageFile) and "exif" not in image.info:
            image.info["exif"] = _late_exif(file)
        turn = Image.Image.getexif(image).get(_ORIENTATION, 1)  # the PNG class's own decodes the photo first
    except _BROKEN_EXIF:
        return 1
    return turn if turn in _TURNS else 1


def _late_exif(file: BinaryIO) -> bytes | None:
    """The EXIF chunk of a PNG, at any position."""
    before = file.tell()
    try:
        file.seek(8)
        while len(head := file.read(8)) == 8:
            length, kind = struct.unpack(">I4s", head)
            if kind == b"eXIf":
                return b"Exif\0\0" + file.read(length)
            file.seek(length + 4, 1)
    finally:
        file.seek(before)
    return None


def _upright(size: tuple[int, int], turn: int) -> tuple[int, int]:
    return (size[1], size[0]) if turn in _ON_THEIR_SIDE else size


def _draft(image: ImageFile, factor: int) -> int:
    """Reduce in the decoder if possible; returns the part of ``factor`` that it covers."""
    if factor == 1 or not isinstance(image, JpegImagePlugin.JpegImageFile):
        return 1
    part = min(factor, 8)
    image.draft(None, (image.size[0] // part, image.size[1] // part))
    return part


def _to_rgb(image: Image.Image) -> Image.Image:
    """Any Pillow mode to RGB. Pillow itself would clip 16-bit greys to white, and reveal colours hidden by alpha."""
    image.load()
    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(_eight_bits(np.asarray(image, dtype=np.float32), image.mode)).convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _eight_bits(grey: np.ndarray, mode: str) -> UInt8[np.ndarray, "H W"]:
    """Greys as bytes: integers of 8 or 16 bits in any type, and floats up to 1 or up to 255."""
    brightest = np.nanmax(grey, initial=0)
    scale = 1.0
    if mode == "F" and brightest <= 1:
        scale = 255.0
    elif mode != "F" and brightest > 255:
        scale = 1 / 257
    return np.nan_to_num(grey * np.float32(scale)).round().clip(0, 255).astype(np.uint8)


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """A decoded photo, from which several views can be rendered."""

    photo: Photo
    pixels: UInt8[Tensor, "3 H W"]  # of the photo, or of a reduced copy that suffices for its views

    def render(self, view: View) -> Float[Tensor, "3 h w"]:
        """The photo in a view, RGB from 0 to 255."""
        return render_view(view, self.pixels.float(), (self.photo.height, self.photo.width))


def load_view(photo: Photo, view: View) -> Float[Tensor, "3 h w"]:
    """A photo in a view, RGB from 0 to 255; ``boxes_in_view`` gives its boxes there."""
    return load_image(photo, [view]).render(view)


def load_image(photo: Photo, views: Sequence[View]) -> DecodedImage:
    """Decode a photo once for several views.

    A photo much larger than the largest view is reduced while it is decoded, so that memory depends on the views. If
    its sides do not divide evenly, objects shift by at most half a pixel of that view.
    """
    sizes = [view_size(view, (photo.height, photo.width)) for view in views]
    wanted = (max(width for _, width in sizes), max(height for height, _ in sizes))
    pixels = read_photo(photo.path, at_least=wanted)
    factor = reduction((photo.width, photo.height), wanted)
    if tuple(pixels.shape[1:]) != (-(-photo.height // factor), -(-photo.width // factor)):
        found = "x".join(map(str, photo_size(photo.path)))
        raise UserError(
            f"{photo.path}: {found} pixels, expected {photo.width}x{photo.height}; "
            "correct the size its dataset gives, or read the dataset again"
        )
    return DecodedImage(photo, pixels)
