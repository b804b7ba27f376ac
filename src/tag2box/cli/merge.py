"""``tag2box merge``: label sets of several runs, merged into what they agree on."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from tag2box import errors, runs
from tag2box.cli import options
from tag2box.labels.agreement import ClassAgreement, class_agreement, merge_sets
from tag2box.labels.journal import read_reviews
from tag2box.labels.label_set import LabelSet, check_new
from tag2box.labels.reviews import apply_reviews


def merge_labels(labels: Sequence[Path], out: Path, *, photos: Path | None = None) -> LabelSet:
    """Merge label sets of the same photos, made by runs of different seeds, and write the result as a label set.

    Per tag, the box that overlaps those of the other sets most is the label; further ones need the agreement of more
    than half of the sets, else they become ignore regions (``labels.agreement``). No true box is used. Photos that were
    reviewed in one of the sets keep the boxes of the review.

    Args:
        labels: folders of two label sets or more.
        out: folder to write, which must not exist.
        photos: root of the photos, if they were moved since.

    Example:
        labels = tag2box.merge_labels([Path("labels-0"), Path("labels-1"), Path("labels-2")], Path("labels"))
    """
    check_new(out)
    sets = [_opened(folder, photos) for folder in labels]
    merged = LabelSet(merge_sets(sets), _origin(labels, sets), {"merged": len(sets)}, runs.versions())
    merged.write(out)
    return merged


def label_agreement(labels: Sequence[Path], photos: Path | None = None) -> dict[str, ClassAgreement]:
    """How far the best boxes of each class agree between label sets of the same photos: a quality sign without boxes.

    Example:
        found = tag2box.label_agreement([Path("labels-0"), Path("labels-1"), Path("labels-2")])
        doubtful = [name for name, own in found.items() if own.same < 0.3]
    """
    return class_agreement([_opened(folder, photos) for folder in labels])


def _opened(folder: Path, photos: Path | None) -> LabelSet:
    """A label set with the boxes of its reviews."""
    opened = LabelSet.open(folder, photos)
    return replace(opened, content=apply_reviews(opened, read_reviews(folder, opened)))


def _origin(folders: Sequence[Path], sets: Sequence[LabelSet]) -> dict[str, object]:
    """The sets that were merged, their runs, and what else than tags they use."""
    uses = sorted({str(own.run["uses"]) for own in sets if own.run.get("uses")})
    merged = [
        {"labels": str(folder.absolute()), "sha256": own.digest, **own.run}
        for folder, own in zip(folders, sets, strict=True)
    ]
    return {"merged": merged, **({"uses": ", ".join(uses)} if uses else {})}


# ---------------------------------------------------------------- the command


def merge_command(
    labels: Annotated[list[Path], typer.Argument(metavar="LABELS...", help="Label sets of the same photos.")],
    out: Annotated[Path, typer.Option(help="Folder to write: labels.json (COCO) and manifest.json.")],
    photos: Annotated[Path | None, typer.Option(help="Root of the photos, if they were moved since.")] = None,
) -> None:
    """Merge the label sets of runs with different seeds into what they agree on, and show how far they agree.

    Example: `tag2box merge labels-0 labels-1 labels-2 --out labels`
    """
    if repeated := [folder for number, folder in enumerate(labels) if folder in labels[:number]]:
        raise errors.UserError(f"{repeated[0]}: named twice; name each label set once")
    made = merge_labels(labels, out, photos=photos)
    options.print_rich(agreement_table(label_agreement(labels, photos)))
    options.print_rich(options.counts_table(made.content))
    boxes = sum(len(photo.labels) for photo in made.content.photos)
    options.say(f"{boxes} boxes in {len(made.content)} photos: {out}")
    options.say(f"next: tag2box review {out}, or tag2box student {out} --out runs/student")


def agreement_table(found: Mapping[str, ClassAgreement]) -> Table:
    """Per class: share of pairs of sets whose best boxes agree, and the mean score of the best boxes of each set."""
    table = Table(box=None, pad_edge=False)
    sets = max((len(own.scores) for own in found.values()), default=0)
    for title in ("class", "photos", "agree, %", *(f"score {number}" for number in range(1, sets + 1))):
        table.add_column(title, justify="left" if title == "class" else "right")
    for name, own in found.items():
        same = f"{100 * own.same:.0f}" if own.photos else "-"
        table.add_row(name, str(own.photos), same, *map(options.score_text, own.scores))
    return table
