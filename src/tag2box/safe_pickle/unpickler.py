"""The bytes of a pickle, and the instructions that push a plain value."""

from __future__ import annotations

import codecs
import mmap
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tag2box.safe_pickle.builders import BUILDERS, NDARRAY, Budget, Name, Refused, Shell, finish_build, key


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


_TIMES, _ROOM = 4, 1 << 20  # bytes that may be built: so many times the file's, and a little for short files
_PROTOCOLS = 5
_FOREIGN = {
    b"P": "an object kept elsewhere (persistent id)",
    b"Q": "an object kept elsewhere (persistent id)",
    b"\x82": "a registered extension",
    b"\x83": "a registered extension",
    b"\x84": "a registered extension",
    b"\x97": "a buffer kept elsewhere",
    b"\x98": "a buffer kept elsewhere",
    b"o": "a new object",
    b"\x81": "a new object",
    b"\x92": "a new object",
}
"""Instructions that no array or plain value needs, and what they ask for."""


class Machine:
    """Runs a pickle's instructions on a stack of plain values."""

    def __init__(self, data: mmap.mmap) -> None:
        self.tape = Tape(data)
        self.stack: list[object] = []
        self.marked: list[list[object]] = []  # the stacks below each mark
        self.memo: dict[int, object] = {}
        self.budget = Budget(_TIMES * len(data) + _ROOM)

    def run(self) -> object:
        """The value the pickle ends with."""
        while (code := self.tape.code()) != b".":
            if code in VALUES:
                self.stack.append(VALUES[code](self.tape))
            elif code in _ACTIONS:
                _ACTIONS[code](self)
            elif code in _FOREIGN:
                raise Refused(f"asks for {_FOREIGN[code]}")
            else:
                raise ValueError(f"unknown instruction {code!r}" if code else "the file ends too early")
        return self.pop()

    # ------------------------------------------------------------ the stack

    def push(self, value: object) -> None:
        """Put a value on top."""
        self.stack.append(value)

    def pop(self) -> object:
        """The top value, which must be complete."""
        return _complete((self.stack.pop(),))[0]

    def pop_mark(self) -> list[object]:
        """All values above the last mark."""
        items = self.stack
        self.stack = self.marked.pop()
        _complete(items)
        return items

    def mark(self) -> None:
        """Begin a group of values."""
        self.marked.append(self.stack)
        self.stack = []

    def discard(self) -> None:
        """Drop the top value, or the last mark where nothing lies above it."""
        if self.stack:
            self.stack.pop()
        else:
            self.pop_mark()

    def repeat(self) -> None:
        """The top value once more."""
        value = self.pop()
        self.stack += [value, value]

    # ------------------------------------------------------------ the memo

    def put(self, place: int) -> None:
        """Remember the top value."""
        value = self.stack[-1]
        self.memo[place] = value
        if isinstance(value, Shell):
            value.places.append(place)

    def get(self, place: int) -> None:
        """Push a remembered value."""
        if place not in self.memo:
            raise LookupError(f"nothing was remembered as {place}")
        self.stack.append(_complete((self.memo[place],))[0])

    # ------------------------------------------------------------ collections

    def tuple_of(self, count: int) -> None:
        """The top values as a tuple."""
        if len(self.stack) < count:
            raise LookupError("too few values for a tuple")
        items = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        self.stack.append(tuple(_complete(items)))

    def extend(self, items: Iterable[object]) -> None:
        """Add to the list on top."""
        top = self.stack[-1]
        if not isinstance(top, list):
            raise TypeError(f"items added to a {type(top).__name__}")
        top.extend(items)

    def update(self, items: list[object]) -> None:
        """Add keys and values to the dictionary on top."""
        top = self.stack[-1]
        if not isinstance(top, dict) or len(items) % 2:
            raise TypeError(f"{len(items)} keys and values added to a {type(top).__name__}")
        for name, value in zip(items[::2], items[1::2], strict=True):
            top[key(name)] = value

    def add(self, items: list[object]) -> None:
        """Add to the set on top."""
        top = self.stack[-1]
        if not isinstance(top, set):
            raise TypeError(f"items added to a {type(top).__name__}")
        top.update(map(key, items))

    def push_dict(self) -> None:
        """Marked keys and values as a dictionary."""
        items = self.pop_mark()
        self.stack.append({})
        self.update(items)

    def set_item(self) -> None:
        """One key and value into the dictionary below them."""
        value, name = self.pop(), self.pop()
        self.update([name, value])

    # ------------------------------------------------------------ names, and what they build

    def name(self, module: object, name: object) -> None:
        """Push a name, if it is one that may be asked for."""
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a name that is not text")
        token = Name({"__builtin__": "builtins"}.get(module, module.replace("numpy._core.", "numpy.core.")), name)
        if token not in BUILDERS and token != NDARRAY:
            raise Refused(f"asks for {Name(module, name)}")
        self.stack.append(token)

    def named_by_stack(self) -> None:
        """A name whose two parts are on the stack."""
        name, module = self.pop(), self.pop()
        self.name(module, name)

    def named_by_line(self) -> None:
        """A name whose two parts are lines of the file."""
        module, name = self.tape.line().decode(), self.tape.line().decode()
        self.name(module, name)

    def instance(self) -> None:
        """Python 2's instances: never data, but the name tells the reader what was asked for."""
        self.named_by_line()
        raise Refused(f"asks for an instance of {self.stack[-1]}")

    def reduce(self) -> None:
        """What a name builds from its arguments."""
        args, name = self.pop(), self.pop()
        if not isinstance(args, tuple) or not isinstance(name, Name) or name not in BUILDERS:
            raise Refused(f"calls a {type(name).__name__}")
        self.stack.append(BUILDERS[name](self.budget, args))

    def build(self) -> None:
        """Complete an array or dtype by its state, on the stack and where it is remembered."""
        state, shell = self.pop(), self.stack.pop()
        if not isinstance(shell, Shell):
            raise Refused(f"sets the state of a {type(shell).__name__}")
        value = finish_build(shell, state, self.budget)
        self.stack.append(value)
        self.memo.update(dict.fromkeys(shell.places, value))

    def protocol(self) -> None:
        """The version of the format."""
        version = self.tape.number("<B")
        if version > _PROTOCOLS:
            raise ValueError(f"protocol {version}, expected up to {_PROTOCOLS}")


