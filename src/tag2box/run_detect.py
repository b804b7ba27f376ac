"""Detection with a trained run: in this process, under torchrun, or in a pool of processes."""

import hashlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from numpy import ndarray
from torch import nn

from tag2box import annotations, errors, run_inputs, runs, settings
from tag2box.annotations import Detections, Photo
from tag2box.formats import detection_log
from tag2box.inference import predict
from tag2box.inference.fitting import SnapPhotos, TrimPhotos
from tag2box.labels.quality import with_absent
from tag2box.labels.rule import LabelRule, PhotoTags, candidates_of_tags
from tag2box.methods.wsrpn import Rescore
from tag2box.models.class_maps import ClassMaps
from tag2box.models.detector import Detector
from tag2box.ops.superpixels import SUPERPIXELS, Superpixels
from tag2box.parallel import set_threads
from tag2box.parallel.pool import Pool
from tag2box.progress import Progress, silent
from tag2box.student.network import StudentDetector
from tag2box.student.student_training import build_student
from tag2box.training import feature_cache
from tag2box.training.class_evidence import preselected
from tag2box.training.dist import SINGLE_PROCESS, DistContext

_COMPUTE_KEYS = ("compute.precision", "compute.engine", "precision")
_EXCHANGED = 64  # photos whose detections are sent to the other ranks at once


def with_inference(trained: runs.AnyRun, overrides: Sequence[str]) -> runs.AnyRun:
    """The run with other settings of inference, precision or engine."""
    other = next((o for o in overrides if not o.strip().startswith(("inference.", *_COMPUTE_KEYS))), None)
    if other is not None:
        raise errors.UserError(
            f"--set {other}: only inference settings of a trained run can change; expected inference.NAME=VALUE, "
            "compute.precision=VALUE or compute.engine=VALUE"
        )
    return run_inputs.with_overrides(trained, overrides) if overrides else trained


def with_compute(trained: runs.AnyRun, overrides: Sequence[str]) -> tuple[runs.AnyRun, list[str]]:
    """The run with other settings of precision or engine, and the overrides of everything else."""
    own = [one for one in overrides if one.strip().startswith(_COMPUTE_KEYS)]
    return with_inference(trained, own), [one for one in overrides if one not in own]


def detect_photos(
    trained: runs.AnyRun,
    photos: Sequence[Photo],
    *,
    proposals: Path | None = None,
    work: Path | None = None,
    skipped: list[str] | None = None,
    pool: Pool | None = None,
    dist: DistContext = SINGLE_PROCESS,
    progress: Progress = silent,
    select: predict.SelectWith | None = None,
    selection: Mapping[str, object] | None = None,
    any_store: bool = False,
) -> Mapping[str, Detections]:
    """All detections of a run in some photos, whose proposals are made with the method of the training photos.

    Args:
        work: folder that keeps proposals and finished photos, from which the next call resumes; the detections are then
            read from it on access, so it must stay as long as they are used.
        skipped: if given, photos that cannot be read are left out, and a line about each is added to it.
        select: reduces the detections of a photo to those that are wanted, in the process that finds them.
        selection: what ``select`` depends on: finished photos of another one are not used.
        any_store: add photos to ``proposals`` whatever photos it has.
    """
    with tempfile.TemporaryDirectory() as own:
        log = detection_log.DetectionLog(work or Path(own), dist.rank)
        folder = proposals or (work or Path(dist.all_gather_object(own)[0])) / "proposals"
        try:
            with dist.main_process_first():
                if work is not None and dist.is_main:
                    log.open(detector_identity(trained) | dict(selection or {}))
                is_skipping = skipped is not None
                how = {"skip_bad": is_skipping, "any_store": any_store or proposals is None}
                store = run_inputs.boxes_of(trained, photos, folder, progress, pool=pool, **how)
        except errors.Interrupted:
            if proposals is not None or work is not None:
                raise
            advice = "`tag2box propose` writes proposals that are kept"
            raise errors.Interrupted(f"stopped, nothing saved; {advice}") from None
        failed = store.failed if is_skipping else {}
        wanted = [photo for photo in photos if photo.id not in failed]
        done = set(dist.all_gather_object(list(log.finished(wanted, store)) if dist.is_main else [])[0])
        rest = [photo for photo in wanted if photo.id not in done]
        bad = [failed[photo.id] for photo in photos if photo.id in failed] if dist.is_main else []

        def on_photo(photo: Photo, result: Detections | errors.UserError) -> None:
            if isinstance(result, Detections):
                log.add(photo, store, result)
            elif is_skipping:
                bad.append(str(result))
            else:
                raise result

        try:
            _detect(trained, rest, store, on_photo, select, pool=pool, dist=dist, progress=progress)
            log.close()
            _exchange(log.stored, wanted, on_photo, dist)
        finally:
            log.close()
        if skipped is not None:
            skipped += [line for share in dist.all_gather_object(bad) for line in share]
        found = log.stored.of(photos)
        return dict(found) if work is None else found


