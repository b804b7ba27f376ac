"""Fitting of boxes to objects: trimming by colour, from tags alone, or snapping to MobileSAM's masks.

Class maps say where an object is, but hardly how far it extends: most wrong boxes are too large.

**Trimming** shrinks a box to the object in it. GrabCut (Rother, Kolmogorov and Blake, 2004) separates the pixels of the
box by their colours. What is outside is background. With p the class map and P its highest value in the box, a pixel of
the box is

    object                   if p > sure x P
    likely object at first   if p > likely x P
    likely background        otherwise

A box of which too little would be left stays as it is.

**Snapping** replaces boxes by those of masks that fit the class maps better. Masks end where objects do, but do not
know which object is meant. So every box prompts masks, and so do peaks of its class map: of the best box of a class the
highest peaks of the photo, of every other box the highest cell inside it. Of the box and all masks, the one with the
best fit remains:

    fit(m) = quality(m)^q x contrast(m)^c x recall(m)^r x evidence(m)^e

    quality   the mask's estimated IoU times its stability; of a mask that a box prompted, times a constant, because
              these estimates are higher; another constant for the box itself
    contrast  mean of the class map inside the mask minus that outside
    recall    share of the map's sum that lies in the mask: of the photo, for all but the best box of the box
    evidence  that of the mask's box (``class_maps.box_evidence``)

MobileSAM was trained on SA-1B's masks, so results with it are kept apart from those of tags alone. In both, scores and
classes stay as they are.
"""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Annotated, ClassVar

import cv2
import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from tag2box import images
from tag2box.annotations import Detections, Photo
from tag2box.models.class_maps import ClassMaps, box_evidence
from tag2box.ops.boxes import areas, clip, nms
from tag2box.proposals import sam_boxes
from tag2box.training.class_evidence import photo_maps

_FLOOR = 1e-3  # no factor of a fit is less, so that none is zero
_NEIGHBOURS = 5  # cells along a side of the window in which a peak is the highest


# ---------------------------------------------------------------- trimming


