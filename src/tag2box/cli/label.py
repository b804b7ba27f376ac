"""``tag2box label``: boxes for tagged photos, chosen with the help of their tags."""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tag2box import errors, images, io, run_detect, runs, settings, storage
from tag2box.annotations import Detections, Photo, TaggedPhotos
from tag2box.cli import options
from tag2box.cli.label_trust import TrustOption, read_trust
from tag2box.data.reviewed_boxes import read_reviewed_file, tag_concerns
from tag2box.formats import datasets, detection_log, listing
from tag2box.identity import trained_photos
from tag2box.inference.fitting import Snap, SnapPhotos, Trim, TrimPhotos
from tag2box.inference.predict import Inference
from tag2box.labels import quality
from tag2box.labels.label_set import LabelSet, check_new, match_classes
from tag2box.labels.labelled import LabelBox, LabelledPhotos, tagged_entries, with_review
from tag2box.labels.rule import (
    LabelRule,
    PhotoTags,
    RuleChoice,
    TwoViews,
    choose_relative,
    label_photo,
    tags_digest,
)
from tag2box.labels.trust import Trust
from tag2box.parallel.pool import Pool
from tag2box.progress import Progress, TerminalProgress, silent
from tag2box.proposals import sam_boxes
from tag2box.reporting.records import run_signs
from tag2box.training.dist import SINGLE_PROCESS, DistContext, init_distributed

_CHOICE_PHOTOS = 200  # photos on which `--rule auto` compares two views
_MOST_DETECTIONS = 1_000_000  # of a photo, before those of its tags are selected
_SHOWN_PHOTOS = 3


@dataclass(frozen=True, kw_only=True)
class LabelSettings:
    """Settings of ``tag2box label``: the label rule, and how the run detects."""

    rule: LabelRule = LabelRule()
    inference: Inference = Inference()
    trim: Trim = Trim()
    snap: Snap = Snap()


@dataclass(frozen=True, kw_only=True)
class _OneView(Inference):
    """Inference without test-time augmentation by flips: the photos as they are, or their flips alone."""

    is_flipped: bool = False

    def views(self) -> tuple[images.View, ...]:
        """One view per scale."""
        return tuple(images.View(scale, self.is_flipped, self.long_max) for scale in self.scales)


def label(
    run: Path,
    photos: Path | listing.DataSource,
    out: Path,
    *,
    rule: Literal["fixed", "auto"] = "fixed",
    proposals: Path | None = None,
    reviewed: Path | None = None,
    trust: Path | None = None,
    snap: bool = False,
    overrides: Sequence[str] = (),
    skipped: list[str] | None = None,
    pool: Pool | None = None,
    dist: DistContext = SINGLE_PROCESS,
    progress: Progress = silent,
) -> LabelSet:
    """Label tagged photos with a trained run, and write a label set: a COCO file with provenance, and its manifest.

    Every tag gets its best box, further instances are compared with it (``labels.rule.LabelRule``), and classes that
    are not tags get none. The same call resumes after an interruption.

    Args:
        photos: a tagged dataset of any format.
        out: folder to write, which must not exist.
        rule: ``auto`` chooses ``rule.relative`` on a sample of the photos (``labels.rule.choose_relative``).
        proposals: proposal store of the photos; built with the method of the training photos if it does not exist.
        reviewed: a label set or file with boxes; its reviewed photos keep these as they are, and are not detected in.
        trust: file of ``tag2box trust``: scores become probabilities, what is not to be trusted an ignore region.
        snap: fit boxes to MobileSAM's masks; the labels then do not come from tags alone.
        overrides: of ``LabelSettings`` and ``compute``, as ``--set`` takes them: ``rule.relative=0.6``.
        skipped: if given, photos that cannot be read are left out, and a line about each is added to it.
        pool: where photos are processed; default: this process.
        dist: ranks that share the photos; rank 0 writes.

    Example:
        labels = tag2box.label(Path("runs/mine"), Path("tags.csv"), Path("labels"))
    """
    check_new(out)
    trained, rest = run_detect.with_compute(runs.open_run(run), overrides)
    chosen = _settings(trained, rest)
    root, tagged = _read(photos, trained, skipped)
    kept = {} if reviewed is None else _reviewed(reviewed, tagged, root)
    fitter = _fitter(trained, chosen, snap=snap)
    work = _Work(trained, chosen, root, tagged, kept, fitter, proposals, pool=pool, dist=dist, progress=progress)
    if trust is not None:
        work = replace(work, trust=read_trust(trust, work.run()))
    with detection_log.unfinished_folder(out, is_main=dist.is_main) as folder:
        assert folder is not None
        if rule == "auto" and work.open_photos():
            work = replace(work, settings=replace(chosen, rule=choose_rule(work, folder).rule))
        made, signs = work.label(folder, skipped)
        if dist.is_main:
            made.write(out)
            work.write_signs(out, signs)
    return made


