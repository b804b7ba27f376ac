"""Mistakes a user can mend: one line that says what, where, and what to do next."""

from __future__ import annotations


class UserError(Exception):
    """Bad input. The command line prints its one line and exits with code 2; there is never a traceback."""


class Busy(UserError):
    """Another process does this work now; what it makes, or its place, can be had when it is done."""


class Interrupted(Exception):
    """The user pressed Ctrl-C during work that was saved and can go on later. Exit code 130."""