@dataclass(frozen=True, kw_only=True)
class Trim:
    """Boxes shrunk to what GrabCut takes for the object in them."""

    on: bool = False
    """Whether boxes are trimmed; needs a run with class maps. It helps where an object differs from what is around it,
    and costs where its parts differ more: spots on a leaf."""
    sure: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Pixels with more than this share of the box's highest probability are object."""
    likely: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Pixels with more than this share are taken for object at first."""
    long_side: Annotated[int, Field(ge=16, le=2048)] = 200
    """Long side to which photos are resized."""
    rounds: Annotated[int, Field(ge=1, le=100)] = 1
    """Iterations of GrabCut."""
    least_left: Annotated[float, Field(ge=0, le=1)] = 0.7
    """A box of which less than this share of its area would be left stays as it is: what was found is a part."""
    max_boxes: Annotated[int, Field(ge=1, le=1000)] = 10
    """Most boxes per class and photo that are trimmed, highest scores first."""


@dataclass(frozen=True)
class TrimPhotos:
    """Trims the detections of photos with class maps.

    Example:
        trim = TrimPhotos(Trim(), detector.class_maps)
        detections = trim(photo, detections)
    """

    name: ClassVar[str] = "trim"
    uses: ClassVar[str] = ""
    settings: Trim
    class_maps: ClassMaps
    nms_iou: float = 0.4  # of detections, before they are trimmed: what is left may be an instance of its own
    least_share: float = 0.0  # of the best score of a class: boxes with less stay as they are

    def __call__(self, photo: Photo, found: Detections) -> Detections:
        """The detections after NMS, those with the highest scores trimmed, in the order of their scores."""
        highest = found[highest_per_class(found, self.nms_iou, len(found))]
        if not len(highest):
            return highest
        maps, pixels = photo_maps(self.class_maps, photo), loaded_pixels(photo, self.settings.long_side)
        size, shape = (photo.width, photo.height), (pixels.shape[1], pixels.shape[2])
        fine = functional.interpolate(maps[None], shape, mode="bilinear", align_corners=False)[0]
        rows = zip(highest.boxes, highest.labels.tolist(), self._are_trimmed(highest), strict=True)
        boxes = [
            self._trimmed(pixels, fine[label], box, size) if is_trimmed else box for box, label, is_trimmed in rows
        ]
        return Detections(torch.stack(boxes), highest.scores, highest.labels)

    def _trimmed(
        self,
        pixels: UInt8[Tensor, "3 h w"],
        probs: Float[Tensor, "h w"],
        box: Float[Tensor, "4"],
        size: tuple[int, int],
    ) -> Float[Tensor, "4"]:
        inside = box_mask(box, (probs.shape[0], probs.shape[1]), size)
        is_object = grabcut(pixels, trimap_of_box(probs, inside, self.settings), self.settings.rounds)
        if not is_object.any():
            return box
        trimmed = intersection(box, mask_box(is_object, size))
        return trimmed if areas(trimmed[None]) >= self.settings.least_left * areas(box[None]) else box

    def identity(self) -> dict[str, object]:
        """What trimmed boxes depend on, apart from the photo, the detections and the class maps."""
        return {self.name: asdict(self.settings), "nms_iou": self.nms_iou, "least_share": self.least_share}

    def _are_trimmed(self, highest: Detections) -> list[bool]:
        """Whether each detection is trimmed; best first."""
        best: dict[int, float] = {}
        seen: Counter[int] = Counter()
        chosen = []
        for score, label in zip(highest.scores.tolist(), highest.labels.tolist(), strict=True):
            seen[label] += 1
            is_high = score >= self.least_share * best.setdefault(label, score)
            chosen.append(is_high and seen[label] <= self.settings.max_boxes)
        return chosen


def trimap_of_box(probs: Float[Tensor, "h w"], inside: Bool[Tensor, "h w"], how: Trim) -> UInt8[np.ndarray, "h w"]:
    """What each pixel is before GrabCut, as OpenCV's numbers: background, object, likely background, likely object.

    >>> inside = torch.tensor([[False, True, True, True]])
    >>> trimap_of_box(torch.tensor([[0.9, 0.8, 0.5, 0.1]]), inside, Trim())
    array([[0, 1, 3, 2]], dtype=uint8)
    """
    highest = probs[inside].amax() if inside.any() else probs.amax()
    likely = torch.where(probs > how.likely * highest, cv2.GC_PR_FGD, cv2.GC_PR_BGD)
    known = torch.where(probs > how.sure * highest, cv2.GC_FGD, likely)
    return np.asarray(torch.where(inside, known, cv2.GC_BGD).byte().numpy())


def grabcut(pixels: UInt8[Tensor, "3 h w"], trimap: UInt8[np.ndarray, "h w"], rounds: int = 1) -> Bool[Tensor, "h w"]:
    """The pixels of the object; all that are not background, if nothing tells the two apart.

    OpenCV starts from random clusters of colours, here always from the same ones.
    """
    is_object = (trimap == cv2.GC_FGD) | (trimap == cv2.GC_PR_FGD)
    if is_object.all() or not is_object.any():
        return torch.from_numpy(trimap != cv2.GC_BGD)
    found, shown = trimap.copy(), np.ascontiguousarray(pixels.permute(1, 2, 0).numpy())
    cv2.setRNGSeed(0)
    cv2.grabCut(shown, found, None, np.zeros((1, 65)), np.zeros((1, 65)), rounds, cv2.GC_INIT_WITH_MASK)  # type: ignore[call-overload]
    return torch.from_numpy((found == cv2.GC_FGD) | (found == cv2.GC_PR_FGD))


def mask_box(mask: Bool[Tensor, "h w"], size: tuple[int, int]) -> Float[Tensor, "4"]:
    """The box of a mask that is not empty, in pixels of a photo of a (width, height).

    >>> mask_box(torch.tensor([[False, True, True, False]]), (8, 2))
    tensor([2., 0., 6., 2.])
    """
    (rows, columns), (height, width) = mask.nonzero(as_tuple=True), mask.shape
    edges = [columns.min() / width, rows.min() / height, (columns.max() + 1) / width, (rows.max() + 1) / height]
    return torch.stack(edges) * torch.tensor([*size, *size])


def intersection(box: Float[Tensor, "4"], other: Float[Tensor, "4"]) -> Float[Tensor, "4"]:
    """What two boxes share.

    >>> intersection(torch.tensor([0.0, 0.0, 4.0, 4.0]), torch.tensor([1.0, -1.0, 5.0, 3.0]))
    tensor([1., 0., 4., 3.])
    """
    return torch.cat([torch.maximum(box[:2], other[:2]), torch.minimum(box[2:], other[2:])])


def loaded_pixels(photo: Photo, long_side: int) -> UInt8[Tensor, "3 h w"]:
    """A photo, resized to a long side."""
    width, height = sam_boxes.long_side_size((photo.width, photo.height), long_side)
    pixels = images.load_view(photo, images.View(min(width, height), long_max=max(width, height)))
    return pixels.round().clamp(0, 255).byte()


# ---------------------------------------------------------------- snapping


@dataclass(frozen=True, kw_only=True)
class Snap:
    """Choice between a box and the boxes of masks at it.

    One set of constants, chosen on training photos of four datasets: everyday classes, fruit, leaf diseases and defects
    of tiles.
    """

    quality: Annotated[float, Field(ge=0, le=10)] = 2.0
    """q, the exponent of a mask's quality."""
    contrast: Annotated[float, Field(ge=0, le=10)] = 1.0
    """c, the exponent of the contrast of the class map between the inside and the outside of a mask."""
    recall: Annotated[float, Field(ge=0, le=10)] = 1.0
    """r, the exponent of the share of the class map that a mask covers."""
    evidence: Annotated[float, Field(ge=0, le=10)] = 0.5
    """e, the exponent of the class map's evidence for the box of a mask."""
    box_quality: Annotated[float, Field(gt=0, le=1)] = 0.65
    """Factor on the quality of masks that a box prompted."""
    own_quality: Annotated[float, Field(ge=0, le=1)] = 0.2
    """The quality of the box itself, which has no mask: the higher, the more boxes stay."""
    peaks: Annotated[int, Field(ge=1, le=100)] = 3
    """Peaks of the photo's class map that prompt masks for the best box of a class."""
    max_boxes: Annotated[int, Field(ge=1, le=1000)] = 6
    """Boxes per class and photo that are snapped, highest scores first; the others are dropped."""
    long_side: Annotated[int, Field(ge=64, le=2048)] = 512
    """Long side to which photos are resized for MobileSAM."""

    def fit(self, candidates: "SnapCandidates") -> Float[Tensor, " M"]:
        """The logarithm of the fit of each candidate."""
        weighted = (
            (self.quality, candidates.quality),
            (self.contrast, candidates.contrast),
            (self.recall, candidates.recall),
            (self.evidence, candidates.evidence),
        )
        return torch.stack([power * factor.clamp(min=_FLOOR).log() for power, factor in weighted]).sum(dim=0)

    def choose(self, candidates: "SnapCandidates") -> int:
        """The best candidate; one without extent is never chosen, unless it is the first."""
        is_empty = (candidates.boxes[:, 2:] - candidates.boxes[:, :2] < 1).any(dim=1)
        is_empty[:1] = False
        return int(self.fit(candidates).masked_fill(is_empty, -torch.inf).argmax())


