"""What a system asks of the data and the network, checked before anything is trained: each lack is one line."""

from __future__ import annotations

import torch

from tag2box.annotations import TaggedPhotos
from tag2box.errors import UserError
from tag2box.methods.base import Labeler, MilStrategy
from tag2box.proposals.store import ProposalStore
from tag2box.recipes import Config
from tag2box.types import Requirements


def check_photos(config: Config, photos: TaggedPhotos) -> None:
    """Raise unless the network and the photos have what is asked for; no proposals are needed to tell."""
    requirements = config.criterion.requirements
    check_attention(config)
    if requirements.mil_heads > config.heads.mil_heads:
        raise UserError(
            f"heads.mil_heads: is {config.heads.mil_heads}, but {_who(config, 'mil_heads')} reads {requirements.mil_heads}; "
            f"set heads.mil_heads={requirements.mil_heads}"
        )
    if requirements.counts and (photos.counts is None or not bool((photos.counts > 0).any())):
        raise UserError(
            f"{config.data.tags}: {_who(config, 'counts')} needs counts of objects, and no photo has any; add a column "
            "counts (docs/datasets.md), or, for study of a dataset with boxes, set data.counts=boxes"
        )
    if requirements.evidence:
        missing = next((photo.path for photo in photos.photos if not photo.path.is_file()), None)
        if missing is not None:
            raise UserError(
                f"{missing}: no such photo, and {_who(config, 'evidence')} needs its superpixels; put it back, or set "
                "data.skip_bad=true"
            )


def check_attention(config: Config) -> None:
    """Raise unless there are several looks, or layers, to compare where that is asked for."""
    requirements = config.criterion.requirements
    if requirements.views_per_image > config.loader.views_per_image:
        raise UserError(
            f"loader.views_per_image: is {config.loader.views_per_image}, but criterion.attention.input_weight compares looks at a photo; "
            f"set loader.views_per_image={requirements.views_per_image} or more, or criterion.attention.input_weight=0"
        )
    if requirements.layers > config.backbone.layers:
        raise UserError(
            f'criterion.attention.layer_weight: compares layers, and backbone.kind = "{config.backbone.title}" shows '
            "one; set it to 0, or take backbone.kind=lite0"
        )


def check_store(config: Config, photos: TaggedPhotos, store: ProposalStore) -> None:
    """Raise unless the proposals have what is asked for."""
    prior = config.heads.box_prior > 0
    if not (prior or config.criterion.requirements.objectness):
        return
    who = "heads.box_prior" if prior else _who(config, "objectness")
    if not store.ranked:
        raise UserError(
            f"{store.path}: {who} needs scores of proposals, and {store.source.get('kind')} gives none; "
            "set proposals.kind=edge_boxes and name another --proposals, or import proposals that have scores"
        )
    ends = [torch.aminmax(scores) for photo in photos.photos if len(scores := store.scores(photo.id))]
    low, high = min((float(x.min) for x in ends), default=0.0), max((float(x.max) for x in ends), default=0.0)
    if low < 0 or high > 1:
        raise UserError(
            f"{store.path}: {who} needs scores within 0 and 1, these reach from {low:.4g} to {high:.4g}; "
            "bring them into this range before they are imported, or set proposals.kind=edge_boxes"
        )


def _who(config: Config, need: str) -> str:
    """The part of the objective that asks for something."""
    parts: dict[str, MilStrategy | Labeler] = {
        "criterion.mil": config.criterion.mil,
        "criterion.labeler": config.criterion.labeler,
    }
    for name, part in parts.items():
        if getattr(part.requirements, need) != getattr(Requirements(), need):
            return f'{name}.kind = "{getattr(part, "kind", type(part).__name__)}"'
    return "the objective"
