"""Notation, and the types that pass between stages of training.

Letters, used in every signature and shape comment:

    N  images in a batch            C  foreground classes, 0 .. C-1; background is index C, the last
    R  proposals in the batch       K  refinement stages
    D  embedding size               F  feature-vector size
    M  exemplars                    S  pseudo boxes (pseudo ground truth)

Boxes are xyxy float pixels with exclusive right and bottom edges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Proposals:
    """Candidate boxes of a batch, packed image after image."""

    boxes: Float[Tensor, "R 4"]
    sizes: tuple[int, ...]  # proposals per image; sums to R
    frames: tuple[tuple[int, int], ...] | None = None  # (width, height) of each image without padding

    def __post_init__(self) -> None:
        if self.boxes.shape != (sum(self.sizes), 4):
            raise ValueError(f"boxes {tuple(self.boxes.shape)} do not match sizes {self.sizes}")

    def image(self, index: int, rows: slice | Int[Tensor, " r"] | None = None) -> Proposals:
        """The proposals of one image, or of some rows of the batch that belong to it."""
        span = self.spans()[index]
        boxes = self.boxes[slice(span.start, span.stop) if rows is None else rows]
        return Proposals(boxes, (len(boxes),), None if self.frames is None else self.frames[index : index + 1])

    def to(self, device: torch.device) -> Proposals:
        """The same on a device."""
        return Proposals(self.boxes.to(device), self.sizes, self.frames)

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


LabelMap = Int[Tensor, "h w"]
"""A label per pixel or cell of a whole photo, at a resolution of its own."""


@dataclass(frozen=True, slots=True)
class SideInfo:
    """Information beside the tags that some methods use; None if unknown or not required."""

    counts: Int[Tensor, "N C"] | None = None  # objects per class; -1 if unknown
    evidence: Float[Tensor, " R"] | None = None  # superpixel straddling score of each proposal, 0 to 1
    objectness: Float[Tensor, " R"] | None = None  # score given by the proposal method, 0 to 1
    class_evidence: Float[Tensor, "R C"] | None = None  # evidence of the class maps for each proposal, 0 to 1
    reviewed: Int[Tensor, " R"] | None = None  # what each proposal is in a reviewed photo: class, or a code below zero
    superpixels: tuple[LabelMap, ...] | None = None  # of each photo, flipped like it
    segments: tuple[LabelMap, ...] | None = None  # class of each cell of each photo, C for background; flipped like it

    @classmethod
    def joined(cls, parts: Sequence[SideInfo]) -> SideInfo:
        """Concatenate parts of a batch; a field that any part lacks becomes None."""
        columns = [[getattr(part, info.name) for part in parts] for info in fields(cls)]
        known = [x if x and all(part is not None for part in x) else None for x in columns]
        whole: list[Any] = [x and (sum(x, ()) if isinstance(x[0], tuple) else torch.cat(x)) for x in known]
        return cls(*whole)

    def of(self, photos: slice, rows: slice | Int[Tensor, " r"]) -> SideInfo:
        """The side information of some photos and of the given proposal rows."""
        counts = None if self.counts is None else self.counts[photos]
        per_row = (self.evidence, self.objectness, self.class_evidence, self.reviewed)
        a, b, c, d = (None if x is None else x[rows] for x in per_row)
        superpixels, segments = (None if x is None else x[photos] for x in (self.superpixels, self.segments))
        return SideInfo(counts, a, b, c, d, superpixels, segments)

    def to(self, device: torch.device) -> SideInfo:
        """The same on a device; maps of photos stay where they are, because they are read on the CPU."""
        columns = (self.counts, self.evidence, self.objectness, self.class_evidence, self.reviewed)
        a, b, c, d, e = (None if x is None else x.to(device) for x in columns)
        return SideInfo(a, b, c, d, e, self.superpixels, self.segments)


TAGS_ONLY, CANDIDATE, IGNORED = -1, -2, -3
"""Codes of ``SideInfo.reviewed``: a proposal of a photo without boxes; an ordinary proposal of a reviewed photo; one of
its ignore regions. The code of a reviewed box is its class."""

PerProposal = Callable[[str], Float32[Tensor, " P"]]
"""A photo's id in, one number per proposal out, in order."""
PerProposalAndClass = Callable[[str], Float32[Tensor, "P C"]]
"""A photo's id in, a number per proposal and class out."""
ReviewedCodes = Callable[[str], Int[Tensor, " P"]]
"""A photo's id in, a code of ``SideInfo.reviewed`` per proposal out."""
PhotoLabels = Callable[[str], LabelMap]
"""A photo's id in, its label map out."""


