"""Detection on photos: every view of the test, averaged proposal by proposal (spec/method.md, section 4)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from tag2box.data.batch import BoxSource
from tag2box.data.transforms import Side, View, place, seen_size
from tag2box.engine.maps import Passes, RoiMaps
from tag2box.engine.processes import ALONE, Processes
from tag2box.engine.progress import Progress, silent
from tag2box.mil import EVERYTHING, Rescore
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
    rescore: Rescore = EVERYTHING,
    progress: Progress = silent,
    processes: Processes = ALONE,
) -> dict[str, Detections]:
    """Detections of each photo by its id, in the photo's own pixels. A photo is read once, ahead of its turn.

    Of processes that work together each looks at its share of the photos, and all get to know everything.
    """
    views, mine = inference.views(), processes.share(len(photos))
    found: dict[str, Detections] = {}
    with torch.no_grad(), progress("detecting", len(mine)) as bar, _reader() as pool:
        for index, passes in zip(mine, _one_ahead(pool, maps, mine, views), strict=True):
            photo = photos[index]
            boxes = store.boxes(photo.id)
            objectness = store.scores(photo.id) if detector.box_prior else None
            believed = [detector.believed(own, objectness) for own in passes]
            seen = [_scored(detector, photo, boxes, view, own) for view, own in zip(views, believed, strict=True)]
            judged = _judged(merge(seen), boxes, rescore)
            found[photo.id] = inference.predict(judged, photo.width, photo.height).to(torch.device("cpu"))
            bar.advance()
    return {name: detections for share in processes.everywhere(found) for name, detections in share.items()}


def _reader() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="tag2box-photos")


def _one_ahead(pool: ThreadPoolExecutor, maps: RoiMaps, photos: range, views: Sequence[View]) -> Iterator[Passes]:
    """The passes over each photo; the next photo is read meanwhile, and none beyond it."""
    if not photos:
        return
    coming = pool.submit(maps.passes, photos[0], views)
    for following in photos[1:]:
        passes = coming.result()
        coming = pool.submit(maps.passes, following, views)
        yield passes
    yield coming.result()


def _judged(seen: Scored, boxes: Float[Tensor, "P 4"], rescore: Rescore) -> Scored:
    """What the MIL head thinks enough of."""
    if not rescore.acts(1.0):
        return seen
    rows = rescore.best(seen.worth, boxes.to(seen.worth))
    return Scored(seen.probs[rows], seen.boxes[rows], seen.worth[rows])


def _scored(
    detector: Detector, photo: Photo, boxes: Float[Tensor, "P 4"], view: View, maps: Float[Tensor, "P ch h w"]
) -> Scored:
    """One pass over a photo, its boxes brought back to the photo's pixels."""
    size = (photo.height, photo.width)
    height, width = seen_size(view, size)
    device = detector.backbone.device
    scores = detector.score(detector.neck(maps.to(device)))
    seen = scored(scores, place(view, boxes, size).to(device), detector.num_classes)
    upright = unflip(seen, width) if view.flip else seen
    return rescale(upright, photo.width / width, photo.height / height)
