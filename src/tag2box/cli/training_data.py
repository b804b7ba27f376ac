"""The data of a training run: photos, tags, reviewed boxes, proposals and what the criterion reads beyond them.

And whether network, photos and proposals provide what the criterion requires, and a summary of what will be done.
"""

import difflib
from dataclasses import replace
from pathlib import Path

import torch

from tag2box import annotations, errors, recipes, run_inputs, runs, settings, systems, types
from tag2box.data.reviewed_boxes import counts_from_boxes, read_reviewed
from tag2box.formats import datasets, listing
from tag2box.methods.protocols import Labeler, MilStrategy
from tag2box.models.backbone import innermost
from tag2box.models.detector import Detector
from tag2box.models.drop_block import Regularizer
from tag2box.parallel.pool import Pool
from tag2box.progress import Progress, silent
from tag2box.proposals.store import ProposalStore
from tag2box.training import adaptation, batches, feature_cache, proposal_cache

TrainingData = tuple[annotations.TaggedPhotos, ProposalStore]
"""The photos of a run, with tags, and their proposals."""

_SHOWN = {"evidence": "superpixels", "superpixels": "superpixels", "segments": "segmentation"}
"""What is computed of the pixels of a photo, by requirement."""
_PHOTO_FAULTS = {"missing photo", "empty photo", "unreadable photo"}  # faults that data.skip_bad tolerates


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


def read_taught(config: recipes.Config) -> tuple[annotations.TaggedPhotos, annotations.ReviewedBoxes | None]:
    """The photos and tags of a run, and the reviewed boxes of some of them, if there are any."""
    photos = read_training(config)
    if config.data.boxes is None:
        return photos, None
    return read_reviewed(config.data.boxes, photos, config.data.photos)


def prepare_data(config: recipes.Config, progress: Progress = silent) -> TrainingData:
    """The photos of a run and their proposals, checked against the requirements of the criterion.

    With ``data.skip_bad``, photos without proposals because they cannot be read are left out.
    """
    return with_proposals(config, read_training(config), progress)


def with_proposals(
    config: recipes.Config, photos: annotations.TaggedPhotos, progress: Progress, pool: Pool | None = None
) -> TrainingData:
    """The photos of a run, without those to be skipped, and their proposals."""
    check_requirements(config, photos)  # before proposals are computed, which may take hours
    folder, skip_bad = runs.required(config.data.proposals), config.data.skip_bad
    store = run_inputs.proposals_of(photos.photos, config, folder, progress, skip_bad=skip_bad, pool=pool)
    kept = photos.part([photo.id not in store.failed for photo in photos.photos]) if skip_bad else photos
    if not any(len(store.boxes(photo.id)) for photo in kept.photos):
        raise errors.UserError(
            f"{store.path}: no proposals in any photo, so there is nothing to learn from; lower proposals.min_side, or "
            "take another proposals.kind"
        )
    check_proposal_scores(config, kept, store)
    return kept, store


def load_side_info(
    config: recipes.Config,
    photos: annotations.TaggedPhotos,
    store: annotations.BoxSource,
    *,
    class_evidence: types.PerProposalAndClass | None = None,
    reviewed: types.ReviewedCodes | None = None,
    progress: Progress = silent,
) -> types.SideInfoLoader:
    """The side info that the criterion requires; numbers per proposal are computed once, in the feature cache."""
    requirements, evidence, maps = config.criterion.requirements, None, None
    folder = runs.required(config.feature_cache)
    if requirements.evidence:
        evidence = proposal_cache.build_superpixel_cache(
            photos.photos, store, config.superpixels, folder, progress=progress
        )
    if requirements.superpixels:
        maps = proposal_cache.build_superpixel_maps(photos.photos, config.superpixels, folder, progress=progress)
    return types.SideInfoLoader(
        counts=photos.counts if requirements.counts else None,
        evidence=evidence,
        objectness=store.scores if requirements.objectness or config.heads.box_prior else None,
        class_evidence=class_evidence if requirements.class_evidence else None,
        reviewed=reviewed,
        superpixels=maps,
    )