def _settings(trained: runs.AnyRun, overrides: Sequence[str]) -> LabelSettings:
    inference = trained.config.inference
    base = LabelSettings(rule=LabelRule().rescaled(inference.prior.power), inference=inference)
    return settings.load(LabelSettings, [], list(overrides), base=base)


def _fitter(trained: runs.AnyRun, chosen: LabelSettings, *, snap: bool) -> run_detect.Fitter | None:
    """What fits boxes with the class maps of a run; raises if it lacks these, or the weights of MobileSAM."""
    if not (snap or chosen.trim.on):
        return None
    if not isinstance(trained, runs.TrainedRun) or trained.detector.class_maps is None:
        advice = "label with a run of `tag2box train` with adaptation.epochs above 0, such as one of the recipe photos"
        raise errors.UserError(f"{'--snap' if snap else 'trim.on'}: {trained.folder} has no class maps; {advice}")
    if not snap:
        return partial(TrimPhotos, chosen.trim, nms_iou=chosen.rule.nms_iou, least_share=chosen.rule.doubtful)
    sam_boxes.mobile_sam_network()
    return partial(SnapPhotos, chosen.snap, nms_iou=chosen.rule.nms_iou)


def _read(
    photos: Path | listing.DataSource, trained: runs.AnyRun, skipped: list[str] | None
) -> tuple[Path, TaggedPhotos]:
    """The root of the photos, and the photos with their tags as classes of the run."""
    source = photos if isinstance(photos, listing.DataSource) else listing.DataSource(path=photos)
    on_fault = listing.refuse if skipped is None else (lambda fault: skipped.append(fault.line))
    listed = datasets.list_dataset(source, on_fault)
    match_classes(listed.classes, trained.classes, str(source.path), "the run's classes")
    found = listing.to_tagged_photos(replace(listed, classes=trained.classes), on_fault)
    if not len(found):
        raise errors.UserError(f"{source.path}: no photos to label; expected tagged photos")
    if not bool(found.tags.any()):
        raise errors.UserError(f"{source.path}: no photo has a tag; use `tag2box detect` for photos without tags")
    return listed.folder, found


def _reviewed(path: Path, tagged: TaggedPhotos, root: Path) -> dict[str, tuple[LabelBox, ...]]:
    """The boxes of reviewed photos, marked as such; where they disagree with the tags, a warning says so."""
    file = read_reviewed_file(path, tagged, root)
    for concern in tag_concerns(file, tagged):
        warnings.warn(concern, stacklevel=2)
    return {
        name: tuple(replace(box, why="reviewed", source="review", is_tag=True) for box in boxes)
        for name, boxes in file.boxes.items()
    }


