"""Renderings of photos for the page: thumbnails and screen-size copies, upright, made on demand."""

from __future__ import annotations

import hashlib
import io
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Literal

from PIL import Image

from tag2box.errors import UserError
from tag2box.images import photo_size, read_pixels
from tag2box.labels.labelled import LabelledPhoto
from tag2box.storage import FileStamp

RenderingSize = Literal["thumb", "screen", "full"]
LONG_SIDES: dict[RenderingSize, int] = {"thumb": 160, "screen": 1600, "full": 6000}
"""Pixels of the long side; smaller photos keep their size."""
_QUALITY: dict[RenderingSize, int] = {"thumb": 78, "screen": 88, "full": 92}
_CACHE_BYTES = 24_000_000


def render_photo(path: Path, photo: LabelledPhoto, size: RenderingSize) -> bytes:
    """A JPEG of a photo; raises ``UserError`` if it is gone, damaged, or not the one that was labelled."""
    if not path.is_file():
        raise UserError(f"{photo.file}: this photo is gone; restore it to review it")
    if photo.stamp is not None and FileStamp.of(path, photo.stamp).sha256 != photo.stamp.sha256:
        raise UserError(f"{photo.file}: is not the photo that was labelled; restore it to review it")
    scale = min(1.0, LONG_SIDES[size] / max(photo.width, photo.height))
    wanted = (max(1, round(photo.width * scale)), max(1, round(photo.height * scale)))
    if photo_size(path) != (photo.width, photo.height):
        raise UserError(f"{photo.file}: expected {photo.width}x{photo.height} pixels; restore the photo to review it")
    image = Image.fromarray(read_pixels(path, at_least=wanted))
    if image.size != wanted:
        image = image.resize(wanted, Image.Resampling.LANCZOS if size != "thumb" else Image.Resampling.BOX)
    out = io.BytesIO()
    image.save(out, format="JPEG", quality=_QUALITY[size])
    return out.getvalue()


class Renderings:
    """Renderings of the last photos that were shown, in memory; safe to use from several threads."""

    def __init__(self, most_bytes: int = _CACHE_BYTES) -> None:
        self._most = most_bytes
        self._bytes = 0
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: Path, photo: LabelledPhoto, size: RenderingSize) -> bytes:
        """A rendering, from memory if the file is unchanged."""
        tag = file_tag(path, photo, size)
        with self._lock:
            if (found := self._kept.get(tag)) is not None:
                self._kept.move_to_end(tag)
                return found
        made = render_photo(path, photo, size)
        with self._lock:
            if tag not in self._kept and len(made) <= self._most:
                self._kept[tag] = made
                self._bytes += len(made)
            while self._bytes > self._most:
                self._bytes -= len(self._kept.popitem(last=False)[1])
        return made


def file_tag(path: Path, photo: LabelledPhoto, size: RenderingSize) -> str:
    """A name of a rendering that changes with the file; raises ``UserError`` if the file is gone."""
    try:
        stat = path.stat()
    except OSError:
        raise UserError(f"{photo.file}: this photo is gone; restore it to review it") from None
    text = f"{photo.file}\0{size}\0{stat.st_size}\0{stat.st_mtime_ns}"
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=12).hexdigest()
