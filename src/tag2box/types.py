"""The notation, and the types that cross borders.

Letters, used in every signature and shape comment:

    N  images in a batch            C  foreground classes, 0 .. C-1; background is index C, the last
    R  proposals in the batch       K  refinement stages
    D  embedding size               F  feature-vector size
    M  exemplars                    S  seeds (pseudo ground-truth boxes)

Boxes are xyxy float pixels with exclusive right and bottom edges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# ---------------------------------------------------------------- training data: tags, never boxes


@dataclass(frozen=True, slots=True)
class Photo:
    """One photo on disk, by name. ``width`` and ``height`` are those after EXIF rotation."""

    id: str
    path: Path
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class TaggedPhotos:
    """What training may see of a dataset: photos and image-level tags. It has no room for boxes."""

    classes: tuple[str, ...]
    photos: tuple[Photo, ...]
    tags: Bool[Tensor, "N C"]
    unsure: Bool[Tensor, "N C"] | None = None  # neither there nor absent, as classes seen in difficult objects only

    def __post_init__(self) -> None:
        if self.unsure is not None and (self.unsure.shape != self.tags.shape or bool((self.unsure & self.tags).any())):
            raise ValueError("unsure must have the shape of tags, and no tag may be unsure")
        if self.tags.shape != (len(self.photos), len(self.classes)):
            raise ValueError(
                f"tags {tuple(self.tags.shape)} do not match {len(self.photos)} photos x {len(self.classes)} classes"
            )

    def __len__(self) -> int:
        return len(self.photos)

    def part(self, wanted: Sequence[bool]) -> TaggedPhotos:
        """The wanted photos."""
        rows = torch.tensor(wanted, dtype=torch.bool)
        photos = tuple(photo for photo, is_wanted in zip(self.photos, wanted, strict=True) if is_wanted)
        return TaggedPhotos(self.classes, photos, self.tags[rows], None if self.unsure is None else self.unsure[rows])


@dataclass(frozen=True, slots=True)
class Proposals:
    """Candidate boxes of a batch, packed image after image."""

    boxes: Float[Tensor, "R 4"]
    sizes: tuple[int, ...]  # proposals per image; sums to R

    def __post_init__(self) -> None:
        if self.boxes.shape != (sum(self.sizes), 4):
            raise ValueError(f"boxes {tuple(self.boxes.shape)} do not match sizes {self.sizes}")

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Cut any (R, ...) tensor back into images."""
        return torch.split(x, list(self.sizes))

    def spans(self) -> tuple[range, ...]:
        """The rows of each image."""
        ends = torch.tensor((0, *self.sizes)).cumsum(0).tolist()
        return tuple(range(a, b) for a, b in pairwise(ends))

    def image_ids(self) -> Int[Tensor, " R"]:
        """The image each row belongs to."""
        sizes = torch.tensor(self.sizes, dtype=torch.long, device=self.boxes.device)
        return torch.repeat_interleave(torch.arange(len(self.sizes), device=self.boxes.device), sizes)


