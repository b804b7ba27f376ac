"""Photos as bytes, in the formats people have."""

from __future__ import annotations

import functools
import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

NOISE = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)
SIDEWAYS = Image.Exif()
SIDEWAYS[0x0112] = 6


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def two_frames(kind: str, **options: Any) -> bytes:
    """A moving picture: noise, then the same upside down."""
    image = Image.fromarray(NOISE)
    return encoded(image, kind, save_all=True, append_images=[image.rotate(180)], **options)


@functools.cache
def formats() -> dict[str, bytes]:
    """Noise in every format people have, 60 wide and 40 high as stored."""
    image = Image.fromarray(NOISE)
    return {
        "jpeg": encoded(image, "JPEG", exif=SIDEWAYS),
        "progressive": encoded(image, "JPEG", progressive=True),
        "cmyk": encoded(image.convert("CMYK"), "JPEG"),
        "mpo": two_frames("MPO"),
        "png": encoded(image, "PNG", exif=SIDEWAYS),
        "palette": encoded(image.quantize(16), "PNG", transparency=0),
        "gif": two_frames("GIF"),
        "webp": encoded(image, "WEBP", lossless=True, exif=SIDEWAYS),
        "moving webp": two_frames("WEBP", lossless=True),
        "bmp": encoded(image, "BMP"),
        "tiff": encoded(image, "TIFF"),
        "lzw": encoded(image, "TIFF", compression="tiff_lzw"),
    }


def png_of(*chunks: tuple[bytes, bytes]) -> bytes:
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def flat_jpeg(width: int, height: int, *, frame: int = 0xC0, scans: int = 1) -> bytes:
    """A grey JPEG of any size without an encoder: every coefficient is zero, and each zero is one bit, 0."""
    components = b"".join(bytes([i, 0x11, 0]) for i in (1, 2, 3))
    tables = b"".join(_segment(0xC4, bytes([kind, 1]) + bytes(16)) for kind in (0x00, 0x10))
    blocks = -(-width // 8) * -(-height // 8) * 3
    groups = [(1, 2, 3)] if scans == 1 else [(1,), (2,), (3,)]
    data = b"".join(
        _segment(0xDA, bytes([len(group), *(b for i in group for b in (i, 0)), 0, 63, 0]))
        + bytes(-(-blocks // len(groups) * 2 // 8))
        for group in groups
    )
    size = struct.pack(">BHHB", 8, height, width, 3)
    return (
        b"\xff\xd8" + _segment(0xDB, b"\0" + b"\1" * 64) + _segment(frame, size + components)
        + tables + data + b"\xff\xd9"
    )  # fmt: skip


def _segment(marker: int, content: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(content) + 2) + content
