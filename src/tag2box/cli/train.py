"""``tag2box train``: photos and image-level tags in, a run folder with a trained detector out."""

import difflib
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from tag2box import annotations, errors, io, recipes, runs, settings, systems, types
from tag2box.cli import options
from tag2box.data.box_counts import counts_from_boxes
from tag2box.formats import datasets, listing
from tag2box.methods.protocols import Labeler, MilStrategy
from tag2box.models.detector import Detector
from tag2box.models.drop_block import Regularizer
from tag2box.progress import Progress, TerminalProgress, silent
from tag2box.proposals.store import ProposalStore
from tag2box.training import batches, checkpoint, events, feature_cache, loop, superpixel_cache
from tag2box.training.dist import SINGLE_PROCESS, DistContext, init_distributed, is_torchrun
from tag2box.training.step import Step

TrainingData = tuple[annotations.TaggedPhotos, ProposalStore]
"""The photos of a run, with tags, and their proposals."""

_PHOTO_FAULTS = {"missing photo", "empty photo", "unreadable photo"}  # faults that data.skip_bad tolerates


def train(
    config: recipes.Config, out: Path, *, progress: Progress = silent, dist: DistContext = SINGLE_PROCESS
) -> None:
    """Train a detector into a new run folder.

    Under torchrun, a run that was started with the same settings is resumed: torchrun restarts the same command.

    Example:
        config = replace(tag2box.RECIPES["photos"](), data=Data(tags=Path("tags.csv"), photos=Path("photos")))
        tag2box.train(config, Path("runs/mine"))
    """
    config = runs.with_paths(config, out)
    config.compute.torch_device()  # raises if this machine lacks what the settings require
    with dist.main_process_first():
        is_new = dist.is_main and not _resumes(config, out)
        if is_new:
            runs.check_free(out)
        data = prepare_data(config, progress)  # before the run is started: an unreadable photo leaves no run
        if is_new:
            _start(config, out, *data)
    _fit(config, out, data, progress=progress, dist=dist)


def resume(out: Path, *, progress: Progress = silent, dist: DistContext = SINGLE_PROCESS) -> None:
    """Continue a run from its last checkpoint, with the settings it was started with."""
    config = runs.read_config(out)
    config.compute.torch_device()
    with dist.main_process_first():
        data = prepare_data(config, progress)
    _fit(config, out, data, progress=progress, dist=dist)


def _resumes(config: recipes.Config, out: Path) -> bool:
    """Whether torchrun restarted a run that exists already."""
    if not (is_torchrun() and runs.has_run(out)):
        return False
    if runs.read_config(out) != config:
        raise errors.UserError(
            f"{out}: already holds a run with other settings; continue it with --resume, or choose another"
        )
    return True


def _start(config: recipes.Config, out: Path, photos: annotations.TaggedPhotos, store: ProposalStore) -> None:
    runs.start_run(config, out)
    events.EventLog(out).write(
        "start",
        {
            "name": config.name,
            "classes": photos.classes,
            "train_photos": len(photos),
            "iterations": config.plan.iterations,
            "seed": config.plan.seed,
            "proposals_per_photo": sum(len(store.boxes(p.id)) for p in photos.photos) / len(photos),
            "machine": runs.machine(),
            "versions": runs.versions(),
        },
    )


# ---------------------------------------------------------------- data


def read_training(config: recipes.Config) -> annotations.TaggedPhotos:
    """The photos and tags of a run."""
    bad: list[listing.Fault] = []
    photos = datasets.read_tagged(config.data.source(), bad.append if config.data.skip_bad else listing.refuse)
    other = next((fault for fault in bad if fault.kind not in _PHOTO_FAULTS), None)
    if other is not None:
        listing.refuse(other)
    if not photos.tags.any():
        raise errors.UserError(f"{config.data.tags}: no photo has a tag; at least one is needed to learn")
    if config.data.counts == "boxes" and config.criterion.requirements.counts:
        return counts_from_boxes(photos, config.data.source())
    return photos


