"""Text files of one name a line, read strictly: UTF-8, no NUL bytes."""

from __future__ import annotations

from pathlib import Path

from tag2box.data.faults import plain
from tag2box.errors import UserError


def read_text(path: Path, what: str) -> str:
    """The text of a file a user named, without a byte order mark; ``what`` says in the error what was expected."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected {what}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not readable as UTF-8 text ({plain(str(error))}); expected {what}") from None
    if "\0" in text:
        raise UserError(f"{path}: holds NUL bytes, so it is no text; expected {what}")
    return text


def read_lines(path: Path, what: str) -> dict[int, str]:
    """Stripped lines that are not blank, by their numbers from 1."""
    lines = read_text(path, what).splitlines()
    return {number: line.strip() for number, line in enumerate(lines, start=1) if line.strip()}
