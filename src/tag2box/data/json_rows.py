"""A JSON object of long lists, read row by row: of COCO's 860,000 outlines, only what is asked for stays in memory."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from tag2box.data.faults import plain
from tag2box.errors import UserError

_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


def each_row(path: Path, what: str, take: Mapping[str, Callable[[object], None]]) -> frozenset[str]:
    """Hand every row of some lists to its taker, as it is met; the names of the lists that were there."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
        if not text.startswith("{", _skip(text, 0)):
            got = type(_DECODER.decode(text)).__name__
            raise UserError(f"{path}: expected an object with {_listed(take)}, got a {got}")
        return frozenset(_members(path, text, take))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected {what}") from None
    except RecursionError:
        raise UserError(f"{path}: not readable as JSON (nested too deep); expected {what}") from None
    except (OSError, ValueError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise UserError(f"{path}: not readable as JSON ({plain(str(error))}); expected {what}") from None


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _members(path: Path, text: str, take: Mapping[str, Callable[[object], None]]) -> Iterator[str]:
    """Walk the object's members; the names of those that are taken."""
    at = _after_space(text, 0, "{")
    while text[at : at + 1] != "}":
        if text[at : at + 1] != '"':
            raise json.JSONDecodeError("Expecting property name enclosed in double quotes", text, at)
        name, at = _DECODER.raw_decode(text, at)
        at = _after_space(text, at, ":")
        if name not in take:
            _, at = _DECODER.raw_decode(text, at)
        elif text[at : at + 1] == "[":
            at = _rows(text, at, take[name])
            yield name
        else:
            value, _ = _DECODER.raw_decode(text, at)
            raise UserError(plain(f"{path}: {name}: expected a list, got {value!r:.40}; correct the file"))
        at = _next(text, at, "}")
    if _SPACE.fullmatch(text, at + 1) is None:
        raise json.JSONDecodeError("Extra data", text, at + 1)


def _rows(text: str, at: int, take: Callable[[object], None]) -> int:
    """Take the rows of the list that begins here; the place behind it."""
    at = _after_space(text, at, "[")
    while text[at : at + 1] != "]":
        row, at = _DECODER.raw_decode(text, at)
        take(row)
        at = _next(text, at, "]")
    return at + 1


def _next(text: str, at: int, end: str) -> int:
    """The place of what follows a comma, or of the closing bracket."""
    at = _skip(text, at)
    if text[at : at + 1] == end:
        return at
    at = _after_space(text, at, ",")
    if text[at : at + 1] == end:
        raise json.JSONDecodeError("Illegal trailing comma", text, at)
    return at


def _after_space(text: str, at: int, mark: str) -> int:
    """The place of the first letter behind a mark and the space around it."""
    at = _skip(text, at)
    if not text.startswith(mark, at):
        raise json.JSONDecodeError(f"Expecting {mark!r}", text, at)
    return _skip(text, at + len(mark))


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at
