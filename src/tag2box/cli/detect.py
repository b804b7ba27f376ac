"""``tag2box detect``: photos in, boxes out; in this process, under torchrun, or in a pool of processes."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from jaxtyping import Float32, Int64
from numpy import ndarray

from tag2box import annotations, errors, extend, images, io, recipes, runs, settings
from tag2box.annotations import Detections, Photo
from tag2box.cli import options
from tag2box.formats import datasets, export as exports, listing, voc_boxes
from tag2box.inference import predict
from tag2box.methods.wsrpn import Rescore
from tag2box.models.detector import Detector
from tag2box.parallel.pool import Pool
from tag2box.progress import Progress, TerminalProgress, silent
from tag2box.training.dist import SINGLE_PROCESS, DistContext, init_distributed
from tag2box.training.feature_cache import RoiMaps

_MAX_DRAWN_SIDE = 4096  # longest side of a picture with boxes; larger photos are drawn smaller


def detect(
    run: Path,
    photos: Sequence[Path],
    out: Path | None = None,
    *,
    export: str = "coco",
    split: str | None = None,
    proposals: Path | None = None,
    draw: Path | None = None,
    voc: Path | None = None,
    min_score: float = 0.3,
    overrides: Sequence[str] = (),
    pool: Pool | None = None,
    dist: DistContext = SINGLE_PROCESS,
    progress: Progress = silent,
) -> dict[str, Detections]:
    """Detect objects in photos (files or folders) with a trained run; keeps scores of at least ``min_score``.

    Args:
        out: file or folder to write.
        export: format of ``out``: a name in ``extend.EXPORT_FORMATS``, or ``package.module:Name``.
        split: if ``photos`` is a dataset, the split of it.
        proposals: proposal store of the photos; built with the method of the training photos if it does not exist.
        draw: folder for pictures with the boxes drawn.
        voc: folder for the result files of VOC's evaluation server, which ranks by score: with boxes of all scores.
        overrides: of ``inference``, as ``--set`` takes them: other scales, horizontal flips, another NMS.
        pool: where photos are processed, e.g. a ``RayPool``; default: this process. Boxes are the same.
        dist: ranks that share the photos; all return all detections, rank 0 writes.

    Example:
        boxes = tag2box.detect(Path("runs/mine"), [Path("photo.jpg")])["photo"].boxes
    """
    if not photos:
        raise errors.UserError("no photos given; name files or folders after the run")
    if pool is not None and dist.world_size > 1:
        raise errors.UserError("--on ray: Ray has processes of its own; start the command without torchrun")
    trained, writer = with_inference(runs.load_run(run), overrides), exports.export_format(export)
    found_photos = images.find_photos(photos) if split is None else _split_photos(photos, split)
    found = detect_photos(trained, found_photos, proposals=proposals, pool=pool, dist=dist, progress=progress)
    kept = {name: detections[detections.scores >= min_score] for name, detections in found.items()}
    if not dist.is_main:
        return kept
    if out is not None:
        exports.export_detections(writer, out, found_photos, trained.classes, found if writer.all_scores else kept)
    if voc is not None:
        name = "test" if split is None else Path(split).stem
        voc_boxes.write_voc_results(voc, found, trained.classes, split=name)
    if draw is not None:
        _draw(found_photos, kept, trained.classes, draw)
    return kept


def with_inference(trained: runs.TrainedRun, overrides: Sequence[str]) -> runs.TrainedRun:
    """The run with other inference settings."""
    other = next((o for o in overrides if not o.strip().startswith("inference.")), None)
    if other is not None:
        raise errors.UserError(
            f"--set {other}: only inference settings of a trained run can change; expected inference.NAME=VALUE"
        )
    return replace(trained, config=settings.load(recipes.Config, [], list(overrides), base=trained.config))


def detect_photos(
    trained: runs.TrainedRun,
    photos: Sequence[Photo],
    *,
    proposals: Path | None = None,
    pool: Pool | None = None,
    dist: DistContext = SINGLE_PROCESS,
    progress: Progress = silent,
) -> dict[str, Detections]:
    """All detections of a run in some photos, whose proposals are made with the method of the training photos."""
    with tempfile.TemporaryDirectory() as own:
        folder = proposals or Path(dist.all_gather_object(own)[0])
        try:
            with dist.main_process_first():
                store = runs.proposals_of(photos, trained.config, folder, progress, pool=pool)
        except errors.Interrupted:
            if proposals is not None:
                raise
            raise errors.Interrupted(
                "stopped, nothing saved; `tag2box propose` writes proposals that are kept"
            ) from None
        if pool is not None:
            return detect_in_pool(pool, trained, photos, store, progress=progress)
        return predict.run_detector(
            trained.detector,
            photos,
            store,
            maps=RoiMaps(trained.detector.backbone, photos, store),
            inference=trained.config.inference,
            rescore=trained.config.criterion.rescore,
            progress=progress,
            dist=dist,
        )


def _split_photos(paths: Sequence[Path], split: str) -> tuple[Photo, ...]:
    if len(paths) != 1:
        raise errors.UserError(
            f"--split {split}: belongs to one dataset, got {len(paths)} paths; name the dataset alone"
        )
    return datasets.read_photos(listing.DataSource(path=paths[0], split=split))


def _draw(photos: Sequence[Photo], found: dict[str, Detections], classes: Sequence[str], folder: Path) -> None:
    from tag2box.reporting.gallery import draw_detections  # imports everything that pages need

    for photo in photos:
        view = images.View(min(photo.width, photo.height), long_max=_MAX_DRAWN_SIDE)
        boxes = images.boxes_in_view(view, found[photo.id].boxes, (photo.height, photo.width))
        shown = replace(found[photo.id], boxes=boxes)
        picture = draw_detections(images.load_view(photo, view).round().byte(), shown, classes)
        with io.replacing(folder / f"{photo.id.replace('/', '_')}.jpg") as temporary:
            picture.save(temporary, format="JPEG", quality=92)


# ---------------------------------------------------------------- in a pool of processes


@dataclass(frozen=True, slots=True)
class PhotoTask:
    """A photo with its proposals: a worker may have no access to the store."""

    photo: Photo
    proposals: Float32[ndarray, "P 4"]
    ranks: Float32[ndarray, " P"]

    @property
    def path(self) -> Path:
        """The file of the photo."""
        return self.photo.path

    def boxes(self, photo_id: str, /) -> Float32[torch.Tensor, "P 4"]:
        """The proposals of the only photo."""
        return torch.from_numpy(self.proposals.copy())

    def scores(self, photo_id: str, /) -> Float32[torch.Tensor, " P"]:
        """Their scores."""
        return torch.from_numpy(self.ranks.copy())


@dataclass(frozen=True, slots=True)
class PhotoResult:
    """Detections of a photo, or an error message. Arrays: tensors are more expensive to send between processes."""

    boxes: Float32[ndarray, "B 4"] | None = None
    scores: Float32[ndarray, " B"] | None = None
    labels: Int64[ndarray, " B"] | None = None
    problem: str = ""

    def detections(self) -> Detections:
        """The detections; raises if the photo failed."""
        if self.boxes is None or self.scores is None or self.labels is None:
            raise errors.UserError(self.problem)
        # Copies: arrays received from another process may be read-only memory.
        return Detections(*(torch.from_numpy(x.copy()) for x in (self.boxes, self.scores, self.labels)))


@dataclass(frozen=True)
class DetectTask:
    """The work of a process: it builds the network once, from weights sent as arrays, then detects photo by photo."""

    build: Callable[[], Detector]
    weights: Mapping[str, ndarray]
    inference: predict.Inference
    rescore: Rescore
    threads: int  # of each process: the order of sums, and so the last bits of scores, depend on it

    def __call__(self, task: PhotoTask) -> PhotoResult:
        """All detections of a photo."""
        detector, photos = self._detector, (task.photo,)
        maps = RoiMaps(detector.backbone, photos, task)
        try:
            found = predict.run_detector(
                detector, photos, task, maps=maps, inference=self.inference, rescore=self.rescore
            )[task.photo.id]
        except errors.UserError as error:
            return PhotoResult(problem=f"{error}")
        return PhotoResult(found.boxes.numpy(), found.scores.numpy(), found.labels.numpy())

    @cached_property
    def _detector(self) -> Detector:
        torch.set_num_threads(self.threads)
        detector = self.build()
        detector.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in self.weights.items()})
        return detector.eval()


def detect_in_pool(
    pool: Pool,
    trained: runs.TrainedRun,
    photos: Sequence[Photo],
    store: annotations.BoxSource,
    *,
    progress: Progress = silent,
) -> dict[str, Detections]:
    """Detections by photo id, in the order of the photos, computed by the processes of a pool."""
    work = DetectTask(
        partial(runs.build_detector, trained.config, len(trained.classes), pretrained=False),
        {name: value.numpy() for name, value in trained.detector.state_dict().items()},
        trained.config.inference,
        trained.config.criterion.rescore,
        torch.get_num_threads(),
    )
    tasks = (PhotoTask(photo, store.boxes(photo.id).numpy(), store.scores(photo.id).numpy()) for photo in photos)
    results = pool(work, tasks, lost=_lost, threads=work.threads)
    found: dict[str, Detections] = {}
    with progress("detecting", len(photos)) as bar, closing(results) as finished:
        for task, result in finished:
            found[task.photo.id] = result.detections()
            bar.advance()
    return {photo.id: found[photo.id] for photo in photos}


def _lost(task: PhotoTask, number: int) -> PhotoResult:
    ended = f"was ended by signal {number}" if number else "died at every attempt"
    hint = "perhaps out of memory; smaller inference.scales need less"
    return PhotoResult(problem=f"{task.path}: the process that worked on it {ended}; {hint}")


# ---------------------------------------------------------------- the command


def detect_command(
    run: Annotated[Path, typer.Argument(help="A trained run.")],
    photos: Annotated[list[Path], typer.Argument(help="Photos, or folders of them; with --split, a dataset.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="File to write; for a format of many files, a folder. Default: detections.json, or detections."
        ),
    ] = None,
    split: options.SplitOption = None,
    proposals: Annotated[
        Path | None, typer.Option(help="Proposal store of these photos; default: made for this call only.")
    ] = None,
    draw: Annotated[Path | None, typer.Option(help="Folder for pictures with the boxes drawn.")] = None,
    voc: Annotated[
        Path | None,
        typer.Option(help="Folder for comp4_det_SPLIT_CLASS.txt, the files of VOC's evaluation server; all scores."),
    ] = None,
    export: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="NAME",
            help=f"Format of OUT: {', '.join(extend.EXPORT_FORMATS)}, or `package.module:Name` of your own.",
        ),
    ] = "coco",
    min_score: Annotated[float, typer.Option(help="Drop detections below this score.")] = 0.3,
    override: Annotated[
        list[str],
        typer.Option(
            "--set", metavar="inference.a=b", help="Override an inference setting, e.g. inference.mirror=true"
        ),
    ] = [],  # noqa: B006
    on: options.OnOption = "here",
    address: options.AddressOption = None,
) -> None:
    """Detect objects in photos with a trained run.

    Under torchrun, the processes share the photos.

    Example: `tag2box detect runs/mine holiday/ --out boxes.json --draw drawn`
    """
    out = out or Path("detections" if exports.export_format(export).is_folder else "detections.json")
    with init_distributed() as dist:
        found = detect(
            run,
            photos,
            out,
            export=export,
            split=split,
            proposals=proposals,
            draw=draw,
            voc=voc,
            min_score=min_score,
            overrides=override,
            pool=options.pool_of(on, address, chunk=1),
            dist=dist,
            progress=TerminalProgress() if dist.is_main else silent,
        )
        if dist.is_main:
            typer.echo(f"{sum(map(len, found.values()))} boxes in {len(found)} photos: {out}")
            if draw is not None:
                typer.echo(f"pictures: {draw}")
            if voc is not None:
                typer.echo(f"files for VOC's evaluation server: {voc}")
