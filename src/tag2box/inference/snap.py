"""Snapping of detections: boxes of MobileSAM's masks replace boxes that fit the evidence for their class less well.

Class maps say where an object is, but hardly how far it extends: most wrong boxes are too large. Masks end where
objects do, but do not know which object is meant. So every box prompts masks, and so does the peak of its class map
inside the box, or, for the best box of a class, its peak in the whole photo (``Snap.peak``); of the box and its masks'
boxes, the one with the best fit remains:

    fit(b) = quality(b)^q x evidence_c(b)^e x (share of the photo's area)^a

where ``quality`` is the mask's estimated IoU times its stability, and a constant for the box itself. Scores and classes
stay as they are. MobileSAM was trained on SA-1B's masks, so results with it are highest apart from those of tags alone.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from tag2box import images
from tag2box.annotations import Detections, Photo
from tag2box.models.class_maps import ClassMaps, box_evidence
from tag2box.ops.boxes import areas, clip, nms
from tag2box.proposals import sam_boxes
from tag2box.training.class_evidence import photo_maps

_FLOOR = 1e-3  # quality and evidence are at least this, so that no factor is zero
_MASKS_OF_BOX, _MASKS_OF_POINT = 4, 3


@dataclass(frozen=True, kw_only=True)
class Snap:
    """Choice between a box and the boxes of masks at it.

    The constants were chosen on the training photos of one dataset of eight everyday classes; CorLoc there hardly
    depends on them.
    """

    quality: Annotated[float, Field(ge=0, le=10)] = 2.0
    """q, the exponent of a mask's quality."""
    evidence: Annotated[float, Field(ge=0, le=10)] = 0.5
    """e, the exponent of the class maps' evidence for a box."""
    area: Annotated[float, Field(ge=-10, le=10)] = 0.0
    """a, the exponent of the area share."""
    own_quality: Annotated[float, Field(ge=0, le=1)] = 0.5
    """The quality of the box itself, which has no mask: the higher, the more boxes stay."""
    max_boxes: Annotated[int, Field(ge=1, le=1000)] = 6
    """Boxes per class and photo that are snapped, highest scores first; the others are dropped."""
    peak: Literal["box", "photo"] = "box"
    """Where the peak of the class map is searched: in the box; ``photo`` also has the masks at the highest peak of the
    photo compete for the best box of the class, for maps that locate well what boxes are too large for (``cells``)."""
    long_side: Annotated[int, Field(ge=64, le=2048)] = 512
    """Long side to which photos are resized for MobileSAM."""

    def choose(
        self,
        boxes: Float[Tensor, "K M 4"],
        quality: Float[Tensor, "K M"],
        evidence: Float[Tensor, "K M"],
        shares: Float[Tensor, "K M"],
    ) -> Int[Tensor, " K"]:
        """The best of M candidates of each of K boxes; one without extent is never chosen, unless it is the first.

        >>> boxes, shares = torch.tensor([[[0, 0, 9, 9], [0, 0, 4, 4.0]]]), torch.tensor([[1.0, 0.2]])
        >>> Snap().choose(boxes, torch.tensor([[0.5, 0.9]]), torch.tensor([[0.2, 0.3]]), shares)
        tensor([1])
        """
        fit = self.quality * quality.clamp(min=_FLOOR).log() + self.evidence * evidence.clamp(min=_FLOOR).log()
        fit = fit + self.area * shares.clamp(min=_FLOOR**2).log()
        is_empty = (boxes[..., 2:] - boxes[..., :2] < 1).any(dim=2)
        is_empty[:, :1] = False
        return fit.masked_fill(is_empty, -torch.inf).argmax(dim=1)


