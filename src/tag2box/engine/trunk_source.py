"""Batches of trunk maps, for networks whose trunk is frozen while what follows it learns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tag2box.data.batch import draw_rows
from tag2box.data.transforms import place
from tag2box.engine.loader import by_thread, in_turn
from tag2box.engine.source import Fed, Seen, Turn, spread, still_view
from tag2box.engine.trunks import Trunks
from tag2box.types import Batch


@dataclass(frozen=True)
class TrunkSource(Fed):
    """Batches of one trunk map a photo, each of its own size: nothing is padded."""

    trunks: Trunks

    def batch(self, iteration: int) -> Batch:
        """Trunk maps of the iteration's photos, each in a view of its own."""
        most, turns = self.feed.max_proposals, self.share(iteration)
        return self.compared(self._packed([self._look(turn, most) for turn in turns]), turns)

    def batches(self, iterations: range) -> AbstractContextManager[Iterator[Batch]]:
        """Made ahead by a thread: maps are too large to pass between processes."""
        ahead = self.feed.workers != 0
        return by_thread(self.batch, iterations) if ahead else in_turn(self.batch, iterations)

    def still(self, count: int) -> Batch:
        """A few photos to look at."""
        view = still_view(self.feed.resize)
        return self._packed([self._look(Turn(index, view, (0,)), None) for index in spread(self.photos, count)])

    def _look(self, turn: Turn, most: int | None) -> Seen:
        photo = self.photos.photos[turn.index]
        boxes = place(turn.view, self.store.boxes(photo.id), (photo.height, photo.width))
        rows = draw_rows(len(boxes), most, turn.draw)
        clues = self.clues.of(turn.index, photo.id, rows)
        return Seen(turn.index, boxes[rows], self.trunks.trunk(turn.index, turn.view), clues)

    def _packed(self, seen: Sequence[Seen]) -> Batch:
        return self.packed(seen, trunks=tuple(one.kept for one in seen)) if seen else Batch.empty(len(self.classes))
