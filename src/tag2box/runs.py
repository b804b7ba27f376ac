"""Run folders: start, read and load them.

What a run is trained on is recorded (``tag2box.identity``), compared and, if it has changed, refused.
"""

import os
import platform
import shutil
import tomllib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import torch

from tag2box import annotations, errors, io, recipes, settings
from tag2box.identity import AnyConfig, RunIdentity, flat_settings, trained_photos
from tag2box.inference.predict import Inference, OnPhoto, Select, run_detector, seen_features
from tag2box.labels.label_set import is_label_set
from tag2box.models.backbone import set_runtime
from tag2box.models.detector import Detector
from tag2box.models.rng import initial_seed
from tag2box.progress import Progress, silent
from tag2box.student.network import StudentDetector
from tag2box.student.student_training import StudentConfig, build_student
from tag2box.training import checkpoint, events
from tag2box.training.adaptation import build_class_maps
from tag2box.training.dist import SINGLE_PROCESS, Compute, DistContext

CONFIG_FILE = "config.toml"
_CONFIG_START = 4096  # characters, in which the kind of a run is found
_ARCHITECTURE = ("backbone.", "heads.", "adaptation.side", "adaptation.part")
_NOT_ARCHITECTURE = {"backbone.weights", "backbone.dropout"}


@dataclass(frozen=True)
class TrainedRun:
    """A run loaded for inference: settings, classes and detector."""

    folder: Path
    config: recipes.Config
    classes: tuple[str, ...]
    detector: Detector

    def detect(
        self,
        photos: Sequence[annotations.Photo],
        store: annotations.BoxSource,
        *,
        progress: Progress = silent,
        dist: DistContext = SINGLE_PROCESS,
        on_photo: OnPhoto | None = None,
        select: Select | None = None,
    ) -> dict[str, annotations.Detections]:
        """All detections in some photos by photo id, in this process; ``store`` has their proposals.

        Args:
            on_photo, select, dist: as of ``run_detector``.
        """
        config, is_known = self.config, tuple(photo.id for photo in photos) == trained_photos(self.folder)
        folder, views = config.feature_cache if is_known else None, config.inference.views()
        keep = config.adaptation.keep_boxes
        seen, maps = seen_features(self.detector, photos, store, keep=keep, folder=folder, views=views)
        return run_detector(
            self.detector,
            photos,
            seen,
            maps=maps,
            inference=self.config.inference,
            superpixels=self.config.superpixels,
            rescore=self.config.criterion.rescore,
            progress=progress,
            dist=dist,
            on_photo=on_photo,
            select=select,
        )


@dataclass(frozen=True)
class StudentRun:
    """A student run loaded for inference: it needs no proposals."""

    folder: Path
    config: StudentConfig
    classes: tuple[str, ...]
    detector: torch.nn.Module

    def predict(self, photos: Sequence[annotations.Photo | torch.Tensor]) -> list[annotations.Detections]:
        """Detections in photos, files or decoded ones (uint8, 3 x H x W), in their own pixels."""
        return self._student().predict(photos)

    def _student(self) -> StudentDetector:
        return StudentDetector(self.detector, self.classes, self.config.inference, self.config.precision)

    def detect(
        self,
        photos: Sequence[annotations.Photo],
        on_photo: OnPhoto | None = None,
        select: Select | None = None,
        *,
        dist: DistContext = SINGLE_PROCESS,
        progress: Progress = silent,
    ) -> dict[str, annotations.Detections]:
        """Detections by photo id, in this process."""
        return self._student().detect(photos, progress=progress, dist=dist, on_photo=on_photo, select=select)


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
    if not path.exists() and is_label_set(folder):
        raise errors.UserError(f"{folder}: a label set; expected a run of `tag2box train` or `tag2box student`")
    if not path.exists():
        raise errors.UserError(
            f"{folder}: no run here ({CONFIG_FILE} is missing); train one with `tag2box train --out {folder}`"
        )
    if _is_student(path):
        return settings.load(StudentConfig, [path])
    config = settings.load(recipes.Config, [path])
    # The file of a run has every setting: one that is missing is younger than the run.
    written = tomllib.loads(path.read_text(encoding="utf-8")).get("proposals", {})
    older = {name: value for name, value in config.proposals.unrecorded.items() if name not in written}
    return replace(config, proposals=replace(config.proposals, **older)) if older else config  # type: ignore[arg-type]


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
    config = replace(config, compute=config.compute.usable())
    detector = build_detector(config, len(state.classes), pretrained=False)
    _load_weights(folder, state, detector)
    return TrainedRun(folder, config, state.classes, detector.eval())


