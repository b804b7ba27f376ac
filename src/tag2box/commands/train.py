"""``tag2box train``: photos and tags in, a trained detector out."""

from __future__ import annotations

from pathlib import Path

from tag2box.commands.runs import (
    build_detector,
    check_free,
    machine,
    proposals_of,
    read_config,
    required,
    roi_maps,
    start_run,
    versions,
    with_paths,
)
from tag2box.data.datasets import read_tagged
from tag2box.data.faults import Fault, refuse
from tag2box.engine import checkpoint
from tag2box.engine.events import EventLog
from tag2box.engine.loop import fit
from tag2box.engine.maps import CachedMaps
from tag2box.engine.progress import Progress, silent
from tag2box.engine.source import MapSource, PhotoSource, Source
from tag2box.engine.step import Step
from tag2box.errors import UserError
from tag2box.model.detector import Detector
from tag2box.proposals.store import ProposalStore
from tag2box.recipes import Config
from tag2box.types import TaggedPhotos

_OF_A_PHOTO = {"missing photo", "empty photo", "unreadable photo"}  # faults that leaving a photo out amends


def train(config: Config, out: Path, *, progress: Progress = silent) -> None:
    """Train a detector into a new run folder."""
    config = with_paths(config, out)
    check_free(out)
    photos, store = prepared(config, progress)  # before the run is begun: a photo that cannot be read leaves none
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
    _fit(config, out, photos, store, progress=progress)


def resume(out: Path, *, progress: Progress = silent) -> None:
    """Continue a run where its last checkpoint left it, with the settings it was started with."""
    config = read_config(out)
    photos, store = prepared(config, progress)
    _fit(config, out, photos, store, progress=progress)


def read_training(config: Config) -> TaggedPhotos:
    """The photos and tags of a run."""
    bad: list[Fault] = []
    photos = read_tagged(config.data.source(), bad.append if config.data.skip_bad else refuse)
    strange = next((fault for fault in bad if fault.kind not in _OF_A_PHOTO), None)
    if strange is not None:
        refuse(strange)
    if not photos.tags.any():
        raise UserError(f"{config.data.tags}: no photo has a tag; at least one is needed to learn")
    return photos


def prepared(config: Config, progress: Progress = silent) -> tuple[TaggedPhotos, ProposalStore]:
    """The photos of a run and their proposals; with ``data.skip_bad``, without photos that cannot be searched."""
    photos, skip_bad = read_training(config), config.data.skip_bad
    store = proposals_of(photos.photos, config, required(config.data.proposals), progress, skip_bad=skip_bad)
    return (photos.part([photo.id not in store.failed for photo in photos.photos]) if skip_bad else photos), store


def _fit(config: Config, out: Path, photos: TaggedPhotos, store: ProposalStore, *, progress: Progress) -> None:
    detector = _network(config, out, len(photos.classes))
    step = Step(detector, config.objective, config.drop_block, config.augment)
    fit(step, _source(config, detector, photos, store, progress), config.plan, run=out, progress=progress)


def _network(config: Config, out: Path, num_classes: int) -> Detector:
    """The network a run begins or goes on with; its checkpoint has all weights, so the pretrained are not needed."""
    is_begun = checkpoint.has_checkpoint(out)
    detector = build_detector(config, num_classes, pretrained=not is_begun)
    if is_begun:
        checkpoint.load_model(out, checkpoint.read_state(out), detector)
    return detector


def _source(
    config: Config, detector: Detector, photos: TaggedPhotos, store: ProposalStore, progress: Progress
) -> Source:
    """Kept maps where they can be kept, else pixels."""
    views = config.feed.resize.views()
    maps = roi_maps(detector, photos.photos, store, config=config, views=views, progress=progress)
    if isinstance(maps, CachedMaps):
        return MapSource(photos, store, config.feed, config.plan.seed, maps)
    return PhotoSource(photos, store, config.feed, config.plan.seed, detector.backbone.preprocess.neutral())