def prepare_data(config: recipes.Config, progress: Progress = silent) -> TrainingData:
    """The photos of a run and their proposals, checked against the requirements of the criterion.

    With ``data.skip_bad``, photos without proposals because they cannot be read are left out.
    """
    photos, skip_bad = read_training(config), config.data.skip_bad
    check_requirements(config, photos)  # before proposals are computed, which may take hours
    folder = runs.required(config.data.proposals)
    store = runs.proposals_of(photos.photos, config, folder, progress, skip_bad=skip_bad)
    kept = photos.part([photo.id not in store.failed for photo in photos.photos]) if skip_bad else photos
    check_proposal_scores(config, kept, store)
    return kept, store


def load_side_info(
    config: recipes.Config, photos: annotations.TaggedPhotos, store: ProposalStore, progress: Progress = silent
) -> types.SideInfoLoader:
    """The side info that the criterion requires; superpixel evidence is computed once, in the feature cache."""
    requirements, evidence = config.criterion.requirements, None
    if requirements.evidence:
        evidence = superpixel_cache.build_superpixel_cache(
            photos.photos, store, config.superpixels, runs.required(config.feature_cache), progress=progress
        )
    return types.SideInfoLoader(
        counts=photos.counts if requirements.counts else None,
        evidence=evidence,
        objectness=store.scores if requirements.objectness or config.heads.box_prior else None,
    )


# ---------------------------------------------------------------- requirements of the criterion


def check_requirements(config: recipes.Config, photos: annotations.TaggedPhotos) -> None:
    """Raise unless the network and the photos provide what the criterion requires; needs no proposals."""
    requirements = config.criterion.requirements
    check_attention(config)
    if requirements.mil_heads > config.heads.mil_heads:
        raise errors.UserError(
            f"heads.mil_heads: is {config.heads.mil_heads}, but {_part_with(config, 'mil_heads')} reads "
            f"{requirements.mil_heads}; set heads.mil_heads={requirements.mil_heads}"
        )
    if requirements.counts and (photos.counts is None or not bool((photos.counts > 0).any())):
        raise errors.UserError(
            f"{config.data.tags}: {_part_with(config, 'counts')} needs counts of objects, and no photo has any; add a "
            "column counts (docs/datasets.md), or, for study of a dataset with boxes, set data.counts=boxes"
        )
    if requirements.evidence:
        missing = next((photo.path for photo in photos.photos if not photo.path.is_file()), None)
        if missing is not None:
            raise errors.UserError(
                f"{missing}: no such photo, and {_part_with(config, 'evidence')} needs its superpixels; put it back, "
                "or set data.skip_bad=true"
            )


def check_attention(config: recipes.Config) -> None:
    """Raise unless there are the views, or layers, that the attention loss compares."""
    requirements = config.criterion.requirements
    if requirements.views_per_image > config.loader.views_per_image:
        raise errors.UserError(
            f"loader.views_per_image: is {config.loader.views_per_image}, but criterion.attention.input_weight "
            f"compares views of a photo; set loader.views_per_image={requirements.views_per_image} or more, or "
            "criterion.attention.input_weight=0"
        )
    if requirements.layers > config.backbone.layers:
        kind = getattr(config.backbone, "kind", config.backbone.title)
        raise errors.UserError(
            f'criterion.attention.layer_weight: compares layers, and backbone.kind = "{kind}" has '
            "one; set it to 0, or take backbone.kind=lite0"
        )


