"""Export formats: detections written to files that other tools read.

An export format is a class that is called without arguments; its instances are called with the place to write to, the
photos, the class names and the detections by photo id. Built-in formats are listed in
``tag2box.extend.EXPORT_FORMATS``; those of other packages are named ``package.module:Name``. Every file is written
whole or not at all.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tag2box import extend
from tag2box.annotations import Detections, Photo
from tag2box.errors import UserError

_RESERVED = r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\.|$)"  # devices on Windows
_UNSAFE = re.compile(rf'[\x00-\x1f\x7f\ud800-\udfff%/\\:*?"<>|]|^\.|[. ]$|^(?={_RESERVED}).', re.IGNORECASE)
_LONGEST_NAME = 200  # bytes; file systems take 255, with suffix


class ExportFormat(Protocol):
    """Writes detections; its class is called without arguments. A base class, too, for the defaults of its fields."""

    what: str = "a file"
    """Its name in messages, such as "a COCO file"."""
    is_folder: bool = False
    """Whether ``out`` is a folder (else a file)."""
    all_scores: bool = False
    """Whether boxes of all scores belong in it: evaluators rank by score, other tools expect the confident boxes."""

    def __call__(
        self, out: Path, photos: Sequence[Photo], classes: Sequence[str], detections: Mapping[str, Detections]
    ) -> None:
        """Write the detections (by photo id, labels indexing ``classes``) of some photos; none if an id is missing."""
        ...


def export_format(kind: str) -> ExportFormat:
    """The export format of a built-in name or of ``package.module:Name``."""
    try:
        made: ExportFormat = extend.find_part("export format", kind)()
    except UserError as error:
        raise UserError(f"export format {kind}: {error}") from None
    return made


def export_detections(
    kind: str | ExportFormat,
    out: Path,
    photos: Sequence[Photo],
    classes: Sequence[str],
    detections: Mapping[str, Detections],
) -> None:
    """Write detections in a format: ``export_detections("yolo", Path("out"), photos, classes, found)``.

    Args:
        kind: a built-in name, ``package.module:Name``, or an export format.
        out: file or folder to write.
        classes: class names, indexed by the labels of the detections.
        detections: by photo id.
    """
    made = export_format(kind) if isinstance(kind, str) else kind
    if out.exists() and out.is_dir() is not made.is_folder:
        other, wanted = ("file", "folder") if made.is_folder else ("folder", "file")
        raise UserError(f"{out}: is a {other}; expected a {wanted} for {made.what}, name another")
    made(out, photos, classes, detections)


def safe_file_name(name: str) -> str:
    """A file name for any text, such as a photo id or a class: different texts give different names.

    Separators and other characters that a file system may not accept are percent-encoded (``a/b`` becomes ``a%2Fb``),
    so no name can lead to another folder. The end of a very long name is replaced by a hash.
    """
    safe = _UNSAFE.sub(lambda c: "".join(f"%{b:02X}" for b in c[0].encode(errors="surrogatepass")), name) or "%"
    raw = safe.encode()
    if len(raw) <= _LONGEST_NAME:
        return safe
    digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    return f"{raw[: _LONGEST_NAME - 20].decode(errors='ignore')}%{digest}"
