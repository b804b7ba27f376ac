"""Proposals, feature caches, precision and engine of a run, as its settings describe them."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Generic, NoReturn, TypeVar

import numpy as np
import torch

from tag2box import annotations, errors, extend, images, recipes, runs, settings
from tag2box.inference.predict import PhotoTask, lost_photo
from tag2box.models.backbone import Backbone, set_runtime
from tag2box.models.class_maps import ClassMaps
from tag2box.models.detector import Detector
from tag2box.parallel import set_threads
from tag2box.parallel.pool import Pool, Result
from tag2box.progress import Progress
from tag2box.proposals import base, build
from tag2box.proposals.importers.proposal_files import Imported
from tag2box.proposals.store import ProposalStore
from tag2box.student.student_training import StudentConfig, build_student
from tag2box.training import feature_cache
from tag2box.training.class_evidence import ClassEvidence
from tag2box.training.dist import SINGLE_PROCESS, DistContext, Parts, backbone_parts, choose_precision
from tag2box.training.reviewed import JoinedMaps, ReviewedSource

_IMPORTED = "imported"  # the kind of stores written by `tag2box proposals import`
_AS_THEY_ARE = (_IMPORTED, base.SNAPPED)  # kinds of stores to which no photos are added

# ---------------------------------------------------------------- proposals


def proposals_of(
    photos: Sequence[annotations.Photo],
    config: recipes.Config,
    folder: Path,
    progress: Progress,
    *,
    skip_bad: bool = False,
    any_store: bool = False,
    pool: Pool | None = None,
) -> ProposalStore:
    """The proposal store of some photos: built if it is missing, used as it is if it was imported or snapped.

    Photos are added to an existing store only if it has some of them already, else it is that of another dataset.

    Args:
        skip_bad: record photos that cannot be read in ``store.failed`` instead of raising.
        any_store: add photos to any store.
        pool: where photos are processed; default: processes of this machine.
    """
    store = ProposalStore.open(folder) if ProposalStore.exists(folder) else None
    if store is None or store.source.get("kind") not in _AS_THEY_ARE:
        method = config.proposals
        store = build.build_proposals(
            photos,
            method,
            folder,
            read=images.read_photo,
            pool=pool,
            skip_bad=skip_bad,
            any_store=any_store,
            progress=progress,
        )
    store.check(photo for photo in photos if not (skip_bad and photo.id in store.failed))
    return store


def boxes_of(
    trained: runs.AnyRun,
    photos: Sequence[annotations.Photo],
    folder: Path,
    progress: Progress,
    *,
    skip_bad: bool = False,
    any_store: bool = False,
    pool: Pool | None = None,
) -> ProposalStore | runs.NoProposals:
    """The proposals of some photos for a run, made if they are missing; a student needs none."""
    if isinstance(trained, runs.StudentRun):
        return runs.NoProposals()
    return proposals_of(photos, trained.config, folder, progress, skip_bad=skip_bad, any_store=any_store, pool=pool)


def match_store_method(config: recipes.Config, folder: Path) -> recipes.Config:
    """The settings with the proposal method that a store was made with, so that ``detect`` uses the same one.

    An imported store names no method: ``detect`` then needs a store too, or uses the method of ``config``. A snapped
    store names that of the proposals to which boxes were added.
    """
    if not ProposalStore.exists(folder):
        return config
    source = ProposalStore.open(folder).source
    inner = source.get("proposals")
    source = inner if source.get("kind") == base.SNAPPED and isinstance(inner, dict) else source
    kind = str(source.get("kind"))
    is_method = kind != _IMPORTED and (kind in extend.PROPOSAL_METHODS or ":" in kind)
    if source == config.proposals.source() or not is_method:
        return config
    if isinstance(config.proposals, Imported):
        wanted = config.proposals.method.upper()
        raise errors.UserError(
            f"{folder}: holds {kind} boxes, but the settings expect {wanted} boxes; import those, or "
            f"--set proposals.kind={kind}"
        )
    try:
        return replace(config, proposals=base.method_from_source(source))
    except errors.UserError as error:
        raise errors.UserError(f"{folder}: {error}") from None


# ---------------------------------------------------------------- feature cache


Network = TypeVar("Network", Backbone, ClassMaps)
Features = TypeVar("Features", feature_cache.RoiMaps, feature_cache.TrunkMaps)


def cached_features(
    features: Features,
    config: recipes.Config,
    views: Sequence[images.View],
    progress: Progress,
    workers: "NetworkPool | None" = None,
) -> feature_cache.FeatureCache | Features:
    """Features cached on disk if they are frozen and all views fit ``feature_cache_gb``, else computed per batch.

    Args:
        workers: processes that fill the cache; default: this one.
    """
    if not features.is_frozen or features.cache_bytes(views) > config.feature_cache_gb * 1e9:
        return features
    cache = feature_cache.FeatureCache(features, runs.required(config.feature_cache))
    cache.build(views, progress, None if workers is None else partial(workers.features, features))
    return cache


def cached_roi_maps(
    maps: feature_cache.RoiMaps,
    config: recipes.Config,
    views: Sequence[images.View],
    progress: Progress,
    workers: "NetworkPool | None" = None,
) -> feature_cache.FeatureCache | JoinedMaps | feature_cache.RoiMaps:
    """RoI maps of training photos, cached like ``cached_features``; those of reviewed boxes in files of their own.

    So a run with other reviewed boxes computes the maps of the reviewed photos alone.
    """
    store, is_cached = maps.store, maps.is_frozen and maps.cache_bytes(views) <= config.feature_cache_gb * 1e9
    if not isinstance(store, ReviewedSource) or not is_cached:
        return cached_features(maps, config, views, progress, workers)
    numbers = [number for number, photo in enumerate(maps.photos) if photo.id in store.reviewed.photos]
    boxed = [maps.photos[number] for number in numbers]
    own = cached_features(replace(maps, store=store.store), config, views, progress, workers)
    added = cached_features(replace(maps, photos=boxed, store=store.added), config, views, progress, workers)
    assert isinstance(own, feature_cache.FeatureCache) and isinstance(added, feature_cache.FeatureCache)
    return JoinedMaps(own, added, {number: place for place, number in enumerate(numbers)})


@dataclass(frozen=True)
class NetworkPool:
    """Processes that compute what a frozen network gives for photos: features, and evidence of class maps."""

    pool: Pool
    build: Callable[[], Detector]
    """Importable by name, as are its arguments; the weights are those of the network here."""
    is_gpu_used: bool = True

    @classmethod
    def of(cls, pool: Pool, config: recipes.Config, num_classes: int) -> "NetworkPool":
        """The processes of a pool, which build the detector of some settings."""
        build = partial(runs.build_detector, config, num_classes, pretrained=False)
        return cls(pool, build, config.compute.device != "cpu")

    def features(
        self, features: feature_cache.RoiMaps | feature_cache.TrunkMaps, view: images.View, indices: Sequence[int]
    ) -> Generator[tuple[int, bytes], None, None]:
        """The features of some photos, as ``FeatureCache.build`` takes them."""
        photos, numbers = features.photos, {features.photos[index].id: index for index in indices}
        store = features.store if isinstance(features, feature_cache.RoiMaps) else runs.NoProposals()
        task = self._task(_network_backbone, features.backbone, partial(_features, type(features), view))
        with closing(self._results(task, [photos[index] for index in indices], store)) as results:
            for name, raw in results:
                yield numbers[name], raw

    def evidence(
        self, evidence: ClassEvidence, photos: Sequence[annotations.Photo]
    ) -> Generator[tuple[str, np.ndarray], None, None]:
        """The evidence for the proposals of some photos, as ``proposal_cache.build_evidence_cache`` takes it."""
        return self._results(self._task(_network_class_maps, evidence.class_maps, _evidence), photos, evidence.store)

    def _task(
        self,
        part: Callable[[Detector], Network],
        network: Network,
        work: Callable[[Network, PhotoTask], Result],
    ) -> "NetworkTask[Network, Result]":
        weights = {name: value.cpu().numpy() for name, value in network.state_dict().items()}
        return NetworkTask(self.build, part, weights, work, torch.get_num_threads(), self.is_gpu_used)

    def _results(
        self,
        task: "NetworkTask[Network, Result]",
        photos: Sequence[annotations.Photo],
        store: annotations.BoxSource,
    ) -> Generator[tuple[str, Result], None, None]:
        items = (PhotoTask(photo, store.boxes(photo.id).numpy(), np.zeros(0, np.float32)) for photo in photos)
        with closing(self.pool(task, items, lost=_lost, threads=task.threads)) as results:
            for item, result in results:
                yield item.photo.id, result


@dataclass(frozen=True)
class NetworkTask(Generic[Network, Result]):
    """The work of such a process: it builds the network once, from weights sent as arrays."""

    build: Callable[[], Detector]
    part: Callable[[Detector], Network]
    weights: Mapping[str, np.ndarray]
    work: Callable[[Network, PhotoTask], Result]
    threads: int  # of each process: the last bits of a sum depend on it
    is_gpu_used: bool  # if the process has one

    def __call__(self, task: PhotoTask) -> Result:
        """The numbers of a photo."""
        return self.work(self._network, task)

    @cached_property
    def _network(self) -> Network:
        set_threads(self.threads)
        network = self.part(self.build())
        network.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in self.weights.items()})
        device = torch.device("cuda" if self.is_gpu_used and torch.cuda.is_available() else "cpu")
        return network.requires_grad_(False).to(device)


def _network_backbone(detector: Detector) -> Backbone:
    return detector.backbone


def _network_class_maps(detector: Detector) -> ClassMaps:
    assert detector.class_maps is not None
    return detector.class_maps


def _features(
    kind: type[feature_cache.RoiMaps | feature_cache.TrunkMaps], view: images.View, network: Backbone, task: PhotoTask
) -> bytes:
    photos = (task.photo,)
    is_roi = kind is feature_cache.RoiMaps
    features = feature_cache.RoiMaps(network, photos, task) if is_roi else feature_cache.TrunkMaps(network, photos)
    return feature_cache.stored_bytes(features, 0, view)


def _evidence(network: ClassMaps, task: PhotoTask) -> np.ndarray:
    return ClassEvidence(network, (task.photo,), task)(task.photo.id).numpy()


def _lost(task: PhotoTask, number: int) -> NoReturn:
    raise errors.UserError(lost_photo(task, number).problem)


# ---------------------------------------------------------------- precision and engine


def with_overrides(trained: runs.AnyRun, overrides: Sequence[str]) -> runs.AnyRun:
    """The run with other settings of inference, precision or engine, as ``--set`` takes them."""
    if isinstance(trained, runs.StudentRun):
        own = settled_student(settings.load(StudentConfig, [], list(overrides), base=trained.config))
        own.torch_device()
        return replace(trained, config=own)
    config = settled(settings.load(recipes.Config, [], list(overrides), base=trained.config))
    config.compute.torch_device()
    set_runtime(trained.detector, config.compute.runtime())
    return replace(trained, config=config)


def settled(config: recipes.Config, dist: DistContext = SINGLE_PROCESS) -> recipes.Config:
    """The settings with the precision that ``auto`` takes on the machine of rank 0."""
    if config.compute.precision != "auto":
        return config
    choice = choose_precision(repr(config.backbone), partial(backbone_parts, config.backbone)) if dist.is_main else None
    chosen = dist.all_gather_object(choice)[0]
    assert chosen is not None
    return replace(config, compute=replace(config.compute, precision=chosen.precision))


def settled_student(config: StudentConfig, dist: DistContext = SINGLE_PROCESS) -> StudentConfig:
    """The settings with the precision that ``auto`` takes on the machine of rank 0."""
    if config.precision != "auto":
        return config
    name = f"student {config.backbone} {config.network}"
    choice = choose_precision(name, partial(_student_parts, config)) if dist.is_main else None
    chosen = dist.all_gather_object(choice)[0]
    assert chosen is not None
    return replace(config, precision=chosen.precision)


def _student_parts(config: StudentConfig) -> Parts:
    """Detection and a training step of the network, whose time is measured."""
    network = build_student(config, 20, pretrained=False)
    pixels = torch.rand(1, 3, 320, 320) * 255

    def detect() -> None:
        with torch.no_grad():
            network(pixels)

    def train() -> None:
        torch.stack([level.float().square().mean() for level in network(pixels)]).sum().backward()

    return {"detection": detect, "training": train}