def check_proposal_scores(config: recipes.Config, photos: annotations.TaggedPhotos, store: ProposalStore) -> None:
    """Raise unless proposals have the scores that the criterion or ``heads.box_prior`` requires."""
    prior = config.heads.box_prior > 0
    if not (prior or config.criterion.requirements.objectness):
        return
    part = "heads.box_prior" if prior else _part_with(config, "objectness")
    if not store.ranked:
        raise errors.UserError(
            f"{store.path}: {part} needs scores of proposals, and {store.source.get('kind')} gives none; "
            "set proposals.kind=edge_boxes and name another --proposals, or import proposals that have scores"
        )
    ends = [torch.aminmax(scores) for photo in photos.photos if len(scores := store.scores(photo.id))]
    low, high = min((float(x.min) for x in ends), default=0.0), max((float(x.max) for x in ends), default=0.0)
    if low < 0 or high > 1:
        raise errors.UserError(
            f"{store.path}: {part} needs scores within 0 and 1, these reach from {low:.4g} to {high:.4g}; "
            "bring them into this range before they are imported, or set proposals.kind=edge_boxes"
        )


def _part_with(config: recipes.Config, requirement: str) -> str:
    """The part of the criterion that has a requirement."""
    criterion = config.criterion
    parts: dict[str, MilStrategy | Labeler] = {"criterion.mil": criterion.mil, "criterion.labeler": criterion.labeler}
    for name, part in parts.items():
        if getattr(part.requirements, requirement) != getattr(types.Requirements(), requirement):
            return f'{name}.kind = "{getattr(part, "kind", type(part).__name__)}"'
    return "the criterion"


# ---------------------------------------------------------------- training


def _fit(config: recipes.Config, out: Path, data: TrainingData, *, progress: Progress, dist: DistContext) -> None:
    step, source = _step_and_batches(config, out, data, progress=progress, dist=dist)
    with io.locked(out / io.LOCK, "trains") if dist.is_main else nullcontext():
        loop.fit(step, source, config.plan, run=out, progress=progress)


def prepare_training(
    config: recipes.Config, out: Path, *, progress: Progress = silent
) -> tuple[Step, batches.FeatureBatches | batches.ImageBatches]:
    """The step and the batches of a config, for a training loop of your own (``examples/own_loop.py``).

    Proposals and the feature cache are built in ``out`` unless the config names other folders.
    """
    config = runs.with_paths(config, out)
    return _step_and_batches(config, out, prepare_data(config, progress), progress=progress, dist=SINGLE_PROCESS)


def _step_and_batches(
    config: recipes.Config, out: Path, data: TrainingData, *, progress: Progress, dist: DistContext
) -> tuple[Step, batches.FeatureBatches | batches.ImageBatches]:
    compute, (photos, store) = config.compute, data
    detector = _detector(config, out, len(photos.classes)).to(compute.torch_device())
    with dist.main_process_first():  # caches are built once
        side_info = load_side_info(config, photos, store, progress)
        source = replace(_batches(config, detector, photos, store, progress), dist=dist, side_info=side_info)
    memory = compute.memory_for(has_cached_maps=isinstance(source, batches.FeatureBatches) and source.has_roi_maps)
    regularizer = build_regularizer(config, detector)
    return Step(detector, config.criterion, regularizer, config.augment, memory, compute.precision, dist), source


def build_regularizer(config: recipes.Config, detector: Detector) -> Regularizer:
    """The regularizer of RoI maps, on the device of the detector if it is a network."""
    built = config.drop_block.build(detector.backbone.channels, config.plan.seed)
    return built.to(detector.backbone.device) if isinstance(built, torch.nn.Module) else built


def _detector(config: recipes.Config, out: Path, num_classes: int) -> Detector:
    """The detector of a new or resumed run; a checkpoint holds all weights, so pretrained ones are not loaded."""
    is_begun = checkpoint.has_checkpoint(out)
    detector = runs.build_detector(config, num_classes, pretrained=not is_begun)
    if is_begun:
        checkpoint.load_model(out, checkpoint.read_state(out), detector)
    return detector


