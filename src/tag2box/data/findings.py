"""What a check of a dataset finds: kinds of trouble, how grave each is, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tag2box.data.faults import Fault, plain

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""An error: a command would refuse the dataset, or learn what is wrong. A note: nothing need be done."""

FIRST = 4
"""So many different names of each kind are kept, however often it occurs."""

ADVICE: dict[str, tuple[Severity, str]] = {
    "missing photo": ("error", "put the file there, or remove its row"),
    "empty photo": ("error", "replace or remove it"),
    "unreadable photo": ("error", "replace or remove it"),
    "missing annotation": ("error", "add the XML file, or take the id off the list"),
    "unreadable annotation": ("error", "correct the XML file"),
    "bad row": ("error", "correct it"),
    "bad box": ("error", "correct it, or evaluation refuses the file"),
    "listed twice": ("error", "keep one"),
    "outside the folder": ("error", "move the photo in, or name its folder with --photos"),
    "unknown class": ("error", "correct the spelling, or add the class"),
    "no tags at all": ("error", "tag some photos: nothing can be learned"),
    "same photo, other tags": ("error", "keep one, with the right tags"),
    "same photo twice": ("warning", "keep one; across train and test, figures flatter"),
    "very small photo": ("warning", "take it out: no object is found in so few pixels"),
    "very long photo": ("warning", "crop it: resized, it loses its content"),
    "very large photo": ("warning", "scale it down: decoding takes memory and time"),
    "size differs from the photo's": ("warning", "boxes belong to another size or rotation (EXIF)"),
    "box outside the photo": ("warning", "correct it: it is compared as it stands"),
    "box without area": ("warning", "correct it: it can never be found"),
    "class without a photo": ("warning", "check its spelling, or leave it out"),
    "class with few photos": ("warning", "add photos: fewer than 5 teach little"),
    "class in every photo": ("warning", "add photos without it: nothing tells it from its surroundings"),
    "classes always together": ("warning", "cannot be told apart: add photos of one alone"),
    "classes spelled alike": ("warning", "one class or two? Spell one class in one way"),
    "class name with a comma": ("warning", "separate tags with ; or |"),
    "photo without tags": ("note", "right where it shows none of the classes"),
    "photo no row names": ("note", "not used"),
    "photos without tags only": ("note", "a plain folder can be detected in, not trained from"),
}
"""Every kind of finding."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One kind of trouble: how often, where first, and what to do."""

    kind: str
    severity: Severity
    count: int
    names: tuple[str, ...]  # the first few
    lines: tuple[str, ...]  # what a strict reader would have said of them, if it would have said anything
    advice: str


class Tally:
    """Counts faults and findings by kind in bounded memory: of each kind, the first few names are kept."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._names: dict[str, list[str]] = {}
        self._lines: dict[str, list[str]] = {}
        self._told: set[int] = set()

    def complain(self, fault: Fault) -> None:
        """Count a reader's fault, once, though several readings meet it."""
        digest = hash(fault.line)
        if digest not in self._told:
            self._told.add(digest)
            self.add(fault.kind, fault.subject, fault.line)

    def add(self, kind: str, name: str, line: str = "") -> None:
        """Count one more."""
        self._counts[kind] = self._counts.get(kind, 0) + 1
        names = self._names.setdefault(kind, [])
        lines = self._lines.setdefault(kind, [])
        if len(names) < FIRST and plain(name) not in names:
            names.append(plain(name))
            lines.extend([plain(line)] if line else [])

    def findings(self) -> tuple[Finding, ...]:
        """All kinds met, the gravest first, in the order of ``ADVICE``."""
        found = []
        for kind, (severity, advice) in ADVICE.items():
            if kind in self._counts:
                names, lines = tuple(self._names[kind]), tuple(self._lines[kind])
                found.append(Finding(kind, severity, self._counts[kind], names, lines, advice))
        return tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity)))
