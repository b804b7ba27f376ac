"""Batches of trunk maps, for networks whose trunk is frozen while what follows it learns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tag2box.data.batch import draw_boxes
from tag2box.data.transforms import View, place
from tag2box.engine.loader import by_thread, in_turn
from tag2box.engine.source import Fed, Seen, spread, still_view
from tag2box.engine.trunks import Trunks
from tag2box.types import Batch


@dataclass(frozen=True)
class TrunkSource(Fed):
    """Batches of one trunk map a photo, each of its own size: nothing is padded."""

    trunks: Trunks

    def batch(self, iteration: int) -> Batch:
        """Trunk maps of the iteration's photos, each in a view of its own."""
        most = self.feed.max_proposals
        return self._packed([self._seen(turn.index, turn.view, most, turn.draw) for turn in self.share(iteration)])

    def batches(self, iterations: range) -> AbstractContextManager[Iterator[Batch]]:
        """Made ahead by a thread: maps are too large to pass between processes."""
        ahead = self.feed.workers != 0
        return by_thread(self.batch, iterations) if ahead else in_turn(self.batch, iterations)

    def still(self, count: int) -> Batch:
        """A few photos to look at."""
        view = still_view(self.feed.resize)
        return self._packed([self._seen(index, view, None, (0,)) for index in spread(self.photos, count)])

    def _seen(self, index: int, view: View, most: int | None, draw: Sequence[int]) -> Seen:
        photo = self.photos.photos[index]
        boxes = draw_boxes(self.store.boxes(photo.id), most, draw)
        return Seen(index, place(view, boxes, (photo.height, photo.width)), self.trunks.trunk(index, view))

    def _packed(self, seen: Sequence[Seen]) -> Batch:
        return self.packed(seen, trunks=tuple(one.kept for one in seen)) if seen else Batch.empty(len(self.classes))
