"""``read_pickle``, and the stack machine behind it, which runs a pickle's instructions on plain values."""

import codecs
import mmap
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tag2box.errors import UserError
from tag2box.safe_pickle.builders import BUILDERS, NDARRAY, Budget, Name, Refused, Shell, checked_key, finish_build

Number = TypeVar("Number", int, float)

_BUDGET_FACTOR, _BUDGET_MINIMUM = 4, 1 << 20  # bytes that may be built: factor * file size + minimum
_NEWEST_PROTOCOL = 5
_REFUSED_CODES = {
    b"P": "an object stored elsewhere (persistent id)",
    b"Q": "an object stored elsewhere (persistent id)",
    b"\x82": "a registered extension",
    b"\x83": "a registered extension",
    b"\x84": "a registered extension",
    b"\x97": "a buffer stored elsewhere",
    b"\x98": "a buffer stored elsewhere",
    b"o": "a new object",
    b"\x81": "a new object",
    b"\x92": "a new object",
}
"""Instructions that no array or plain value needs, and what they create."""


def read_pickle(path: Path, what: str) -> object:
    """The numpy arrays and builtins of a pickle of any protocol; strings of Python 2 are decoded as latin-1.

    Arrays are read-only. Anything but dict, list, tuple, set, text, bytes, numbers, arrays, numpy scalars and dtypes is
    refused before it can have an effect.

    Args:
        what: the expected content, for the error.
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
    machine = PickleMachine(data)
    try:
        return machine.run()
    except Refused as refused:
        raise UserError(
            f"{path}: {refused}; nothing was run; expected {what}, numpy arrays and plain values only"
        ) from None
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, struct.error) as error:
        at = machine.reader.at
        reason = " ".join(str(error).split())[:120]
        raise UserError(f"{path}: not readable as a pickle (byte {at}: {reason}); expected {what}") from None


@dataclass(slots=True)
class ByteReader:
    """Sequential reader of a file, which never reads beyond its end."""

    data: mmap.mmap
    at: int = 0

    def code(self) -> bytes:
        """The next instruction; empty at the end of the file."""
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
        """Bytes preceded by their count."""
        return self.take(self.number(form))

    def line(self) -> bytes:
        """The rest of the line, without the line break."""
        end = self.data.find(b"\n", self.at)
        return self.take(end - self.at + 1 if end >= 0 else -1)[:-1]


def _utf8(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogatepass")


def _number_line(reader: ByteReader, kind: Callable[[bytes], Number], suffix: bytes = b"") -> Number:
    """The number in the rest of the line. An error does not quote it: the file may be something else, and private."""
    line = reader.line().removesuffix(suffix)
    try:
        return kind(line)
    except ValueError:
        raise ValueError("not a number") from None


def _int_line(reader: ByteReader) -> int:
    return _number_line(reader, lambda line: line == b"01" if line in {b"00", b"01"} else int(line))


def _quoted(reader: ByteReader) -> str:
    line = reader.line().strip()
    if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in {b"'", b'"'}:
        raise ValueError("a text without quotes")
    return codecs.escape_decode(line[1:-1])[0].decode("latin-1")


def _whole_number(raw: bytes) -> int:
    return int.from_bytes(raw, "little", signed=True)


_VALUES: dict[bytes, Callable[[ByteReader], object]] = {
    b"N": lambda reader: None,
    b"\x88": lambda reader: True,
    b"\x89": lambda reader: False,
    b"I": _int_line,
    b"J": lambda reader: reader.number("<i"),
    b"K": lambda reader: reader.number("<B"),
    b"M": lambda reader: reader.number("<H"),
    b"L": lambda reader: _number_line(reader, int, b"L"),
    b"\x8a": lambda reader: _whole_number(reader.counted("<B")),
    b"\x8b": lambda reader: _whole_number(reader.counted("<i")),
    b"F": lambda reader: _number_line(reader, float),
    b"G": lambda reader: reader.number(">d"),
    b"S": _quoted,
    b"T": lambda reader: reader.counted("<i").decode("latin-1"),
    b"U": lambda reader: reader.counted("<B").decode("latin-1"),
    b"V": lambda reader: reader.line().decode("raw-unicode-escape"),
    b"X": lambda reader: _utf8(reader.counted("<I")),
    b"\x8c": lambda reader: _utf8(reader.counted("<B")),
    b"\x8d": lambda reader: _utf8(reader.counted("<Q")),
    b"B": lambda reader: reader.counted("<I"),
    b"C": lambda reader: reader.counted("<B"),
    b"\x8e": lambda reader: reader.counted("<Q"),
    b"\x96": lambda reader: bytearray(reader.counted("<Q")),
    b"]": lambda reader: [],
    b"}": lambda reader: {},
    b")": lambda reader: (),
    b"\x8f": lambda reader: set(),
}
"""Instructions of all protocols that push a value; strings of Python 2 (S, T, U) are decoded as latin-1."""


class PickleMachine:
    """Runs a pickle's instructions on a stack of plain values; none of them imports or calls."""

    def __init__(self, data: mmap.mmap) -> None:
        self.reader = ByteReader(data)
        self.stack: list[object] = []
        self.marked: list[list[object]] = []  # the stacks below each mark
        self.memo: dict[int, object] = {}
        self.budget = Budget(_BUDGET_FACTOR * len(data) + _BUDGET_MINIMUM)

    def run(self) -> object:
        """The final value of the pickle."""
        while (code := self.reader.code()) != b".":
            if code in _VALUES:
                self.stack.append(_VALUES[code](self.reader))
            elif code in _ACTIONS:
                _ACTIONS[code](self)
            elif code in _REFUSED_CODES:
                raise Refused(f"contains {_REFUSED_CODES[code]}")
            else:
                raise ValueError(f"unknown instruction {code!r}" if code else "the file ends too early")
        return self.pop()

    # ------------------------------------------------------------ the stack

    def push(self, value: object) -> None:
        """Push a value."""
        self.stack.append(value)

    def pop(self) -> object:
        """Pop the top value, which must be complete."""
        return _complete((self.stack.pop(),))[0]

    def pop_mark(self) -> list[object]:
        """Pop all values above the last mark."""
        items = self.stack
        self.stack = self.marked.pop()
        _complete(items)
        return items

    def mark(self) -> None:
        """Begin a group of values."""
        self.marked.append(self.stack)
        self.stack = []

    def discard(self) -> None:
        """Drop the top value, or the last mark if nothing is above it."""
        if self.stack:
            self.stack.pop()
        else:
            self.pop_mark()

    def repeat(self) -> None:
        """Duplicate the top value."""
        value = self.pop()
        self.stack += [value, value]

    # ------------------------------------------------------------ the memo

    def put(self, place: int) -> None:
        """Store the top value in the memo."""
        value = self.stack[-1]
        self.memo[place] = value
        if isinstance(value, Shell):
            value.places.append(place)

    def get(self, place: int) -> None:
        """Push a value of the memo."""
        if place not in self.memo:
            raise LookupError(f"nothing is stored in the memo at {place}")
        self.stack.append(_complete((self.memo[place],))[0])

    # ------------------------------------------------------------ collections

    def tuple_of(self, count: int) -> None:
        """Replace the top ``count`` values by a tuple."""
        if len(self.stack) < count:
            raise LookupError("too few values for a tuple")
        items = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        self.stack.append(tuple(_complete(items)))

    def extend(self, items: Iterable[object]) -> None:
        """Extend the list on top."""
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
            top[checked_key(name)] = value

    def add(self, items: list[object]) -> None:
        """Add to the set on top."""
        top = self.stack[-1]
        if not isinstance(top, set):
            raise TypeError(f"items added to a {type(top).__name__}")
        top.update(map(checked_key, items))

    def push_dict(self) -> None:
        """Replace marked keys and values by a dictionary."""
        items = self.pop_mark()
        self.stack.append({})
        self.update(items)

    def set_item(self) -> None:
        """Move a key and a value into the dictionary below them."""
        value, name = self.pop(), self.pop()
        self.update([name, value])

    # ------------------------------------------------------------ names and builders

    def name(self, module: object, name: object) -> None:
        """Push a name, if it is one of the builders."""
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a name that is not text")
        token = Name({"__builtin__": "builtins"}.get(module, module.replace("numpy._core.", "numpy.core.")), name)
        if token not in BUILDERS and token != NDARRAY:
            raise Refused(f"refers to {Name(module, name)}")
        self.stack.append(token)

    def named_by_stack(self) -> None:
        """Push a name whose two parts are on the stack."""
        name, module = self.pop(), self.pop()
        self.name(module, name)

    def named_by_line(self) -> None:
        """Push a name whose two parts are lines of the file."""
        module, name = self.reader.line().decode(), self.reader.line().decode()
        self.name(module, name)

    def instance(self) -> None:
        """Refuse an instance of Python 2, by name: it is never data."""
        self.named_by_line()
        raise Refused(f"contains an instance of {self.stack[-1]}")

    def reduce(self) -> None:
        """Replace a name and its arguments by what its builder returns."""
        args, name = self.pop(), self.pop()
        if not isinstance(args, tuple) or not isinstance(name, Name) or name not in BUILDERS:
            raise Refused(f"calls a {type(name).__name__}")
        self.stack.append(BUILDERS[name](self.budget, args))

    def build(self) -> None:
        """Complete an array or dtype by its state, on the stack and in the memo."""
        state, shell = self.pop(), self.stack.pop()
        if not isinstance(shell, Shell):
            raise Refused(f"sets the state of a {type(shell).__name__}")
        value = finish_build(shell, state, self.budget)
        self.stack.append(value)
        self.memo.update(dict.fromkeys(shell.places, value))

    def protocol(self) -> None:
        """Check the version of the format."""
        version = self.reader.number("<B")
        if version > _NEWEST_PROTOCOL:
            raise ValueError(f"protocol {version}, expected up to {_NEWEST_PROTOCOL}")


