"""Run folders: opened for training, or loaded for use."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch

from tag2box import settings
from tag2box.annotations import Photo
from tag2box.commands.propose import METHODS
from tag2box.data.images import read_photo
from tag2box.data.transforms import View
from tag2box.errors import UserError
from tag2box.io import write_text
from tag2box.models.detector import Detector
from tag2box.progress import Progress
from tag2box.proposals.build import build_proposals
from tag2box.proposals.importers.proposal_files import Imported
from tag2box.proposals.pool import Pool
from tag2box.proposals.store import ProposalStore
from tag2box.recipes import Config
from tag2box.training import checkpoint
from tag2box.training.events import EVENTS_FILE as EVENTS
from tag2box.training.feature_cache import CachedRoiMaps, CachedTrunks, LiveRoiMaps, LiveTrunks, map_bytes, trunk_bytes

CONFIG = "config.toml"
IMPORTED = "imported"  # the kind of proposals that were not made here


@dataclass(frozen=True)
class TrainedRun:
    """A run that can be used: its settings, its classes and its detector."""

    folder: Path
    config: Config
    classes: tuple[str, ...]
    detector: Detector


def has_run(folder: Path) -> bool:
    """Whether a folder holds a run, or the beginning of one."""
    return any((folder / name).exists() for name in (CONFIG, EVENTS, checkpoint.STATE))


def check_free(folder: Path) -> None:
    """Raise if a folder cannot take a new run."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; expected a folder for the run, choose another --out")
    if has_run(folder):
        raise UserError(f"{folder}: already holds a run; continue it with --resume, or choose another --out")


def start_run(config: Config, folder: Path) -> None:
    """Claim a folder for a new run; whatever is there already is never overwritten."""
    check_free(folder)
    write_text(folder / CONFIG, settings.dump(config))


def read_config(folder: Path) -> Config:
    """The settings a run was started with."""
    path = folder / CONFIG
    if not path.exists():
        raise UserError(f"{folder}: no run here ({CONFIG} is missing); train one with `tag2box train --out {folder}`")
    return settings.load(Config, [path])


def load_run(folder: Path) -> TrainedRun:
    """The detector of a run, as its last checkpoint left it."""
    config = read_config(folder)
    if not checkpoint.has_checkpoint(folder):
        raise UserError(f"{folder}: no checkpoint yet; continue it with `tag2box train --out {folder} --resume`")
    state = checkpoint.read_state(folder)
    detector = build_detector(config, len(state.classes), pretrained=False)
    checkpoint.load_model(folder, state, detector)
    return TrainedRun(folder, config, state.classes, detector.eval())


def build_detector(config: Config, num_classes: int, *, pretrained: bool) -> Detector:
    """Backbone and heads, freshly seeded."""
    torch.manual_seed(config.plan.seed)
    return Detector(config.backbone.build(pretrained=pretrained), num_classes, config.heads)


def proposals_of(
    photos: Sequence[Photo],
    config: Config,
    folder: Path,
    progress: Progress,
    *,
    skip_bad: bool = False,
    pool: Pool | None = None,
) -> ProposalStore:
    """The proposal store of some photos: made where it is missing, taken as it is where it comes from elsewhere.

    With ``skip_bad``, photos that cannot be searched are not in it, but among those that failed. ``pool`` is where else
    than on this machine photos are searched.
    """
    store = ProposalStore.open(folder) if ProposalStore.exists(folder) else None
    if store is None or store.source.get("kind") != IMPORTED:
        method = config.proposals
        store = build_proposals(
            photos, method, folder, read=read_photo, pool=pool, skip_bad=skip_bad, progress=progress
        )
    store.check(photo for photo in photos if not (skip_bad and photo.id in store.failed))
    return store


def proposing_as(config: Config, folder: Path) -> Config:
    """The settings with the method that a store was made with, so that new photos are treated as those it holds.

    Of proposals from elsewhere no method is known: detection then takes a store too, or proposes as ``config`` says.
    """
    if not ProposalStore.exists(folder):
        return config
    source = ProposalStore.open(folder).source
    if source == config.proposals.source() or source.get("kind") not in METHODS:
        return config
    if isinstance(config.proposals, Imported):
        wanted, made = config.proposals.method.upper(), source["kind"]
        raise UserError(
            f"{folder}: holds {made} boxes, and {wanted} boxes are wanted; import those, or --set proposals.kind={made}"
        )
    if source.get("model"):
        raise UserError(f"{folder}: made with {source['model']}; name this file with --set proposals.model=FILE")
    method = type(METHODS[str(source["kind"])])
    return replace(config, proposals=method(**source))  # type: ignore[arg-type]


def roi_maps(
    detector: Detector,
    photos: Sequence[Photo],
    store: ProposalStore,
    *,
    config: Config,
    views: Sequence[View],
    progress: Progress,
) -> LiveRoiMaps | CachedRoiMaps:
    """Maps of the photos' proposals: kept on disk where their network is frozen and all views fit the budget."""
    backbone = detector.backbone
    live = LiveRoiMaps(backbone, photos, store)
    boxes = sum(len(store.boxes(photo.id)) for photo in photos)
    if not backbone.frozen_roi_maps or len(views) * boxes * map_bytes(backbone) > config.feature_cache_gb * 1e9:
        return live
    kept = CachedRoiMaps(live, required(config.feature_cache))
    kept.make(views, progress)
    return kept


def trunk_maps(
    detector: Detector, photos: Sequence[Photo], *, config: Config, views: Sequence[View], progress: Progress
) -> LiveTrunks | CachedTrunks:
    """Maps of a frozen trunk: kept on disk where all views fit the budget; the same values where they do not."""
    live = LiveTrunks(detector.backbone, photos)
    if trunk_bytes(detector.backbone, photos, views) > config.feature_cache_gb * 1e9:
        return live
    kept = CachedTrunks(live, required(config.feature_cache))
    kept.make(views, progress)
    return kept


def required(path: Path | None) -> Path:
    """A path that ``with_paths`` filled in, unless somebody emptied it since."""
    if path is None:
        raise UserError(f"{CONFIG}: a path of data, or maps, is empty; restore it, or train anew")
    return path


def with_paths(config: Config, folder: Path) -> Config:
    """The settings with every path absolute, and the ones left open inside the run."""
    data, source = config.data, config.data.source()
    is_list = data.split is not None and Path(data.split).is_file()
    return replace(
        config,
        backbone=config.backbone.with_absolute_paths(),
        data=replace(
            data,
            tags=source.path.absolute(),
            photos=data.photos.absolute() if data.photos else None,
            split=f"{Path(data.split).absolute()}" if data.split and is_list else data.split,
            proposals=(data.proposals or folder / "proposals").absolute(),
        ),
        feature_cache=(config.feature_cache or folder / "maps").absolute(),
    )


def machine() -> dict[str, str]:
    """Where a run happens, for the report."""
    return {
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "system": platform.system(),
        "processor": platform.machine(),
    }


def versions() -> dict[str, str]:
    """What a run happens with."""
    return {"python": platform.python_version(), "torch": torch.__version__, "tag2box": version("tag2box")}
