"""MobileSAM as a source of candidate boxes: of a grid of points, and of given boxes ("snapping").

It only adds candidates. A mask often spoils a box that was right, so nothing is overwritten: scores of the detector
choose. MobileSAM was trained on SA-1B's masks, so results with these boxes are kept apart from those of tags alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int, UInt8
from pydantic import Field
from torch import Tensor

from tag2box import storage
from tag2box.annotations import Photo
from tag2box.errors import UserError
from tag2box.models.mobile_sam import MASK_STRIDE, STRIDE, MobileSam, Prompts, box_prompts, mobile_sam, point_prompts
from tag2box.ops.boxes import clip, iou, mask_boxes, nms
from tag2box.proposals import base
from tag2box.proposals.importers import match_ids, proposal_files
from tag2box.proposals.selective_search import OLD_ENGINE, SearchEngine, SelectiveSearch
from tag2box.proposals.store import ProposalStore

SA_1B = "SA-1B masks"
_ALL, _SEVERAL = slice(0, 4), slice(1, 4)  # masks of a prompt: all, or without the one for clear prompts
_BATCH_PIXELS = 64 * 512**2  # input pixels times prompts per pass: bounds the memory
_STABLE = 1.0  # logits: a mask is stable if it hardly changes between thresholds of -1 and 1
_SAME_PROMPT = 0.9  # IoU of two prompts of which one is enough
_NO_BOXES = np.zeros((0, 4), np.float32)


# ---------------------------------------------------------------- masks to boxes


@dataclass(frozen=True, slots=True)
class SnapBoxes:
    """Boxes of masks, in pixels of the image, and their quality in [0, 1]: estimated IoU times stability."""

    boxes: Float32[Tensor, "P 4"]
    quality: Float32[Tensor, " P"]
    masks: Bool[Tensor, "P h w"] | None = None  # in cells of MASK_STRIDE pixels

    def best(self, min_quality: float, nms_iou: float) -> "SnapBoxes":
        """Boxes of some quality, without near duplicates, best first."""
        good = (self.quality >= min_quality) & (self.boxes[:, 2:] > self.boxes[:, :2]).all(dim=1)
        boxes, quality = self.boxes[good], self.quality[good]
        kept = nms(boxes, quality, nms_iou)
        return SnapBoxes(boxes[kept], quality[kept])


@dataclass(frozen=True, slots=True)
class EmbeddedImage:
    """An image after MobileSAM's encoder, ready for any number of prompts."""

    network: MobileSam
    embedding: Float[Tensor, "1 D s s"]
    width: int
    height: int

    @classmethod
    def of(cls, network: MobileSam, image: UInt8[Tensor, "3 h w"]) -> "EmbeddedImage":
        """Encode an image, padded to a square."""
        side = -(-max(image.shape[1:]) // STRIDE) * STRIDE
        with torch.no_grad():
            return cls(network, network.embed(image.float(), side), image.shape[2], image.shape[1])

    def at_points(self, points: Float[Tensor, "N 2"]) -> SnapBoxes:
        """Boxes of the three masks at each point: whole, part, and part of a part."""
        return self._boxes(point_prompts(points), _SEVERAL)

    def at_boxes(self, boxes: Float[Tensor, "N 4"]) -> SnapBoxes:
        """Boxes of the four masks of each box."""
        return self._boxes(box_prompts(boxes), _ALL)

    def _boxes(self, prompts: Prompts, masks: slice) -> SnapBoxes:
        points, kinds = prompts
        batch = max(1, _BATCH_PIXELS // (STRIDE * self.embedding.shape[2]) ** 2)
        with torch.no_grad():
            found = [self._batch((part, kinds), masks) for part in points.split(batch)] if len(points) else []
        boxes = [torch.zeros(0, 4), *(each.boxes for each in found)]
        none = torch.zeros(0, *self.mask_size, dtype=torch.bool)
        masks_of = [none, *(each.masks for each in found if each.masks is not None)]
        quality = [torch.zeros(0), *(each.quality for each in found)]
        return SnapBoxes(torch.cat(boxes), torch.cat(quality), torch.cat(masks_of))

    @property
    def mask_size(self) -> tuple[int, int]:
        """Rows and columns of a mask."""
        return -(-self.height // MASK_STRIDE), -(-self.width // MASK_STRIDE)

    def _batch(self, prompts: Prompts, masks: slice) -> SnapBoxes:
        rows, columns = self.mask_size
        output = self.network.masks(self.embedding, *prompts)
        logits = output.logits[:, masks, :rows, :columns].flatten(0, 1)  # without the padding
        quality = output.ious[:, masks].flatten().clamp(0, 1) * stability(logits)
        limit = torch.tensor([self.width, self.height] * 2)
        return SnapBoxes(torch.minimum(MASK_STRIDE * mask_boxes(logits), limit), quality, logits > 0)


def stability(logits: Float[Tensor, "K h w"]) -> Float[Tensor, " K"]:
    """IoU of each mask with itself between a low and a high threshold; 0 for an empty one (Kirillov et al., 2023)."""
    small, large = ((logits > offset).flatten(1).sum(dim=1) for offset in (_STABLE, -_STABLE))
    return small / large.clamp(min=1)


def grid_points(width: int, height: int, count: int) -> Float32[Tensor, "N 2"]:
    """Points on a regular grid, ``count`` along the longer side of an image."""
    step = max(width, height) / count
    columns, rows = max(1, round(width / step)), max(1, round(height / step))
    x, y = (torch.arange(columns) + 0.5) * width / columns, (torch.arange(rows) + 0.5) * height / rows
    return torch.cartesian_prod(y, x).flip(1)


# ---------------------------------------------------------------- a grid of points, as a proposal method


@dataclass(frozen=True, kw_only=True)
class Sam(base.ProposalMethod):
    """Boxes of MobileSAM's masks on a grid of points, added to those of selective search. Masks' boxes are ranked.

    Zhang et al., "Faster Segment Anything: Towards Lightweight SAM for Mobile Applications", 2023,
    https://arxiv.org/abs/2306.14289
    """

    kind: Literal["sam"] = "sam"
    uses: ClassVar[str] = SA_1B
    unrecorded: ClassVar[Mapping[str, object]] = OLD_ENGINE
    long_side: Annotated[int, Field(ge=64, le=2048)] = 512
    """Long side to which photos are resized; the network was trained on 1024, which takes five times as long."""
    points: Annotated[int, Field(ge=1, le=64)] = 12
    """Points along the long side of a photo; each gives up to three boxes: whole, part, and part of a part."""
    min_quality: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Masks below this estimated IoU times stability are dropped."""
    nms_iou: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Of two masks' boxes with a higher IoU, the better one is kept."""
    selective_search: bool = True
    """Add the boxes to those of selective search, fast, on a copy with a short side of 200 pixels."""
    engine: SearchEngine = "tag2box"
    """Implementation of selective search: our own, or OpenCV's, which takes several times as long."""
    short_side: int | None = field(default=None, init=False)  # replaced by long_side

    def ready(self) -> None:
        """Raise a UserError unless the weights are stored."""
        mobile_sam_network()

    def working_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Width and height at which a photo of this width and height is searched."""
        return long_side_size(size, self.long_side)

    def search(self, bgr: UInt8[np.ndarray, "h w 3"], min_side: float) -> base.FoundBoxes:
        """Find the boxes of masks, with their quality, and those of selective search, with zeros."""
        image = torch.from_numpy(np.ascontiguousarray(bgr[..., ::-1])).permute(2, 0, 1)
        embedded = EmbeddedImage.of(mobile_sam_network(), image)
        found = embedded.at_points(grid_points(embedded.width, embedded.height, self.points))
        found = found.best(self.min_quality, self.nms_iou)
        boxes, scores = [found.boxes], [found.quality]
        if self.selective_search:
            smallest = math.floor(min_side)
            search = SelectiveSearch(short_side=200, max_boxes=None, min_side=smallest, engine=self.engine)
            regions = search(image)
            boxes, scores = [*boxes, regions.boxes], [*scores, regions.scores]
        return base.FoundBoxes(torch.cat(boxes).double().numpy(), torch.cat(scores).double().numpy())

    def order(self, boxes: Float32[np.ndarray, "n 4"], scores: Float32[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """Masks' boxes first, best first; then the others, shuffled as those of selective search."""
        shuffled = np.random.default_rng(0).permutation(len(boxes))
        return shuffled[np.argsort(-scores[shuffled], kind="stable")]


def long_side_size(size: tuple[int, int], long_side: int) -> tuple[int, int]:
    """Width and height of a photo resized to a long side."""
    scale = long_side / max(size)
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


@lru_cache(maxsize=1)
def mobile_sam_network() -> MobileSam:
    """MobileSAM with its published weights, loaded once; raises a UserError unless they are stored."""
    return mobile_sam()


# ---------------------------------------------------------------- snapping


@dataclass(frozen=True, kw_only=True)
class Snapping:
    """How boxes are snapped: each is a prompt itself, and so is its centre."""

    long_side: int = 512
    max_prompts: int = 20  # per photo, highest scores first
    min_quality: float = 0.0
    nms_iou: float = 0.9

    def __call__(self, embedded: EmbeddedImage, boxes: Float[Tensor, "N 4"]) -> SnapBoxes:
        """Candidates for boxes in pixels of the embedded image, best first."""
        centres = (boxes[:, :2] + boxes[:, 2:]) / 2
        both = embedded.at_boxes(boxes), embedded.at_points(centres)
        found = SnapBoxes(torch.cat([each.boxes for each in both]), torch.cat([each.quality for each in both]))
        return found.best(self.min_quality, self.nms_iou)


@dataclass(frozen=True, slots=True)
class PromptFile:
    """Boxes to snap, by photo id, best first, in pixels of the photo; and the file that they are from."""

    name: str
    sha256: str
    boxes: Mapping[str, Float32[np.ndarray, "n 4"]]

    def of(self, photo_id: str, size: tuple[int, int], count: int) -> Float32[Tensor, "n 4"]:
        """The first boxes of a photo that have an extent inside it, without repetitions."""
        boxes = clip(torch.from_numpy(self.boxes.get(photo_id, _NO_BOXES).copy()), *size)
        boxes = boxes[(boxes[:, 2:] - boxes[:, :2] >= 1).all(dim=1)]
        return boxes[nms(boxes, -torch.arange(len(boxes)).float(), _SAME_PROMPT)][:count]


def read_prompts(path: Path, photos: Sequence[Photo]) -> PromptFile:
    """Boxes of a COCO file, or of a list of COCO results, for the photos that it names."""
    found = proposal_files.open_coco_proposals(path)
    matching = match_ids.match_ids(path, found.ids, photos)
    if not matching.matched:
        raise UserError(f"{path}: none of its {len(found.ids):,} images is one of the photos; name a file of these")
    boxes = {}
    for photo, place in zip(photos, matching.places, strict=True):
        if place is not None:
            rows = found.read(place)
            order = np.arange(len(rows)) if rows.scores is None else np.argsort(-rows.scores, kind="stable")
            corners = rows.boxes[order].astype(np.float32)
            corners[:, 2:] += corners[:, :2]
            boxes[photo.id] = corners
    return PromptFile(path.name, storage.file_digest(path), boxes)


@dataclass(frozen=True, kw_only=True)
class Snapped(base.ProposalMethod):
    """Proposals of a store, or of a search, and the boxes snapped from prompts. The former stay as they are."""

    kind: str = base.SNAPPED
    uses: ClassVar[str] = SA_1B
    proposals: ProposalStore | base.ProposalMethod
    prompts: PromptFile
    snapping: Snapping = Snapping()

    def ready(self) -> None:
        """Raise a UserError unless the weights are stored."""
        mobile_sam_network()
        if isinstance(self.proposals, base.ProposalMethod):
            self.proposals.ready()

    def source(self) -> dict[str, object]:
        """The source of the proposals, the file of the prompts, and how they were snapped."""
        inner = self.proposals.source if isinstance(self.proposals, ProposalStore) else self.proposals.source()
        return {
            "kind": self.kind,
            "proposals": inner,
            "boxes": f"{self.prompts.name} sha256:{self.prompts.sha256}",
            **asdict(self.snapping),
            "min_side": self.min_side,
            "uses": self.uses,
        }

    def working_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """Width and height at which both the search and MobileSAM find enough pixels."""
        own = long_side_size(size, self.snapping.long_side)
        if isinstance(self.proposals, ProposalStore):
            return own
        return max(own, self.proposals.working_size(size))

    def propose(
        self, photo_id: str, image: UInt8[Tensor, "3 H W"], size: tuple[int, int] | None = None
    ) -> base.Candidates:
        """The proposals of a photo, then the candidates that none of them nearly equals."""
        size = size or (image.shape[2], image.shape[1])
        known = self.proposals
        found = known.candidates(photo_id) if isinstance(known, ProposalStore) else known(image, size)
        prompts = self.prompts.of(photo_id, size, self.snapping.max_prompts)
        if not len(prompts):
            return found
        width, height = long_side_size(size, self.snapping.long_side)
        scale = torch.tensor([width / size[0], height / size[1]] * 2)
        embedded = EmbeddedImage.of(mobile_sam_network(), base.resized_image(image, width, height))
        snapped = self.snapping(embedded, prompts * scale)
        boxes = clip(snapped.boxes / scale, *size)
        is_big = (boxes[:, 2:] - boxes[:, :2] >= max(self.min_side, 1e-3)).all(dim=1)
        is_new = is_big & ~(iou(boxes, found.boxes) > self.snapping.nms_iou).any(dim=1)
        # Without ranks in the proposals, none are invented for the others: scores stay comparable.
        quality = snapped.quality[is_new] * bool(found.scores.any())
        return base.Candidates(torch.cat([found.boxes, boxes[is_new]]), torch.cat([found.scores, quality]))