@dataclass(frozen=True, slots=True)
class SnapCandidates:
    """A box, then the boxes of masks at it, and what their fit depends on."""

    boxes: Float[Tensor, "M 4"]
    quality: Float[Tensor, " M"]
    contrast: Float[Tensor, " M"]
    recall: Float[Tensor, " M"]
    evidence: Float[Tensor, " M"]


@dataclass(frozen=True)
class SnapPhotos:
    """Snaps the detections of photos with class maps and MobileSAM.

    Example:
        snap = SnapPhotos(Snap(), detector.class_maps)
        detections = snap(photo, detections)
    """

    name: ClassVar[str] = "snap"
    uses: ClassVar[str] = sam_boxes.SA_1B
    settings: Snap
    class_maps: ClassMaps
    nms_iou: float = 0.4  # of detections, before they are snapped: what is left may be an instance of its own

    def __call__(self, photo: Photo, found: Detections) -> Detections:
        """The highest detections of each class, snapped, in the order of their scores."""
        highest = found[highest_per_class(found, self.nms_iou, self.settings.max_boxes)]
        if not len(highest):
            return highest
        maps, image = photo_maps(self.class_maps, photo), self._embedded(photo)
        size, is_first = (photo.width, photo.height), first_of_each(highest.labels).tolist()
        chosen = []
        for box, label, is_best in zip(highest.boxes, highest.labels.tolist(), is_first, strict=True):
            own = maps[label]
            points = highest_peaks(own, size, self.settings.peaks) if is_best else peak_in(own, box, size)
            candidates = self._candidates(image, own, box, points, size, is_best=is_best)
            chosen.append(candidates.boxes[self.settings.choose(candidates)])
        return Detections(torch.stack(chosen), highest.scores, highest.labels)

    def identity(self) -> dict[str, object]:
        """What snapped boxes depend on, apart from the photo, the detections and the class maps."""
        return {self.name: asdict(self.settings), "nms_iou": self.nms_iou}

    def _embedded(self, photo: Photo) -> sam_boxes.EmbeddedImage:
        return sam_boxes.EmbeddedImage.of(sam_boxes.mobile_sam_network(), loaded_pixels(photo, self.settings.long_side))

    def _candidates(
        self,
        image: sam_boxes.EmbeddedImage,
        own_map: Float[Tensor, "h w"],
        box: Float[Tensor, "4"],
        points: Float[Tensor, "n 2"],
        size: tuple[int, int],
        *,
        is_best: bool,
    ) -> SnapCandidates:
        """The box itself, the masks that it prompts, and those that points prompt."""
        scale = torch.tensor([image.width / size[0], image.height / size[1]] * 2)
        of_box, of_points = image.at_boxes(box[None] * scale), image.at_points(points * scale[:2])
        assert of_box.masks is not None and of_points.masks is not None
        own_mask = box_mask(box, image.mask_size, size)
        masks = torch.cat([own_mask[None], of_box.masks, of_points.masks])
        own_quality = torch.tensor([self.settings.own_quality])
        quality = torch.cat([own_quality, of_box.quality * self.settings.box_quality, of_points.quality])
        boxes = torch.cat([box[None], clip(torch.cat([of_box.boxes, of_points.boxes]) / scale, *size)])
        fine = functional.interpolate(own_map[None, None], image.mask_size, mode="bilinear", align_corners=False)[0, 0]
        contrast, recall = mask_agreement(masks, fine, torch.ones_like(own_mask) if is_best else own_mask)
        return SnapCandidates(boxes, quality, contrast, recall, box_evidence(own_map[None], boxes, size)[:, 0])


