"""``tag2box train``: photos and image-level tags in, a run folder with a trained detector out."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tag2box import annotations, errors, io, recipes, run_inputs, runs
from tag2box.cli import options
from tag2box.cli.label import label
from tag2box.cli.merge import agreement_table
from tag2box.cli.training_data import (
    TrainingData,
    adapt_backbone,
    build_regularizer,
    chosen_config,
    load_side_info,
    new_store_line,
    open_batches,
    read_taught,
    recipe_config,
    segment_photos,
    training_summary,
    with_proposals,
)
from tag2box.data.check import lacks_negatives, no_negatives_line, quick_findings
from tag2box.identity import RunIdentity
from tag2box.labels.agreement import class_agreement
from tag2box.labels.label_set import LabelSet, is_label_set
from tag2box.labels.quality import RunChoice, choose_run, labelled_scores
from tag2box.models.detector import Detector
from tag2box.parallel.pool import LocalPool, Pool
from tag2box.progress import Progress, TerminalProgress, silent
from tag2box.proposals import base
from tag2box.proposals.suitability import store_concerns
from tag2box.training import batches, checkpoint, events, loop, proposal_cache, trackers
from tag2box.training.dist import SINGLE_PROCESS, DistContext, init_distributed, is_torchrun
from tag2box.training.step import Step

RunParts = tuple[TrainingData, annotations.ReviewedBoxes | None, Detector]


def train(
    config: recipes.Config,
    out: Path,
    *,
    progress: Progress = silent,
    dist: DistContext = SINGLE_PROCESS,
    announce: Callable[[str], None] | None = None,
    pool: Pool | None = None,
) -> None:
    """Train a detector into a new run folder.

    Under torchrun, a run that was started with the same settings is resumed: torchrun restarts the same command.

    Args:
        announce: receives a line on what will be done, once photos and proposals are known.
        pool: where proposals and cached features are computed, e.g. a ``RayPool``; training itself is here.

    Example:
        config = replace(tag2box.RECIPES["photos"](), data=Data(tags=Path("tags.csv"), photos=Path("photos")))
        tag2box.train(config, Path("runs/mine"))
    """
    config = run_inputs.settled(runs.with_paths(config, out), dist)
    config.compute.torch_device()  # raises if this machine lacks what the settings require
    with runs.claimed(out, is_main=dist.is_main):
        with dist.main_process_first():
            is_new = dist.is_main and not _resumes(config, out)
            if is_new:
                runs.check_free(out)
            elif dist.is_main:
                config = runs.read_config(out)
            parts = _prepare(config, out, is_new=is_new, progress=progress, dist=dist, pool=pool)
        config = _with_length(config, parts[0])
        if announce is not None and dist.is_main:
            announce(training_summary(config, *parts[0]))
        _fit(config, parts, out=out, progress=progress, dist=dist, pool=pool)


def _with_length(config: recipes.Config, data: TrainingData) -> recipes.Config:
    """The settings with the iterations that the number of photos asks for."""
    return replace(config, plan=config.plan.for_photos(len(data[0]), config.loader.batch_size))


def resume(
    out: Path, *, progress: Progress = silent, dist: DistContext = SINGLE_PROCESS, pool: Pool | None = None
) -> None:
    """Continue a run from its last checkpoint, with the settings it was started with; ``pool`` as of ``train``.

    Raises if settings, classes, tags, photos or proposals are not those that the run was started with.
    """
    config = runs.read_config(out)
    config.compute.torch_device()
    with runs.claimed(out, is_main=dist.is_main):
        with dist.main_process_first():
            parts = _prepare(config, out, is_new=False, progress=progress, dist=dist, pool=pool)
        _fit(config, parts, out=out, progress=progress, dist=dist, pool=pool)


def _resumes(config: recipes.Config, out: Path) -> bool:
    """Whether torchrun restarted a run that exists already."""
    return is_torchrun() and _has_same_run(config, out)


def _has_same_run(config: recipes.Config, out: Path) -> bool:
    """Whether a folder holds a run; raises if it has other settings."""
    if not runs.has_run(out):
        return False
    before = runs.read_config(out)
    plan = config.plan if config.plan.epochs is None else replace(config.plan, iterations=before.plan.iterations)
    if before != replace(config, plan=plan):
        raise errors.UserError(
            f"{out}: already holds a run with other settings; continue it with --resume, or choose another"
        )
    return True


SEEDS_FILE = "seeds.json"
"""Of a folder of runs with several seeds: their mean scores, the best, and whether that is sure."""


def train_seeds(
    config: recipes.Config,
    seeds: Sequence[int],
    out: Path,
    *,
    track: Sequence[str] = (),
    progress: Progress = silent,
    dist: DistContext = SINGLE_PROCESS,
    announce: Callable[[str], None] | None = None,
    pool: Pool | None = None,
) -> RunChoice:
    """Train a run for each seed, label its photos with it, and compare the runs by a sign that needs no true box.

    All runs (``out``/seed-N) and label sets (``out``/labels-N) are kept; the proposals are shared. The same call
    continues what is unfinished. ``labels.quality.choose_run`` has the sign, and what it does not say.

    Example:
        choice = tag2box.train_seeds(config, [0, 1, 2], Path("runs/mine"))
        print(choice.best, choice.is_sure)
    """
    if len(set(seeds)) < 2 or len(set(seeds)) < len(seeds):
        raise errors.UserError(f"--seeds {','.join(map(str, seeds))}: expected two different seeds or more, as 0,1,2")
    data = replace(config.data, proposals=config.data.proposals or out / "proposals")
    scores = {}
    for seed in seeds:
        run, labels = out / f"seed-{seed}", out / f"labels-{seed}"
        own = replace(config, data=data, plan=replace(config.plan, seed=seed))
        settled = run_inputs.settled(runs.with_paths(own, run), dist)
        with trackers.tracking(run, track if dist.is_main else ()):
            is_begun, is_labelled = dist.all_gather_object((_has_same_run(settled, run), is_label_set(labels)))[0]
            if not is_begun:
                train(own, run, progress=progress, dist=dist, announce=announce, pool=pool)
            elif not is_labelled:
                resume(run, progress=progress, dist=dist, pool=pool)
        if not is_labelled:
            skipped: list[str] | None = [] if data.skip_bad else None
            label(run, data.source(), labels, proposals=data.proposals, skipped=skipped, progress=progress, dist=dist)
        dist.barrier()
        scores[run.name] = labelled_scores(LabelSet.open(labels).content)
    choice = choose_run(scores)
    if choice is None:
        raise errors.UserError(f"{out}: no tag has a box in all runs, so they cannot be compared; train for longer")
    if dist.is_main:
        lead = choice.lead and {"mean": choice.lead.mean, "error": choice.lead.error}
        found = {"scores": dict(choice.scores), "best": choice.best, "is_sure": choice.is_sure, "lead": lead}
        io.write_json(out / SEEDS_FILE, found)
    return choice


def _show_seeds(choice: RunChoice, seeds: Sequence[int], out: Path) -> None:
    """Print how far the seeds agree by class, the best one, and what to do with them."""
    folders = [out / f"labels-{seed}" for seed in seeds]
    options.print_rich(agreement_table(class_agreement([LabelSet.open(folder) for folder in folders])))
    options.say(choice.words())
    best = f"{out / choice.best.replace('seed', 'labels')}"
    merged = f"tag2box merge {' '.join(map(str, folders))} --out labels"
    options.say(f"next: tag2box review {best}" if choice.is_sure else f"next: {merged}")


def _prepare(
    config: recipes.Config, out: Path, *, is_new: bool, progress: Progress, dist: DistContext, pool: Pool | None
) -> RunParts:
    """Photos, proposals and network of a run; a new one is started once these are there, so a mistake leaves no run.

    Those of a resumed run are compared with what it recorded, tags and photos before proposals are computed.
    """
    recorded = None if is_new or not dist.is_main else RunIdentity.read(out)
    if recorded is not None:
        recorded.check_settings(config, out / runs.CONFIG_FILE)
        recorded.check_sources(config, out / runs.CONFIG_FILE)
        recorded = recorded.with_photos(out)
    photos, reviewed = read_taught(config)
    if config.warm_start is not None and not checkpoint.has_checkpoint(out):
        runs.check_warm_start(config, photos.classes)
    if is_new:
        for finding in quick_findings(photos):
            warnings.warn(f"{config.data.tags}: {finding}", stacklevel=2)
    if recorded is not None:
        recorded.check_classes(photos.classes, config.data.tags)
        recorded.check_boxes(reviewed, config.data.boxes)
        recorded.check_photos(photos, None, config)
    data = with_proposals(config, photos, progress, pool)
    if recorded is not None:
        recorded.check_photos(*data, config)
    detector = _detector(config, out, photos.classes)
    if recorded is not None and not checkpoint.has_checkpoint(out):
        recorded.check_weights(detector)
    if is_new:
        config = _with_length(config, data)
        _start(config, out, data, RunIdentity.of(config, *data, detector, reviewed))
    return data, reviewed, detector


def _start(config: recipes.Config, out: Path, data: TrainingData, identity: RunIdentity) -> None:
    photos, store = data
    runs.start_run(config, out, identity)
    boxes, warm = identity.boxes, identity.warm_start
    events.EventLog(out).write(
        "start",
        {
            "name": config.name,
            "classes": photos.classes,
            "train_photos": len(photos),
            **({} if boxes is None else {"boxed_photos": boxes.photos, "boxes": boxes.boxes}),
            **({} if warm is None else {"warm_start_boxes": warm.boxes}),
            "iterations": config.plan.iterations,
            "seed": config.plan.seed,
            "uses": base.uses_of(store.source),
            "proposals_per_photo": sum(len(store.boxes(p.id)) for p in photos.photos) / len(photos),
            "machine": runs.machine(),
            "versions": runs.versions(),
        },
    )
    concerns = [str(concern) for concern in store_concerns(store, photos.photos)]
    if lacks_negatives(photos.tags.sum(dim=1).tolist(), len(photos.classes)):
        concerns.append(no_negatives_line(len(photos)))
    log = events.EventLog(out)
    for concern in concerns:
        events.warn(log, out, 0, concern)
    for finding in quick_findings(photos):
        log.write("warning", {"iteration": 0, "problem": str(finding)})


# ---------------------------------------------------------------- training


def _fit(
    config: recipes.Config, parts: RunParts, *, out: Path, progress: Progress, dist: DistContext, pool: Pool | None
) -> None:
    step, source = _step_and_batches(config, *parts, progress=progress, dist=dist, pool=pool)
    loop.fit(step, source, config.plan, run=out, progress=progress)


def prepare_training(
    config: recipes.Config, out: Path, *, progress: Progress = silent
) -> tuple[Step, batches.FeatureBatches | batches.ImageBatches]:
    """The step and the batches of a config, for a training loop of your own (``examples/own_loop.py``).

    Proposals and the feature cache are built in ``out`` unless the config names other folders.
    """
    config = run_inputs.settled(runs.with_paths(config, out))
    photos, reviewed = read_taught(config)
    data = with_proposals(config, photos, progress)
    parts = (data, reviewed, _detector(config, out, photos.classes))
    return _step_and_batches(config, *parts, progress=progress, dist=SINGLE_PROCESS)


def _step_and_batches(
    config: recipes.Config,
    data: TrainingData,
    reviewed: annotations.ReviewedBoxes | None,
    detector: Detector,
    *,
    progress: Progress,
    dist: DistContext,
    pool: Pool | None = None,
) -> tuple[Step, batches.FeatureBatches | batches.ImageBatches]:
    compute, (photos, store) = config.compute, data
    detector = detector.to(compute.torch_device())
    workers = None if pool is None else run_inputs.NetworkPool.of(pool, config, len(photos.classes))
    with dist.main_process_first():  # caches are built once
        adapt_backbone(config, detector, photos, progress)
        folder, maps = runs.required(config.feature_cache), detector.class_maps
        keep, compute_evidence = config.adaptation.keep_boxes, None if workers is None else workers.evidence
        seen = proposal_cache.seen_boxes(
            photos.photos, store, maps, keep=keep, folder=folder, compute=compute_evidence, progress=progress
        )
        if reviewed is not None:
            seen = proposal_cache.with_reviewed_boxes(
                seen, photos.photos, reviewed, maps, copies=config.loader.box_copies, folder=folder
            )
        side_info = load_side_info(
            config, photos, seen.boxes, class_evidence=seen.evidence, reviewed=seen.codes, progress=progress
        )
        if config.criterion.requirements.segments:
            side_info = replace(side_info, segments=segment_photos(config, detector, photos, progress))
        made = open_batches(config, detector, photos, seen.boxes, progress, workers)
        source = replace(made, dist=dist, side_info=side_info)
    memory = compute.memory_for(has_cached_maps=isinstance(source, batches.FeatureBatches) and source.has_roi_maps)
    regularizer = build_regularizer(config, detector)
    criterion = config.criterion.for_classes(photos.classes)
    return Step(detector, criterion, regularizer, config.augment, memory, compute.runtime().precision, dist), source


def _detector(config: recipes.Config, out: Path, classes: Sequence[str]) -> Detector:
    """The detector of a new or resumed run; a checkpoint holds all weights, so pretrained ones are not loaded."""
    is_begun = checkpoint.has_checkpoint(out)
    if config.warm_start is not None and not is_begun:
        return runs.warm_detector(config, classes)
    detector = runs.build_detector(config, len(classes), pretrained=not is_begun)
    if is_begun:
        checkpoint.load_model(out, checkpoint.read_state(out), detector)
        detector.is_adapted = True
    return detector


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
    boxes: Annotated[
        Path | None,
        typer.Option(help="Reviewed boxes of some photos (data.boxes): they teach beside the tags of all photos."),
    ] = None,
    warm_start: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Start from the weights of a finished run (warm_start).")
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
    track: options.TrackOption = [],  # noqa: B006
    override: options.SetOption = [],  # noqa: B006
    seeds: Annotated[
        str | None, typer.Option(help="Several runs, OUT/seed-N, compared by a sign that needs no boxes: 0,1,2.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes for proposals and the feature cache.")] = None,
    on: options.OnOption = "here",
    address: options.AddressOption = None,
) -> None:
    """Train a detector from photos and image-level tags.

    Runs on all processes that torchrun starts; with --on ray a cluster computes proposals and the feature cache.
    Resumable: `--resume` continues from the last checkpoint.

    Example: `tag2box train tags.csv --photos photos --out runs/mine`. DATA is a CSV of tags, a COCO file, a VOC folder
    or a tree of class folders. Later, with some photos reviewed:
    `tag2box train tags.csv --photos photos --boxes labels --warm-start runs/mine --out runs/second`.
    """
    places = (data, tags, photos, split, classes, data_format, proposals, boxes, warm_start, seeds)
    if is_resumed and (config or override or system or any(places)):
        raise errors.UserError(
            "--resume takes its settings from the run; leave out the dataset, --config, --system, --seeds and --set"
        )
    named = {"tags": data or tags, "photos": photos, "split": split, "proposals": proposals, "format": data_format,
             "boxes": boxes}  # fmt: skip
    pool = options.pool_of(on, address, workers=workers, chunk=1) or (LocalPool(workers) if workers else None)
    with init_distributed() as dist, trackers.tracking(out, track if dist.is_main and not seeds else ()):
        progress = TerminalProgress() if dist.is_main else silent
        if is_resumed:
            resume(out, progress=progress, dist=dist, pool=pool)
        else:
            settled = chosen_config(recipe_config(recipe, system), config, override, named, classes)
            if warm_start is not None:
                settled = replace(settled, warm_start=warm_start)
            if proposals is not None:
                settled = run_inputs.match_store_method(settled, proposals)
                if dist.is_main and not proposals.exists():
                    options.say(new_store_line(proposals))
            if seeds:
                numbers, made = options.seed_list(seeds), partial(train_seeds, settled, announce=options.say, pool=pool)
                choice = made(numbers, out, track=track, progress=progress, dist=dist)
                if dist.is_main:
                    _show_seeds(choice, numbers, out)
                return
            train(settled, out, progress=progress, dist=dist, announce=options.say, pool=pool)
        if dist.is_main:
            typer.echo(f"trained: {out}; try `tag2box detect {out} PHOTO --draw drawn`")