@dataclass(frozen=True)
class _Work:
    """A run and the photos that it labels."""

    trained: runs.AnyRun
    settings: LabelSettings
    root: Path
    photos: TaggedPhotos
    reviewed: Mapping[str, tuple[LabelBox, ...]]  # boxes of photos that are not labelled again, by id
    fitter: run_detect.Fitter | None
    proposals: Path | None
    pool: Pool | None
    dist: DistContext
    progress: Progress
    trust: Trust | None = None

    @property
    def fit(self) -> SnapPhotos | TrimPhotos | None:
        """What fits boxes with the class maps of the run."""
        return None if self.fitter is None else run_detect.fit_of(self.fitter, self.trained.detector)

    def open_photos(self) -> list[Photo]:
        """The photos that are to be labelled: those that are not reviewed."""
        return [photo for photo in self.photos.photos if photo.id not in self.reviewed]

    def tags(self) -> dict[str, PhotoTags]:
        """The tags by photo id."""
        empty = [()] * len(self.photos)
        unsure = self.photos.unsure.tolist() if self.photos.unsure is not None else empty
        counts = self.photos.counts.tolist() if self.photos.counts is not None else empty
        rows = zip(self.photos.photos, self.photos.tags.tolist(), unsure, counts, strict=True)
        return {
            photo.id: PhotoTags(
                frozenset(number for number, is_there in enumerate(own) if is_there),
                frozenset(number for number, is_there in enumerate(doubts) if is_there),
                {number: count for number, count in enumerate(counted) if count > 0},
            )
            for photo, own, doubts, counted in rows
        }

    def detect(
        self, inference: Inference, photos: Sequence[Photo], work: Path, skipped: list[str] | None
    ) -> Mapping[str, Detections]:
        """The candidates of the tags of some photos at every score, and the best box of each absent class."""
        tags, rule, fit = self.tags(), self.settings.rule, self.fit
        wanted = {photo.id: tags[photo.id] for photo in photos}
        fitted = {} if fit is None else fit.identity()
        predict = replace(inference.predict, score_threshold=0.0, max_detections=_MOST_DETECTIONS)
        return run_detect.detect_photos(
            runs.replace_inference(self.trained, replace(inference, predict=predict)),
            photos,
            proposals=self.proposals or work.parent / "proposals",
            any_store=self.proposals is None,
            work=work,
            skipped=skipped,
            pool=self.pool,
            dist=self.dist,
            progress=self.progress,
            select=run_detect.SelectTagged(rule, wanted, self.fitter),
            selection={
                "tags": tags_digest(tags),
                "others": [rule.other_classes, rule.other_min_score],
                "absent": 1,
                **fitted,
            },
        )

    def label(self, work: Path, skipped: list[str] | None) -> tuple[LabelSet, quality.QualitySigns]:
        """The label set of all photos, and signs of its quality."""
        left = self.open_photos()
        found = self.detect(self.settings.inference, left, work / "photos", skipped) if left else {}
        tags, rule = self.tags(), self.settings.rule
        labelled = []
        for entry, photo in zip(tagged_entries(self.photos, self.root), self.photos.photos, strict=True):
            if photo.id in self.reviewed:
                done = with_review(entry, self.reviewed[photo.id])
            elif photo.id in found:
                boxes = label_photo(rule, found[photo.id], tags[photo.id], self.trained.classes)
                done = replace(entry, boxes=boxes if self.trust is None else self.trust.label_boxes(boxes))
            else:
                continue
            labelled.append(replace(done, stamp=storage.FileStamp.of(photo.path)))
        if not labelled:
            raise errors.UserError(f"no photo can be read, {len(skipped or ())} were skipped; check the photos")
        content = LabelledPhotos(self.root, self.trained.classes, tuple(labelled))
        applied = {} if self.trust is None else {"trust": self.trust.labels_digest}
        fitted: dict[str, object] = {} if self.fit is None else {self.fit.name: asdict(self.fit.settings)}
        uses = {"uses": self.fit.uses} if self.fit is not None and self.fit.uses else {}
        made = LabelSet(content, self.run() | applied | fitted | uses, asdict(rule), runs.versions())
        return made, self.signs(found)

    def signs(self, found: Mapping[str, Detections]) -> quality.QualitySigns:
        """Signs of quality: of the photos that were labelled, and of what the run recorded in training."""
        best = quality.boxes_of_tags(found, self.tags(), self.trained.classes)
        return run_signs(self.trained.folder, best, self.trained.classes)

    def write_signs(self, out: Path, signs: quality.QualitySigns) -> None:
        """Write the signs beside the labels and, if these are all its training photos, into the run."""
        io.write_json(out / quality.SIGNS_FILE, signs.to_json())
        folder = self.trained.folder
        if tuple(own.id for own in self.open_photos()) == trained_photos(folder) and os.access(folder, os.W_OK):
            io.write_json(folder / quality.SIGNS_FILE, signs.to_json())

    def run(self) -> dict[str, object]:
        """Folder and identity of the run."""
        folder = self.trained.folder
        identity = run_detect.detector_identity(runs.replace_inference(self.trained, self.settings.inference))
        recorded = folder / "run.json"
        digest = storage.file_digest(recorded) if recorded.exists() else None
        return {
            "folder": str(folder.absolute()),
            "run_json": digest,
            "weights": identity["weights"],
            "settings": identity["settings"],
            **({"reviewed_photos": len(self.reviewed)} if self.reviewed else {}),
        }