def mask_agreement(
    masks: Bool[Tensor, "M h w"], probs: Float[Tensor, "h w"], region: Bool[Tensor, "h w"]
) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"]]:
    """Contrast and recall of masks: mean inside minus mean outside; share of the sum in ``region`` that is inside.

    The mean of no cells is 0.

    >>> half, probs = torch.tensor([[[True, False]]]), torch.tensor([[0.6, 0.2]])
    >>> [round(float(value), 3) for value in mask_agreement(half, probs, torch.ones(1, 2, dtype=torch.bool))]
    [0.4, 0.75]
    """
    inside, values = masks.flatten(1).to(probs), probs.flatten()
    count, total = inside.sum(dim=1), inside @ values
    outside = (values.sum() - total) / (len(values) - count).clamp(min=1)
    covered = inside @ (values * region.flatten()) / (values * region.flatten()).sum().clamp(min=_FLOOR**2)
    return total / count.clamp(min=1) - outside, covered


def box_mask(box: Float[Tensor, "4"], shape: tuple[int, int], size: tuple[int, int]) -> Bool[Tensor, "h w"]:
    """The cells whose centre is in a box; ``size`` is the photo's (width, height).

    >>> box_mask(torch.tensor([4.0, 0.0, 8.0, 2.0]), (1, 4), (8, 2))
    tensor([[False, False,  True,  True]])
    """
    rows, columns = shape
    x, y = (torch.arange(columns) + 0.5) * size[0] / columns, (torch.arange(rows) + 0.5) * size[1] / rows
    left, top, right, bottom = box
    inside: Tensor = ((x >= left) & (x < right)) & ((y >= top) & (y < bottom))[:, None]
    return inside