def open_run(folder: Path) -> AnyRun:
    """Load the detector of any run from its last checkpoint."""
    config = read_any_config(folder)
    if not isinstance(config, StudentConfig):
        return load_run(folder)
    state = _loadable(folder, config)
    is_usable = Compute(precision=config.precision).usable().precision == config.precision
    config = config if is_usable else replace(config, precision="fp32")
    network = build_student(config, len(state.classes), pretrained=False)
    _load_weights(folder, state, network)
    return StudentRun(folder, config, state.classes, network.to(config.torch_device()).eval())


def replace_inference(trained: AnyRun, inference: Inference) -> AnyRun:
    """The run with other settings of inference."""
    if isinstance(trained, StudentRun):
        return replace(trained, config=replace(trained.config, inference=inference))
    return replace(trained, config=replace(trained.config, inference=inference))


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
        identity.check_sources(config, folder / CONFIG_FILE)
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
        with initial_seed(config.adaptation.seed):
            class_maps = build_class_maps(config.backbone.build(pretrained=pretrained), num_classes, config.adaptation)
    detector = Detector(backbone, num_classes, config.heads, class_maps)
    set_runtime(detector, config.compute.runtime())
    return detector


def warm_detector(config: recipes.Config, classes: Sequence[str]) -> Detector:
    """The detector of a new run with the weights of ``config.warm_start``; its adaptation is taken over."""
    check_warm_start(config, classes)
    folder = required(config.warm_start)
    detector = build_detector(config, len(classes), pretrained=False)
    checkpoint.load_model(folder, checkpoint.read_state(folder), detector)
    detector.is_adapted = True
    return detector


def check_warm_start(config: recipes.Config, classes: Sequence[str]) -> None:
    """Raise unless ``config.warm_start`` is a finished run with these classes in this order and this architecture."""
    folder = required(config.warm_start)
    earlier = read_config(folder)
    if not checkpoint.has_checkpoint(folder):
        raise errors.UserError(f"{folder}: no checkpoint to start from; finish that run, or name another --warm-start")
    state = checkpoint.read_state(folder)
    if state.iteration < earlier.plan.iterations:
        raise errors.UserError(
            f"{folder}: trained for {state.iteration} of {earlier.plan.iterations} iterations; finish it with "
            "`tag2box train --resume` before another run starts from it"
        )
    _check_weights_fit(folder, state.classes, classes, differing_architecture(earlier, config))


def _check_weights_fit(folder: Path, before: Sequence[str], now: Sequence[str], other: str | None) -> None:
    """Raise unless the weights of a run fit the classes and the architecture of another."""
    if set(before) != set(now):
        name = next(iter([*sorted(set(now) - set(before)), *sorted(set(before) - set(now))]))
        whose = "the dataset" if name in now else "that run"
        raise errors.UserError(
            errors.printable(
                f"{folder}: cannot start from it: only {whose} has class {name!r}; take the same with --classes, or "
                "train without --warm-start"
            )
        )
    if tuple(before) != tuple(now):
        raise errors.UserError(
            errors.printable(
                f"{folder}: cannot start from it: its classes are in another order; give --classes {','.join(before)}"
            )
        )
    if other is not None:
        raise errors.UserError(
            f"{folder}: cannot start from it: {other} differs; set it as in that run's {CONFIG_FILE}"
        )


def differing_architecture(earlier: recipes.Config, config: recipes.Config) -> str | None:
    """The first setting that gives two configs networks whose weights cannot be exchanged."""
    if bool(earlier.adaptation.epochs) != bool(config.adaptation.epochs):
        return "adaptation.epochs, which is 0 in one of both,"
    before, now = flat_settings(earlier), flat_settings(config)
    keys = [key for key in before | now if key.startswith(_ARCHITECTURE) and key not in _NOT_ARCHITECTURE]
    return next((key for key in keys if before.get(key) != now.get(key)), None)


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
            boxes=data.boxes.absolute() if data.boxes else None,
        ),
        warm_start=config.warm_start.absolute() if config.warm_start else None,
        feature_cache=(config.feature_cache or folder / "maps").absolute(),
    )


def required(path: Path | None) -> Path:
    """A path that ``with_paths`` has set; raises if the settings file was edited to empty it."""
    if path is None:
        raise errors.UserError(f"{CONFIG_FILE}: data.proposals or feature_cache is empty; restore it, or train again")
    return path


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
