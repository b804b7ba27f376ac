"""Detection spread over a pool of processes: each gets the network once, then photos with their proposals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from jaxtyping import Float32, Int64
from numpy import ndarray
from torch import Tensor

from tag2box.annotations import BoxSource, Detections, Photo
from tag2box.commands import runs
from tag2box.errors import UserError
from tag2box.inference.predict import Inference
from tag2box.inference.predict import detect_photos_with as detect_with
from tag2box.methods.wsrpn import Rescore
from tag2box.models.detector import Detector
from tag2box.progress import Progress, silent
from tag2box.proposals.pool import Pool
from tag2box.training.feature_cache import LiveRoiMaps


@dataclass(frozen=True, slots=True)
class Order:
    """A photo to look at, and its proposals: the store they are in need not be within reach."""

    photo: Photo
    proposals: Float32[ndarray, "P 4"]
    ranks: Float32[ndarray, " P"]

    @property
    def path(self) -> Path:
        """The file."""
        return self.photo.path

    def boxes(self, photo_id: str, /) -> Float32[Tensor, "P 4"]:
        """The proposals, whoever's they are asked for: there is but one photo."""
        return torch.from_numpy(self.proposals.copy())

    def scores(self, photo_id: str, /) -> Float32[Tensor, " P"]:
        """Their scores."""
        return torch.from_numpy(self.ranks.copy())


@dataclass(frozen=True, slots=True)
class Looked:
    """Detections of a photo, or the problem with it. Arrays: tensors cross between processes less cheaply."""

    boxes: Float32[ndarray, "B 4"] | None = None
    scores: Float32[ndarray, " B"] | None = None
    labels: Int64[ndarray, " B"] | None = None
    problem: str = ""

    def detections(self) -> Detections:
        """What was seen; a problem is raised."""
        if self.boxes is None or self.scores is None or self.labels is None:
            raise UserError(self.problem)
        # Copies: what comes from another process may be memory that is not to be written.
        return Detections(*(torch.from_numpy(x.copy()) for x in (self.boxes, self.scores, self.labels)))


@dataclass(frozen=True)
class Looking:
    """The work on a photo. The network crosses as arrays, and is built once in each process."""

    build: Callable[[], Detector]
    weights: Mapping[str, ndarray]
    inference: Inference
    rescore: Rescore
    threads: int  # of each process: sums, and so the last bits of scores, depend on it

    def __call__(self, order: Order) -> Looked:
        """Everything seen in a photo."""
        detector, photos = self._detector, (order.photo,)
        maps = LiveRoiMaps(detector.backbone, photos, order)
        try:
            seen = detect_with(detector, photos, order, maps=maps, inference=self.inference, rescore=self.rescore)
            found = seen[order.photo.id]
        except UserError as error:
            return Looked(problem=f"{error}")
        return Looked(found.boxes.numpy(), found.scores.numpy(), found.labels.numpy())

    @cached_property
    def _detector(self) -> Detector:
        torch.set_num_threads(self.threads)
        detector = self.build()
        detector.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in self.weights.items()})
        return detector.eval()


def detect_on(
    pool: Pool, trained: runs.TrainedRun, photos: Sequence[Photo], store: BoxSource, *, progress: Progress = silent
) -> dict[str, Detections]:
    """Detections of each photo by its id, in the photos' order, made by the processes of a pool."""
    work = Looking(
        partial(runs.build_detector, trained.config, len(trained.classes), pretrained=False),
        {name: value.numpy() for name, value in trained.detector.state_dict().items()},
        trained.config.inference,
        trained.config.criterion.rescore,
        torch.get_num_threads(),
    )
    orders = (Order(photo, store.boxes(photo.id).numpy(), store.scores(photo.id).numpy()) for photo in photos)
    results = pool(work, orders, lost=_died, threads=work.threads)
    found: dict[str, Detections] = {}
    with progress("detecting", len(photos)) as bar, closing(results) as answers:
        for order, looked in answers:
            found[order.photo.id] = looked.detections()
            bar.advance()
    return {photo.id: found[photo.id] for photo in photos}


def _died(order: Order, number: int) -> Looked:
    ended = f"was ended by signal {number}" if number else "died, each time it was tried"
    hint = "perhaps out of memory; smaller inference.scales need less"
    return Looked(problem=f"{order.path}: the process that looked at it {ended}; {hint}")