@dataclass(frozen=True, slots=True)
class SideInfoLoader:
    """Side information by photo. What is not required is None, and never read."""

    counts: Int[Tensor, "N C"] | None = None
    evidence: PerProposal | None = None
    objectness: PerProposal | None = None
    class_evidence: PerProposalAndClass | None = None
    reviewed: ReviewedCodes | None = None
    superpixels: PhotoLabels | None = None
    segments: PhotoLabels | None = None

    def kept(self, photo_id: str) -> Int[Tensor, " k"] | None:
        """The rows of a photo that every batch has: its reviewed boxes and ignore regions."""
        if self.reviewed is None:
            return None
        codes = self.reviewed(photo_id)
        return ((codes >= 0) | (codes == IGNORED)).nonzero().flatten()

    def of(self, index: int, photo_id: str, rows: Int[Tensor, " p"], *, flip: bool = False) -> SideInfo:
        """The side information of one photo, horizontally flipped or not, and of some of its proposals."""
        counts = None if self.counts is None else self.counts[index : index + 1]
        loaders = (self.evidence, self.objectness, self.class_evidence, self.reviewed)
        a, b, c, d = (None if x is None else x(photo_id)[rows] for x in loaders)
        maps = (None if x is None else x(photo_id) for x in (self.superpixels, self.segments))
        superpixels, segments = (None if x is None else (x.flip(1) if flip else x,) for x in maps)
        return SideInfo(counts, a, b, c, d, superpixels, segments)


NO_SIDE_INFO = SideInfoLoader()


@dataclass(frozen=True, slots=True)
class Batch:
    """One training batch: pixels (``images``), or features of a frozen network: ``trunks``, or RoI ``maps``."""

    ids: tuple[str, ...]
    tags: Bool[Tensor, "N C"]
    proposals: Proposals
    images: Float[Tensor, "N 3 H W"] | None = None
    maps: Float[Tensor, "R ch h w"] | None = None
    unsure: Bool[Tensor, "N C"] | None = None  # tags that are neither true nor false
    trunks: tuple[Float[Tensor, "c h w"], ...] | None = None  # a map a photo, each of its own size
    side_info: SideInfo = SideInfo()
    views_per_image: int = 1  # that many consecutive entries are views of one photo
    flipped: Bool[Tensor, " N"] | None = None  # horizontally flipped entries; None if views are not compared

    def __post_init__(self) -> None:
        if sum(x is not None for x in (self.images, self.maps, self.trunks)) != 1:
            raise ValueError("a batch carries either images, trunks or maps")

    @classmethod
    def empty(cls, num_classes: int) -> Batch:
        """A batch of no photos: the shard of a rank if the world size exceeds the batch size."""
        tags = torch.zeros(0, num_classes, dtype=torch.bool)
        return cls((), tags, Proposals(torch.zeros(0, 4), ()), trunks=())

    def photo(self, index: int) -> Batch:
        """The batch of a single entry."""
        span, photo = self.proposals.spans()[index], slice(index, index + 1)
        rows = slice(span.start, span.stop)
        return Batch(
            ids=self.ids[photo],
            tags=self.tags[photo],
            proposals=self.proposals.image(index),
            images=None if self.images is None else self.images[photo],
            maps=None if self.maps is None else self.maps[rows],
            unsure=None if self.unsure is None else self.unsure[photo],
            trunks=None if self.trunks is None else self.trunks[photo],
            side_info=self.side_info.of(photo, rows),
        )

    def meta(self) -> BatchMeta:
        """Everything but the pixels or features."""
        return BatchMeta(self.proposals, self.tags, self.unsure, self.side_info, self.views_per_image, self.flipped)

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        return replace(
            self,
            tags=self.tags.to(device),
            proposals=self.proposals.to(device),
            images=None if self.images is None else self.images.to(device),
            maps=None if self.maps is None else self.maps.to(device),
            unsure=None if self.unsure is None else self.unsure.to(device),
            trunks=None if self.trunks is None else tuple(trunk.to(device) for trunk in self.trunks),
            side_info=self.side_info.to(device),
            flipped=None if self.flipped is None else self.flipped.to(device),
        )


