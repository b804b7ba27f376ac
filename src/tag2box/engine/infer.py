"""Detection on photos: every view of the test, averaged proposal by proposal (spec/method.md, section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field

from tag2box.data.batch import BoxSource
from tag2box.data.transforms import Side, View, place, seen_size
from tag2box.engine.maps import RoiMaps
from tag2box.engine.progress import Progress, silent
from tag2box.model.detector import Detector
from tag2box.model.predict import Predict, Scored, merge, rescale, scored, unflip
from tag2box.types import Detections, Photo


@dataclass(frozen=True, kw_only=True)
class Inference:
    """How photos are looked at, and what is kept of what is seen."""

    scales: Annotated[tuple[Side, ...], Field(min_length=1)] = (480, 576, 688, 800, 864, 1000, 1200)
    """Short sides; scores and boxes of a proposal are averaged over all of them."""
    long_max: Side = 2000
    mirror: bool = True
    """Look at the mirror image of every scale too."""
    predict: Predict = Predict()

    def views(self) -> tuple[View, ...]:
        """Every pass over a photo."""
        flips = (False, True) if self.mirror else (False,)
        return tuple(View(scale, flip, self.long_max) for scale in self.scales for flip in flips)


def detect(
    detector: Detector,
    photos: Sequence[Photo],
    store: BoxSource,
    *,
    maps: RoiMaps,
    inference: Inference,
    progress: Progress = silent,
) -> dict[str, Detections]:
    """Detections of each photo by its id, in the photo's own pixels."""
    was_training = detector.training
    detector.eval()
    found: dict[str, Detections] = {}
    with torch.no_grad(), progress("detecting", len(photos)) as bar:
        for index, photo in enumerate(photos):
            passes = [_pass(detector, photo, store, index, maps, view) for view in inference.views()]
            found[photo.id] = inference.predict(merge(passes), photo.width, photo.height)
            bar.advance()
    detector.train(was_training)
    return found


def _pass(detector: Detector, photo: Photo, store: BoxSource, index: int, maps: RoiMaps, view: View) -> Scored:
    """One view of one photo, its boxes brought back to the photo's pixels."""
    size = (photo.height, photo.width)
    height, width = seen_size(view, size)
    boxes = place(view, store.boxes(photo.id), size)
    seen = scored(detector.score(detector.neck(maps.maps(index, view))), boxes)
    upright = unflip(seen, width) if view.flip else seen
    return rescale(upright, photo.width / width, photo.height / height)
