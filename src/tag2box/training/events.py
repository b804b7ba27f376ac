"""events.jsonl, the log of a run: losses, pseudo labels, galleries. Curves and report are drawn from it.

Each line ends with a checksum (CRC-32) of its content; those of version 0.1 have none.
"""

import json
import os
import re
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BeforeValidator, Field

from tag2box import errors, io
from tag2box.annotations import Detections
from tag2box.labels.quality import best_of_classes
from tag2box.models.rng import StepRng
from tag2box.training import batches, criterion, grad_cache
from tag2box.training.step import Step
from tag2box.types import PseudoBoxes

EVENTS_FILE = "events.jsonl"
Listener = Callable[[Mapping[str, object]], None]
_LISTENERS: dict[Path, list[Listener]] = {}  # by run folder
_CHECKSUM = re.compile(rb', "crc32": "([0-9a-f]{8})"\}\Z')


class EventLog:
    """Appends one JSON object per line; each is on disk before the next begins."""

    def __init__(self, folder: Path) -> None:
        io.make_folder(folder)
        self._path = folder / EVENTS_FILE
        self._mend_last_line()

    def write(self, event: str, fields: Mapping[str, object]) -> None:
        """Append an event with a time stamp; on a full disk nothing of it is left."""
        content = {"event": event, "time": round(time.time(), 3), **fields}
        line = _with_checksum(json.dumps(content, allow_nan=False))
        is_new = not self._path.exists()
        try:
            with self._path.open("ab", buffering=0) as file:
                _append(file, line)
            if is_new:
                io.sync(self._path.parent)
        except OSError as error:
            raise errors.UserError(
                f"{self._path}: cannot be written ({error.strerror or error}); free some space or repair the disk, "
                "then continue with --resume"
            ) from None
        for listener in _LISTENERS.get(self._path.parent.absolute(), ()):
            listener(content)

    def _mend_last_line(self) -> None:
        """Cut half a line left by a killed process; the next event would be appended to it."""
        if not self._path.exists():
            return
        content = self._path.read_bytes()
        if content and not content.endswith(b"\n"):
            with self._path.open("r+b") as file:
                file.truncate(content.rfind(b"\n") + 1)
                os.fsync(file.fileno())


@contextmanager
def listening(folder: Path, listener: Listener) -> Iterator[None]:
    """Call a function with each event of a run that this process writes during the block, once it is on disk."""
    listeners = _LISTENERS.setdefault(folder.absolute(), [])
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)


def _append(file: FileIO, line: bytes) -> None:
    """Write a whole line to disk, or none of it."""
    size = os.fstat(file.fileno()).st_size
    try:
        while line:
            line = line[file.write(line) :]
        os.fsync(file.fileno())
    except OSError:
        with suppress(OSError):
            file.truncate(size)
        raise


class NullEventLog:
    """Discards events: for ranks other than 0."""

    def write(self, event: str, fields: Mapping[str, object]) -> None:
        """Discard the event."""


@dataclass(frozen=True, slots=True)
class TrainingWarning:
    """A ``warning`` event: what may be wrong with a training."""

    iteration: int
    problem: str


@dataclass(frozen=True, slots=True)
class GalleryStage:
    """The best pseudo box of each class on one training photo by a refinement stage, in pixels of the photo."""

    boxes: tuple[tuple[float, float, float, float], ...] = ()
    labels: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _check_lengths(self)

    def detections(self) -> Detections:
        """The boxes as detections."""
        return _to_detections(self)


@dataclass(frozen=True, slots=True)
class GalleryPhoto:
    """Pseudo labels of the last stage on one training photo, in pixels of the photo."""

    id: Annotated[str, BeforeValidator(str)]
    boxes: tuple[tuple[float, float, float, float], ...] = ()
    labels: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    earlier: tuple[GalleryStage, ...] = ()  # the stages before the last; none in runs of older versions

    def __post_init__(self) -> None:
        _check_lengths(self)

    def detections(self) -> Detections:
        """The pseudo boxes as detections."""
        return _to_detections(self)


@dataclass(frozen=True, slots=True)
class Gallery:
    """A ``gallery`` event: pseudo labels of a fixed set of training photos at one iteration."""

    iteration: Annotated[int, Field(ge=0, le=1 << 53)]
    photos: tuple[GalleryPhoto, ...] = ()

    def of(self, photo: str) -> tuple[GalleryPhoto, ...]:
        """The pseudo labels of one photo; empty if the gallery does not have it."""
        return tuple(each for each in self.photos if each.id == photo)

    @property
    def stages(self) -> int:
        """Number of stages that all photos have."""
        return 1 + min((len(photo.earlier) for photo in self.photos), default=0)

    def of_stage(self, stage: int) -> dict[str, Detections]:
        """The pseudo boxes of a stage (0 .. stages - 1) by photo; of all but the last, the best of each class."""
        back = self.stages - 1 - stage
        return {own.id: (own.earlier[-back] if back else own).detections() for own in self.photos}


def _check_lengths(own: GalleryStage | GalleryPhoto) -> None:
    if not len(own.boxes) == len(own.labels) == len(own.scores):
        raise ValueError("boxes, labels and scores differ in length")


def _to_detections(own: GalleryStage | GalleryPhoto) -> Detections:
    boxes = torch.tensor(own.boxes, dtype=torch.float32).reshape(-1, 4)
    scores = torch.tensor(own.scores, dtype=torch.float32)
    return Detections(boxes, scores, torch.tensor(own.labels, dtype=torch.long))


def warn(log: EventLog | NullEventLog, run: Path, iteration: int, problem: str) -> None:
    """Log a sign of a training that does not learn, and show it as one line."""
    log.write("warning", {"iteration": iteration, "problem": problem})
    warnings.warn(f"{run}: iteration {iteration}: {problem}", stacklevel=2)


