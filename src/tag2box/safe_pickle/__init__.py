"""Pickles read as data: numpy arrays and plain values come out, and nothing in the file can run.

A pickle is a program for a stack machine that may import and call anything. Python's machine is not used here. The one
in ``unpickler`` has no instruction that imports or calls: a name in the file stays a name, and only the names listed in
``builders`` make anything, from checked arguments.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from tag2box.errors import UserError
from tag2box.safe_pickle.builders import Refused
from tag2box.safe_pickle.unpickler import Machine

__all__ = ["read_pickle"]


def read_pickle(path: Path, what: str) -> object:
    """The numpy arrays and builtins of a pickle, Python 2's too (its strings as latin-1); ``what`` is for the error.

    Arrays are read-only: copy what you want to change. Anything but dict, list, tuple, set, text, bytes, numbers,
    arrays, numpy scalars and dtypes is refused before it could do anything.
    """
    try:
        with path.open("rb") as file:
            if not path.stat().st_size:
                raise UserError(f"{path}: empty; expected {what}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _run(data, path, what)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected {what}") from None
    except (OSError, MemoryError) as error:
        raise UserError(f"{path}: not readable ({error}); expected {what}") from None


def _run(data: mmap.mmap, path: Path, what: str) -> object:
    if data[:2] in {b"PK", b"\x1f\x8b"}:
        raise UserError(f"{path}: a compressed archive, not a pickle; expected {what}")
    machine = Machine(data)
    try:
        return machine.run()
    except Refused as refused:
        raise UserError(
            f"{path}: {refused}; nothing was run; expected {what}, numpy arrays and plain values only"
        ) from None
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, struct.error) as error:
        at = machine.tape.at
        reason = " ".join(str(error).split())[:120]
        raise UserError(f"{path}: not readable as a pickle (byte {at}: {reason}); expected {what}") from None