@dataclass(frozen=True, slots=True)
class BatchMeta:
    """Batch metadata: what the criterion reads beside the network's outputs."""

    proposals: Proposals
    tags: Bool[Tensor, "N C"]
    unsure: Bool[Tensor, "N C"] | None = None
    side_info: SideInfo = SideInfo()
    views_per_image: int = 1  # consecutive entries with the same proposals in the same order
    flipped: Bool[Tensor, " N"] | None = None

    @classmethod
    def joined(cls, parts: Sequence[BatchMeta]) -> BatchMeta:
        """Concatenate shards of a batch; the views of a photo may be in different shards."""
        unsure = [part.unsure for part in parts if part.unsure is not None]
        flipped = [part.flipped for part in parts if part.flipped is not None]
        sizes = tuple(size for part in parts for size in part.proposals.sizes)
        frames = [part.proposals.frames for part in parts if part.proposals.sizes]
        known = tuple(frame for own in frames if own is not None for frame in own)
        return cls(
            Proposals(torch.cat([p.proposals.boxes for p in parts]), sizes, known if None not in frames else None),
            torch.cat([part.tags for part in parts]),
            torch.cat(unsure) if unsure else None,
            SideInfo.joined([part.side_info for part in parts if part.proposals.sizes]),
            max((part.views_per_image for part in parts), default=1),
            torch.cat(flipped) if flipped else None,
        )

    def subset(self, rows: Int[Tensor, " r"]) -> BatchMeta:
        """The same batch with some of its proposals; ``rows`` are in order, image after image."""
        counts = torch.bincount(self.proposals.image_ids()[rows], minlength=len(self.proposals.sizes))
        proposals = Proposals(self.proposals.boxes[rows], tuple(counts.tolist()), self.proposals.frames)
        return replace(self, proposals=proposals, side_info=self.side_info.of(slice(None), rows))

    def view_groups(self) -> list[tuple[range, range]]:
        """Per photo: the entries that are its views, and the rows of all their proposals."""
        spans = self.proposals.spans()
        firsts = range(0, len(spans), self.views_per_image)
        return [
            (range(i, i + self.views_per_image), range(spans[i].start, spans[i + self.views_per_image - 1].stop))
            for i in firsts
        ]

    def to(self, device: torch.device) -> BatchMeta:
        """The same on a device."""
        unsure, flipped = (None if x is None else x.to(device) for x in (self.unsure, self.flipped))
        proposals, side_info = self.proposals.to(device), self.side_info.to(device)
        return BatchMeta(proposals, self.tags.to(device), unsure, side_info, self.views_per_image, flipped)


@dataclass(frozen=True, slots=True)
class StageScores:
    """Head outputs of R proposals, all before any softmax. The MIL columns are C, or C+1 with a background column."""

    mil_cls: Float[Tensor, "R c"]
    mil_det: Float[Tensor, "R c"]
    refine: tuple[Float[Tensor, "R c1"], ...]  # K x (R, C+1)
    deltas: tuple[Float[Tensor, "R c4"], ...]  # K x (R, 4C), or () without box regression
    mil_more: tuple[Float[Tensor, "R c"], ...] = ()  # cls and det of every further MIL head
    region: tuple[Float[Tensor, "R c"], ...] = ()  # cls and det of the region classifier (WSRPN), if there is one

    def map(self, function: Callable[[Tensor], Tensor]) -> StageScores:
        """The function applied to every tensor."""
        parts = (tuple(map(function, x)) for x in (self.refine, self.deltas, self.mil_more, self.region))
        return StageScores(function(self.mil_cls), function(self.mil_det), *parts)


@dataclass(frozen=True, slots=True)
class Outputs:
    """Network outputs of R proposals. What is not in the ``Requirements`` has no columns."""

    scores: StageScores
    embed: Float[Tensor, "R D"]  # z, unit length
    vectors: Float[Tensor, "R F"]  # v~, the regularised feature vectors that the heads read
    responses: Float[Tensor, "R L s s"] | None = None  # channel means of L layers, without DropBlock

    def tensors(self) -> tuple[Float[Tensor, "R ..."], ...]:
        """All outputs in a fixed order: MIL heads, stages, deltas, regions, embeddings, vectors, responses."""
        s, last = self.scores, () if self.responses is None else (self.responses,)
        heads = (s.mil_cls, s.mil_det, *s.mil_more, *s.refine, *s.deltas, *s.region)
        return (*heads, self.embed, self.vectors, *last)

    def map(self, function: Callable[[Tensor], Tensor]) -> Outputs:
        """The function applied to every tensor."""
        responses = None if self.responses is None else function(self.responses)
        return Outputs(self.scores.map(function), function(self.embed), function(self.vectors), responses)


@dataclass(frozen=True, slots=True)
class AugmentedRois:
    """Head outputs of V augmented copies of m chosen proposals."""

    embed: Float[Tensor, "V m D"]
    probs: tuple[Float[Tensor, "V m C"], ...]  # teacher scores of the copies, K stages, detached


