"""Signs, found without ground truth, that proposals cannot fit the objects of a dataset."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float32

from tag2box.annotations import Photo
from tag2box.proposals.base import ProposalMethod, ProposalSource
from tag2box.proposals.build import ReadPhoto, search_photo
from tag2box.proposals.store import ProposalStore

SAMPLE = 8
"""Photos that are searched if there is no store."""
MIN_PHOTOS = 16
"""Photos of which nothing is said if there are fewer: medians would mean little."""

_MOST = 200  # photos of a store that are examined
_FEW_BOXES = 200  # median per photo
_CAPPED = 0.5  # of max_boxes: with a low cap, photos that reach half of it have what was asked for
_HALF, _MOSTLY = 0.5, 0.5  # a box of half the photo is large; half of the boxes are most of them
_SMALL = 0.07  # smallest side of boxes, as a share of the short side, above which small objects are out of reach
_FEW_PIXELS = 8  # things that are smaller need no boxes
_ENLARGED = 2.0  # times that photos are enlarged for the search
_REDUCED = 10.0  # times that they are reduced
_OTHER = "combined"  # the method with sources for faint and small things


@dataclass(frozen=True, slots=True)
class Concern:
    """A reason why proposals may miss objects: the kind, the measurement, and what to do."""

    kind: str
    line: str
    advice: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.line}; {self.advice}"


@dataclass(frozen=True, slots=True)
class SearchedPhoto:
    """Width and height of a photo, and its proposals."""

    size: tuple[int, int]
    boxes: Float32[torch.Tensor, "P 4"]


def store_concerns(store: ProposalStore, photos: Sequence[Photo]) -> tuple[Concern, ...]:
    """Concerns about the proposals of some photos, from at most 200 of them, evenly spaced."""
    known = [photo for photo in photos if photo.id in store.spans]
    if len(known) < MIN_PHOTOS:
        return ()
    searched = [SearchedPhoto((p.width, p.height), store.boxes(p.id)) for p in sample_evenly(known, _MOST)]
    return find_concerns(searched, store.source)


def sample_concerns(photos: Sequence[Photo], method: ProposalMethod, read: ReadPhoto) -> tuple[Concern, ...]:
    """Concerns about proposals that are not made yet: 8 photos, evenly spaced, are searched. Bad photos are skipped."""
    if len(photos) < MIN_PHOTOS:
        return ()
    searched = []
    for photo in sample_evenly(photos, SAMPLE):
        found = search_photo(method, read, photo).candidates()
        if found is not None:
            searched.append(SearchedPhoto((photo.width, photo.height), found.boxes))
    return find_concerns(searched, method.source())


def sample_evenly(photos: Sequence[Photo], count: int) -> list[Photo]:
    """At most ``count`` photos, from the first to the last."""
    rows = np.linspace(0, len(photos) - 1, min(count, len(photos))).round().astype(int)
    return [photos[row] for row in rows.tolist()]


def find_concerns(searched: Sequence[SearchedPhoto], source: ProposalSource) -> tuple[Concern, ...]:
    """Concerns about searched photos; none without photos.

    Args:
        source: settings of the method, as a store records them; ``min_side`` and ``short_side`` are read if there.
    """
    if not searched:
        return ()
    short = float(np.median([min(photo.size) for photo in searched]))
    checks = (_few_boxes(searched, source), _large_boxes(searched, source), *_sizes(short, source))
    return tuple(concern for concern in checks if concern is not None)


def _few_boxes(searched: Iterable[SearchedPhoto], source: ProposalSource) -> Concern | None:
    median = float(np.median([len(photo.boxes) for photo in searched]))
    if median >= min(_FEW_BOXES, _CAPPED * _cap(source)):
        return None
    line = f"{median:,.0f} per photo (median), where photos of everyday objects have {_FEW_BOXES} or more"
    return Concern("few proposals", line, _other_method(source))


def _large_boxes(searched: Iterable[SearchedPhoto], source: ProposalSource) -> Concern | None:
    shares = [_large_share(photo) for photo in searched if len(photo.boxes)]
    if not shares or (share := float(np.median(shares))) <= _MOSTLY:
        return None
    line = f"{share:.0%} of the boxes (median photo) cover more than half of the photo"
    return Concern("proposals as large as the photo", line, _other_method(source))


def _large_share(photo: SearchedPhoto) -> float:
    sides = photo.boxes[:, 2:] - photo.boxes[:, :2]
    return float((sides.prod(1) > _HALF * photo.size[0] * photo.size[1]).float().mean())


def _sizes(short: float, source: ProposalSource) -> list[Concern]:
    """Concerns about the sizes of photos (median short side) and the settings of the search."""
    found = []
    smallest, working = _number(source, "min_side"), _number(source, "short_side")
    is_lowered = smallest < ProposalMethod.min_side  # a value below the default was chosen for these photos
    if smallest > max(_SMALL * short, _FEW_PIXELS) and not is_lowered:
        line = f"boxes under {smallest:.0f} pixels are dropped, {smallest / short:.0%} of the photos' short side"
        found.append(Concern("small objects without proposals", line, f"set min_side to {int(0.02 * short)}"))
    if working > _ENLARGED * short:
        line = f"the short side is {short:.0f} pixels, and the search enlarges photos to {working:.0f}"
        found.append(Concern("photos enlarged for the search", line, f"set short_side to {max(32, int(short))}"))
    if 0 < _REDUCED * working < short:
        line = f"things under {4 * short / working:.0f} pixels are lost at the working resolution of {working:.0f}"
        advice = f"if objects are that small, set short_side to {int(working * 2)} or more, or cut photos into tiles"
        found.append(Concern("photos much reduced for the search", line, advice))
    return found


def _number(source: ProposalSource, name: str) -> float:
    value = source.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def _cap(source: ProposalSource) -> float:
    return _number(source, "max_boxes") or np.inf


def _other_method(source: ProposalSource) -> str:
    if source.get("kind") != _OTHER:
        return f"propose with --method {_OTHER}, which also searches faint and small things"
    return "raise short_side, or lower min_share; photos without any structure have no boxes"
