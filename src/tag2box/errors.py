"""Errors that end a command with one line for the user: what is wrong, where, and what to do next."""

import re

_LONGEST_LINE = 600
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+")


class UserError(Exception):
    """Bad input. The command line prints the message, which is a single line, without traceback; exit code 2."""


class Busy(UserError):
    """Another process is doing this work, or writing to this place."""


class Interrupted(Exception):
    """Ctrl-C during work whose progress is saved, so that it can be resumed. Exit code 130."""


def printable(text: str) -> str:
    """Text of untrusted files as one short line, without control characters that a terminal would obey."""
    line = _CONTROL.sub(" ", text).encode(errors="replace").decode()  # half a surrogate pair cannot be printed
    if len(line) <= _LONGEST_LINE:
        return line
    return f"{line[: _LONGEST_LINE // 2]} ... {line[-_LONGEST_LINE // 2 :]}"
