"""A trained student at work: photos in, detections out. There are no proposals."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from tag2box import errors, images
from tag2box.annotations import Detections, Photo
from tag2box.inference.predict import Inference, OnPhoto, Select
from tag2box.models.class_maps import NO_PRIOR
from tag2box.ops.boxes import areas, class_nms, clip
from tag2box.progress import Progress, silent
from tag2box.student.network import StudentModule, decode_levels
from tag2box.training import batches
from tag2box.training.dist import SINGLE_PROCESS, DistContext

CANDIDATES = 200
"""Cells per class and view before NMS, so that every class of a photo has boxes, whatever their scores."""


@dataclass(frozen=True)
class StudentDetector:
    """A student's network, its classes and its views of photos.

    Example:
        found = StudentDetector(network, classes, inference).predict([pixels])  # uint8 (3, H, W)
    """

    network: nn.Module
    classes: tuple[str, ...]
    inference: Inference

    def __post_init__(self) -> None:
        if self.inference.prior != NO_PRIOR:
            raise errors.UserError(
                "inference.prior: a student has no proposals and no class maps; leave evidence and area at 0"
            )

    def predict(self, photos: Sequence[Photo | UInt8[Tensor, "3 H W"]]) -> list[Detections]:
        """Detections of any score in photos, files or decoded ones, in their own pixels."""
        found = []
        for photo in photos:
            if isinstance(photo, Photo):
                views, size = self._views(photo), (photo.height, photo.width)
            else:
                size, shown = (photo.shape[1], photo.shape[2]), photo.float()
                views = [(view, images.render_view(view, shown, size)) for view in self.inference.views()]
            if isinstance(views, errors.UserError):
                raise views
            found.append(self._merged(views, size))
        return found

    def detect(
        self,
        photos: Sequence[Photo],
        *,
        progress: Progress = silent,
        dist: DistContext = SINGLE_PROCESS,
        on_photo: OnPhoto | None = None,
        select: Select | None = None,
    ) -> dict[str, Detections]:
        """Detections by photo id, in the photo's own pixels; ``on_photo`` and ``select`` are those of ``run_detector``.

        Each rank detects on its shard of the photos; all ranks return all detections.
        """
        mine, found = dist.shard(len(photos)), {}
        with (
            progress("detecting", len(mine)) as bar,
            ThreadPoolExecutor(1, thread_name_prefix="tag2box-photos") as pool,
        ):
            for index, views in zip(mine, batches.prefetch(pool, lambda i: self._views(photos[i]), mine), strict=True):
                photo = photos[index]
                if isinstance(views, errors.UserError):
                    if on_photo is None:
                        raise views
                    on_photo(photo, views)
                else:
                    own = self._merged(views, (photo.height, photo.width))
                    own = own if select is None else select(photo, own)
                    if on_photo is None:
                        found[photo.id] = own
                    else:
                        on_photo(photo, own)
                bar.advance()
        return {name: own for share in dist.all_gather_object(found) for name, own in share.items()}

    def _views(self, photo: Photo) -> list[tuple[images.View, Float[Tensor, "3 h w"]]] | errors.UserError:
        views = self.inference.views()
        try:
            decoded = images.load_image(photo, views)
        except errors.UserError as error:
            return error
        return [(view, decoded.render(view)) for view in views]

    def _merged(self, views: Sequence[tuple[images.View, Float[Tensor, "3 h w"]]], size: tuple[int, int]) -> Detections:
        """NMS over the candidates of all views."""
        parts = [self._candidates(view, pixels, size) for view, pixels in views]
        how = self.inference.predict
        boxes, scores, labels = (torch.cat(column) for column in zip(*parts, strict=True))
        boxes = clip(boxes, size[1], size[0])
        is_kept = (scores > how.score_threshold) & (areas(boxes) > 0)
        boxes, scores, labels = boxes[is_kept], scores[is_kept], labels[is_kept]
        kept = class_nms(boxes, scores, labels, how.nms_iou)[: how.max_detections]
        return Detections(boxes[kept], scores[kept], labels[kept]).to(torch.device("cpu"))

    @torch.no_grad()
    def _candidates(
        self, view: images.View, pixels: Float[Tensor, "3 h w"], size: tuple[int, int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The best boxes of each class in a view, in the photo's own pixels, with scores and classes."""
        assert isinstance(self.network, StudentModule)
        device = self.network.backbone.device
        height, width = pixels.shape[1:]
        logits, boxes, _ = decode_levels(
            self.network.forward(padded(pixels, self.network)[None].to(device)), self.network.strides
        )
        scores, rows = logits[0].sigmoid().topk(min(CANDIDATES, logits.shape[1]), dim=0)  # (k, C)
        labels = torch.arange(len(self.classes), device=device).expand_as(rows).flatten()
        found = boxes[0][rows.flatten()]
        found = images.flip_boxes(found, width) if view.flip else found
        return found * found.new_tensor([size[1] / width, size[0] / height] * 2), scores.flatten(), labels


def padded(pixels: Float[Tensor, "3 h w"], network: StudentModule) -> Float[Tensor, "3 H W"]:
    """A picture with space of a neutral colour to the right and below, up to multiples of the coarsest stride."""
    multiple, (height, width) = network.strides[-1], pixels.shape[1:]
    room = (-(-height // multiple) * multiple, -(-width // multiple) * multiple)
    canvas = pixels.new_tensor(network.backbone.preprocess.neutral()).view(3, 1, 1).expand(3, *room).clone()
    canvas[:, :height, :width] = pixels
    return canvas
