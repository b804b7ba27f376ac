"""The data of a training run: photos, tags, reviewed boxes, proposals and what the criterion reads beyond them."""

from tag2box import annotations, errors, recipes, run_inputs, runs, types
from tag2box.cli.requirements import check_proposal_scores, check_requirements
from tag2box.data.reviewed_boxes import counts_from_boxes, read_reviewed
from tag2box.formats import datasets, listing
from tag2box.progress import Progress, silent
from tag2box.proposals.store import ProposalStore
from tag2box.training import proposal_cache

TrainingData = tuple[annotations.TaggedPhotos, ProposalStore]
"""The photos of a run, with tags, and their proposals."""

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


def with_proposals(config: recipes.Config, photos: annotations.TaggedPhotos, progress: Progress) -> TrainingData:
    """The photos of a run, without those to be skipped, and their proposals."""
    check_requirements(config, photos)  # before proposals are computed, which may take hours
    folder, skip_bad = runs.required(config.data.proposals), config.data.skip_bad
    store = run_inputs.proposals_of(photos.photos, config, folder, progress, skip_bad=skip_bad)
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
    requirements, evidence = config.criterion.requirements, None
    folder = runs.required(config.feature_cache)
    if requirements.evidence:
        evidence = proposal_cache.build_superpixel_cache(
            photos.photos, store, config.superpixels, folder, progress=progress
        )
    return types.SideInfoLoader(
        counts=photos.counts if requirements.counts else None,
        evidence=evidence,
        objectness=store.scores if requirements.objectness or config.heads.box_prior else None,
        class_evidence=class_evidence if requirements.class_evidence else None,
        reviewed=reviewed,
    )
