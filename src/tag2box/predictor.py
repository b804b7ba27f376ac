"""``tag2box.load``: a trained run as an object that stays in memory; images in, boxes out.

model = tag2box.load("runs/mine")
found = model("photo.jpg")
print(found.boxes, found.scores, found.names)
found.min_score(0.5).plot().save("drawn.jpg")
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, overload

import numpy as np
import torch
from jaxtyping import Float32, Int64, UInt8
from numpy import ndarray
from PIL import Image

from tag2box import hub, images, runs
from tag2box.annotations import Detections, Photo
from tag2box.errors import UserError, printable
from tag2box.formats import coco_boxes
from tag2box.proposals import build, store
from tag2box.proposals.base import Candidates

ImageLike = str | os.PathLike[str] | Image.Image | ndarray | torch.Tensor
"""A file, a PIL image, an array (H, W, 3), (H, W, 4) or (H, W), or a tensor (3, H, W): RGB, bytes or 0.0 to 1.0."""
ImageList = list[Any] | tuple[Any, ...]
"""Several of these."""

_CHANNELS = (1, 3, 4)  # grey, RGB, RGBA
_SHOWN_CLASSES = 8


def load(run: str | os.PathLike[str]) -> Predictor:
    """Load a trained run; its weights are read once, and stay in memory with the object.

    ``owner/name`` is a model of the Hugging Face Hub if no such folder is here, nor the one above it.

    Example:
        model = tag2box.load("runs/mine")
        found = model("photo.jpg")
        print(found.boxes, found.scores, found.names)
    """
    folder = hub.download(str(run)) if hub.is_repository(os.fspath(run)) else Path(run)
    return Predictor(folder, _detector_of(folder))


def _detector_of(folder: Path) -> ImageDetector:
    opened = runs.open_run(folder)
    return RunDetector.of(opened) if isinstance(opened, runs.TrainedRun) else opened


# ---------------------------------------------------------------- detectors by kind of run


class ImageDetector(Protocol):
    """What ``load`` finds in a folder: the classes, and the detections in photos.

    A photo is a file or, as ``images.LoadedPhoto``, pixels; ``images.load_view`` and ``images.load_image`` decode both.
    """

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names, indexed by the labels of detections."""
        ...

    def predict(self, photos: Sequence[Photo], /) -> list[Detections]:
        """All detections of each photo, of any score, in its own pixels."""
        ...


@dataclass(frozen=True)
class RunDetector:
    """A run of ``tag2box train``: proposals by its own method, then its network."""

    trained: runs.TrainedRun

    @classmethod
    def of(cls, trained: runs.TrainedRun) -> RunDetector:
        """The detector of a run, if its proposals can be made here."""
        trained.config.proposals.ready()
        return cls(trained)

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names of the run."""
        return self.trained.classes

    def predict(self, photos: Sequence[Photo], /) -> list[Detections]:
        """All detections of each photo, one photo after another."""
        return [self.trained.detect([photo], self._proposals(photo))[photo.id] for photo in photos]

    def _proposals(self, photo: Photo) -> _Proposals:
        method, size = self.trained.config.proposals, (photo.width, photo.height)
        if not isinstance(photo, images.LoadedPhoto):
            found = build.search_photo(method, images.read_photo, photo)
            candidates = found.candidates()
            if candidates is None:
                raise UserError(found.problem)
            return _Proposals(candidates)
        factor = images.reduction(size, working) if (working := method.working_size(size)) != size else 1
        candidates = method.propose(photo.id, photo.reduced(factor), size)
        store.check_candidates(f"{photo.path}: photo {photo.id}", size, candidates)
        return _Proposals(candidates)


@dataclass(frozen=True, slots=True)
class _Proposals:
    """The proposals of the only photo."""

    candidates: Candidates

    def boxes(self, photo_id: str, /) -> Float32[torch.Tensor, "P 4"]:
        """Its boxes."""
        return self.candidates.boxes

    def scores(self, photo_id: str, /) -> Float32[torch.Tensor, " P"]:
        """Their scores."""
        return self.candidates.scores


# ---------------------------------------------------------------- a model in memory


@dataclass(frozen=True, repr=False)
class Predictor:
    """A trained model in memory: ``model(image)`` is a ``Prediction``, ``model([image, image])`` a list of them."""

    folder: Path
    detector: ImageDetector

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names, indexed by labels."""
        return self.detector.classes

    @property
    def names(self) -> dict[int, str]:
        """Class names by label."""
        return dict(enumerate(self.classes))

    @overload
    def __call__(self, image: ImageLike, *, min_score: float = 0.3) -> Prediction: ...

    @overload
    def __call__(self, image: ImageList, *, min_score: float = 0.3) -> list[Prediction]: ...

    def __call__(self, image: ImageLike | ImageList, *, min_score: float = 0.3) -> Prediction | list[Prediction]:
        """Detect objects in an image or in a list of images; keeps scores of at least ``min_score``.

        A file gives the boxes of ``tag2box detect``. Pixels are taken as they are: the EXIF rotation of a PIL image is
        not applied, and OpenCV's BGR needs ``frame[..., ::-1]``.
        """
        if not 0 <= min_score <= 1:
            raise UserError(f"min_score {min_score:g}: expected a number from 0 to 1, such as 0.3")
        photos = [as_photo(one) for one in (image if isinstance(image, list | tuple) else [image])]
        found = self.detector.predict(photos)
        made = [
            Prediction(one[one.scores >= min_score], self.classes, photo)
            for one, photo in zip(found, photos, strict=True)
        ]
        return made if isinstance(image, list | tuple) else made[0]

    def __repr__(self) -> str:
        shown = ", ".join(printable(name, 40) for name in self.classes[:_SHOWN_CLASSES])
        more = ", ..." if len(self.classes) > _SHOWN_CLASSES else ""
        return f"Predictor({str(self.folder)!r}, {len(self.classes)} classes: {shown}{more})"


