"""``tag2box detect``: photos in, boxes out."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tag2box import settings
from tag2box.annotations import Detections, Photo
from tag2box.commands.detect_pool import detect_on
from tag2box.commands.runs import TrainedRun, load_run, proposals_of
from tag2box.data.images import find_photos, load_view
from tag2box.data.transforms import View, boxes_in_view
from tag2box.errors import Interrupted, UserError
from tag2box.formats.datasets import read_photos
from tag2box.formats.detection_files import write_coco_detections, write_voc_results
from tag2box.formats.listing import DataSource
from tag2box.inference.predict import detect_photos_with as detect_with
from tag2box.io import replacing
from tag2box.progress import Progress, silent
from tag2box.proposals.pool import Pool
from tag2box.recipes import Config
from tag2box.training.dist import SINGLE_PROCESS, DistContext
from tag2box.training.feature_cache import LiveRoiMaps

DRAWN_MOST = 4096
"""Longest side of a picture with boxes; larger photos are drawn smaller."""


def detect(  # noqa: PLR0913 - one keyword an option of the command
    run: Path,
    photos: Sequence[Path],
    out: Path | None = None,
    *,
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
    """Detect in photos (files or folders) with a trained run; keep boxes from ``min_score`` up.

    Writes a COCO JSON to ``out``, pictures with the boxes drawn to the folder ``draw``, and to the folder ``voc`` the
    files VOC's evaluation server takes, where given. The server ranks by score, so its files have boxes of all scores.

    Args:
        split: with a dataset in place of the photos, the part of it to look at.
        proposals: a store of the photos' proposals; made as those of the training photos where it does not exist yet.
        overrides: of ``inference``, as ``--set`` takes them: other scales, mirror images, another NMS.
        pool: where photos are looked at, if not by this process; ``RayPool`` is a cluster. Boxes are the same.
        processes: those that share the photos among them; all return everything, and the leader writes.
    """
    if not photos:
        raise UserError("no photos given; name files or folders after the run")
    if pool is not None and dist.size > 1:
        raise UserError("--on ray: Ray has processes of its own; start the command without torchrun")
    trained = looking(load_run(run), overrides)
    found_photos = find_photos(photos) if split is None else _part(photos, split)
    found = detect_photos(trained, found_photos, proposals=proposals, pool=pool, dist=dist, progress=progress)
    kept = {name: detections[detections.scores >= min_score] for name, detections in found.items()}
    if not dist.is_main:
        return kept
    if out is not None:
        write_coco_detections(out, kept, trained.classes, found_photos)
    if voc is not None:
        write_voc_results(voc, found, trained.classes, split="test" if split is None else Path(split).stem)
    if draw is not None:
        _draw(found_photos, kept, trained.classes, draw)
    return kept


def looking(trained: TrainedRun, overrides: Sequence[str]) -> TrainedRun:
    """A run that looks at photos in another way than its settings say."""
    strange = next((o for o in overrides if not o.strip().startswith("inference.")), None)
    if strange is not None:
        raise UserError(f"--set {strange}: a trained run can only be told how to look; expected inference.NAME=VALUE")
    return replace(trained, config=settings.load(Config, [], list(overrides), base=trained.config))


def detect_photos(
    trained: TrainedRun,
    photos: Sequence[Photo],
    *,
    proposals: Path | None = None,
    pool: Pool | None = None,
    dist: DistContext = SINGLE_PROCESS,
    progress: Progress = silent,
) -> dict[str, Detections]:
    """Everything a run sees in some photos; their proposals are made as those of its training photos were."""
    with tempfile.TemporaryDirectory() as own:
        folder = proposals or Path(dist.all_gather_object(own)[0])
        try:
            with dist.main_process_first():
                store = proposals_of(photos, trained.config, folder, progress, pool=pool)
        except Interrupted:
            if proposals is not None:
                raise
            raise Interrupted("stopped, and nothing kept; `tag2box propose` makes proposals that last") from None
        if pool is not None:
            return detect_on(pool, trained, photos, store, progress=progress)
        maps = LiveRoiMaps(trained.detector.backbone, photos, store)
        return detect_with(
            trained.detector,
            photos,
            store,
            maps=maps,
            inference=trained.config.inference,
            rescore=trained.config.criterion.rescore,
            progress=progress,
            dist=dist,
        )


def _part(places: Sequence[Path], split: str) -> tuple[Photo, ...]:
    if len(places) != 1:
        raise UserError(f"--split {split}: belongs to one dataset, got {len(places)} paths; name the dataset alone")
    return read_photos(DataSource(path=places[0], split=split))


def _draw(photos: Sequence[Photo], found: dict[str, Detections], classes: Sequence[str], folder: Path) -> None:
    from tag2box.reporting.gallery import draw_detections  # brings all that pages are made with

    for photo in photos:
        view = View(min(photo.width, photo.height), long_max=DRAWN_MOST)
        boxes = boxes_in_view(view, found[photo.id].boxes, (photo.height, photo.width))
        shown = replace(found[photo.id], boxes=boxes)
        picture = draw_detections(load_view(photo, view).round().byte(), shown, classes)
        with replacing(folder / f"{photo.id.replace('/', '_')}.jpg") as temporary:
            picture.save(temporary, format="JPEG", quality=92)