def _batches(
    config: recipes.Config,
    detector: Detector,
    photos: annotations.TaggedPhotos,
    store: ProposalStore,
    progress: Progress,
) -> batches.FeatureBatches | batches.ImageBatches:
    """Batches of RoI maps if they are frozen and fit the cache, of trunk maps if these are frozen, else of images."""
    backbone, views = detector.backbone, config.loader.resize.views()
    maps = runs.cached_features(feature_cache.RoiMaps(backbone, photos.photos, store), config, views, progress)
    if isinstance(maps, feature_cache.FeatureCache):
        return batches.FeatureBatches(photos, store, config.loader, config.plan.seed, maps)
    if detector.backbone.frozen_trunk:
        trunks = runs.cached_features(
            feature_cache.TrunkMaps(detector.backbone, photos.photos), config, views, progress
        )
        return batches.FeatureBatches(photos, store, config.loader, config.plan.seed, trunks)
    return batches.ImageBatches(photos, store, config.loader, config.plan.seed, backbone.preprocess.neutral())


# ---------------------------------------------------------------- the command


def train_command(
    out: Annotated[Path, typer.Option(help="Run folder to write.")],
    data: Annotated[Path | None, typer.Argument(metavar="DATA", help="Dataset to learn from (data.tags).")] = None,
    photos: options.PhotosOption = None,
    split: options.SplitOption = None,
    classes: options.ClassesOption = None,
    data_format: options.DataFormatOption = None,
    proposals: Annotated[
        Path | None, typer.Option(help="Proposal store of the photos (data.proposals); default: made inside the run.")
    ] = None,
    config: Annotated[list[Path], typer.Option(help="TOML settings file; repeatable, later files win.")] = [],  # noqa: B006
    recipe: Annotated[
        str, typer.Option(help="Base settings: photos, od-wscl, or another of `tag2box recipes`.")
    ] = "photos",
    system: Annotated[
        str | None, typer.Option(metavar="NAME", help="Apply a system of `tag2box systems` to the recipe.")
    ] = None,
    is_resumed: Annotated[
        bool, typer.Option("--resume", help="Continue the run in OUT with its own settings.")
    ] = False,
    tags: Annotated[Path | None, typer.Option(help="Older name of DATA.", hidden=True)] = None,
    override: options.SetOption = [],  # noqa: B006
) -> None:
    """Train a detector from photos and image-level tags.

    Runs on all processes that torchrun starts. Resumable: `--resume` continues from the last checkpoint.

    Example: `tag2box train tags.csv --photos photos --out runs/mine`. DATA is a CSV of tags, a COCO file, a VOC folder
    or a tree of class folders.
    """
    if is_resumed and (config or override or any((data, tags, photos, split, classes, data_format, proposals, system))):
        raise errors.UserError(
            "--resume takes its settings from the run; leave out the dataset, --config, --system and --set"
        )
    named = {"tags": data or tags, "photos": photos, "split": split, "proposals": proposals, "format": data_format}
    with init_distributed() as dist:
        progress = TerminalProgress() if dist.is_main else silent
        if is_resumed:
            resume(out, progress=progress, dist=dist)
        else:
            settled = _config(_base(recipe, system), config, override, named, classes)
            if proposals is not None:
                settled = runs.match_store_method(settled, proposals)
            train(settled, out, progress=progress, dist=dist)
        if dist.is_main:
            typer.echo(f"trained: {out}; try `tag2box detect {out} PHOTO --draw drawn`")


def _base(recipe: str, system: str | None) -> recipes.Config:
    """The recipe with the system applied, before files and --set."""
    if recipe not in recipes.RECIPES:
        near = difflib.get_close_matches(recipe, recipes.RECIPES, 1, 0.0)[0]
        raise errors.UserError(f"--recipe {recipe}: unknown; did you mean {near}? `tag2box recipes` lists all")
    return recipes.RECIPES[recipe]() if system is None else systems.find_system(system)(recipes.RECIPES[recipe]())


def _config(
    base: recipes.Config,
    files: list[Path],
    overrides: list[str],
    named: dict[str, Path | str | None],
    classes: str | None,
) -> recipes.Config:
    loaded = settings.load(recipes.Config, files, overrides, base=base)
    given: dict[str, object] = {key: value for key, value in named.items() if value is not None}
    if classes is not None:
        given["classes"] = datasets.class_names(classes)
    return replace(loaded, data=replace(loaded.data, **given))  # type: ignore[arg-type]