# ---------------------------------------------------------------- requirements


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
    needs_maps = requirements.class_evidence or config.inference.prior.evidence != 0
    if needs_maps and not config.adaptation.epochs:
        key = "criterion" if requirements.class_evidence else "inference"
        raise errors.UserError(
            f"{key}.prior.evidence: needs class maps; set adaptation.epochs, for example to 10, or this to 0"
        )
    need = next((name for name in _SHOWN if getattr(requirements, name)), None)
    if need is not None:
        missing = next((photo.path for photo in photos.photos if not photo.path.is_file()), None)
        if missing is not None:
            raise errors.UserError(
                f"{missing}: no such photo, and {_part_with(config, need)} needs its {_SHOWN[need]}; put it back, "
                "or set data.skip_bad=true"
            )


def check_attention(config: recipes.Config) -> None:
    """Raise unless there are the views, or layers, that the attention loss compares, and it trains any of them."""
    requirements = config.criterion.requirements
    if requirements.views_per_image > config.loader.views_per_image:
        raise errors.UserError(
            f"loader.views_per_image: is {config.loader.views_per_image}, but criterion.attention.input_weight "
            f"compares views of a photo; set loader.views_per_image={requirements.views_per_image} or more, or "
            "criterion.attention.input_weight=0"
        )
    if requirements.responses and getattr(config.backbone, "pooled", False):
        raise errors.UserError(
            "criterion.attention: compares cells of RoI maps, which backbone.pooled averages; set it to false"
        )
    backbone, early = config.backbone, config.heads.early_layers
    kind = getattr(backbone, "kind", backbone.title)
    is_pooled = getattr(backbone, "pooled", False)
    if is_pooled and (requirements.responses or early):
        raise errors.UserError("backbone.pooled: RoI maps of one cell have no attention to compare; set it to false")
    if early > backbone.early_layers:
        raise errors.UserError(
            f'heads.early_layers: is {early}, but backbone.kind = "{kind}" has {backbone.early_layers} early layers; '
            f"set it to {backbone.early_layers}"
        )
    if requirements.responses and not backbone.trains_responses:
        raise errors.UserError(
            f'criterion.attention: all layers of backbone.kind = "{kind}" that it compares are frozen, so it trains '
            "nothing; train one, for example with backbone.neck_channels=128 (vgg16) or backbone.train_neck=true "
            "(lite0), or set both weights to 0"
        )
    if requirements.layers > backbone.layers + early:
        raise errors.UserError(
            f'criterion.attention.layer_weight: compares layers, and backbone.kind = "{kind}" has one after RoI '
            "pooling; set heads.early_layers=2, or this to 0"
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


def training_summary(config: recipes.Config, photos: annotations.TaggedPhotos, store: annotations.BoxSource) -> str:
    """What a training that begins will do, in one line: photos, proposals, iterations and the rounds they make."""
    count, plan, batch = len(photos), config.plan, config.loader.batch_size
    boxes = sum(len(store.boxes(photo.id)) for photo in photos.photos) / max(1, count)
    most = config.adaptation.keep_boxes if config.adaptation.epochs else None
    used = f", {most} of them used" if most is not None and most < boxes else ""
    rounds = plan.iterations * batch / max(1, count)
    bound = ""
    if plan.epochs is not None and plan.iterations in {plan.least_iterations, plan.most_iterations}:
        name = "least_iterations" if plan.iterations == plan.least_iterations else "most_iterations"
        bound = f", as plan.{name} has it"
    return (
        f"{count:,} photos, {boxes:,.0f} proposals each{used}; {plan.iterations:,} iterations of {batch} photos = "
        f"{rounds:,.1f} rounds{bound}"
    )


def new_store_line(place: Path) -> str:
    """What is said of a store that does not exist: it is made. If one beside it has a similar name, that is named."""
    stores = [path.name for path in place.absolute().parent.glob("*") if ProposalStore.exists(path)]
    near = difflib.get_close_matches(place.name, stores, 1)
    hint = f"; did you mean {place.with_name(near[0])}?" if near else ""
    return f"proposals: {place} does not exist, so they are computed into it{hint}"


# ---------------------------------------------------------------- what training reads


def adapt_backbone(
    config: recipes.Config, detector: Detector, photos: annotations.TaggedPhotos, progress: Progress
) -> None:
    """Let the backbone learn the tags first, if that is set; the weights of a checkpoint have learned already."""
    if detector.class_maps is None or detector.is_adapted:
        return
    own = config.adaptation.seed
    adaptation.adapt(
        detector.class_maps,
        photos,
        config.adaptation,
        folder=runs.required(config.feature_cache),
        seed=config.plan.seed if own is None else own,
        progress=progress,
    )
    detector.load_adapted()


def segment_photos(
    config: recipes.Config, detector: Detector, photos: annotations.TaggedPhotos, progress: Progress
) -> types.PhotoLabels:
    """The segmentation of photos by a branch on the adapted backbone, or on the pretrained one.

    Neither changes during training, so a resumed run has the same segmentation.
    """
    if detector.class_maps is not None:
        backbone = detector.class_maps.backbone
    else:
        with torch.random.fork_rng():
            torch.manual_seed(config.plan.seed)  # of layers without pretrained weights
            built = runs.build_detector(config, len(photos.classes), pretrained=True)
        backbone = innermost(built.backbone).to(config.compute.torch_device())
    folder, seed = runs.required(config.feature_cache), config.plan.seed
    return adaptation.build_segments(backbone, photos, config.segmentation, folder=folder, seed=seed, progress=progress)


def build_regularizer(config: recipes.Config, detector: Detector) -> Regularizer:
    """The regularizer of RoI maps, on the device of the detector if it is a network."""
    built = config.drop_block.build(detector.backbone.channels, config.plan.seed)
    return built.to(detector.backbone.device) if isinstance(built, torch.nn.Module) else built


def open_batches(
    config: recipes.Config,
    detector: Detector,
    photos: annotations.TaggedPhotos,
    store: annotations.BoxSource,
    progress: Progress,
    workers: run_inputs.NetworkPool | None,
) -> batches.FeatureBatches | batches.ImageBatches:
    """Batches of RoI maps if they are frozen and fit the cache, of trunk maps if these are frozen, else of images."""
    backbone, views = detector.backbone, config.loader.resize.views()
    computed = feature_cache.RoiMaps(backbone, photos.photos, store)
    maps = run_inputs.cached_roi_maps(computed, config, views, progress, workers)
    if not isinstance(maps, feature_cache.RoiMaps):
        return batches.FeatureBatches(photos, store, config.loader, config.plan.seed, maps)
    if backbone.frozen_trunk:
        trunk_maps = feature_cache.TrunkMaps(backbone, photos.photos)
        trunks = run_inputs.cached_features(trunk_maps, config, views, progress, workers)
        return batches.FeatureBatches(photos, store, config.loader, config.plan.seed, trunks)
    return batches.ImageBatches(photos, store, config.loader, config.plan.seed, backbone.preprocess.neutral())


# ---------------------------------------------------------------- settings of a command


def recipe_config(recipe: str, system: str | None) -> recipes.Config:
    """The recipe with the system applied, before files and --set."""
    if recipe not in recipes.RECIPES:
        near = difflib.get_close_matches(recipe, recipes.RECIPES, 1, 0.0)[0]
        raise errors.UserError(f"--recipe {recipe}: unknown; did you mean {near}? `tag2box recipes` lists all")
    return recipes.RECIPES[recipe]() if system is None else systems.find_system(system)(recipes.RECIPES[recipe]())


def chosen_config(
    base: recipes.Config,
    files: list[Path],
    overrides: list[str],
    named: dict[str, Path | str | None],
    classes: str | None,
) -> recipes.Config:
    """The recipe changed by files, by --set, and by the options that name data."""
    loaded = settings.load(recipes.Config, files, overrides, base=base)
    given: dict[str, object] = {key: value for key, value in named.items() if value is not None}
    if classes is not None:
        given["classes"] = datasets.class_names(classes)
    return replace(loaded, data=replace(loaded.data, **given))  # type: ignore[arg-type]