@dataclass(frozen=True, slots=True)
class Batch:
    """One training batch: pixels (``images``), or what a frozen network made of them: ``trunks``, or RoI ``maps``."""

    ids: tuple[str, ...]
    tags: Bool[Tensor, "N C"]
    proposals: Proposals
    images: Float[Tensor, "N 3 H W"] | None = None
    maps: Float[Tensor, "R ch h w"] | None = None
    unsure: Bool[Tensor, "N C"] | None = None  # tags that are neither true nor false
    trunks: tuple[Float[Tensor, "c h w"], ...] | None = None  # a map a photo, each of its own size

    def __post_init__(self) -> None:
        if sum(x is not None for x in (self.images, self.maps, self.trunks)) != 1:
            raise ValueError("a batch carries either images, trunks or maps")

    @classmethod
    def empty(cls, num_classes: int) -> Batch:
        """No photo at all: the share of a process when processes outnumber photos."""
        tags = torch.zeros(0, num_classes, dtype=torch.bool)
        return cls((), tags, Proposals(torch.zeros(0, 4), ()), trunks=())

    def photo(self, index: int) -> Batch:
        """One photo of it."""
        span, photo = self.proposals.spans()[index], slice(index, index + 1)
        rows = slice(span.start, span.stop)
        return Batch(
            ids=self.ids[photo],
            tags=self.tags[photo],
            proposals=Proposals(self.proposals.boxes[rows], self.proposals.sizes[photo]),
            images=None if self.images is None else self.images[photo],
            maps=None if self.maps is None else self.maps[rows],
            unsure=None if self.unsure is None else self.unsure[photo],
            trunks=None if self.trunks is None else self.trunks[photo],
        )

    def facts(self) -> Facts:
        """What the objective is told of it."""
        return Facts(self.proposals, self.tags, self.unsure)

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        return Batch(
            ids=self.ids,
            tags=self.tags.to(device),
            proposals=Proposals(self.proposals.boxes.to(device), self.proposals.sizes),
            images=None if self.images is None else self.images.to(device),
            maps=None if self.maps is None else self.maps.to(device),
            unsure=None if self.unsure is None else self.unsure.to(device),
            trunks=None if self.trunks is None else tuple(trunk.to(device) for trunk in self.trunks),
        )


@dataclass(frozen=True, slots=True)
class Facts:
    """A batch without its pixels: proposals and tags, all that the objective is told beside the network's outputs."""

    proposals: Proposals
    tags: Bool[Tensor, "N C"]
    unsure: Bool[Tensor, "N C"] | None

    @classmethod
    def joined(cls, parts: Sequence[Facts]) -> Facts:
        """Parts of a batch, one after the other."""
        unsure = [part.unsure for part in parts if part.unsure is not None]
        sizes = tuple(size for part in parts for size in part.proposals.sizes)
        return cls(
            Proposals(torch.cat([part.proposals.boxes for part in parts]), sizes),
            torch.cat([part.tags for part in parts]),
            torch.cat(unsure) if unsure else None,
        )

    def to(self, device: torch.device) -> Facts:
        """The same on a device."""
        return Facts(
            Proposals(self.proposals.boxes.to(device), self.proposals.sizes),
            self.tags.to(device),
            None if self.unsure is None else self.unsure.to(device),
        )


# ---------------------------------------------------------------- what the network says


@dataclass(frozen=True, slots=True)
class StageScores:
    """Head outputs of R proposals, all before any softmax. The MIL columns are C, or C+1 with a background column."""

    mil_cls: Float[Tensor, "R c"]
    mil_det: Float[Tensor, "R c"]
    refine: tuple[Float[Tensor, "R c1"], ...]  # K x (R, C+1)
    deltas: tuple[Float[Tensor, "R c4"], ...]  # K x (R, 4C), or () without box regression


@dataclass(frozen=True, slots=True)
class Views:
    """V augmented copies of m chosen proposals, as the heads see them."""

    embed: Float[Tensor, "V m D"]
    probs: tuple[Float[Tensor, "V m C"], ...]  # teacher scores of the copies, K stages, detached


ViewMaker = Callable[[Int[Tensor, " m"]], Views]
"""Proposal rows in, augmented copies out: all that a labeler ever learns about the network."""


# ---------------------------------------------------------------- what the objective decides


@dataclass(frozen=True, slots=True)
class Exemplars:
    """The set S (eq. 8): embeddings believed to show class ``cls``. M rows."""

    embed: Float[Tensor, "M D"]
    cls: Int[Tensor, " M"]
    weight: Float[Tensor, " M"]  # instance difficulty omega (eq. 12), detached
    rows: Int[Tensor, " M"]  # the proposal each one shows
    probs: tuple[Float[Tensor, " M"], ...] = ()  # K x teacher score of its class on this very view, detached

    def __len__(self) -> int:
        return int(self.cls.shape[0])


@dataclass(frozen=True, slots=True)
class Scene:
    """What a labeler sees of a batch: scores, embeddings and exemplars, never the network."""

    proposals: Proposals
    tags: Bool[Tensor, "N C"]
    probs: tuple[Float[Tensor, "R C"], ...]  # K teachers: MIL scores, then softmax of stage 1 .. K-1; detached
    embed: Float[Tensor, "R D"]  # unit length
    exemplars: Exemplars