AugmentRois = Callable[[Int[Tensor, " m"]], AugmentedRois]
"""Proposal rows in, augmented copies out; labelers and loss terms have no other access to the network."""


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a part of the criterion requires beyond scores and tags."""

    exemplars: bool = False  # the set S, and embeddings with it
    vectors: bool = False  # feature vectors of proposals
    deltas: bool = False  # box deltas of the stages, for the labeler
    counts: bool = False  # SideInfo.counts
    evidence: bool = False  # SideInfo.evidence
    objectness: bool = False  # SideInfo.objectness
    class_evidence: bool = False  # SideInfo.class_evidence
    superpixels: bool = False  # SideInfo.superpixels
    segments: bool = False  # SideInfo.segments
    mil_heads: int = 1
    responses: bool = False  # channel means of the network's layers per cell of a proposal
    layers: int = 1  # at least that many of these layers
    views_per_image: int = 1  # at least that many views per photo

    def __or__(self, other: Requirements) -> Requirements:
        """The union of both."""
        return Requirements(
            *(max(getattr(self, need.name), getattr(other, need.name)) for need in fields(Requirements))
        )


@dataclass(frozen=True, slots=True)
class Exemplars:
    """The set S (eq. 8): embeddings assumed to show class ``cls``. M rows."""

    embed: Float[Tensor, "M D"]
    cls: Int[Tensor, " M"]
    weight: Float[Tensor, " M"]  # instance difficulty omega (eq. 12), detached
    rows: Int[Tensor, " M"]  # the proposal each one shows
    probs: tuple[Float[Tensor, " M"], ...] = ()  # K x teacher score of its class on this very view, detached

    def __len__(self) -> int:
        return int(self.cls.shape[0])


@dataclass(frozen=True, slots=True)
class LabelerInput:
    """Input of a labeler: scores, embeddings and exemplars of a batch, never the network."""

    proposals: Proposals
    tags: Bool[Tensor, "N C"]
    probs: tuple[Float[Tensor, "R C"], ...]  # K teachers: MIL scores, then softmax of stage 1 .. K-1; detached
    embed: Float[Tensor, "R D"]  # unit length
    exemplars: Exemplars
    vectors: Float[Tensor, "R F"] | None = None  # detached; None unless the labeler needs them
    deltas: tuple[Float[Tensor, "R c4"], ...] = ()  # box deltas of K stages, detached, if the labeler needs them
    second: Float[Tensor, "R C"] | None = None  # scores of a second MIL head, if there is one; detached
    side_info: SideInfo = SideInfo()
    fraction: float = 0.0  # share of the training iterations done
    subsets: Int[Tensor, " R"] | None = None  # subset of each proposal, if the MIL head scores subsets


@dataclass(frozen=True, slots=True)
class PseudoBoxes:
    """Pseudo ground truth of one stage: S proposals labelled as objects."""

    rows: Int[Tensor, " S"]
    cls: Int[Tensor, " S"]
    score: Float[Tensor, " S"]  # teacher score: the loss weight of proposals assigned to this box
    boxes: Float[Tensor, "S 4"] | None = None  # if they differ from the boxes of their rows

    def placed(self, proposals: Proposals) -> Float[Tensor, "S 4"]:
        """The pseudo boxes."""
        return proposals.boxes[self.rows] if self.boxes is None else self.boxes

    def __len__(self) -> int:
        return int(self.rows.shape[0])

    def to(self, device: torch.device) -> PseudoBoxes:
        """The same on a device."""
        boxes = None if self.boxes is None else self.boxes.to(device)
        return PseudoBoxes(self.rows.to(device), self.cls.to(device), self.score.to(device), boxes)


@dataclass(frozen=True, slots=True)
class PseudoLabels:
    """Instance-level supervision of one stage. A weight of zero excludes a proposal from the loss."""

    cls: Int[Tensor, " R"]  # 0 .. C-1, or C for background
    weight: Float[Tensor, " R"]
    boxes: Float[Tensor, "R 4"]  # regression target of each proposal
    pseudo_boxes: PseudoBoxes
    owner: Int[Tensor, " R"]  # the pseudo box each proposal is assigned to; -1 if its image has none


@dataclass(frozen=True, slots=True)
class Labeling:
    """Output of a labeler: K stages of pseudo labels, and its thresholds, which are logged."""

    stages: tuple[PseudoLabels, ...]
    thresholds: tuple[Float[Tensor, " t"], ...] = ()  # tau per stage, one entry per (image, class)
