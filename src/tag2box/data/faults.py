"""What can be wrong with a dataset, told one thing at a time: raised at once, or collected while reading goes on."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tag2box.errors import UserError

Kind = Literal[
    "missing photo",
    "empty photo",
    "unreadable photo",
    "missing annotation",
    "unreadable annotation",
    "bad row",
    "bad box",
    "listed twice",
    "outside the folder",
    "unknown class",
]

_LONGEST = 600
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong: its kind, the photo, row or class it is about, and the whole line for the user."""

    kind: Kind
    subject: str
    line: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "subject", plain(self.subject))
        object.__setattr__(self, "line", plain(self.line))


Complain = Callable[[Fault], None]
"""Told of every fault. A reader whose complaint is answered leaves that photo, row or object out and goes on."""


def refuse(fault: Fault) -> None:
    """The strict answer: the first fault ends the reading."""
    raise UserError(fault.line)


def plain(text: str) -> str:
    """Text from strangers' files on one short line, without control characters that could write on a terminal."""
    line = _CONTROL.sub(" ", text).encode(errors="replace").decode()  # half a surrogate pair cannot be printed
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"
