"""``tag2box trust``: which classes of a label set can be used, from reviews of a sample of its photos."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from tag2box import errors, io, settings, storage
from tag2box.annotations import Detections
from tag2box.cli import options
from tag2box.formats import export as exports, listing
from tag2box.labels.journal import read_reviews
from tag2box.labels.label_set import LABELS_FILE, LabelSet, is_label_set, match_classes
from tag2box.labels.reviews import Reviews, compared_reviews
from tag2box.labels.trust import TRUST_FILE, Trust, TrustRule, advice
from tag2box.labels.trust_measure import measure_trust

DEFAULT_SCORE = 0.3
"""Least score of a detection that is kept, unless another is given."""


def trust(
    labels: Path,
    *,
    reviewed: Path | listing.DataSource | None = None,
    photos: Path | None = None,
    page: Path | None = None,
    overrides: Sequence[str] = (),
) -> Trust:
    """Measure what can be trusted of a label set, and write it as ``trust.json`` into its folder.

    Args:
        labels: folder of a label set, of which a random sample of the photos is reviewed.
        reviewed: corrected boxes of another tool, a dataset of any format, instead of reviews of ``tag2box review``;
            all its photos count as reviewed, and should be a random sample of the label set.
        photos: root of the photos, if they were moved since.
        page: HTML file to write.
        overrides: of the rule, as ``--set`` takes them: ``use_from=0.8``.

    Example:
        found = tag2box.trust(Path("labels"), page=Path("trust.html"))
        usable = [name for name, own in found.classes.items() if own.verdict == "use"]
    """
    rule = settings.load(TrustRule, [], list(overrides))
    opened = LabelSet.open(labels, photos)
    io.check_writable(labels / TRUST_FILE)
    if page is not None:
        io.check_writable(page)
    reviews = read_reviews(labels, opened) if reviewed is None else _compared(opened, reviewed)
    if not len(reviews):
        raise errors.UserError(
            f"{labels}: no photo is reviewed; review some with `tag2box review`, or name corrected boxes (--reviewed)"
        )
    found = measure_trust(opened, reviews, rule)
    if page is not None:
        from tag2box.reporting.trust_page import write_trust_page  # imports everything that pages need

        write_trust_page(found, labels.absolute().name, page)
    found.write(labels / TRUST_FILE)
    return found


def _compared(labels: LabelSet, reviewed: Path | listing.DataSource) -> Reviews:
    """Reviews from boxes that were corrected in another tool."""
    source = reviewed if isinstance(reviewed, listing.DataSource) else listing.DataSource(path=reviewed)
    corrected = exports.read_labelled(replace(source, photos=source.photos or labels.content.root))
    match_classes(corrected.classes, labels.classes, str(source.path), "the classes of the label set")
    reviews = compared_reviews(labels.content, labels.digest, corrected)
    if not len(reviews):
        raise errors.UserError(
            f"{source.path}: none of its {len(corrected)} photos is one of the label set; expected the same file names"
        )
    return reviews


def read_trust(path: Path, identity: Mapping[str, object]) -> Trust:
    """Trust for a detector of this identity (``detect.detector_identity``); raises if it is of another.

    Beside a label set, it has to be that set's.
    """
    found = Trust.read(path)
    if is_label_set(path.parent) and storage.file_digest(path.parent / LABELS_FILE) != found.labels_digest:
        raise errors.UserError(f"{path}: belongs to other labels than those beside it; run `tag2box trust` again")
    found.check_run(identity["weights"], identity["settings"], path)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Changed(Mapping[str, Detections]):
    """Detections by photo id, each changed by a function on access: they may be on disk, and too many for memory."""

    found: Mapping[str, Detections]
    change: Callable[[Detections], Detections]

    def __getitem__(self, photo_id: str) -> Detections:
        return self.change(self.found[photo_id])

    def __iter__(self) -> Iterator[str]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)


def selected(
    found: Mapping[str, Detections], classes: Sequence[str], known: Trust | None, min_score: float | None
) -> tuple[Mapping[str, Detections], Mapping[str, Detections]]:
    """Detections by photo, calibrated if trust is known; and those of at least ``min_score``, or of a default."""
    if known is None:
        least = DEFAULT_SCORE if min_score is None else min_score
        return found, Changed(found, lambda own: own[own.scores >= least])
    calibrated = Changed(found, lambda own: known.detections(own, classes))
    return calibrated, Changed(calibrated, lambda own: known.kept(own, classes, min_score))


# ---------------------------------------------------------------- the command

TrustOption = Annotated[
    Path | None,
    typer.Option(
        "--trust", metavar="FILE", help="trust.json of reviewed labels of this run: scores become probabilities."
    ),
]


def trust_command(
    labels: Annotated[Path, typer.Argument(metavar="LABELS", help="A label set, of which a sample is reviewed.")],
    reviewed: Annotated[
        Path | None,
        typer.Option(
            "--reviewed", metavar="DATA", help="Boxes of a random sample of the photos, corrected in another tool."
        ),
    ] = None,
    photos: options.PhotosOption = None,
    split: options.SplitOption = None,
    data_format: options.DataFormatOption = None,
    precision: Annotated[
        float, typer.Option(help="Wanted share of right labels above the threshold of a class.")
    ] = TrustRule.precision,
    out: Annotated[Path | None, typer.Option(help="HTML file to write; trust.json is written into LABELS.")] = None,
    override: Annotated[
        list[str],
        typer.Option(
            "--set", metavar="a=b", help="Override a setting of the rule: use_from=0.8, refuse_below=0.4, ..."
        ),
    ] = [],  # noqa: B006
) -> None:
    """Say which classes of a label set can be used, from reviews of a random sample of its photos.

    Example: `tag2box trust labels --precision 0.9 --out trust.html`
    """
    if reviewed is None and (split is not None or data_format is not None):
        raise errors.UserError("--split and --data-format belong to --reviewed; add it, or leave them out")
    source = None if reviewed is None else options.data_source(reviewed, photos, split, None, data_format)
    found = trust(
        labels, reviewed=source, photos=photos, page=out, overrides=[f"precision={precision}", *override]
    )  # fmt: skip
    options.print_rich(trust_table(found))
    for line in advice(found):
        options.say(line)
    options.say(f"{found.sampled} photos of the random sample count, of {found.photos} reviewed: {labels / TRUST_FILE}")
    if out is not None:
        options.say(f"page: {out}")


def trust_table(found: Trust) -> Table:
    """A table of what can be trusted, one line per class."""
    table = Table(box=None, pad_edge=False)
    wanted = f"{100 * found.rule.precision:g} % from"
    for title in ("class", "labels", "reviewed", "right %", "95 %", "recall", wanted, "verdict"):
        is_text = title in {"class", "verdict"}
        table.add_column(title, justify="left" if is_text else "right", no_wrap=title == "verdict")
    for name, own in (*found.classes.items(), ("all", found.overall)):
        low, high = own.precision.interval
        table.add_row(
            name,
            str(own.labels),
            str(own.precision.count),
            _percent(own.precision.share),
            f"{100 * low:.0f}-{100 * high:.0f}" if own.precision.count else "-",
            _percent(own.recall.share),
            "never" if own.threshold is None else f"{own.threshold:.3f}",
            own.verdict,
        )
    return table


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}"