@dataclass(frozen=True)
class SnapPhotos:
    """Snaps the detections of photos with class maps and MobileSAM.

    Example:
        snap = SnapPhotos(Snap(), detector.class_maps)
        detections = snap(photo, detections)
    """

    settings: Snap
    class_maps: ClassMaps
    nms_iou: float = 0.4  # of detections, before they are snapped: what is left may be an instance of its own

    def __call__(self, photo: Photo, found: Detections) -> Detections:
        """The highest detections of each class, snapped, in the order of their scores."""
        highest = found[highest_per_class(found, self.nms_iou, self.settings.max_boxes)]
        if not len(highest):
            return highest
        maps, size = photo_maps(self.class_maps, photo), (photo.width, photo.height)
        candidates, quality = self._candidates(photo, highest, maps)
        evidence = torch.stack(
            [
                box_evidence(maps[label][None], boxes, size)[:, 0]
                for label, boxes in zip(highest.labels.tolist(), candidates, strict=True)
            ]
        )
        shares = areas(candidates.flatten(0, 1)).view(quality.shape) / max(1, photo.width * photo.height)
        chosen = self.settings.choose(candidates, quality, evidence, shares)
        return Detections(candidates[torch.arange(len(chosen)), chosen], highest.scores, highest.labels)

    def _candidates(
        self, photo: Photo, highest: Detections, maps: Float[Tensor, "C h w"]
    ) -> tuple[Float[Tensor, "K M 4"], Float[Tensor, "K M"]]:
        """Each box, the boxes of its masks, and those of the masks at the peak of its class map; and their quality."""
        width, height = sam_boxes.long_side_size((photo.width, photo.height), self.settings.long_side)
        pixels = images.load_view(photo, images.View(min(width, height), long_max=max(width, height)))
        image = sam_boxes.EmbeddedImage.of(sam_boxes.mobile_sam_network(), pixels.round().clamp(0, 255).byte())
        scale = torch.tensor([image.width / photo.width, image.height / photo.height] * 2)
        points = peaks(maps[highest.labels], highest.boxes, (photo.width, photo.height))
        of_boxes, of_points = image.at_boxes(highest.boxes * scale), image.at_points(points * scale[:2])

        def in_photo(masks: sam_boxes.SnapBoxes, count: int) -> tuple[Tensor, Tensor]:
            boxes = clip(masks.boxes / scale, photo.width, photo.height)
            return boxes.view(-1, count, 4), masks.quality.view(-1, count)

        found = [in_photo(of_boxes, _MASKS_OF_BOX), in_photo(of_points, _MASKS_OF_POINT)]
        if self.settings.peak == "photo":
            photos = torch.tensor([0.0, 0.0, photo.width, photo.height]).expand(len(highest), 4)
            highest_points = peaks(maps[highest.labels], photos, (photo.width, photo.height))
            boxes, quality = in_photo(image.at_points(highest_points * scale[:2]), _MASKS_OF_POINT)
            found.append((boxes * first_of_each(highest.labels)[:, None, None], quality))  # others: without extent
        own = torch.full((len(highest), 1), self.settings.own_quality)
        candidates = torch.cat([highest.boxes[:, None], *(boxes for boxes, _ in found)], dim=1)
        return candidates, torch.cat([own, *(quality for _, quality in found)], dim=1)


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


def peaks(maps: Float[Tensor, "K h w"], boxes: Float[Tensor, "K 4"], size: tuple[float, float]) -> Float[Tensor, "K 2"]:
    """The centre (x, y) of the highest cell of each map among those with a centre in its box; else the box's centre.

    >>> peaks(torch.tensor([[[0.9, 0.1, 0.2, 0.5]]]), torch.tensor([[4.0, 0.0, 8.0, 2.0]]), (8, 2))
    tensor([[7., 1.]])
    """
    height, width = maps.shape[1:]
    x, y = (torch.arange(width) + 0.5) * size[0] / width, (torch.arange(height) + 0.5) * size[1] / height
    left, top, right, bottom = boxes.T[:, :, None, None]
    inside = (x >= left) & (x < right) & (y[:, None] >= top) & (y[:, None] < bottom)  # (K, h, w)
    best = maps.masked_fill(~inside, -torch.inf).flatten(1).argmax(dim=1)
    points = torch.stack([x[best % width], y[best // width]], dim=1)
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    return torch.where(inside.flatten(1).any(dim=1)[:, None], points, centres)
