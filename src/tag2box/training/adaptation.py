"""Adaptation: before the detector is trained, the backbone learns the tags as a multi-label image classifier.

Minutes on a CPU. All layers are trained, on random crops; or, for small things, a classifier of single cells of the
frozen network alone (``CellMaps``), on features that are computed once. Afterwards the detector starts from these
weights, and the classifier's ``ClassMaps`` say where the evidence for a tag is. What is learned is cached in the folder
of the feature cache, under a digest of everything it depends on, so runs that differ in other settings share it. A
checkpoint is written after every epoch: an interrupted adaptation continues, with the weights of an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from tag2box import errors, images, io, storage
from tag2box.annotations import TaggedPhotos
from tag2box.methods.c_midn import cell_seeds, seed_loss, segment_labels
from tag2box.models.backbone import Backbone
from tag2box.models.class_maps import CELL_SHARPNESS, CellMaps, ClassMaps, pooled_logits
from tag2box.models.runtime import autocast
from tag2box.models.weights.state_dict import load_into
from tag2box.progress import Bar, Progress, silent
from tag2box.training import batches, checkpoint, optim
from tag2box.training.class_evidence import photo_logits, photo_pixels, random_crop
from tag2box.training.feature_cache import photos_digest, weights_digest
from tag2box.training.proposal_cache import LabelMapCache, build_label_maps, cache_place

_FOLDER = "adapted"
_MODEL, _OPTIMIZER = "model.safetensors", "optimizer.safetensors"
_REMEDY = "remove the folder; adaptation is run again"
_MARGIN = 1.15  # photos are read this much larger than crops
_DROPOUT = 0.2
_CLASSIFIER_LR = 5.0  # relative to that of the backbone
_MAX_NORM = 5.0  # of gradients
_CELL_LR, _CELL_WEIGHT_DECAY = 10.0, 1e-3  # of the classifier of cells; the first relative to ``Adaptation.lr``
_CELL_PHOTOS, _CELL_BYTES = 4000, 3e9  # that the classifier of cells is trained on at most: they are kept in memory


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """Fine-tuning of the backbone on the tags, as an image classifier, before the detector is trained."""

    epochs: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Epochs through the photos; 0 disables adaptation, and with it class maps."""
    part: Literal["backbone", "cells"] = "backbone"
    """What learns: the whole backbone, or, for small or faint things, a classifier of cells of the frozen backbone."""
    side: images.Side = 256
    """Side of the square crops, in pixels; of ``cells``, the short side of the photos."""
    batch_size: Annotated[int, Field(ge=1, le=4096)] = 16
    lr: Annotated[float, Field(gt=0, le=10)] = 2e-4
    """Learning rate of AdamW, with a short warm-up and cosine decay."""
    weight_decay: Annotated[float, Field(ge=0, le=10)] = 0.05
    min_crop: Annotated[float, Field(gt=0, le=1)] = 0.4
    """Smallest share of a photo's area that a random crop shows."""
    frozen_stages: Annotated[int, Field(ge=0, le=100)] = 0
    """Stages of the backbone, from the stem on, that keep their pretrained weights (never the last): they cost most."""
    keep_boxes: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Proposals per photo that the detector sees: those with most evidence for any class, and a quarter of others."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Seed of adaptation alone; default: ``plan.seed``. Runs of several seeds with the same one share features."""


def build_class_maps(backbone: Backbone, num_classes: int, settings: Adaptation) -> ClassMaps:
    """The network that learns the tags."""
    kind = CellMaps if settings.part == "cells" else ClassMaps
    return kind(backbone, num_classes, settings.side)


def adapt(
    class_maps: ClassMaps,
    photos: TaggedPhotos,
    settings: Adaptation,
    *,
    folder: Path,
    seed: int,
    progress: Progress = silent,
) -> None:
    """Train the classifier on the tags, or load what was learned before; continues after an interruption.

    Args:
        folder: of the cache.
        seed: of crops, order and dropout.
    """
    place = folder / f"{_FOLDER}-{_key(class_maps, photos, settings, seed, folder)[:24]}"
    _run(_training(class_maps, photos, settings, seed), place, "adaptation", progress)


