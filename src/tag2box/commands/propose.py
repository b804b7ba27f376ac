"""``tag2box propose``: photos in, a store of candidate boxes out."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tag2box import settings
from tag2box.data.images import read_photo
from tag2box.errors import Interrupted, UserError
from tag2box.formats.datasets import dataset_format, read_photos
from tag2box.formats.listing import DataSource, Fault
from tag2box.progress import Progress, silent
from tag2box.proposals.base import ProposalMethod
from tag2box.proposals.build import build_proposals
from tag2box.proposals.early_responses import Wsrpn
from tag2box.proposals.edge_boxes import EdgeBoxes
from tag2box.proposals.pool import Pool
from tag2box.proposals.selective_search import SelectiveSearch
from tag2box.proposals.store import ProposalStore

METHODS: dict[str, ProposalMethod] = {
    "selective_search": SelectiveSearch(short_side=200),
    "edge_boxes": EdgeBoxes(short_side=200),
    "wsrpn": Wsrpn(short_side=200),
}
"""What people's own photos start from: on a copy of 200 pixels a search takes a fraction of a second."""

SMALLEST = 32  # pixels that a searched copy must have


@dataclass(frozen=True, slots=True)
class Proposed:
    """What became of the photos of a dataset."""

    store: ProposalStore
    counts: tuple[int, ...]  # boxes of each photo that has been searched
    left_out: tuple[str, ...]  # a line for each photo that has not, and for each row that was not understood
    seconds: float

    def lines(self) -> tuple[str, ...]:
        """The report, a line each."""
        boxes, photos = sum(self.counts), len(self.counts)
        spread = f", {boxes / photos:,.0f} a photo ({min(self.counts):,} to {max(self.counts):,})" if photos else ""
        kind = str(self.store.source["kind"]).replace("_", " ")
        return (
            f"{kind}: {_many(photos, 'photo')}, {_many(boxes, 'box')}{spread}, in {self.seconds:,.0f} s",
            *((f"left out: {len(self.left_out)}, named below",) if self.left_out else ()),
            f"store: {self.store.path}",
        )


def propose(
    source: DataSource,
    method: ProposalMethod,
    out: Path,
    *,
    workers: int | None = None,
    pool: Pool | None = None,
    progress: Progress = silent,
) -> Proposed:
    """Propose boxes for the photos of a dataset; photos that cannot be read are left out and told of.

    Args:
        pool: where photos are searched, if not by ``workers`` processes of this machine; ``RayPool`` is a cluster.
    """
    start = time.monotonic()
    faults: list[Fault] = []
    try:
        photos = read_photos(source, faults.append)
    except KeyboardInterrupt:
        raise Interrupted(f"{source.path}: stopped while the dataset was read; the same command goes on") from None
    if not photos:
        first = f" ({faults[0].line})" if faults else ""
        raise UserError(f"{source.path}: no photo to search{first}; name a dataset or a folder of photos")
    store = build_proposals(
        photos, method, out, read=read_photo, workers=workers, pool=pool, skip_bad=True, progress=progress
    )
    spans = [store.spans[photo.id] for photo in photos if photo.id in store.spans]
    failed = [store.failed[photo.id] for photo in photos if photo.id in store.failed]
    left_out = (*(fault.line for fault in faults), *failed)
    return Proposed(store, tuple(last - first for first, last in spans), left_out, time.monotonic() - start)


def build_method(kind: str, options: Mapping[str, object], overrides: Sequence[str] = ()) -> ProposalMethod:
    """A method as people's own photos want it, with the options that were given and ``key=value`` overrides on top.

    Args:
        options: settings by name; None was not given, and a short_side of 0 is none.
    """
    base = METHODS[kind]
    given = {name: value for name, value in options.items() if value is not None}
    for name in given:
        if not hasattr(base, name):
            option = "--edge-model" if name == "model" else f"--{name}"
            raise UserError(f"{option}: no setting of {kind}; leave it out, or choose another --method")
    short_side = given.get("short_side")
    if isinstance(short_side, int) and 0 < short_side < SMALLEST:
        raise UserError(f"--short-side {short_side}: expected {SMALLEST} or more, or 0 for photos as they are")
    if short_side == 0:
        given["short_side"] = None
    return settings.load(type(base), [], overrides, base=replace(base, **given))  # type: ignore[arg-type]


def next_command(source: DataSource, classes: str | None, out: Path) -> str:
    """What to type next: training, or detection where the dataset has no tags to train from."""
    if not dataset_format(source).has_tags:
        return f"tag2box detect RUN {shlex.quote(str(source.path))} --proposals {shlex.quote(str(out))} --draw drawn"
    given = {"--photos": source.photos, "--split": source.split, "--classes": classes}
    options = [word for option, value in given.items() if value is not None for word in (option, str(value))]
    return shlex.join(["tag2box", "train", str(source.path), *options, "--proposals", str(out), "--out", "runs/mine"])


def _many(count: int, what: str) -> str:
    plural = {"photo": "photos", "box": "boxes"}[what]
    return f"{count:,} {what if count == 1 else plural}"
