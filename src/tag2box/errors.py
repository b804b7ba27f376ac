"""Errors that end a command with one line for the user: what is wrong, where, and what to do next."""

import signal
import unicodedata
from typing import NoReturn

LONGEST_LINE = 2000
"""Characters of a line on a terminal; that of a name in it is shorter."""
_LONGEST_NAME = 600
_LINE_BREAKS = "\t\n\v\f\r\x1c\x1d\x1e\x85\u2028\u2029"


class UserError(Exception):
    """Bad input. The command line prints the message, which is a single line, without traceback; exit code 2."""


class Busy(UserError):
    """Another process is doing this work, or writing to this place."""


class Interrupted(Exception):
    """Ctrl-C or SIGTERM during work whose progress is saved, so that it can be resumed. Exit code 130 or 143."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which batch systems send before they end a job; handled as Ctrl-C is, with another exit code."""


def stop_at_once(number: int, frame: object) -> NoReturn:
    """Signal handler: raise ``Terminated`` at SIGTERM, ``KeyboardInterrupt`` at Ctrl-C."""
    raise Terminated if number == signal.SIGTERM else KeyboardInterrupt


def memory_problem(error: BaseException) -> str | None:
    """The cause, if an error is an allocation that failed (in Python, numpy or torch); else None."""
    text = printable(str(error) or type(error).__name__, 200)
    is_torch = isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text)
    return text if is_torch or isinstance(error, MemoryError) else None


def printable(text: str, longest: int = _LONGEST_NAME) -> str:
    """Text of untrusted origin, such as a class name or a photo id, as one short line for a terminal.

    Line breaks and tabs become spaces. What a terminal obeys or does not show is escaped as in Python source: control
    characters (``\\x1b``), changes of the writing direction, zero-width characters, halves of surrogate pairs. The
    middle of a text of more than ``longest`` characters is left out.
    """
    if text.isprintable() and len(text) <= longest:
        return text
    half = (longest - 5) // 2
    ends = text if len(text) <= longest else text[:half] + text[-half:]  # first: a text may be megabytes long
    line = "".join(map(_visible, ends))
    return line if ends is text and len(line) <= longest else f"{line[:half]} ... {line[-half:]}"


def _visible(character: str) -> str:
    if character in _LINE_BREAKS:
        return " "
    if character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    return character.encode("unicode_escape").decode()