class PredictedBox(NamedTuple):
    """One box of a prediction."""

    box: tuple[float, float, float, float]
    """Left, top, right, bottom in pixels."""
    score: float
    label: int
    name: str


@dataclass(frozen=True, repr=False, eq=False)
class Prediction:
    """The objects found in an image, the highest score first; ``detections`` are the same as tensors.

    ``len(found)`` is the number of boxes, ``for box in found`` gives each as a ``PredictedBox``, and
    ``found[found.scores > 0.8]`` a prediction of some of them.
    """

    detections: Detections
    classes: tuple[str, ...]
    photo: Photo

    @property
    def boxes(self) -> Float32[ndarray, "B 4"]:
        """Left, top, right, bottom in pixels of the image; right and bottom are exclusive."""
        return self.detections.boxes.numpy()

    @property
    def scores(self) -> Float32[ndarray, " B"]:
        """Scores from 0 to 1."""
        return self.detections.scores.numpy()

    @property
    def labels(self) -> Int64[ndarray, " B"]:
        """The class of each box, an index of ``classes``."""
        return self.detections.labels.numpy()

    @property
    def names(self) -> list[str]:
        """The class name of each box."""
        return [self.classes[label] for label in self.detections.labels.tolist()]

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the image."""
        return self.photo.width, self.photo.height

    def min_score(self, score: float) -> Prediction:
        """The boxes with a score of at least ``score``."""
        return self[self.scores >= score]

    def only(self, *names: str) -> Prediction:
        """The boxes of some classes; raises if the model has no class of such a name."""
        unknown = next((name for name in names if name not in self.classes), None)
        if unknown is not None:
            raise UserError(f"class {unknown!r}: unknown; the classes are {', '.join(self.classes[:_SHOWN_CLASSES])}")
        return self[np.array([name in names for name in self.names], dtype=bool)]

    def plot(self) -> Image.Image:
        """The image with its boxes drawn; at most 4096 pixels long. A file is read again."""
        from tag2box.reporting.gallery import draw_photo  # imports everything that pages need

        return draw_photo(self.photo, self.detections, self.classes)

    def to_supervision(self) -> Any:
        """``supervision.Detections`` with class names; ``pip install tag2box[supervision]``."""
        return self.detections.to_supervision(self.classes)

    def to_coco(self, image_id: int = 1) -> list[dict[str, Any]]:
        """Entries of a COCO results file; categories are numbered from 1, as ``tag2box detect`` does."""
        categories = {name: number for number, name in enumerate(self.classes, start=1)}
        entries = coco_boxes.coco_entries(self.detections, self.classes, categories)
        return [{"image_id": image_id, "file_name": self.photo.path.name, **entry} for entry in entries]

    def __len__(self) -> int:
        return len(self.detections)

    def __iter__(self) -> Iterator[PredictedBox]:
        found = self.detections
        for (x1, y1, x2, y2), score, label in zip(
            found.boxes.tolist(), found.scores.tolist(), found.labels.tolist(), strict=True
        ):
            yield PredictedBox((x1, y1, x2, y2), score, label, self.classes[label])

    @overload
    def __getitem__(self, index: int) -> PredictedBox: ...

    @overload
    def __getitem__(self, index: slice | ndarray | torch.Tensor) -> Prediction: ...

    def __getitem__(self, index: int | slice | ndarray | torch.Tensor) -> PredictedBox | Prediction:
        """A box by number, or the boxes of a slice, a mask or indices as a prediction."""
        if isinstance(index, int | np.integer):
            return list(self)[index]
        wanted = torch.from_numpy(np.ascontiguousarray(index)) if isinstance(index, ndarray) else index
        rows = torch.arange(len(self))[wanted]
        return replace(self, detections=self.detections[rows])

    def __repr__(self) -> str:
        counts = [f"{count} {printable(name, 40)}" for name, count in Counter(self.names).most_common(_SHOWN_CLASSES)]
        best = f": {', '.join(counts)}; best score {self.scores.max():.2f}" if len(self) else ""
        place = f"{printable(self.photo.path.name, 80)}, {self.photo.width}x{self.photo.height}"
        return f"Prediction({place}, {len(self)} box{'' if len(self) == 1 else 'es'}{best})"


# ---------------------------------------------------------------- images of all kinds


def as_photo(image: ImageLike) -> Photo:
    """A file, or pixels of any kind, as a photo to detect in."""
    if isinstance(image, str | os.PathLike):
        path = Path(image)
        if path.is_dir():
            raise UserError(f"{path}: is a folder; give a list of photos, or call tag2box.detect")
        return Photo(path.stem, path, *images.photo_size(path))
    pixels = to_pixels(image)
    name = str(getattr(image, "filename", "")) or "image"  # of a PIL image that was opened from a file
    return images.LoadedPhoto(Path(name).stem, Path(name), pixels.shape[2], pixels.shape[1], pixels=pixels)


def to_pixels(image: Image.Image | ndarray | torch.Tensor) -> UInt8[torch.Tensor, "3 H W"]:
    """Pixels of any kind as RGB bytes; transparent ones show white."""
    if isinstance(image, Image.Image):
        picture = image
    elif isinstance(image, torch.Tensor):
        channels_last = image.detach().cpu().permute(1, 2, 0) if image.ndim == 3 else image.detach().cpu()
        picture = _picture(channels_last.numpy(), "a tensor", "(3, H, W)", tuple(image.shape))
    elif isinstance(image, ndarray):
        picture = _picture(image, "an array", "(H, W, 3)", image.shape)
    else:
        raise UserError(
            f"{type(image).__name__}: no image; expected a path, a PIL image, an array (H, W, 3), a tensor (3, H, W), "
            "or a list of these"
        )
    if 0 in picture.size:
        raise UserError(f"the image has {picture.size[0]}x{picture.size[1]} pixels; expected at least one")
    return torch.from_numpy(np.asarray(images.to_rgb(picture)).transpose(2, 0, 1).copy())


def _picture(array: ndarray, what: str, expected: str, shape: tuple[int, ...]) -> Image.Image:
    """A PIL image of grey values, or of pixels with their channels last."""
    if array.ndim not in {2, 3} or (array.ndim == 3 and array.shape[2] not in _CHANNELS):
        hint = "; several images are a list" if array.ndim == 4 else ""
        raise UserError(f"{what} of shape {shape}: expected {expected}, grey or with alpha{hint}")
    if array.dtype.kind == "f":
        if array.size and not (array.min() >= 0 and array.max() <= 1):  # also true of NaN
            raise UserError(
                f"{what} of {array.dtype} has values outside 0 to 1; expected these, or bytes from 0 to 255"
            )
        array = (array * 255).round().astype(np.uint8)
    is_deep_grey = array.dtype == np.uint16 and array.ndim == 2
    if array.dtype != np.uint8 and not is_deep_grey:
        raise UserError(f"{what} of {array.dtype}: expected bytes (uint8) from 0 to 255, or floats from 0 to 1")
    return Image.fromarray(np.ascontiguousarray(array[..., 0] if array.shape[2:] == (1,) else array))
