"""Before training: whether network, photos and proposals provide what the criterion requires; what will be done."""

import difflib
from pathlib import Path

import torch

from tag2box import annotations, errors, recipes, types
from tag2box.methods.protocols import Labeler, MilStrategy
from tag2box.proposals.store import ProposalStore


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
