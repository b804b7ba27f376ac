"""Inference: mean over refinement stages and test-time augmentation (TTA), then class-wise NMS."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
from jaxtyping import Float, Float32, Int64
from numpy import ndarray
from pydantic import Field

from tag2box import errors, storage
from tag2box.annotations import BoxSource, Detections, Photo
from tag2box.images import Side, View, boxes_in_view, view_size
from tag2box.methods.wsrpn import KEEP_EVERYTHING, Rescore
from tag2box.models.class_maps import NO_PRIOR, Prior
from tag2box.models.detector import Detector
from tag2box.ops.boxes import areas, class_nms, clip, decode, vote
from tag2box.ops.losses import at_least_single, mil_scores
from tag2box.ops.superpixels import SUPERPIXELS, Superpixels
from tag2box.progress import Progress, silent
from tag2box.training import batches, feature_cache, proposal_cache
from tag2box.training.class_evidence import ClassEvidence, PreselectedBoxes, StraddlingScores, preselected
from tag2box.training.dist import SINGLE_PROCESS, DistContext
from tag2box.types import PerProposal, PerProposalAndClass, StageScores

OnPhoto = Callable[[Photo, Detections | errors.UserError], None]
"""Receives the detections of a photo, or the error if it cannot be read."""
Select = Callable[[Photo, Detections], Detections]
"""Reduces the detections of a photo to those that are wanted."""
SelectWith = Callable[[torch.nn.Module], Select]
"""Given the detector, which may have networks that selection needs; importable by name, for other processes."""


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Postprocessing: scores and boxes to detections."""

    nms_iou: Annotated[float, Field(gt=0, le=1)] = 0.4
    score_threshold: Annotated[float, Field(ge=0, le=1)] = 0.0
    max_detections: Annotated[int, Field(ge=1, le=1_000_000)] = 100
    """Per image, over all classes."""
    vote_iou: Annotated[float, Field(gt=0, le=1)] | None = None
    """Box voting: a detection becomes the mean of the boxes of its class that overlap it by at least this IoU, weighted
    by their scores; of detectors with proposals. Default: none."""

    def __call__(self, scored: Scored, width: int, height: int) -> Detections:
        """Detections of one image; boxes outside the image are dropped."""
        boxes = clip(scored.boxes.reshape(-1, 4), width, height)
        is_kept = (scored.probs.flatten() > self.score_threshold) & (areas(boxes) > 0)
        labels = torch.arange(scored.probs.shape[1], device=boxes.device).repeat(len(scored.probs))[is_kept]
        return self.merge(Detections(boxes[is_kept], scored.probs.flatten()[is_kept], labels))

    def merge(self, found: Detections) -> Detections:
        """Class-wise NMS, then box voting; the best first."""
        kept = class_nms(found.boxes, found.scores, found.labels, self.nms_iou)[: self.max_detections]
        if self.vote_iou is None:
            return found[kept]
        boxes = vote(found.boxes, found.scores, found.labels, kept, self.vote_iou)
        return Detections(boxes, found.scores[kept], found.labels[kept])


@dataclass(frozen=True, slots=True)
class Scored:
    """Class scores and class-wise boxes of the P proposals of one image, in its own pixels."""

    probs: Float[torch.Tensor, "P C"]
    boxes: Float[torch.Tensor, "P c4"]
    mil: Float[torch.Tensor, " P"]  # score of the region classifier, else of the MIL head, summed over classes


def scored(scores: StageScores, boxes: Float[torch.Tensor, "P 4"], num_classes: int) -> Scored:
    """One pass: the mean of the K softmaxes, and the proposals shifted by the mean of the K deltas.

    Without refinement stages the scores are those of the MIL head.
    """
    stages = [logits.softmax(dim=1)[:, :num_classes] for logits in scores.refine]
    mil = mil_scores(scores.mil_cls, scores.mil_det, (len(boxes),))[:, :num_classes]
    probs = torch.stack(stages).mean(dim=0) if stages else mil
    if scores.region:
        cls, det = scores.region
        mil = mil_scores(cls, det, (len(boxes),))[:, :num_classes]
    mil = mil.sum(dim=1)
    if not scores.deltas:
        return Scored(probs, boxes.repeat(1, num_classes), mil)
    return Scored(probs, decode(torch.stack(scores.deltas).mean(dim=0), boxes), mil)