def choose_rule(work: _Work, folder: Path) -> RuleChoice:
    """The label rule that agrees best between the photos and their flips, on an evenly spaced sample of them."""
    photos = work.open_photos()
    sample = photos[:: -(-len(photos) // _CHOICE_PHOTOS)]
    shared: dict[str, Any] = vars(work.settings.inference)
    found = [
        work.detect(
            _OneView(**shared, is_flipped=is_flipped),
            sample,
            folder / ("flips" if is_flipped else "plain"),
            [],
        )
        for is_flipped in (False, True)
    ]
    tags = work.tags()
    both = [TwoViews(found[0][name], found[1][name], tags[name]) for name in found[0] if name in found[1]]
    return choose_relative(work.settings.rule, both, work.trained.classes)


# ---------------------------------------------------------------- the command


def label_command(
    run: Annotated[Path, typer.Argument(help="A trained run.")],
    photos: options.DataArgument,
    out: Annotated[Path, typer.Option(help="Folder to write: labels.json (COCO) and manifest.json.")] = Path("labels"),
    folder: options.PhotosOption = None,
    split: options.SplitOption = None,
    classes: options.ClassesOption = None,
    data_format: options.DataFormatOption = None,
    rule: Annotated[
        Literal["fixed", "auto"],
        typer.Option(
            "--rule",
            help="auto: choose rule.relative so that the labels of photos and of their flips agree; takes longer.",
        ),
    ] = "fixed",
    other_classes: Annotated[
        bool,
        typer.Option("--boxes-of-other-classes", help="Also label confident boxes of classes that are not tags."),
    ] = False,
    proposals: Annotated[
        Path | None, typer.Option(help="Proposal store of these photos; default: made for this call only.")
    ] = None,
    reviewed: Annotated[
        Path | None,
        typer.Option(help="Label set or file with boxes: its reviewed photos keep them, only the others are labelled."),
    ] = None,
    trust: TrustOption = None,
    snap: Annotated[
        bool, typer.Option("--snap", help="Fit boxes to MobileSAM's masks (`tag2box weights get mobile-sam`).")
    ] = False,
    override: Annotated[
        list[str],
        typer.Option("--set", metavar="a.b=c", help="Override a setting of rule, inference, trim, snap or compute."),
    ] = [],  # noqa: B006
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Skip photos that cannot be read, name them, and exit with code 1.")
    ] = False,
    on: options.OnOption = "here",
    address: options.AddressOption = None,
) -> None:
    """Put boxes on tagged photos, using their tags: at least one box per tag, none of other classes.

    Resumable: rerun the same command. Under torchrun, the processes share the photos.

    Example: `tag2box label runs/mine tags.csv --out labels`; to keep the photos that you have reviewed:
    `tag2box label runs/second tags.csv --reviewed labels --out labels-2`
    """
    skipped: list[str] | None = [] if skip_bad else None
    overrides = [*override, *(["rule.other_classes=true"] if other_classes else [])]
    with init_distributed() as dist:
        made = label(
            run,
            options.data_source(photos, folder, split, classes, data_format),
            out,
            rule=rule,
            proposals=proposals,
            reviewed=reviewed,
            trust=trust,
            snap=snap,
            overrides=overrides,
            skipped=skipped,
            pool=options.pool_of(on, address, chunk=1),
            dist=dist,
            progress=TerminalProgress() if dist.is_main else silent,
        )
        if dist.is_main:
            _show(made, out, rule)
            for line in skipped or ():
                options.say(f"skipped: {line}", err=True)
    if skipped:
        raise typer.Exit(1)


def _show(made: LabelSet, out: Path, rule: str) -> None:
    """Print what was labelled, per class, and the tags without a box."""
    options.print_rich(options.counts_table(made.content))
    if rule == "auto":
        options.say(f"rule.relative={made.rule['relative']:g} and rule.doubtful={made.rule['doubtful']:g} were chosen")
    bare = [photo for photo in made.content.photos if photo.unboxed_tags]
    for photo in bare[:_SHOWN_PHOTOS]:
        options.say(f"no box: {photo.file}: {', '.join(photo.unboxed_tags)}", err=True)
    if len(bare) > _SHOWN_PHOTOS:
        options.say(f"no box: {len(bare) - _SHOWN_PHOTOS} more photos", err=True)
    for line in quality.read_signs(out / quality.SIGNS_FILE).words():
        options.say(line)
    boxes = sum(len(photo.labels) for photo in made.content.photos)
    options.say(f"{boxes} boxes in {len(made.content)} photos: {out}")
    if not boxes and "trust" in made.run:
        advice = "review more, or run `tag2box trust` with a lower --precision"
        options.say(f"all boxes are doubtful: no class reaches the wanted precision; {advice}", err=True)
    options.say(f"next: tag2box review {out}, or tag2box student {out} --out runs/student")