def _exchange(
    mine: Mapping[str, Detections], photos: Sequence[Photo], on_photo: predict.OnPhoto, dist: DistContext
) -> None:
    """Send the detections of each rank to the others, some photos at a time."""
    if dist.world_size == 1:
        return
    by_id, names = {photo.id: photo for photo in photos}, list(mine)
    known = set(names)
    for first in range(0, max(dist.all_gather_object(len(names))), _EXCHANGED):
        part = {name: mine[name] for name in names[first : first + _EXCHANGED]}
        for share in dist.all_gather_object(part):
            for name, own in share.items():
                if name not in known:
                    known.add(name)
                    on_photo(by_id[name], own)


def _detect(
    trained: runs.AnyRun,
    photos: Sequence[Photo],
    store: annotations.BoxSource,
    on_photo: predict.OnPhoto,
    select: predict.SelectWith | None,
    *,
    pool: Pool | None,
    dist: DistContext,
    progress: Progress,
) -> None:
    if pool is not None:
        detect_in_pool(pool, trained, photos, store, progress=progress, on_photo=on_photo, select=select)
        return
    chosen = None if select is None else select(trained.detector)
    if isinstance(trained, runs.StudentRun):
        trained.detect(photos, on_photo, chosen, dist=dist, progress=progress)
    else:
        trained.detect(photos, store, progress=progress, dist=dist, on_photo=on_photo, select=chosen)


def detector_identity(trained: runs.AnyRun) -> dict[str, object]:
    """What detections depend on, apart from the photo and its proposals."""
    weights = feature_cache.weights_digest("detector", [trained.detector])
    config = hashlib.sha256(settings.dump(trained.config).encode()).hexdigest()
    return {"format": 1, "weights": weights, "settings": config, **runs.versions()}


# ---------------------------------------------------------------- in a pool of processes


@dataclass(frozen=True, kw_only=True)
class DetectTask:
    """The work of a process: it builds the network once, from weights sent as arrays, then detects photo by photo."""

    build: Callable[[], nn.Module]
    weights: Mapping[str, ndarray]
    inference: predict.Inference
    threads: int  # of each process: the order of sums, and so the last bits of scores, depend on it
    is_gpu_used: bool = False  # if the process has one
    select: predict.SelectWith | None = None

    def __call__(self, task: predict.PhotoTask) -> predict.PhotoResult:
        """The detections of a photo: all, or those that are selected."""
        network = self.network  # outside: if it cannot be built, no photo is at fault
        try:
            found = self.detect(network, task)
            found = found if self._selected is None else self._selected(task.photo, found)
        except errors.UserError as error:
            return predict.PhotoResult(problem=f"{error}")
        return predict.PhotoResult(found.boxes.numpy(), found.scores.numpy(), found.labels.numpy())

    def detect(self, network: nn.Module, task: predict.PhotoTask) -> Detections:
        """All detections of a photo."""
        raise NotImplementedError

    @cached_property
    def network(self) -> nn.Module:
        """The network, built at the first photo."""
        set_threads(self.threads)
        network = self.build()
        network.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in self.weights.items()})
        device = torch.device("cuda" if self.is_gpu_used and torch.cuda.is_available() else "cpu")
        return network.to(device).eval()

    @cached_property
    def _selected(self) -> predict.Select | None:
        return None if self.select is None else self.select(self.network)