def _with_checksum(event: str) -> bytes:
    """The line of an event: its JSON with one more field, and a line break."""
    return f'{event[:-1]}, "crc32": "{zlib.crc32(event.encode()):08x}"}}\n'.encode()


def read_events(folder: Path) -> Iterator[dict[str, object]]:
    """The events of a run in order; an incomplete last line, left by a killed process, is skipped."""
    return (event for event, _ in _checked_events(folder / EVENTS_FILE))


def verify_events(folder: Path) -> bool:
    """Read the log of a run, and raise if a line of it is damaged; False if some have no checksum: of version 0.1."""
    checked = [has_checksum for _, has_checksum in _checked_events(folder / EVENTS_FILE)]  # all lines, not only some
    return all(checked)


def _checked_events(path: Path) -> Iterator[tuple[dict[str, object], bool]]:
    """The events of a log, and whether each had a checksum; after a line that has one, all must."""
    *lines, _ = path.read_bytes().split(b"\n")
    is_needed = False
    for number, line in enumerate(lines, start=1):
        found = _CHECKSUM.search(line)
        content = line if found is None else line[: found.start()] + b"}"
        try:
            event = json.loads(content)
        except (ValueError, RecursionError):  # not JSON, a number of thousands of digits, or brackets nested too deeply
            event = None
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            raise errors.UserError(f"{path}:{number}: not an event of training; remove this line")
        if is_needed if found is None else int(found[1], 16) != zlib.crc32(content):
            raise errors.UserError(
                f"{path}:{number}: damaged, its checksum is not that of its content; remove this line"
            )
        is_needed = is_needed or found is not None
        yield event, found is not None


def step_event(iteration: int, loss: criterion.LossOutput, lr: float, seconds: float) -> dict[str, object]:
    """Losses of one batch, and the share of WSCL in the gradient at the neck if it was measured."""
    losses = {name: value.item() for name, value in loss.losses.items()}
    share = {} if loss.contrast_share is None else {"contrast_share": loss.contrast_share}
    return {
        "iteration": iteration,
        "losses": {**losses, "total": loss.total.item()},
        **share,
        "lr": lr,
        "seconds": seconds,
    }


def pseudo_event(iteration: int, loss: criterion.LossOutput, classes: Sequence[str]) -> dict[str, object]:
    """Mean number of pseudo boxes per present image-class pair, by stage and (last stage) by class; mean tau."""
    labeling, pairs = loss.labeling, loss.tags.sum(dim=0)  # (C,)
    last = torch.bincount(labeling.stages[-1].pseudo_boxes.cls, minlength=len(classes))
    return {
        "iteration": iteration,
        "boxes_per_class": [_ratio(len(stage.pseudo_boxes), int(pairs.sum())) for stage in labeling.stages],
        "threshold": [t.mean().item() if len(t) else None for t in labeling.thresholds]
        or [None] * len(labeling.stages),
        "per_class": {name: _ratio(int(n), int(p)) for name, n, p in zip(classes, last, pairs, strict=True) if p},
    }


def _ratio(count: int, of: int) -> float | None:
    return count / of if of else None


def has_constant_scores(step: Step, source: batches.BatchSource) -> bool:
    """Whether a training photo's proposals all have the same scores in every head, so that nothing can be learnt."""
    with torch.no_grad():
        batch = source.preview_batch(1).to(step.device)
        scores = step.detector.score(step.detector.neck(step.detector.roi_maps(batch)))
    rows = torch.cat([scores.mil_cls, scores.mil_det, *scores.refine], dim=1)
    return len(rows) > 1 and bool((rows == rows[0]).all())


def gallery_event(
    iteration: int, step: Step, source: batches.BatchSource, rng: StepRng, count: int, *, fraction: float = 0.0
) -> dict[str, object]:
    """Pseudo ground truth on the same few training photos, in their own pixels.

    Of the last stage all boxes, of each earlier one the best box of every class.
    """
    batch = source.preview_batch(count)
    labeling = grad_cache.preview(step, batch.to(step.device), rng, fraction).labeling
    stages = [stage.pseudo_boxes.to(torch.device("cpu")) for stage in labeling.stages]
    photos = []
    for photo, span in zip(batch.ids, batch.proposals.spans(), strict=True):
        seen, own = batch.proposals.boxes[span.start : span.stop], source.photo_boxes(photo)
        *earlier, last = [_shown(stage, span, seen, own) for stage in stages]
        photos.append({"id": photo, **_row(last), "earlier": [_row(best_of_classes(stage)) for stage in earlier]})
    return {"iteration": iteration, "photos": photos}


def _shown(pseudo_boxes: PseudoBoxes, span: range, seen: torch.Tensor, own: torch.Tensor) -> Detections:
    """The pseudo boxes of one photo with a finite score, in its own pixels."""
    inside = (pseudo_boxes.rows >= span.start) & (pseudo_boxes.rows < span.stop) & pseudo_boxes.score.isfinite()
    boxes = own[pseudo_boxes.rows[inside] - span.start]
    if pseudo_boxes.boxes is not None and len(boxes):
        sides = own[:, 2:].amax(dim=0) / seen[:, 2:].amax(dim=0)  # the view only scales
        boxes = pseudo_boxes.boxes[inside] * sides.repeat(2)
    return Detections(boxes, pseudo_boxes.score[inside], pseudo_boxes.cls[inside])


def _row(found: Detections) -> dict[str, object]:
    return {
        "boxes": [[round(v, 1) for v in row] for row in found.boxes.tolist()],
        "labels": found.labels.tolist(),
        "scores": [round(v, 4) for v in found.scores.tolist()],
    }