def _complete(items: Sequence[object]) -> Sequence[object]:
    for item in items:
        if type(item) is Shell:
            raise Refused("uses an array before it is complete")
    return items


_ACTIONS: dict[bytes, Callable[[PickleMachine], object]] = {
    b"(": PickleMachine.mark,
    b"0": PickleMachine.discard,
    b"1": PickleMachine.pop_mark,
    b"2": PickleMachine.repeat,
    b"p": lambda m: m.put(_number_line(m.reader, int)),
    b"q": lambda m: m.put(m.reader.number("<B")),
    b"r": lambda m: m.put(m.reader.number("<I")),
    b"\x94": lambda m: m.put(len(m.memo)),
    b"g": lambda m: m.get(_number_line(m.reader, int)),
    b"h": lambda m: m.get(m.reader.number("<B")),
    b"j": lambda m: m.get(m.reader.number("<I")),
    b"t": lambda m: m.push(tuple(m.pop_mark())),
    b"\x85": lambda m: m.tuple_of(1),
    b"\x86": lambda m: m.tuple_of(2),
    b"\x87": lambda m: m.tuple_of(3),
    b"l": lambda m: m.push(m.pop_mark()),
    b"a": lambda m: m.extend((m.pop(),)),
    b"e": lambda m: m.extend(m.pop_mark()),
    b"d": PickleMachine.push_dict,
    b"s": PickleMachine.set_item,
    b"u": lambda m: m.update(m.pop_mark()),
    b"\x90": lambda m: m.add(m.pop_mark()),
    b"\x91": lambda m: m.push(frozenset(map(checked_key, m.pop_mark()))),
    b"c": PickleMachine.named_by_line,
    b"\x93": PickleMachine.named_by_stack,
    b"i": PickleMachine.instance,
    b"R": PickleMachine.reduce,
    b"b": PickleMachine.build,
    b"\x80": PickleMachine.protocol,
    b"\x95": lambda m: m.reader.take(8),
}
