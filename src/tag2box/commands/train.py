"""``tag2box train``: photos and tags in, a trained detector out."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from tag2box.annotations import TaggedPhotos
from tag2box.commands.requirements import check_photos, check_store
from tag2box.commands.runs import (
    build_detector,
    check_free,
    has_run,
    machine,
    proposals_of,
    read_config,
    required,
    roi_maps,
    start_run,
    trunk_maps,
    versions,
    with_paths,
)
from tag2box.data.side_info import SideInfoLoader, counts_from_boxes
from tag2box.errors import UserError
from tag2box.formats.datasets import read_tagged
from tag2box.formats.listing import Fault, refuse
from tag2box.io import LOCK, locked
from tag2box.models.detector import Detector
from tag2box.models.drop_block import MaskNet, Regulariser
from tag2box.progress import Progress, silent
from tag2box.proposals.store import ProposalStore
from tag2box.recipes import Config
from tag2box.training import checkpoint
from tag2box.training.batches import ImageBatches, RoiMapBatches, TrunkBatches
from tag2box.training.dist import SINGLE_PROCESS, DistContext, is_torchrun
from tag2box.training.events import EventLog
from tag2box.training.feature_cache import CachedRoiMaps
from tag2box.training.loop import fit
from tag2box.training.step import Step
from tag2box.training.superpixel_cache import build_superpixel_cache

_OF_A_PHOTO = {"missing photo", "empty photo", "unreadable photo"}  # faults that leaving a photo out amends


def train(config: Config, out: Path, *, progress: Progress = silent, dist: DistContext = SINGLE_PROCESS) -> None:
    """Train a detector into a new run folder.

    Under torchrun a run that was begun with the same settings goes on: whoever is started again says the same words.
    """
    config = with_paths(config, out)
    config.compute.place()  # asks nothing that this machine cannot do
    with dist.main_process_first():
        is_new = dist.is_main and not _goes_on(config, out)
        if is_new:
            check_free(out)
        photos, store = prepared(config, progress)  # before the run is begun: a photo that cannot be read leaves none
        if is_new:
            _begin(config, out, photos, store)
    _fit(config, out, photos, store, progress=progress, dist=dist)


def resume(out: Path, *, progress: Progress = silent, dist: DistContext = SINGLE_PROCESS) -> None:
    """Continue a run where its last checkpoint left it, with the settings it was started with."""
    config = read_config(out)
    config.compute.place()
    with dist.main_process_first():
        photos, store = prepared(config, progress)
    _fit(config, out, photos, store, progress=progress, dist=dist)


def _goes_on(config: Config, out: Path) -> bool:
    """Whether torchrun started again what it had begun."""
    if not (is_torchrun() and has_run(out)):
        return False
    if read_config(out) != config:
        raise UserError(f"{out}: already holds a run with other settings; continue it with --resume, or choose another")
    return True


def _begin(config: Config, out: Path, photos: TaggedPhotos, store: ProposalStore) -> None:
    start_run(config, out)
    EventLog(out).write(
        "start",
        {
            "name": config.name,
            "classes": photos.classes,
            "train_photos": len(photos),
            "iterations": config.plan.iterations,
            "seed": config.plan.seed,
            "proposals_per_photo": sum(len(store.boxes(p.id)) for p in photos.photos) / len(photos),
            "machine": machine(),
            "versions": versions(),
        },
    )


def read_training(config: Config) -> TaggedPhotos:
    """The photos and tags of a run."""
    bad: list[Fault] = []
    photos = read_tagged(config.data.source(), bad.append if config.data.skip_bad else refuse)
    strange = next((fault for fault in bad if fault.kind not in _OF_A_PHOTO), None)
    if strange is not None:
        refuse(strange)
    if not photos.tags.any():
        raise UserError(f"{config.data.tags}: no photo has a tag; at least one is needed to learn")
    if config.data.counts == "boxes" and config.criterion.requirements.counts:
        return counts_from_boxes(photos, config.data.source())
    return photos


def prepared(config: Config, progress: Progress = silent) -> tuple[TaggedPhotos, ProposalStore]:
    """The photos of a run and their proposals, which have all that it asks for.

    With ``data.skip_bad``, photos that cannot be searched are not among them.
    """
    photos, skip_bad = read_training(config), config.data.skip_bad
    check_photos(config, photos)  # before boxes are searched for, which may take hours
    store = proposals_of(photos.photos, config, required(config.data.proposals), progress, skip_bad=skip_bad)
    searched = photos.part([photo.id not in store.failed for photo in photos.photos]) if skip_bad else photos
    check_store(config, searched, store)
    return searched, store


def _fit(
    config: Config,
    out: Path,
    photos: TaggedPhotos,
    store: ProposalStore,
    *,
    progress: Progress,
    dist: DistContext,
) -> None:
    compute = config.compute
    detector = _network(config, out, len(photos.classes)).to(compute.place())
    with dist.main_process_first():  # kept maps are made once
        side_info = load_side_info(config, photos, store, progress)
        source = replace(_source(config, detector, photos, store, progress), dist=dist, side_info=side_info)
    memory = compute.memory_for(keeps_maps=isinstance(source, RoiMapBatches))
    regularise = regulariser(config, detector)
    step = Step(detector, config.criterion, regularise, config.augment, memory, compute.precision, dist)
    with locked(out / LOCK, "trains") if dist.is_main else nullcontext():
        fit(step, source, config.plan, run=out, progress=progress)


def regulariser(config: Config, detector: Detector) -> Regulariser:
    """What changes proposal maps in training, with its network where it has one."""
    built = config.drop_block.build(detector.backbone.channels, config.plan.seed)
    return built.to(detector.backbone.device) if isinstance(built, MaskNet) else built


def _network(config: Config, out: Path, num_classes: int) -> Detector:
    """The network a run begins or goes on with; its checkpoint has all weights, so the pretrained are not needed."""
    is_begun = checkpoint.has_checkpoint(out)
    detector = build_detector(config, num_classes, pretrained=not is_begun)
    if is_begun:
        checkpoint.load_model(out, checkpoint.read_state(out), detector)
    return detector


def _source(
    config: Config, detector: Detector, photos: TaggedPhotos, store: ProposalStore, progress: Progress
) -> RoiMapBatches | TrunkBatches | ImageBatches:
    """RoI maps where they are frozen and can be kept; else trunk maps where these are frozen; else pixels."""
    views = config.loader.resize.views()
    maps = roi_maps(detector, photos.photos, store, config=config, views=views, progress=progress)
    if isinstance(maps, CachedRoiMaps):
        return RoiMapBatches(photos, store, config.loader, config.plan.seed, maps)
    if detector.backbone.frozen_trunk:
        trunks = trunk_maps(detector, photos.photos, config=config, views=views, progress=progress)
        return TrunkBatches(photos, store, config.loader, config.plan.seed, trunks)
    return ImageBatches(photos, store, config.loader, config.plan.seed, detector.backbone.preprocess.neutral())


def load_side_info(
    config: Config, photos: TaggedPhotos, store: ProposalStore, progress: Progress = silent
) -> SideInfoLoader:
    """What the objective asks for beyond tags and boxes; evidence is made on first use, and kept beside the maps."""
    requirements, evidence = config.criterion.requirements, None
    if requirements.evidence:
        evidence = build_superpixel_cache(
            photos.photos, store, config.superpixels, required(config.feature_cache), progress=progress
        )
    return SideInfoLoader(
        counts=photos.counts if requirements.counts else None,
        evidence=evidence,
        objectness=store.scores if requirements.objectness or config.heads.box_prior else None,
    )
