"""Images: views of a photo (resize, horizontal flip) with their boxes, and decoding of photo files."""

from __future__ import annotations

import difflib
import stat
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, BinaryIO

import numpy as np
from jaxtyping import Float, UInt8
from PIL import BmpImagePlugin, GifImagePlugin, Image, JpegImagePlugin, PngImagePlugin, TiffImagePlugin, WebPImagePlugin
from PIL.ImageFile import ImageFile
from pydantic import Field

from tag2box.annotations import Photo
from tag2box.errors import UserError

if TYPE_CHECKING:  # loaded where tensors are made
    from torch import Tensor

Side = Annotated[int, Field(ge=16, le=20_000)]


@dataclass(frozen=True, slots=True)
class View:
    """A resized, possibly flipped version of a photo; ``short`` is the length of the short side (None: full size)."""

    short: int | None
    flip: bool = False
    long_max: int | None = None


@dataclass(frozen=True, kw_only=True)
class Resize:
    """Random scale and horizontal flip of training photos (paper, section 4.1)."""

    scales: Annotated[tuple[Side, ...], Field(min_length=1)] = (480, 576, 688, 864, 1000, 1200)
    """Short sides to draw from, in pixels."""
    ratios: Annotated[tuple[Annotated[float, Field(gt=0, le=1)], ...], Field(min_length=1)] = (1.0,)
    """Factors on the short sides: every scale also comes at each of them. CASD has (1, 5/6) if there is one scale."""
    long_max: Side = 2000
    """Largest long side, in pixels, at any scale."""
    flip: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Probability of a horizontal flip."""

    def view(self, seed: int, epoch: int, index: int) -> View:
        """The view of photo ``index`` in an epoch: depends on these numbers only, so it is the same in any worker."""
        rng = np.random.default_rng([seed, epoch, index])
        scale, ratio = divmod(int(rng.integers(len(self.scales) * len(self.ratios))), len(self.ratios))
        return View(
            max(16, round(self.ratios[ratio] * self.scales[scale])), bool(rng.random() < self.flip), self.long_max
        )

    def views(self) -> tuple[View, ...]:
        """Every view that can be drawn."""
        flips = [flip for flip, chance in ((False, 1 - self.flip), (True, self.flip)) if chance > 0]
        sides = [max(16, round(ratio * scale)) for scale in self.scales for ratio in self.ratios]
        return tuple(View(side, flip, self.long_max) for side in sides for flip in flips)


def resized(size: tuple[int, int], short: int, long_max: int | None) -> tuple[int, int]:
    """Height and width with the short side at ``short``, or less if the long one would exceed ``long_max``."""
    scale = short / min(size)
    if long_max is not None:
        scale = min(scale, long_max / max(size))
    height, width = (max(1, round(side * scale)) for side in size)
    return height, width


def view_size(view: View, size: tuple[int, int]) -> tuple[int, int]:
    """Height and width of a view of a photo of ``size`` (height, width)."""
    return size if view.short is None else resized(size, view.short, view.long_max)


def boxes_in_view(view: View, boxes: Float[Tensor, "P 4"], size: tuple[int, int]) -> Float[Tensor, "P 4"]:
    """Boxes of a photo of ``size`` (height, width) in the pixels of a view, scaled by the exact ratio of the sides."""
    height, width = size
    target = view_size(view, size)
    scaled = boxes * boxes.new_tensor([target[1] / width, target[0] / height] * 2)
    return flip_boxes(scaled, target[1]) if view.flip else scaled


def flip_boxes(boxes: Float[Tensor, "P 4"], width: float) -> Float[Tensor, "P 4"]:
    """Boxes after a horizontal flip."""
    import torch

    x1, y1, x2, y2 = boxes.unbind(1)
    return torch.stack([width - x2, y1, width - x1, y2], dim=1)


def render_view(view: View, image: Float[Tensor, "ch H W"], size: tuple[int, int]) -> Float[Tensor, "ch h w"]:
    """A view of a photo of ``size`` (height, width); ``image`` is the photo, or a copy of another size."""
    target = view_size(view, size)
    if target != tuple(image.shape[1:]):
        from torch.nn.functional import interpolate

        image = interpolate(image[None], target, mode="bilinear", align_corners=False, antialias=True)[0]
    return image.flip(2) if view.flip else image


MAX_PIXELS = 2**29 // 3
"""Largest decoded photo: half a gigabyte of RGB."""
_ALWAYS_PIXELS, _PIXELS_PER_BYTE = 2**25, 32  # a larger photo needs a file that is not tiny: it would be a bomb
_MAX_SCANNED = 2**31  # pixels in all scans of a JPEG, each of which takes the time of a photo
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

_MOST_NAMES = 5000  # of a folder that are compared with a name that is not there
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
    """Decode a photo; see ``read_pixels``."""
    import torch

    return torch.from_numpy(read_pixels(path, at_least).transpose(2, 0, 1).copy())


def read_pixels(path: Path, at_least: tuple[int, int] | None = None) -> UInt8[np.ndarray, "H W 3"]:
    """Decode a photo of any colour mode to upright 8-bit RGB; transparent pixels show white.

    Args:
        at_least: (width, height) needed of the upright photo. A much larger photo is then reduced by a power of two, to
            at least twice that size, so that the resize that follows still determines the result.
    """
    with _opened(path) as (image, turn, by_rows):
        if isinstance(image, JpegImagePlugin.JpegImageFile) and not by_rows:
            _refuse_many_scans(path, image.size)
        factor = 1 if at_least is None else reduction(_upright(image.size, turn), at_least)
        rest = factor // _draft(image, factor)
        _refuse_above(path, image.size)
        rgb = to_rgb(image)
        small = rgb.reduce(rest) if rest > 1 else rgb
        return np.asarray(small.transpose(_TURNS[turn]) if turn in _TURNS else small)


def photo_size(path: Path) -> tuple[int, int]:
    """Width and height of the upright photo, from its header alone."""
    with _opened(path) as (image, turn, _):
        return _upright(image.size, turn)


def reduction(size: tuple[int, int], at_least: tuple[int, int]) -> int:
    """The largest power of two that leaves both sides of a photo at least twice as long as needed; 1 if none does."""
    room = min(side // (2 * max(1, wanted)) for side, wanted in zip(size, at_least, strict=True))
    return 1 << (room.bit_length() - 1) if room else 1


def distinct_names(paths: Sequence[PurePosixPath]) -> list[str]:
    """Photo ids: the shortest of stem, path without suffix and whole path that is different for all photos."""
    names = [path.stem for path in paths]
    if len(set(names)) < len(names):
        names = [path.with_suffix("").as_posix() for path in paths]
    return names if len(set(names)) == len(names) else [path.as_posix() for path in paths]


@contextmanager
def _opened(path: Path) -> Iterator[tuple[ImageFile, int, bool]]:
    """A photo with its header read, its EXIF orientation, and whether it decodes by rows.

    Every decoding error becomes a ``UserError``.
    """
    size = _file_size(path)
    if size is None:
        raise UserError(f"{path}: no such photo; {_near_name(path)}")
    if size == 0:
        raise UserError(f"{path}: the file is empty (0 bytes); replace or remove this photo")
    try:
        with path.open("rb") as file:
            reader = _reader(path, file.read(16))
            file.seek(0)
            image = reader(file)
            by_rows = _decodes_by_rows(image, file)
            if not by_rows:
                _refuse_above(path, image.size)
            yield image, _orientation(image, file), by_rows
    except _UNREADABLE as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: not readable as a photo ({reason}); replace or remove it") from None


def _near_name(path: Path) -> str:
    """Advice about a photo that does not exist: the file with the most similar name."""
    wanted, folder = path.name.lower(), path.parent
    known = _names_by_digits(folder, folder.stat().st_mtime_ns) if folder.is_dir() else {}
    names = known.get(_digits(wanted), {})  # a photo of another number is another photo
    near = difflib.get_close_matches(wanted, names, 1)
    return f"did you mean {names[near[0]]}?" if near else "check the name and the photos folder"


@lru_cache(maxsize=4)  # of thousands of photos that are missing, the folder is read once
def _names_by_digits(folder: Path, mtime_ns: int) -> dict[str, dict[str, str]]:
    """The photos of a folder, which changed last at ``mtime_ns``: by digits, lower case name to name."""
    found: dict[str, dict[str, str]] = {}
    for other in islice(folder.iterdir(), _MOST_NAMES):
        if other.suffix.lower() in SUFFIXES:
            found.setdefault(_digits(other.name), {})[other.name.lower()] = other.name
    return found


def _file_size(path: Path) -> int | None:
    """Bytes of a file; None if there is no file of this name."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        if path.is_file():  # raises if there is no permission to look
            raise
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _digits(name: str) -> str:
    return "".join(filter(str.isdigit, name))


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
    if size[0] * size[1] > max(_ALWAYS_PIXELS, _PIXELS_PER_BYTE * path.stat().st_size):
        kilobytes = path.stat().st_size // 1000
        raise UserError(f"{path}: {size[0]}x{size[1]} pixels from {kilobytes} kB, no photo; save a smaller copy of it")


