"""Run folders: start, read and load them, and make the proposals and feature caches that their settings describe.

What a run is trained on is recorded (``tag2box.identity``), compared and, if it has changed, refused.
"""

import os
import platform
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch

from tag2box import annotations, errors, extend, images, io, recipes, settings
from tag2box.identity import AnyConfig, RunIdentity
from tag2box.inference.predict import Inference, OnPhoto, Select
from tag2box.models.class_maps import ClassMaps
from tag2box.models.detector import Detector
from tag2box.parallel.pool import Pool
from tag2box.progress import Progress, silent
from tag2box.proposals import base, build
from tag2box.proposals.importers.proposal_files import Imported
from tag2box.proposals.store import ProposalStore
from tag2box.student.student_detector import StudentDetector
from tag2box.student.student_training import StudentConfig, build_student
from tag2box.training import checkpoint, events, feature_cache
from tag2box.training.dist import SINGLE_PROCESS, DistContext

CONFIG_FILE = "config.toml"
_CONFIG_START = 4096  # characters, in which the kind of a run is found
_IMPORTED = "imported"  # the kind of stores written by `tag2box proposals import`
_AS_THEY_ARE = (_IMPORTED, base.SNAPPED)  # kinds of stores to which no photos are added


@dataclass(frozen=True)
class TrainedRun:
    """A run loaded for inference: settings, classes and detector."""

    folder: Path
    config: recipes.Config
    classes: tuple[str, ...]
    detector: Detector


@dataclass(frozen=True)
class StudentRun:
    """A student run loaded for inference: it needs no proposals."""

    folder: Path
    config: StudentConfig
    classes: tuple[str, ...]
    detector: torch.nn.Module

    def predict(self, photos: Sequence[annotations.Photo | torch.Tensor]) -> list[annotations.Detections]:
        """Detections in photos, files or decoded ones (uint8, 3 x H x W), in their own pixels."""
        return StudentDetector(self.detector, self.classes, self.config.inference).predict(photos)

    def detect(
        self,
        photos: Sequence[annotations.Photo],
        on_photo: OnPhoto | None = None,
        select: Select | None = None,
        *,
        pool: Pool | None = None,
        dist: DistContext = SINGLE_PROCESS,
        progress: Progress = silent,
    ) -> dict[str, annotations.Detections]:
        """Detections by photo id."""
        if pool is not None:
            raise errors.UserError("--on ray: a student run detects here, or under torchrun; leave it out")
        student = StudentDetector(self.detector, self.classes, self.config.inference)
        return student.detect(photos, progress=progress, dist=dist, on_photo=on_photo, select=select)


AnyRun = TrainedRun | StudentRun
"""A run loaded for inference."""


class NoProposals:
    """The proposals of a student run: none, in any photo."""

    failed: Mapping[str, str] = {}

    def boxes(self, photo_id: str, /) -> torch.Tensor:
        """No boxes."""
        return torch.zeros(0, 4)

    def scores(self, photo_id: str, /) -> torch.Tensor:
        """No scores."""
        return torch.zeros(0)


def has_run(folder: Path) -> bool:
    """Whether a folder holds a run, finished or not."""
    return any((folder / name).exists() for name in (CONFIG_FILE, events.EVENTS_FILE, checkpoint.STATE))


def check_free(folder: Path) -> None:
    """Raise if a folder cannot take a new run."""
    if folder.exists() and not folder.is_dir():
        raise errors.UserError(f"{folder}: is a file; expected a folder for the run, choose another --out")
    if has_run(folder):
        raise errors.UserError(f"{folder}: already holds a run; continue it with --resume, or choose another --out")


@contextmanager
def claimed(folder: Path, *, is_main: bool = True) -> Iterator[None]:
    """Hold the lock of a run folder, before anything is written there; raises ``Busy`` if another process holds it.

    Leftovers of killed processes are removed. Folders that were created and are empty at the end are removed, too.
    Ranks that are not ``is_main`` write nothing, and hold no lock.
    """
    if not is_main:
        yield
        return
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with io.locked(folder / io.LOCK, "trains"):
            io.sweep(folder)
            for old in folder.glob(".checkpoint-??????"):  # of version 0.1
                shutil.rmtree(old, ignore_errors=True)
            yield
    except (MemoryError, RuntimeError) as error:
        problem = errors.memory_problem(error)
        if problem is None:
            raise
        raise errors.UserError(
            f"{folder}: out of memory ({problem}); lower loader.batch_size, loader.max_proposals or the scales, set "
            "compute.memory=exact, or close other programs"
        ) from None
    finally:
        with suppress(OSError):
            for path in created:
                path.rmdir()


def start_run(config: AnyConfig, folder: Path, identity: RunIdentity | None = None) -> None:
    """Create a run folder with its settings file; an existing run is never overwritten."""
    check_free(folder)
    if identity is not None:
        identity.write(folder)
    io.write_text(folder / CONFIG_FILE, settings.dump(config))


def read_config(folder: Path) -> recipes.Config:
    """The settings that a run was started with."""
    found = read_any_config(folder)
    if isinstance(found, StudentConfig):
        raise errors.UserError(f"{folder}: a student run; expected one of `tag2box train`")
    return found


def read_any_config(folder: Path) -> AnyConfig:
    """The settings that a run, of `tag2box train` or a student, was started with."""
    path = folder / CONFIG_FILE
    if not path.exists():
        raise errors.UserError(
            f"{folder}: no run here ({CONFIG_FILE} is missing); train one with `tag2box train --out {folder}`"
        )
    return settings.load(StudentConfig, [path]) if _is_student(path) else settings.load(recipes.Config, [path])