def first_of_each(labels: Int[Tensor, " K"]) -> Bool[Tensor, " K"]:
    """Whether no row above has the same label.

    >>> first_of_each(torch.tensor([2, 0, 2, 1]))
    tensor([ True,  True, False,  True])
    """
    return ~(labels[:, None] == labels[None, :]).tril(diagonal=-1).any(dim=1)


def highest_per_class(found: Detections, nms_iou: float, most: int) -> Int[Tensor, " K"]:
    """The rows of the highest detections of each class after NMS, highest score first."""
    rows = [torch.zeros(0, dtype=torch.long)]
    for label in found.labels.unique().tolist():
        own = (found.labels == label).nonzero().flatten()
        rows.append(own[nms(found.boxes[own], found.scores[own], nms_iou)[:most]])
    chosen = torch.cat(rows)
    return chosen[found.scores[chosen].argsort(descending=True, stable=True)]


def highest_peaks(probs: Float[Tensor, "h w"], size: tuple[int, int], most: int) -> Float[Tensor, "n 2"]:
    """The centres (x, y) of the highest cells that no cell in the 5 x 5 cells around them exceeds.

    >>> highest_peaks(torch.tensor([[0.9, 0.1, 0.2, 0.5]]), (8, 2), most=2)
    tensor([[1., 1.],
            [7., 1.]])
    """
    around = functional.max_pool2d(probs[None, None], _NEIGHBOURS, 1, _NEIGHBOURS // 2)[0, 0]
    cells = (probs >= around).flatten().nonzero().flatten()
    best = cells[probs.flatten()[cells].argsort(descending=True, stable=True)[:most]]
    return _centres(best, probs.shape, size)


def peak_in(probs: Float[Tensor, "h w"], box: Float[Tensor, "4"], size: tuple[int, int]) -> Float[Tensor, "1 2"]:
    """The centre (x, y) of the highest cell among those with a centre in the box; else the box's centre.

    >>> peak_in(torch.tensor([[0.9, 0.1, 0.2, 0.5]]), torch.tensor([4.0, 0.0, 8.0, 2.0]), (8, 2))
    tensor([[7., 1.]])
    """
    inside = box_mask(box, (probs.shape[0], probs.shape[1]), size)
    if not inside.any():
        return (box[None, :2] + box[None, 2:]) / 2
    return _centres(probs.masked_fill(~inside, -torch.inf).flatten().argmax()[None], probs.shape, size)


def _centres(cells: Int[Tensor, " n"], shape: torch.Size, size: tuple[int, int]) -> Float[Tensor, "n 2"]:
    height, width = shape
    x, y = (cells % width + 0.5) * size[0] / width, (cells // width + 0.5) * size[1] / height
    return torch.stack([x, y], dim=1)