def _complete(items: Sequence[object]) -> Sequence[object]:
    for item in items:
        if type(item) is Shell:
            raise Refused("uses an array before it is complete")
    return items


_ACTIONS: dict[bytes, Callable[[Machine], object]] = {
    b"(": Machine.mark,
    b"0": Machine.discard,
    b"1": Machine.pop_mark,
    b"2": Machine.repeat,
    b"p": lambda m: m.put(int(m.tape.line())),
    b"q": lambda m: m.put(m.tape.number("<B")),
    b"r": lambda m: m.put(m.tape.number("<I")),
    b"\x94": lambda m: m.put(len(m.memo)),
    b"g": lambda m: m.get(int(m.tape.line())),
    b"h": lambda m: m.get(m.tape.number("<B")),
    b"j": lambda m: m.get(m.tape.number("<I")),
    b"t": lambda m: m.push(tuple(m.pop_mark())),
    b"\x85": lambda m: m.tuple_of(1),
    b"\x86": lambda m: m.tuple_of(2),
    b"\x87": lambda m: m.tuple_of(3),
    b"l": lambda m: m.push(m.pop_mark()),
    b"a": lambda m: m.extend((m.pop(),)),
    b"e": lambda m: m.extend(m.pop_mark()),
    b"d": Machine.push_dict,
    b"s": Machine.set_item,
    b"u": lambda m: m.update(m.pop_mark()),
    b"\x90": lambda m: m.add(m.pop_mark()),
    b"\x91": lambda m: m.push(frozenset(map(key, m.pop_mark()))),
    b"c": Machine.named_by_line,
    b"\x93": Machine.named_by_stack,
    b"i": Machine.instance,
    b"R": Machine.reduce,
    b"b": Machine.build,
    b"\x80": Machine.protocol,
    b"\x95": lambda m: m.tape.take(8),
}
