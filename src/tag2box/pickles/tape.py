"""The bytes of a pickle, and the instructions that push a plain value."""

from __future__ import annotations

import codecs
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Tape:
    """A file, read from the front and never beyond its end."""

    data: mmap.mmap
    at: int = 0

    def code(self) -> bytes:
        """The next instruction; at the end of the file, none."""
        self.at += 1
        return self.data[self.at - 1 : self.at]

    def take(self, count: int) -> bytes:
        """The next bytes."""
        if not 0 <= count <= len(self.data) - self.at:
            raise ValueError("the file ends too early")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, form: str) -> Any:
        """The next number, in ``struct``'s notation."""
        (value,) = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def counted(self, form: str) -> bytes:
        """Bytes behind their count."""
        return self.take(self.number(form))

    def line(self) -> bytes:
        """The rest of a line, without its end."""
        end = self.data.find(b"\n", self.at)
        return self.take(end - self.at + 1 if end >= 0 else -1)[:-1]


def _utf8(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def _int_line(tape: Tape) -> int:
    line = tape.line()
    return {b"00": False, b"01": True}[line] if line in {b"00", b"01"} else int(line)


def _quoted(tape: Tape) -> str:
    line = tape.line().strip()
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in {b"'", b'"'}:
        raise ValueError("a text without quotes")
    return codecs.escape_decode(line[1:-1])[0].decode("latin-1")


def _whole_number(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


VALUES: dict[bytes, Callable[[Tape], object]] = {
    b"N": lambda tape: None,
    b"\x88": lambda tape: True,
    b"\x89": lambda tape: False,
    b"I": _int_line,
    b"J": lambda tape: tape.number("<i"),
    b"K": lambda tape: tape.number("<B"),
    b"M": lambda tape: tape.number("<H"),
    b"L": lambda tape: int(tape.line().removesuffix(b"L")),
    b"\x8a": lambda tape: _whole_number(tape.counted("<B")),
    b"\x8b": lambda tape: _whole_number(tape.counted("<i")),
    b"F": lambda tape: float(tape.line()),
    b"G": lambda tape: tape.number(">d"),
    b"S": _quoted,
    b"T": lambda tape: tape.counted("<i").decode("latin-1"),
    b"U": lambda tape: tape.counted("<B").decode("latin-1"),
    b"V": lambda tape: tape.line().decode("raw-unicode-escape"),
    b"X": lambda tape: _utf8(tape.counted("<I")),
    b"\x8c": lambda tape: _utf8(tape.counted("<B")),
    b"\x8d": lambda tape: _utf8(tape.counted("<Q")),
    b"B": lambda tape: tape.counted("<I"),
    b"C": lambda tape: tape.counted("<B"),
    b"\x8e": lambda tape: tape.counted("<Q"),
    b"\x96": lambda tape: bytearray(tape.counted("<Q")),
    b"]": lambda tape: [],
    b"}": lambda tape: {},
    b")": lambda tape: (),
    b"\x8f": lambda tape: set(),
}
"""Instructions of all protocols that push a value; Python 2's strings (S, T, U) come as latin-1 text."""