def _refuse_many_scans(path: Path, size: tuple[int, int]) -> None:
    """Refuse a JPEG of thousands of scans; usual are 10. A marker cannot occur in the pixels themselves."""
    with path.open("rb") as file:
        scans = sum(block.count(b"\xff\xda") for block in iter(lambda: file.read(1 << 20), b""))
    if scans * size[0] * size[1] > _MAX_SCANNED:
        raise UserError(f"{path}: {scans} scans of {size[0]}x{size[1]} pixels, no photo; save a copy of it")


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


def to_rgb(image: Image.Image) -> Image.Image:
    """Any Pillow mode to RGB. Pillow itself would clip 16-bit greys to white, and reveal colours hidden by alpha."""
    image.load()
    if image.mode.startswith("I") or image.mode == "F":
        return Image.fromarray(_eight_bits(np.asarray(image, dtype=np.float32), image.mode)).convert("RGB")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def _eight_bits(grey: np.ndarray, mode: str) -> UInt8[np.ndarray, "H W"]:
    """Greys as bytes: integers of 8, 16 or, stretched by their range, 9 to 14 bits; floats up to 1 or up to 255."""
    brightest, low, scale = np.nanmax(grey, initial=0), 0.0, 1.0
    if mode == "F" and brightest <= 1:
        scale = 255.0
    elif mode != "F" and brightest > 255:
        black, white = np.percentile(grey, (0.1, 99.9)) if brightest < 1 << 14 else (0.0, 0.0)  # of a scan of few bits
        low, scale = (black, 255 / (white - black)) if black < white else (0.0, 1 / 257)
    return np.asarray(np.nan_to_num((grey - np.float32(low)) * np.float32(scale)).round().clip(0, 255).astype(np.uint8))


@dataclass(frozen=True, slots=True, eq=False)
class LoadedPhoto(Photo):
    """A photo in memory, upright; its path is a name for messages."""

    pixels: UInt8[Tensor, "3 H W"] = field(kw_only=True)

    def reduced(self, factor: int) -> UInt8[Tensor, "3 h w"]:
        """The pixels, reduced as ``read_photo`` reduces those of a file without loss."""
        if factor == 1:
            return self.pixels
        import torch

        small = Image.fromarray(self.pixels.permute(1, 2, 0).contiguous().numpy()).reduce(factor)
        return torch.from_numpy(np.asarray(small).transpose(2, 0, 1).copy())


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
    factor = reduction((photo.width, photo.height), wanted)
    if isinstance(photo, LoadedPhoto):
        return DecodedImage(photo, photo.reduced(factor))
    pixels = read_photo(photo.path, at_least=wanted)
    if tuple(pixels.shape[1:]) != (-(-photo.height // factor), -(-photo.width // factor)):
        found = "x".join(map(str, photo_size(photo.path)))
        raise UserError(
            f"{photo.path}: {found} pixels, expected {photo.width}x{photo.height}; "
            "correct the size its dataset gives, or read the dataset again"
        )
    return DecodedImage(photo, pixels)
