"""Inference: mean over refinement stages and test-time augmentation (TTA), then class-wise NMS."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field

from tag2box.annotations import BoxSource, Detections, Photo
from tag2box.images import Side, View, boxes_in_view, view_size
from tag2box.methods.wsrpn import KEEP_EVERYTHING, Rescore
from tag2box.models.detector import Detector
from tag2box.ops.boxes import areas, class_nms, clip, decode
from tag2box.ops.losses import mil_scores
from tag2box.progress import Progress, silent
from tag2box.training import batches, feature_cache
from tag2box.training.dist import SINGLE_PROCESS, DistContext
from tag2box.types import StageScores


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Postprocessing: scores and boxes to detections."""

    nms_iou: Annotated[float, Field(gt=0, le=1)] = 0.4
    score_threshold: Annotated[float, Field(ge=0, le=1)] = 0.0
    max_detections: Annotated[int, Field(ge=1)] = 100
    """Per image, over all classes."""

    def __call__(self, scored: Scored, width: int, height: int) -> Detections:
        """Detections of one image; boxes outside the image are dropped."""
        boxes = clip(scored.boxes.reshape(-1, 4), width, height)
        is_kept = (scored.probs.flatten() > self.score_threshold) & (areas(boxes) > 0)
        labels = torch.arange(scored.probs.shape[1], device=boxes.device).repeat(len(scored.probs))[is_kept]
        boxes, scores = boxes[is_kept], scored.probs.flatten()[is_kept]
        kept = class_nms(boxes, scores, labels, self.nms_iou)[: self.max_detections]
        return Detections(boxes[kept], scores[kept], labels[kept])


@dataclass(frozen=True, slots=True)
class Scored:
    """Class scores and class-wise boxes of the P proposals of one image, in its own pixels."""

    probs: Float[torch.Tensor, "P C"]
    boxes: Float[torch.Tensor, "P c4"]
    mil: Float[torch.Tensor, " P"]  # MIL score, summed over classes


def scored(scores: StageScores, boxes: Float[torch.Tensor, "P 4"], num_classes: int) -> Scored:
    """One pass: the mean of the K softmaxes, and the proposals shifted by the mean of the K deltas.

    Without refinement stages the scores are those of the MIL head.
    """
    stages = [logits.softmax(dim=1)[:, :num_classes] for logits in scores.refine]
    mil = mil_scores(scores.mil_cls, scores.mil_det, (len(boxes),))[:, :num_classes]
    probs, mil = torch.stack(stages).mean(dim=0) if stages else mil, mil.sum(dim=1)
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


@dataclass(frozen=True, kw_only=True)
class Inference:
    """Test-time augmentation and postprocessing."""

    scales: Annotated[tuple[Side, ...], Field(min_length=1)] = (480, 576, 688, 800, 864, 1000, 1200)
    """Short sides; scores and boxes of a proposal are averaged over all of them."""
    long_max: Side = 2000
    mirror: bool = True
    """Also run the horizontal flip of every scale."""
    predict: Predict = Predict()

    def views(self) -> tuple[View, ...]:
        """The views of a photo that are averaged."""
        flips = (False, True) if self.mirror else (False,)
        return tuple(View(scale, flip, self.long_max) for scale in self.scales for flip in flips)


def run_detector(
    detector: Detector,
    photos: Sequence[Photo],
    store: BoxSource,
    *,
    maps: feature_cache.RoiMaps | feature_cache.FeatureCache,
    inference: Inference,
    rescore: Rescore = KEEP_EVERYTHING,
    progress: Progress = silent,
    dist: DistContext = SINGLE_PROCESS,
) -> dict[str, Detections]:
    """Detections by photo id, in the photo's own pixels. Each photo is decoded once, prefetched by a thread.

    Each rank detects on its shard of the photos; all ranks return all detections.
    """
    views, mine = inference.views(), dist.shard(len(photos))
    found: dict[str, Detections] = {}
    with (
        torch.no_grad(),
        progress("detecting", len(mine)) as bar,
        ThreadPoolExecutor(1, thread_name_prefix="tag2box-photos") as pool,
    ):
        for index, passes in zip(mine, batches.prefetch(pool, lambda i: maps.passes(i, views), mine), strict=True):
            photo = photos[index]
            boxes = store.boxes(photo.id)
            objectness = store.scores(photo.id) if detector.box_prior else None
            weighted = [detector.weight_by_objectness(own, objectness) for own in passes]
            passed = [_scored(detector, photo, boxes, view, own) for view, own in zip(views, weighted, strict=True)]
            kept = _rescored(merge_passes(passed), boxes, rescore)
            found[photo.id] = inference.predict(kept, photo.width, photo.height).to(torch.device("cpu"))
            bar.advance()
    return {name: detections for share in dist.all_gather_object(found) for name, detections in share.items()}


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
    scores = detector.score(detector.neck(maps.to(device)))
    passed = scored(scores, boxes_in_view(view, boxes, size).to(device), detector.num_classes)
    upright = unflip(passed, width) if view.flip else passed
    return rescale(upright, photo.width / width, photo.height / height)