@dataclass(frozen=True, kw_only=True)
class DetectorTask(DetectTask):
    """Detection with the detector of a run of ``tag2box train``."""

    rescore: Rescore
    keep_boxes: int | None  # as of ``adaptation``
    superpixels: Superpixels = SUPERPIXELS

    def detect(self, network: nn.Module, task: predict.PhotoTask) -> Detections:
        """All detections of a photo."""
        assert isinstance(network, Detector)
        photos = (task.photo,)
        boxes = preselected(network.class_maps, photos, task, self.keep_boxes)
        found = predict.run_detector(
            network,
            photos,
            boxes,
            maps=feature_cache.RoiMaps(network.backbone, photos, boxes),
            inference=self.inference,
            superpixels=self.superpixels,
            rescore=self.rescore,
        )
        return found[task.photo.id]


@dataclass(frozen=True, kw_only=True)
class StudentTask(DetectTask):
    """Detection with the network of a student run, which needs no proposals."""

    classes: tuple[str, ...]
    precision: str

    def detect(self, network: nn.Module, task: predict.PhotoTask) -> Detections:
        """All detections of a photo."""
        return StudentDetector(network, self.classes, self.inference, self.precision).predict([task.photo])[0]


def detect_task(trained: runs.AnyRun, select: predict.SelectWith | None = None) -> DetectTask:
    """The work of other processes: the network of a run, with as many threads as here, on a GPU if they have one."""
    weights = {name: value.cpu().numpy() for name, value in trained.detector.state_dict().items()}
    if isinstance(trained, runs.StudentRun):
        return StudentTask(
            build=partial(build_student, trained.config, len(trained.classes), pretrained=False),
            weights=weights,
            inference=trained.config.inference,
            threads=torch.get_num_threads(),
            is_gpu_used=trained.config.device != "cpu",
            select=select,
            classes=trained.classes,
            precision=trained.config.precision,
        )
    return DetectorTask(
        build=partial(runs.build_detector, trained.config, len(trained.classes), pretrained=False),
        weights=weights,
        inference=trained.config.inference,
        threads=torch.get_num_threads(),
        is_gpu_used=trained.config.compute.device != "cpu",
        select=select,
        rescore=trained.config.criterion.rescore,
        keep_boxes=trained.config.adaptation.keep_boxes,
        superpixels=trained.config.superpixels,
    )


def detect_in_pool(
    pool: Pool,
    trained: runs.AnyRun,
    photos: Sequence[Photo],
    store: annotations.BoxSource,
    *,
    progress: Progress = silent,
    on_photo: predict.OnPhoto | None = None,
    select: predict.SelectWith | None = None,
) -> dict[str, Detections]:
    """Detections by photo id, in the order of the photos, computed and selected by a pool."""
    work = detect_task(trained, select)
    tasks = (
        predict.PhotoTask(photo, store.boxes(photo.id).numpy(), store.scores(photo.id).numpy()) for photo in photos
    )
    results = pool(work, tasks, lost=predict.lost_photo, threads=work.threads)
    found: dict[str, Detections] = {}
    with progress("detecting", len(photos)) as bar, closing(results) as finished:
        for task, result in finished:
            outcome = result.outcome()
            if on_photo is not None:
                on_photo(task.photo, outcome)
            elif isinstance(outcome, Detections):
                found[task.photo.id] = outcome
            else:
                raise outcome
            bar.advance()
    return {photo.id: found[photo.id] for photo in photos if photo.id in found}


# ---------------------------------------------------------------- of tagged photos

Fitter = Callable[[ClassMaps], SnapPhotos | TrimPhotos]
"""Builds what fits boxes, given class maps; importable by name, for other processes."""


def fit_of(fitter: Fitter, detector: nn.Module) -> SnapPhotos | TrimPhotos:
    """What fits boxes with the class maps of a detector, which must have some."""
    assert isinstance(detector, Detector) and detector.class_maps is not None
    return fitter(detector.class_maps)


@dataclass(frozen=True)
class SelectTagged:
    """Selects the candidates of the tags of photos, fits them if that is set, and adds the best of absent classes."""

    rule: LabelRule
    tags: Mapping[str, PhotoTags]  # by photo id
    fitter: Fitter | None = None

    def __call__(self, detector: nn.Module) -> predict.Select:
        """Selection with the class maps of a detector."""
        return partial(self._selected, None if self.fitter is None else fit_of(self.fitter, detector))

    def _selected(self, fit: SnapPhotos | TrimPhotos | None, photo: Photo, found: Detections) -> Detections:
        tags = self.tags[photo.id]
        candidates = candidates_of_tags(self.rule, found, tags)
        return with_absent(candidates if fit is None else fit(photo, candidates), found, tags)
