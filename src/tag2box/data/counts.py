"""How many objects of a class a photo shows, by somebody's word: a weak label that some systems can use (C-WSL)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tag2box.data.faults import Complain, Fault

Counts = tuple[tuple[str, int], ...]
"""Class and number, for each class that somebody counted."""

COLUMN = "counts"
_FORM = re.compile(r"(.+):\s*(\S+)\s*")
_NUMBER = re.compile(r"0*[1-9][0-9]{0,5}", re.ASCII)


def parse_counts(text: str) -> Counts:
    """The counts of a table's cell, like ``dog:2;car:1``; ValueError where it is none."""
    parts = (part.strip() for part in re.split(r"[;|]", text))
    return tuple(_count(part) for part in parts if part)


def _count(part: str) -> tuple[str, int]:
    found = _FORM.fullmatch(part)
    if found is None:
        raise ValueError(f"column {COLUMN!r}: expected class:number, like dog:2;car:1, got {part[:40]!r}")
    name, number = found[1].strip(), found[2]
    if _NUMBER.fullmatch(number) is None:
        raise ValueError(
            f"column {COLUMN!r}: expected a whole number of 1 or more after {name!r}, got {number[:40]!r}; "
            "leave out what nobody counted"
        )
    return name, int(number)


def of_tags(counts: Counts, tags: Sequence[str], where: str, complain: Complain) -> Counts:
    """The counts of a photo's tags, each once; a complaint of any other."""
    kept: dict[str, int] = {}
    for name, number in counts:
        if name not in tags:
            problem = f"{name!r} is counted and not tagged; tag it, or remove its count"
        elif kept.get(name, number) != number:
            problem = f"{name!r} is counted twice, as {kept[name]} and {number}; keep one"
        else:
            kept[name] = number
            continue
        complain(Fault("bad row", Path(where).name, f"{where}: {COLUMN}: {problem}"))
    return tuple(kept.items())