def _run(training: _Training, place: Path, title: str, progress: Progress) -> None:
    """All epochs of a training that are not in its folder yet."""
    with storage.writing(place), io.wait_for_lock(place.with_suffix(".lock"), lambda: progress(title, 1)):
        io.sweep(place)
        epochs, done = training.settings.epochs, training.restore(place)
        with progress(title, epochs * training.steps, done * training.steps) as bar:
            for epoch in range(done, epochs):
                training.run_epoch(epoch, bar)
                training.save(place, epoch + 1)
    training.net.requires_grad_(False).eval()


# ---------------------------------------------------------------- segmentation


@dataclass(frozen=True, kw_only=True)
class Segmentation:
    """Segmentation branch of C-MIDN, trained from tags before the detector: class maps of cells, then their seeds.

    Used only if the criterion requires it (``guide = "segmentation"``). It reads cells of the pretrained backbone, or
    of the adapted one.
    """

    side: images.Side = 320
    """Short side of the photos, in pixels."""
    map_epochs: Annotated[int, Field(ge=1, le=10_000)] = 16
    """Epochs of the class maps, which learn the tags."""
    epochs: Annotated[int, Field(ge=1, le=10_000)] = 8
    """Epochs of the segmentation, which learns the seeds."""
    batch_size: Annotated[int, Field(ge=1, le=4096)] = 16
    lr: Annotated[float, Field(gt=0, le=1)] = 2e-4
    """Learning rate, as of ``adaptation`` with ``part = "cells"``."""
    foreground: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Cells with at least this share of the peak of a tag's class map are seeds of its class."""
    background: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Cells below this share of the peaks of all tags are seeds of background."""


def build_segments(
    backbone: Backbone,
    photos: TaggedPhotos,
    settings: Segmentation,
    *,
    folder: Path,
    seed: int,
    progress: Progress = silent,
) -> LabelMapCache:
    """The segmentation of photos into their tags and background, cached; trained from the tags if it is missing."""
    learned = Adaptation(part="cells", side=settings.side, batch_size=settings.batch_size, lr=settings.lr)
    with torch.random.fork_rng([]):  # of initial weights
        torch.manual_seed(seed)
        maps, segmenter = (CellMaps(backbone, len(photos.classes) + more, settings.side) for more in (0, 1))
    maps, segmenter = maps.to(backbone.device), segmenter.to(backbone.device)
    key = hashlib.sha256(f"{_key(maps, photos, learned, seed, folder)} {settings}".encode()).hexdigest()

    def results() -> Generator[tuple[str, Int[np.ndarray, "h w"]], None, None]:
        adapt(maps, photos, replace(learned, epochs=settings.map_epochs), folder=folder, seed=seed, progress=progress)
        own = replace(learned, epochs=settings.epochs)
        training = _SeedTraining(_Seeds(maps, settings), segmenter, photos, own, seed)
        _run(training, folder / f"{_FOLDER}-{key[:24]}", "segmentation", progress)
        for photo, tags in zip(photos.photos, photos.tags, strict=True):
            yield photo.id, segment_labels(photo_logits(segmenter, photo), tags).numpy()

    path = cache_place(folder, f"segments {key}", photos.photos)
    return build_label_maps(path, len(photos), results, title="segments", progress=progress)


class _Training:
    """Batches, optimizer and checkpoints of an adaptation."""

    def __init__(self, class_maps: ClassMaps, photos: TaggedPhotos, settings: Adaptation, seed: int) -> None:
        self.net, self.photos, self.settings, self.seed = class_maps, photos, settings, seed
        self.steps = math.ceil(len(photos) / settings.batch_size)
        self.device = class_maps.backbone.device
        self.optimizer = self._optimizer()

    def _optimizer(self) -> torch.optim.Optimizer:
        self.net.requires_grad_(False).train()
        backbone, fixed = self.net.backbone, self.settings.frozen_stages
        stages = backbone.pyramid_modules()[:-1][:fixed] if fixed else ()
        frozen = {p for stage in stages for p in stage.parameters()}
        trained = [p for module in backbone.photo_modules() for p in module.parameters() if p not in frozen]
        for p in trained:
            p.requires_grad_(True)
        self.net.classifier.requires_grad_(True)
        groups = [
            {"params": trained, "scale": 1.0},
            {"params": list(self.net.classifier.parameters()), "scale": _CLASSIFIER_LR},
        ]
        return torch.optim.AdamW(groups, lr=self.settings.lr, weight_decay=self.settings.weight_decay)

    def run_epoch(self, epoch: int, bar: Bar) -> None:
        """One pass over all photos; raises if the loss is not finite."""
        parts = self._parts(epoch)
        with ThreadPoolExecutor(1, thread_name_prefix="tag2box-crops") as pool:
            crops = batches.prefetch(pool, lambda part: self._crops(epoch, part), parts)
            for number, (part, pixels) in enumerate(zip(parts, crops, strict=True)):
                step = epoch * self.steps + number
                self._take_step(self._loss(pixels.to(self.device), list(part), step), step, bar)

    def _parts(self, epoch: int) -> list[tuple[int, ...]]:
        """The batches of an epoch."""
        order, size = batches.epoch_order(len(self.photos), self.seed, epoch), self.settings.batch_size
        return [tuple(order[first : first + size]) for first in range(0, len(order), size)]

    def _take_step(self, loss: Float[Tensor, ""], step: int, bar: Bar) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = clip_grad_norm_([p for p in self.net.parameters() if p.requires_grad], _MAX_NORM)
        if not (loss.isfinite() and norm.isfinite()):
            epoch = step // self.steps + 1
            raise errors.UserError(
                f"adaptation diverged in epoch {epoch}: the loss is {loss.item()}; lower adaptation.lr"
            )
        optim.set_lr(self.optimizer, self.settings.lr * lr_factor(step, self.settings.epochs * self.steps))
        self.optimizer.step()
        bar.advance(f"loss {loss.item():.3f}")

    def _generator(self, step: int) -> torch.Generator:
        return torch.Generator().manual_seed(int(np.random.default_rng([self.seed, step]).integers(2**62)))

    def _loss(self, pixels: Float[Tensor, "n 3 s s"], part: list[int], step: int) -> Float[Tensor, ""]:
        """The loss of random crops, some channels of whose features are dropped."""
        channels = self.net.backbone.photo_channels
        kept = torch.rand(len(part), channels, generator=self._generator(step)) >= _DROPOUT
        with self._autocast():
            logits = self.net(pixels, kept.to(pixels) / (1 - _DROPOUT))
        return self._tag_loss(logits, part)

    def _autocast(self) -> AbstractContextManager[object]:
        """The precision of training; fp16 would need scaled gradients, so adaptation then runs in fp32."""
        precision = self.net.backbone.runtime.precision
        return autocast(self.device, "fp32" if precision == "fp16" else precision)

    def _tag_loss(self, logits: Float[Tensor, "n C"], part: list[int]) -> Float[Tensor, ""]:
        """Binary cross-entropy, summed over the classes that are not unsure, mean over photos."""
        target = self.photos.tags[part].to(logits)
        entropy = functional.binary_cross_entropy_with_logits(logits, target, reduction="none")
        if self.photos.unsure is not None:
            entropy = entropy.masked_fill(self.photos.unsure[part].to(entropy.device), 0)
        return entropy.sum(dim=1).mean()

    def _crops(self, epoch: int, part: tuple[int, ...]) -> Float[Tensor, "n 3 s s"]:
        view = images.View(round(_MARGIN * self.settings.side), long_max=round(2 * _MARGIN * self.settings.side))
        crops = []
        for index in part:
            photo = images.load_view(self.photos.photos[index], view)
            rng = np.random.default_rng([self.seed, epoch, index])
            crops.append(random_crop(photo, self.settings.side, self.settings.min_crop, rng))
        return torch.stack(crops)

    def save(self, place: Path, epoch: int) -> None:
        """Write the checkpoint of an epoch, then remove that of the one before; the last has no optimizer."""
        model = {name: value.contiguous() for name, value in self.net.state_dict().items()}
        if (bad := checkpoint.non_finite(model)) is not None:
            raise errors.UserError(f"adaptation diverged: {bad} is not finite; lower adaptation.lr")
        folder = place / _epoch_name(epoch)
        shutil.rmtree(folder, ignore_errors=True)
        with io.replacing_folder(folder) as temporary:
            save_file(model, temporary / _MODEL)
            if epoch < self.settings.epochs:
                save_file(checkpoint.optimizer_tensors(self.optimizer), temporary / _OPTIMIZER)
            storage.write_manifest(temporary)
        for older in place.glob("epoch-*"):
            if older != folder:
                shutil.rmtree(older, ignore_errors=True)

    def restore(self, place: Path) -> int:
        """Load the newest checkpoint; returns the epochs done."""
        for epoch in range(self.settings.epochs, 0, -1):
            folder = place / _epoch_name(epoch)
            if folder.is_dir():
                storage.verify_folder(folder, _REMEDY)
                load_into(self.net, checkpoint.read_tensors(folder / _MODEL), str(folder / _MODEL))
                if epoch < self.settings.epochs:
                    checkpoint.restore_optimizer(folder / _OPTIMIZER, self.optimizer)
                return epoch
        return 0


class _CellTraining(_Training):
    """Training of a classifier of cells, on features of whole photos in half precision."""

    def __init__(self, cell_maps: CellMaps, photos: TaggedPhotos, settings: Adaptation, seed: int) -> None:
        every = -(-len(photos) // _max_photos(cell_maps))
        super().__init__(cell_maps, photos.part([at % every == 0 for at in range(len(photos))]), settings, seed)
        self.cell_maps = cell_maps
        self.cells: list[Float[Tensor, "1 F h w"]] = []

    def _optimizer(self) -> torch.optim.Optimizer:
        self.net.requires_grad_(False).eval()
        self.net.classifier.requires_grad_(True)
        groups = [{"params": list(self.net.classifier.parameters()), "scale": _CELL_LR}]
        return torch.optim.AdamW(groups, lr=self.settings.lr, weight_decay=_CELL_WEIGHT_DECAY)

    def run_epoch(self, epoch: int, bar: Bar) -> None:
        """One pass over all photos; the first call computes the features, and standardizes them unless that is done."""
        if not self.cells:
            with self.net.backbone.frozen():
                pixels = (photo_pixels(self.net, photo).to(self.device) for photo in self.photos.photos)
                self.cells = [self.cell_maps.cells(one).half().cpu() for one in pixels]
            if not epoch:
                self.cell_maps.standardize(_some_cells(self.cells).to(self.device))
        for number, part in enumerate(self._parts(epoch)):
            step = epoch * self.steps + number
            with torch.random.fork_rng([]):  # of dropout
                torch.manual_seed(self._generator(step).initial_seed())
                self.net.classifier.train()
                logits = [self.cell_maps.cell_logits(self.cells[at].to(self.device).float()) for at in part]
            self._take_step(self._cell_loss(logits, part), step, bar)

    def _cell_loss(self, logits: list[Float[Tensor, "1 C h w"]], part: tuple[int, ...]) -> Float[Tensor, ""]:
        pooled = torch.cat([pooled_logits(one, CELL_SHARPNESS) for one in logits])
        return self._tag_loss(pooled, list(part))


@dataclass(frozen=True)
class _Seeds:
    """Seeds of photos from their features of cells."""

    maps: CellMaps
    settings: Segmentation

    def __call__(self, cells: Float[Tensor, "1 F h w"], tags: Bool[Tensor, " C"]) -> Int[Tensor, "h w"]:
        shares = self.settings.foreground, self.settings.background
        with torch.no_grad():
            maps = self.maps.cell_logits(cells)[0].sigmoid()
        return cell_seeds(maps, tags.to(maps.device), foreground=shares[0], background=shares[1])


class _SeedTraining(_CellTraining):
    """Training of the classes of cells on seeds."""

    def __init__(
        self, seeds_of: _Seeds, segmenter: CellMaps, photos: TaggedPhotos, settings: Adaptation, seed: int
    ) -> None:
        super().__init__(segmenter, photos, settings, seed)
        self.seeds_of = seeds_of

    def _cell_loss(self, logits: list[Float[Tensor, "1 c1 h w"]], part: tuple[int, ...]) -> Float[Tensor, ""]:
        cells = [self.cells[at].to(self.device).float() for at in part]
        seeds = [self.seeds_of(one, self.photos.tags[at]) for one, at in zip(cells, part, strict=True)]
        return torch.stack([seed_loss(one[0], own) for one, own in zip(logits, seeds, strict=True)]).mean()


def _max_photos(cell_maps: CellMaps) -> int:
    """Photos whose features of cells, in half precision and at an aspect ratio of 3:2, are kept in memory."""
    stride = cell_maps.backbone.pyramid_levels[0][0]
    size = 2 * len(cell_maps.mean) * 1.5 * (cell_maps.side / stride) ** 2
    return max(1, min(_CELL_PHOTOS, int(_CELL_BYTES / size)))


def _some_cells(cells: list[Float[Tensor, "1 F h w"]], most: int = 200_000) -> Float[Tensor, "1 F k 1"]:
    """Features of evenly spaced cells of all photos."""
    step = max(1, -(-sum(one[0, 0].numel() for one in cells) // most))
    return torch.cat([one.flatten(2)[:, :, ::step] for one in cells], dim=2)[..., None].float()


def _training(class_maps: ClassMaps, photos: TaggedPhotos, settings: Adaptation, seed: int) -> _Training:
    if isinstance(class_maps, CellMaps):
        return _CellTraining(class_maps, photos, settings, seed)
    return _Training(class_maps, photos, settings, seed)


def lr_factor(step: int, steps: int, warmup: int = 20) -> float:
    """Linear warm-up times cosine decay.

    >>> [round(lr_factor(step, 100), 3) for step in (0, 19, 50, 100)]
    [0.05, 0.914, 0.5, 0.0]
    """
    return min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _epoch_name(epoch: int) -> str:
    return f"epoch-{epoch:05d}"


def _key(class_maps: ClassMaps, photos: TaggedPhotos, settings: Adaptation, seed: int, folder: Path) -> str:
    """A digest of everything that the result depends on."""
    learned = replace(settings, keep_boxes=None, seed=None)  # the first comes after; the second is ``seed``
    content = photos_digest(photos.photos, folder)
    runtime = class_maps.backbone.runtime.key()
    digest = hashlib.sha256(f"{learned} seed {seed} {content} {photos.classes}{runtime}".encode())
    digest.update(photos.tags.numpy().tobytes())
    if photos.unsure is not None:
        digest.update(photos.unsure.numpy().tobytes())
    digest.update(weights_digest("before adaptation", [class_maps]).encode())
    return digest.hexdigest()


def adapted_folders(folder: Path) -> Iterator[Path]:
    """The folders of adaptations in a cache, for ``tag2box doctor``."""
    return (path for path in folder.glob(f"{_FOLDER}-*/epoch-*") if path.is_dir())