@dataclass(frozen=True, slots=True)
class Seeds:
    """Pseudo ground truth of one stage: S proposals taken for objects."""

    rows: Int[Tensor, " S"]
    cls: Int[Tensor, " S"]
    score: Float[Tensor, " S"]  # teacher score, becomes the loss weight of what is assigned to the seed

    def __len__(self) -> int:
        return int(self.rows.shape[0])

    def to(self, device: torch.device) -> Seeds:
        """The same on a device."""
        return Seeds(self.rows.to(device), self.cls.to(device), self.score.to(device))


@dataclass(frozen=True, slots=True)
class PseudoLabels:
    """Instance-level supervision of one stage. A weight of zero takes a proposal out of the loss."""

    cls: Int[Tensor, " R"]  # 0 .. C-1, or C for background
    weight: Float[Tensor, " R"]
    boxes: Float[Tensor, "R 4"]  # the pseudo box each proposal should regress to
    seeds: Seeds


@dataclass(frozen=True, slots=True)
class Labeling:
    """A labeler's answer: K stages of pseudo labels, and the thresholds it used, for the curves."""

    stages: tuple[PseudoLabels, ...]
    thresholds: tuple[Float[Tensor, " t"], ...] = ()  # tau per stage, one entry per (image, class)


@dataclass(frozen=True, slots=True)
class Losses:
    """The terms of eq. 13, unweighted."""

    mil: Float[Tensor, ""]
    refine: Float[Tensor, ""]
    box: Float[Tensor, ""]
    contrast: Float[Tensor, ""]


# ---------------------------------------------------------------- detections and truth, for evaluation


@dataclass(frozen=True, slots=True)
class Detections:
    """Detected boxes of one image, checked on construction."""

    boxes: Float[Tensor, "B 4"]
    scores: Float[Tensor, " B"]
    labels: Int[Tensor, " B"]

    def __post_init__(self) -> None:
        n = len(self.boxes)
        if self.boxes.shape != (n, 4) or self.scores.shape != (n,) or self.labels.shape != (n,):
            shapes = [tuple(x.shape) for x in (self.boxes, self.scores, self.labels)]
            raise ValueError(f"shapes of boxes, scores and labels disagree: {shapes}")

    def to(self, device: torch.device) -> Detections:
        """The same on a device."""
        return Detections(self.boxes.to(device), self.scores.to(device), self.labels.to(device))

    @classmethod
    def empty(cls) -> Detections:
        """Nothing detected."""
        return cls(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, dtype=torch.long))

    def __len__(self) -> int:
        return len(self.boxes)

    def __getitem__(self, index: Tensor) -> Detections:
        """Keep the rows of a mask or an index tensor."""
        return Detections(self.boxes[index], self.scores[index], self.labels[index])


@dataclass(frozen=True, slots=True)
class Objects:
    """True objects of one image: for evaluation and pictures only."""

    boxes: Float[Tensor, "B 4"]
    labels: Int[Tensor, " B"]
    difficult: Bool[Tensor, " B"]  # VOC: neither rewards nor punishes
    crowd: Bool[Tensor, " B"]  # COCO: a region, not an object

    def __len__(self) -> int:
        return len(self.boxes)

    @classmethod
    def of(cls, boxes: Sequence[Sequence[float]] | Tensor, labels: Sequence[int] | Tensor) -> Objects:
        """Plain objects, none of them difficult or a crowd."""
        b = torch.as_tensor(boxes, dtype=torch.float32).reshape(-1, 4)
        none = torch.zeros(len(b), dtype=torch.bool)
        return cls(b, torch.as_tensor(labels, dtype=torch.long).reshape(-1), none, none)


@dataclass(frozen=True, slots=True)
class Truth:
    """Ground truth of an evaluation set. Training code never receives one."""

    classes: tuple[str, ...]
    ids: tuple[str, ...]  # image ids, in order
    sizes: tuple[tuple[int, int], ...]  # (width, height)
    objects: tuple[Objects, ...]

    def __len__(self) -> int:
        return len(self.ids)