def _is_student(path: Path) -> bool:
    """Whether a settings file begins with the kind of a student; reading the rest of it reports its faults."""
    with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        start = file.read(_CONFIG_START).splitlines()
        first = next((line for line in start if line.strip() and not line.startswith("#")), "")
        return first.replace(" ", "") == 'kind="student"'
    return False


def load_run(folder: Path) -> TrainedRun:
    """Load the detector of a run of `tag2box train` from its last checkpoint."""
    config = read_config(folder)
    state = _loadable(folder, config)
    detector = build_detector(config, len(state.classes), pretrained=False)
    _load_weights(folder, state, detector)
    return TrainedRun(folder, config, state.classes, detector.eval())


def open_run(folder: Path) -> AnyRun:
    """Load the detector of any run from its last checkpoint."""
    config = read_any_config(folder)
    if not isinstance(config, StudentConfig):
        return load_run(folder)
    state = _loadable(folder, config)
    network = build_student(config, len(state.classes), pretrained=False)
    _load_weights(folder, state, network)
    return StudentRun(folder, config, state.classes, network.to(config.torch_device()).eval())


def replace_inference(trained: AnyRun, inference: Inference) -> AnyRun:
    """The run with other settings of inference."""
    if isinstance(trained, StudentRun):
        return replace(trained, config=replace(trained.config, inference=inference))
    return replace(trained, config=replace(trained.config, inference=inference))


def inference_of(trained: AnyRun, overrides: Sequence[str]) -> Inference:
    """The settings of inference of a run, changed as ``--set`` takes them."""
    return settings.load(type(trained.config), [], list(overrides), base=trained.config).inference


def _loadable(folder: Path, config: AnyConfig) -> checkpoint.State:
    """The state of a run with a checkpoint."""
    if not checkpoint.has_checkpoint(folder):
        raise errors.UserError(f"{folder}: no checkpoint yet; continue it with `{_resume_command(folder, config)}`")
    return check_run(folder, config)


def _load_weights(folder: Path, state: checkpoint.State, detector: torch.nn.Module) -> None:
    """Load the weights of a checkpoint; raises if one is not finite."""
    checkpoint.load_model(folder, state, detector)
    bad = checkpoint.non_finite(detector.state_dict())
    if bad is not None:
        path = folder / state.folder / checkpoint.MODEL
        raise errors.UserError(f"{path}: {bad} is not finite: training diverged; train with a lower plan.optimizer.lr")


def _resume_command(folder: Path, config: AnyConfig) -> str:
    return f"tag2box {'student' if isinstance(config, StudentConfig) else 'train'} --out {folder} --resume"


def check_run(folder: Path, config: AnyConfig) -> checkpoint.State:
    """The state of a run with a checkpoint; raises if it, the settings and ``run.json`` do not belong together.

    Warns if training has not ended.
    """
    state, identity = checkpoint.read_state(folder), RunIdentity.read(folder)
    if identity is not None:
        identity.check_settings(config, folder / CONFIG_FILE)
        identity.check_classes(state.classes, folder / checkpoint.STATE)
    if state.iteration < config.plan.iterations:
        warnings.warn(
            f"{folder}: trained for {state.iteration} of {config.plan.iterations} iterations; continue with "
            f"`{_resume_command(folder, config)}`",
            stacklevel=2,
        )
    return state


def build_detector(config: recipes.Config, num_classes: int, *, pretrained: bool) -> Detector:
    """Build backbone and heads, initialised from the seed of the run."""
    torch.manual_seed(config.plan.seed)
    backbone, class_maps = config.backbone.build(pretrained=pretrained), None
    if config.adaptation.epochs:
        class_maps = ClassMaps(config.backbone.build(pretrained=pretrained), num_classes, config.adaptation.side)
    return Detector(backbone, num_classes, config.heads, class_maps)


def with_paths(config: recipes.Config, folder: Path) -> recipes.Config:
    """The settings with absolute paths; unset ones are placed inside the run folder."""
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


def required(path: Path | None) -> Path:
    """A path that ``with_paths`` has set; raises if the settings file was edited to empty it."""
    if path is None:
        raise errors.UserError(f"{CONFIG_FILE}: data.proposals or feature_cache is empty; restore it, or train again")
    return path


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
    trained: AnyRun,
    photos: Sequence[annotations.Photo],
    folder: Path,
    progress: Progress,
    *,
    skip_bad: bool = False,
    any_store: bool = False,
    pool: Pool | None = None,
) -> ProposalStore | NoProposals:
    """The proposals of some photos for a run, made if they are missing; a student needs none."""
    if isinstance(trained, StudentRun):
        return NoProposals()
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


def cached_features(
    features: feature_cache.Features, config: recipes.Config, views: Sequence[images.View], progress: Progress
) -> feature_cache.FeatureCache | feature_cache.Features:
    """Features cached on disk if they are frozen and all views fit ``feature_cache_gb``, else computed per batch."""
    return feature_cache.cached_if_possible(
        features, required(config.feature_cache), views=views, max_gb=config.feature_cache_gb, progress=progress
    )


# ---------------------------------------------------------------- environment


def machine() -> dict[str, str]:
    """Hardware and threads, for the report."""
    return {
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "system": platform.system(),
        "processor": platform.machine(),
    }


def versions() -> dict[str, str]:
    """Versions of Python, torch and tag2box, for the report."""
    return {"python": platform.python_version(), "torch": torch.__version__, "tag2box": version("tag2box")}
