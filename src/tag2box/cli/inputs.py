"""The photos of a command: files, folders, patterns, a list on standard input, a split, frames of videos."""

import glob
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import cv2
import typer

from tag2box import errors, images, storage
from tag2box.annotations import Photo
from tag2box.formats import datasets, listing
from tag2box.progress import Progress, silent
from tag2box.training.dist import SINGLE_PROCESS, DistContext

VIDEO_SUFFIXES = frozenset({".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".wmv"})
FROM_STDIN = Path("-")
AnyPath = str | os.PathLike[str]
EVERY = "1s"
"""Frames of a video that are looked at by default."""
_EVERY = re.compile(r"(?P<frames>[1-9][0-9]{0,8})|(?P<seconds>[0-9]{1,6}(?:\.[0-9]{1,6})?)s")
_UNREADABLE = "convert it, e.g. to MP4 with H.264, or remove it"
_WHOLE = 0.9  # of the frames that a video states: fewer mean that it was cut short, a few are an estimate
_NO_SPACE = "free some space, take fewer frames with --every, or set TMPDIR to a folder on another disk"

# OpenCV reads these once, with the first video: FFmpeg prints nothing, and a video can name no further file or address.
os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
os.environ.setdefault("OPENCV_FFMPEG_CAPTURE_OPTIONS", "protocol_whitelist;file")

EveryOption = Annotated[
    str, typer.Option("--every", metavar="N", help="Look at each N-th frame of a video, or, as in 2s, at one per 2 s.")
]


@dataclass(frozen=True, slots=True)
class Every:
    """Which frames of a video are looked at: each n-th, or one per so many seconds."""

    frames: int = 0
    seconds: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Every":
        """From the text of --every: ``30``, or ``2s``."""
        found = _EVERY.fullmatch(text.strip())
        if found is None or (found["seconds"] and not float(found["seconds"])):
            raise errors.UserError(
                f"--every {text}: expected a number of frames, such as 30, or of seconds, such as 2s or 0.5s"
            )
        return cls(int(found["frames"] or 0), float(found["seconds"] or 0))

    def step(self, video: Path, rate: float) -> int:
        """Frames from one to the next, in a video of ``rate`` frames per second."""
        if self.frames:
            return self.frames
        if not 0 < rate < 1e6:  # also refuses NaN
            raise errors.UserError(f"{video}: states no frame rate; give --every a number of frames, such as 30")
        return max(1, round(self.seconds * rate))


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a command was given: photos, and videos, some frames of which are photos."""

    photos: tuple[Photo, ...]
    videos: tuple[Path, ...]
    every: Every


def find_inputs(
    places: Sequence[Path], split: str | None = None, every: str = EVERY, skipped: list[str] | None = None
) -> Inputs:
    """The photos and videos among files, folders and patterns; with a split, the photos of a dataset.

    Of folders the photos are taken; videos are named themselves, or by a pattern.

    Args:
        every: of a video, each how many frames, such as ``30``, or seconds, such as ``2s``, one is taken.
        skipped: if given, a photo that cannot be read adds a line to it, instead of raising.
    """
    chosen = Every.parse(every)
    if split is not None:
        return Inputs(_split_photos(places, split, skipped), (), chosen)
    root, files = _root(places), _files(places)
    below: dict[Path, str] = {}  # each folder in relation to the root
    videos = [file for file in files if file.suffix.lower() in VIDEO_SUFFIXES]
    missing = next((video for video in videos if not video.is_file()), None)
    if missing is not None:
        raise errors.UserError(f"{missing}: no such video; check the name and the folder")
    rest = [file for file in files if file.suffix.lower() not in VIDEO_SUFFIXES] if videos else files
    photos: list[Photo] = []
    for name, file in zip(images.distinct_names([PurePosixPath(file.as_posix()) for file in rest]), rest, strict=True):
        try:
            size, folder = images.photo_size(file), file.parent
            if folder not in below:
                below[folder] = os.path.relpath(folder, root)
            photos.append(Photo(name, file, *size, file=os.path.normpath(f"{below[folder]}/{file.name}")))
        except errors.UserError as error:
            if skipped is None:
                raise
            skipped.append(str(error))
    return Inputs(tuple(photos), tuple(videos), chosen)


def as_paths(places: AnyPath | Sequence[AnyPath]) -> list[Path]:
    """One path or several, of text or not, as paths."""
    return [Path(place) for place in ([places] if isinstance(places, str | os.PathLike) else places)]


def find_photos(places: Sequence[Path], skipped: list[str] | None = None) -> tuple[Photo, ...]:
    """The photos among files, folders and patterns; folders are searched recursively, in the order of names."""
    return find_inputs(places, skipped=skipped).photos


def _files(places: Sequence[Path]) -> list[Path]:
    """The files that are named, those in folders and those that match patterns, each once."""
    files: dict[Path, None] = {}
    for place in places:
        is_one = place.is_file() or (not place.is_dir() and (place.exists() or not glob.has_magic(str(place))))
        files |= {place: None} if is_one else dict.fromkeys(_expanded(place))
    return list(files)


def _expanded(place: Path) -> list[Path]:
    """The photos in a folder, or the files that match a pattern, and the photos in folders that do."""
    if place.is_dir():
        inside = sorted(p for p in place.rglob("*") if p.suffix.lower() in images.SUFFIXES and not p.is_dir())
        if not inside:
            expected = ", ".join(sorted(images.SUFFIXES))
            raise errors.UserError(f"{place}: no photos in this folder; expected {expected} files")
        return inside
    matches = sorted(Path(name) for name in glob.glob(str(place), recursive=True))  # noqa: PTH207 - may be absolute
    if not matches:
        raise errors.UserError(
            f"{place}: no such photo, and no file matches this pattern; check the folder and the suffix"
        )
    return [file for match in matches for file in (_expanded(match) if match.is_dir() else [match])]


def _root(places: Sequence[Path]) -> str:
    """The folder that photos are named in relation to: it depends on what was given, not on what is inside."""
    folders = {place if place.is_dir() else place.parent for place in places}
    found = []
    for folder in map(Path.absolute, folders):
        while glob.has_magic(str(folder)) and not folder.exists():
            folder = folder.parent  # noqa: PLW2901
        found.append(str(folder))
    return os.path.commonpath(found) if found else ""


def _split_photos(paths: Sequence[Path], split: str, skipped: list[str] | None) -> tuple[Photo, ...]:
    if len(paths) != 1:
        raise errors.UserError(
            f"--split {split}: belongs to one dataset, got {len(paths)} paths; name the dataset alone"
        )
    source = listing.DataSource(path=paths[0], split=split)
    if skipped is None:
        return datasets.read_photos(source)
    return datasets.read_photos(source, lambda fault: skipped.append(fault.line))


def with_listed(places: Sequence[Path]) -> list[Path]:
    """The places, with those on standard input, one per line, in place of ``-``; NUL also separates them."""
    found: list[Path] = []
    for place in places:
        if place != FROM_STDIN:
            found.append(place)
            continue
        text = sys.stdin.buffer.read()
        lines = text.split(b"\0") if b"\0" in text else text.splitlines()
        listed = [Path(os.fsdecode(line)) for line in lines if line.strip()]
        if not listed:
            raise errors.UserError("-: standard input names no photo; expected one path per line")
        found += listed
    return found


# ---------------------------------------------------------------- videos


@contextmanager
def with_frames(
    inputs: Inputs,
    *,
    skipped: list[str] | None = None,
    dist: DistContext = SINGLE_PROCESS,
    progress: Progress = silent,
) -> Iterator[tuple[Photo, ...]]:
    """The photos, and the frames of the videos as photos in a temporary folder, which is removed at the end.

    Args:
        skipped: if given, a video that cannot be read adds a line to it, instead of raising.
    """
    if not inputs.videos:
        yield inputs.photos
        return
    with tempfile.TemporaryDirectory(prefix="tag2box-") as folder:
        frames: list[Photo] = []
        with dist.main_process_first():
            for video, name in zip(inputs.videos, _video_names(inputs.videos), strict=True) if dist.is_main else ():
                try:
                    frames += extract_frames(video, name, inputs.every, Path(folder), progress)
                except errors.UserError as error:
                    if skipped is None:
                        raise
                    skipped.append(str(error))
        yield (*inputs.photos, *dist.all_gather_object(frames)[0])


def _video_names(videos: Sequence[Path]) -> list[str]:
    """File names; whole paths if two files have the same name."""
    names = [video.name for video in videos]
    return names if len(set(names)) == len(names) else [video.as_posix() for video in videos]


def extract_frames(video: Path, name: str, every: Every, folder: Path, progress: Progress = silent) -> list[Photo]:
    """Write frames of a video into a folder, without loss; their ids are NAME#NUMBER, counted from 0.

    A video of which no frame can be read is refused; of one that was cut short, the frames before are kept.
    """
    with _opened(video) as capture:
        step = every.step(video, capture.get(cv2.CAP_PROP_FPS))
        stated = max(0, int(capture.get(cv2.CAP_PROP_FRAME_COUNT)))
        frames: list[Photo] = []
        with progress(f"frames of {video.name}", -(-stated // step)) as bar:
            for number in count():
                if not capture.grab():
                    break
                if number % step:
                    continue
                is_read, bgr = capture.retrieve()
                if not is_read:
                    break
                frames.append(_write_frame(video, f"{name}#{number:06d}", bgr, folder))
                bar.advance()
    if not frames:
        raise errors.UserError(f"{video}: no frame of this video can be read; {_UNREADABLE}")
    if number < _WHOLE * stated:
        warnings.warn(f"{video}: ends after {number} of {stated} frames: damaged or cut short", stacklevel=2)
    return frames


@contextmanager
def _opened(video: Path) -> Iterator[Any]:
    """An open video; every error becomes a ``UserError``, and OpenCV prints nothing."""
    before = cv2.utils.logging.getLogLevel()
    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    try:
        capture = cv2.VideoCapture(str(video.absolute()), cv2.CAP_FFMPEG)
        if not capture.isOpened():
            raise errors.UserError(f"{video}: not readable as a video; {_UNREADABLE}")
        yield capture
        capture.release()
    except cv2.error as error:
        raise errors.UserError(f"{video}: not readable as a video ({error.err}); {_UNREADABLE}") from None
    finally:
        cv2.utils.logging.setLogLevel(before)


def _write_frame(video: Path, photo_id: str, bgr: Any, folder: Path) -> Photo:
    height, width = bgr.shape[:2]
    if height * width > images.MAX_PIXELS:
        raise errors.UserError(f"{video}: frames of {width}x{height} pixels are too large; save a smaller copy of it")
    path = folder / f"{storage.safe_file_name(photo_id)}.png"
    _, png = cv2.imencode(".png", bgr, [cv2.IMWRITE_PNG_COMPRESSION, 1])
    with storage.writing(path, _NO_SPACE):
        path.write_bytes(png.tobytes())
    return Photo(photo_id, path, width, height, file=photo_id)
