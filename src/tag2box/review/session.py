"""A review session: a label set, its journal and its queue, as the page sees them."""

from __future__ import annotations

import hashlib
import io
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from tag2box.errors import UserError, printable
from tag2box.images import photo_size, read_pixels
from tag2box.labels.journal import Journal
from tag2box.labels.label_set import LabelSet
from tag2box.labels.labelled import LabelledPhoto
from tag2box.labels.review_order import Order, PhotoFilter, doubt_of, draw_sample, median_pace, review_order
from tag2box.labels.reviews import Action, Impossible, ReviewCounts, count_reviews, states_of
from tag2box.progress import Progress, silent
from tag2box.storage import FileStamp

RenderingSize = Literal["thumb", "screen", "full"]
LONG_SIDES: dict[RenderingSize, int] = {"thumb": 160, "screen": 1600, "full": 6000}
"""Pixels of the long side; smaller photos keep their size."""
_QUALITY: dict[RenderingSize, int] = {"thumb": 78, "screen": 88, "full": 92}
_CACHE_BYTES = 24_000_000
_LONGEST_KEY = 64
_MOST_CHANGES = 5000
_SHOWN_MISSING = 3


class ReviewSession:
    """A label set under review. Photos are addressed by their place in the set, never by a path.

    Args:
        folder: the label set.
        photos: root of its photos, if they were moved.
        reviewer: name that is stored with every action.
        seed: of the random sample; a journal keeps the one that it began with.
    """

    def __init__(
        self,
        folder: Path,
        *,
        photos: Path | None = None,
        reviewer: str = "",
        order: Order = "queue",
        seed: int = 0,
        progress: Progress = silent,
    ) -> None:
        self.folder, self.reviewer, self.order = folder, reviewer, order
        self.labels = LabelSet.open(folder, photos)
        missing: list[str] = []
        self.labels.verify(progress, missing)
        if not len(self.labels.content) or len(missing) == len(self.labels.content):
            raise UserError(f"{folder}: none of its photos is in {self.labels.content.root}; name another --photos")
        self.photos = self.labels.content.photos
        self.journal = Journal(folder, self.labels, seed=seed)
        self.notices = [*self.journal.notes, *_missing_lines(missing)]
        self.began = time.time()
        self._ids = [photo.id for photo in self.photos]
        self._numbers = {name: number for number, name in enumerate(self._ids)}
        self._doubts = [doubt_of(photo) for photo in self.photos]
        self._sample = frozenset(draw_sample(self._ids, self.journal.history.seed))
        self._renderings = Renderings()
        self._orders: dict[Order, list[int]] = {}
        self.numbers(order)

    def __len__(self) -> int:
        return len(self.photos)

    def close(self) -> None:
        """Close the journal."""
        self.journal.close()

    def numbers(self, order: Order) -> list[int]:
        """All photos in an order of review, which is computed once."""
        if order not in self._orders:
            self._orders[order] = review_order(self._doubts, self._ids, order, self.journal.history.seed)
        return self._orders[order]

    # ------------------------------------------------------------ what the page asks for

    def describe(self) -> dict[str, object]:
        """The label set, once per page."""
        return {
            "name": self.folder.absolute().name,
            "folder": str(self.folder),
            "classes": list(self.labels.classes),
            "photos": len(self),
            "reviewer": self.reviewer,
            "order": self.order,
            "digest": self.labels.digest[:16],
            "notices": self.notices,
            "position": len(self.journal.history.changed),
        }

    def queue(self, order: Order, wanted: PhotoFilter) -> dict[str, object]:
        """The numbers of the photos in the order of review; which are of the sample, and which are done."""
        kept = [number for number in self.numbers(order) if wanted.keeps(self.photos[number])]
        done = [self._numbers[name] for name, own in self.journal.history.photos.items() if own.now.is_done]
        return {"photos": kept, "sampled": sorted(self._sample), "done": sorted(done)}

    def photo(self, number: int) -> dict[str, object]:
        """A photo with the boxes as they are now."""
        photo = self.photos[number]
        state = self.journal.history.state(photo.id)
        return {
            "number": number,
            "id": photo.id,
            "file": photo.file,
            "width": photo.width,
            "height": photo.height,
            "tags": photo.tags,
            "unsure": photo.unsure,
            "reasons": self._doubts[number].reasons,
            "sampled": number in self._sample,
            "boxes": _boxes_json(photo, states_of(photo, state)),
            "revision": state.revision,
            "done": state.now.is_done,
            "undo": len(state.past),
            "redo": len(state.future),
            "reviewer": state.reviewer,
        }

    def act(self, number: int, sent: Mapping[str, Any]) -> dict[str, object]:
        """Store an action of the page; returns the photo after it. Raises ``Outdated`` if another one was faster."""
        try:
            action, based_on, key = Action.from_json(sent), sent["based_on"], sent["key"]
            if type(based_on) is not int or not isinstance(key, str) or not 0 < len(key) <= _LONGEST_KEY:
                raise ValueError("expected based_on, a revision, and key, a short text")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Impossible(printable(f"not an action of a review ({type(error).__name__}: {error})", 300)) from None
        self.journal.append(
            self.photos[number].id,
            action,
            based_on=based_on,
            key=key,
            reviewer=self.reviewer,
            is_sampled=number in self._sample,
        )
        return self.photo(number)

    def progress(self, since: int) -> dict[str, object]:
        """How far the review is, and the photos that changed since a position in the journal."""
        self.journal.refresh()
        history = self.journal.history
        done = [name for name, own in history.photos.items() if own.now.is_done]
        changed = dict.fromkeys(history.changed[max(since, 0) :][-_MOST_CHANGES:])
        mine = [finish.time for finish in history.finishes if finish.reviewer == self.reviewer]
        return {
            "position": len(history.changed),
            "changed": [
                [self._numbers[name], history.state(name).revision, history.state(name).now.is_done] for name in changed
            ],
            "done": len(done),
            "total": len(self),
            "sample_done": sum(self._numbers[name] in self._sample for name in done),
            "sample_total": len(self._sample),
            "pace": median_pace(mine),
        }

    def counts(self) -> ReviewCounts:
        """What the review came to so far, of all reviewers."""
        self.journal.refresh()
        return count_reviews(self.journal.history.reviews())

    def rendering(self, number: int, size: RenderingSize) -> bytes:
        """A JPEG of a photo."""
        photo = self.photos[number]
        return self._renderings.get(self.labels.content.path(photo), photo, size)

    def rendering_tag(self, number: int, size: RenderingSize) -> str:
        """A name of the JPEG that changes with the photo's file."""
        photo = self.photos[number]
        return file_tag(self.labels.content.path(photo), photo, size)


def _boxes_json(photo: LabelledPhoto, states: Mapping[int, Any]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for number, own in states.items():
        row: dict[str, object] = {"number": number, **asdict(own), "is_drawn": number >= len(photo.boxes)}
        if number < len(photo.boxes):
            before = photo.boxes[number]
            row |= {
                "first": before.box,
                "first_name": before.name,
                "alternative": before.alternative,
                "score": before.score,
                "why": before.why,
                "is_doubtful": before.is_doubtful,
            }
        rows.append(row)
    return rows


def _missing_lines(missing: list[str]) -> list[str]:
    lines = [f"{file}: this photo is gone; it cannot be reviewed" for file in missing[:_SHOWN_MISSING]]
    more = len(missing) - len(lines)
    return [*lines, *([f"{more} more photos are gone"] if more else [])]


# ---------------------------------------------------------------- renderings of photos


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