def merge_passes(passes: Sequence[Scored]) -> Scored:
    """Test-time augmentation: scores and boxes of a proposal averaged over all passes."""
    return Scored(
        torch.stack([p.probs for p in passes]).mean(dim=0),
        torch.stack([p.boxes for p in passes]).mean(dim=0),
        torch.stack([p.mil for p in passes]).mean(dim=0),
    )


def unflip(passed: Scored, width: float) -> Scored:
    """A pass over the horizontally flipped image, its boxes flipped back."""
    boxes = passed.boxes.reshape(*passed.probs.shape, 4)
    flipped = torch.stack([width - boxes[..., 2], boxes[..., 1], width - boxes[..., 0], boxes[..., 3]], dim=2)
    return replace(passed, boxes=flipped.reshape(passed.boxes.shape))


def rescale(passed: Scored, across: float, down: float) -> Scored:
    """A pass over a resized image, its boxes in the photo's own pixels."""
    factors = passed.boxes.new_tensor([across, down, across, down]).repeat(passed.boxes.shape[1] // 4)
    return replace(passed, boxes=passed.boxes * factors)


OnScores = Callable[[Photo, Scored], None]
"""Receives the scores of all proposals of a photo."""


@dataclass(frozen=True, kw_only=True)
class Inference:
    """Test-time augmentation and postprocessing."""

    scales: Annotated[tuple[Side, ...], Field(min_length=1)] = (480, 576, 688, 800, 864, 1000, 1200)
    """Short sides; scores and boxes of a proposal are averaged over all of them."""
    long_max: Side = 2000
    mirror: bool = True
    """Also run the horizontal flip of every scale."""
    prior: Prior = NO_PRIOR
    """Prior on boxes: scores become weighted geometric means of probability, evidence and area share."""
    regression: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the way from its proposal to where box regression moves it that a box goes; 0 leaves it there."""
    predict: Predict = Predict()

    def views(self) -> tuple[View, ...]:
        """The views of a photo that are averaged."""
        flips = (False, True) if self.mirror else (False,)
        return tuple(View(scale, flip, self.long_max) for scale in self.scales for flip in flips)

    def moved(self, passed: Scored, proposals: Float[torch.Tensor, "P 4"]) -> Scored:
        """Boxes ``regression`` of the way from the proposals to where the heads move them."""
        if self.regression == 1.0:
            return passed
        start = proposals.to(passed.boxes).repeat(1, passed.probs.shape[1])
        return replace(passed, boxes=start.lerp(passed.boxes, self.regression))


def run_detector(  # noqa: PLR0913
    detector: Detector,
    photos: Sequence[Photo],
    store: BoxSource,
    *,
    maps: feature_cache.RoiMaps | feature_cache.FeatureCache,
    inference: Inference,
    superpixels: Superpixels = SUPERPIXELS,
    rescore: Rescore = KEEP_EVERYTHING,
    progress: Progress = silent,
    dist: DistContext = SINGLE_PROCESS,
    on_photo: OnPhoto | None = None,
    on_scores: OnScores | None = None,
    select: Select | None = None,
) -> dict[str, Detections]:
    """Detections by photo id, in the photo's own pixels. Each photo is decoded once, prefetched by a thread.

    Each rank detects on its shard of the photos; all ranks return all detections.

    Args:
        superpixels: those that the prior's straddling scores are of, if it has any.
        on_photo: called with the detections of each photo of this rank, which are then not returned, or with the error
            if it cannot be read: it is then skipped, unless this raises. Default: return all, raise the error.
        on_scores: called with the scores of all proposals of each photo of this rank, prior included, for analyses.
        select: reduces the detections of a photo to those that are wanted. Default: all.
    """
    views, mine = inference.views(), dist.shard(len(photos))
    with_prior = PriorOfPhotos.of(inference.prior, detector, photos, store, superpixels)
    found: dict[str, Detections] = {}

    def read(index: int) -> Iterator[Float[torch.Tensor, "P ch h w"]] | errors.UserError:
        try:
            return maps.passes(index, views)
        except errors.UserError as error:
            return error

    with (
        torch.no_grad(),
        progress("detecting", len(mine)) as bar,
        ThreadPoolExecutor(1, thread_name_prefix="tag2box-photos") as pool,
    ):
        for index, passes in zip(mine, batches.prefetch(pool, read, mine), strict=True):
            photo = photos[index]
            if isinstance(passes, errors.UserError):
                if on_photo is None:
                    raise passes
                on_photo(photo, passes)
            else:
                merged = merge_passes(_passes(detector, photo, store, views, passes))
                weighted = with_prior(inference.moved(merged, store.boxes(photo.id)), photo)
                if on_scores is not None:
                    on_scores(photo, weighted)
                kept = _rescored(weighted, store.boxes(photo.id), rescore)
                detected = inference.predict(kept, photo.width, photo.height).to(torch.device("cpu"))
                detected = detected if select is None else select(photo, detected)
                if on_photo is None:
                    found[photo.id] = detected
                else:
                    on_photo(photo, detected)
            bar.advance()
    return {name: detections for share in dist.all_gather_object(found) for name, detections in share.items()}


def seen_features(
    detector: Detector,
    photos: Sequence[Photo],
    store: BoxSource,
    *,
    keep: int | None,
    folder: Path | None,
    views: Sequence[View],
) -> tuple[BoxSource, feature_cache.RoiMaps | feature_cache.FeatureCache]:
    """The proposals that a detector sees in photos, and their features.

    Args:
        keep: as of ``adaptation.keep_boxes``.
        folder: of the feature cache of these very photos, if the detector was trained on them. What is there for
            ``views`` is read, if no photo has changed since; nothing is written to it.
    """
    seen = preselected(detector.class_maps, photos, store, keep)
    computed = feature_cache.RoiMaps(detector.backbone, photos, seen)
    if folder is None or not folder.is_dir() or not computed.is_frozen:
        return seen, computed
    if not storage.has_digests([photo.path for photo in photos], folder / feature_cache.PHOTO_DIGESTS):
        return seen, computed
    if detector.class_maps is not None:
        if not proposal_cache.has_evidence(ClassEvidence(detector.class_maps, photos, store), folder):
            return seen, computed
        seen = proposal_cache.seen_boxes(photos, store, detector.class_maps, keep=keep, folder=folder).boxes
    cache = feature_cache.FeatureCache(feature_cache.RoiMaps(detector.backbone, photos, seen), folder)
    return seen, cache if cache.open(views) else replace(computed, store=seen)


def class_evidence(detector: Detector, photos: Sequence[Photo], store: BoxSource) -> PerProposalAndClass:
    """The evidence of the detector's class maps for proposals; raises if it was trained without adaptation."""
    if detector.class_maps is None:
        raise errors.UserError(
            "inference.prior.evidence: needs class maps, and the run was trained without; set it to 0, or train with "
            "adaptation.epochs above 0"
        )
    if isinstance(store, PreselectedBoxes):
        return store.class_evidence
    return ClassEvidence(detector.class_maps, photos, store)


@dataclass(frozen=True)
class PriorOfPhotos:
    """The prior on the proposals of photos, with what it reads of them."""

    prior: Prior
    store: BoxSource
    evidence: PerProposalAndClass | None
    straddling: PerProposal | None

    @classmethod
    def of(
        cls, prior: Prior, detector: Detector, photos: Sequence[Photo], store: BoxSource, superpixels: Superpixels
    ) -> PriorOfPhotos:
        """The prior of a detector; raises if it needs class maps and the detector has none."""
        evidence = class_evidence(detector, photos, store) if prior.evidence else None
        return cls(prior, store, evidence, StraddlingScores(superpixels, photos, store) if prior.straddling else None)

    def __call__(self, passed: Scored, photo: Photo) -> Scored:
        """Scores of a photo with the prior on its proposals."""
        if self.prior == NO_PRIOR:
            return passed
        shares = areas(self.store.boxes(photo.id).to(passed.probs)) / (photo.width * photo.height)
        found, fit = (None if read is None else read(photo.id) for read in (self.evidence, self.straddling))
        return replace(passed, probs=self.prior.mean(passed.probs, shares, found, fit))


def _passes(
    detector: Detector,
    photo: Photo,
    store: BoxSource,
    views: Sequence[View],
    maps: Iterator[Float[torch.Tensor, "P ch h w"]],
) -> list[Scored]:
    """The passes over a photo, one per view."""
    boxes = store.boxes(photo.id)
    objectness = store.scores(photo.id) if detector.box_prior else None
    weighted = [detector.weight_by_objectness(own, objectness) for own in maps]
    return [_scored(detector, photo, boxes, view, own) for view, own in zip(views, weighted, strict=True)]


def _rescored(passed: Scored, boxes: Float[torch.Tensor, "P 4"], rescore: Rescore) -> Scored:
    """The proposals that WSRPN's rescoring keeps."""
    if not rescore.acts(1.0):
        return passed
    rows = rescore.best(passed.mil, boxes.to(passed.mil))
    return Scored(passed.probs[rows], passed.boxes[rows], passed.mil[rows])


def _scored(
    detector: Detector,
    photo: Photo,
    boxes: Float[torch.Tensor, "P 4"],
    view: View,
    maps: Float[torch.Tensor, "P ch h w"],
) -> Scored:
    """One pass over a photo, its boxes in the photo's own pixels."""
    size = (photo.height, photo.width)
    height, width = view_size(view, size)
    device = detector.backbone.device
    with detector.backbone.frozen():
        scores = detector.score(detector.neck(maps.to(device)))
        if detector.region is not None:
            scores = replace(scores, region=detector.region.logits(maps.to(device)))
    passed = scored(scores.map(at_least_single), boxes_in_view(view, boxes, size).to(device), detector.num_classes)
    upright = unflip(passed, width) if view.flip else passed
    return rescale(upright, photo.width / width, photo.height / height)


# ---------------------------------------------------------------- in other processes


@dataclass(frozen=True, slots=True)
class PhotoTask:
    """A photo with its proposals: a worker may have no access to the store."""

    photo: Photo
    proposals: Float32[ndarray, "P 4"]
    ranks: Float32[ndarray, " P"]

    @property
    def path(self) -> Path:
        """The file of the photo."""
        return self.photo.path

    def boxes(self, photo_id: str, /) -> Float32[torch.Tensor, "P 4"]:
        """The proposals of the only photo."""
        return torch.from_numpy(self.proposals.copy())

    def scores(self, photo_id: str, /) -> Float32[torch.Tensor, " P"]:
        """Their scores."""
        return torch.from_numpy(self.ranks.copy())


@dataclass(frozen=True, slots=True)
class PhotoResult:
    """Detections of a photo, or an error message. Arrays: tensors are more expensive to send between processes."""

    boxes: Float32[ndarray, "B 4"] | None = None
    scores: Float32[ndarray, " B"] | None = None
    labels: Int64[ndarray, " B"] | None = None
    problem: str = ""

    def outcome(self) -> Detections | errors.UserError:
        """The detections, or the error."""
        if self.boxes is None or self.scores is None or self.labels is None:
            return errors.UserError(self.problem)
        # Copies: arrays received from another process may be read-only memory.
        return Detections(*(torch.from_numpy(x.copy()) for x in (self.boxes, self.scores, self.labels)))


def lost_photo(task: PhotoTask, number: int) -> PhotoResult:
    """The result for a photo whose process died."""
    ended = f"was ended by signal {number}" if number else "died at every attempt"
    hint = "perhaps out of memory; smaller inference.scales need less"
    return PhotoResult(problem=f"{task.path}: the process that worked on it {ended}; {hint}")
