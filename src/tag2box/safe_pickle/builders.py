"""Builders of the names that a pickle may contain: numpy arrays, dtypes, scalars, bytes, sets, ordered dictionaries.

``ndarray.__setstate__`` and ``dtype.__setstate__`` trust their input and can be made to crash, so they are not used:
arrays are views of bytes in the file, and dtypes come from a short list of codes.
"""

import math
import re
import reprlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_DTYPE = re.compile(r"b1|[iu][1248]|f[248]|c8|c16|[SU][1-9]\d{0,5}|O[48]?")
_KEYS = (str, bytes, int, float, complex, bool, type(None))
_UNICODE = 0x10FFFF
_MAX_KEY_PARTS = 16


class Refused(Exception):
    """A file contains something other than data."""


@dataclass(frozen=True, slots=True)
class Name:
    """A name in the file: a token, never the object of that name."""

    module: str
    name: str

    def __str__(self) -> str:
        text = f"{self.module}.{self.name}"[:80]
        return text if text.isprintable() else repr(text)


@dataclass(slots=True)
class Shell:
    """An incomplete array or dtype: pickles first create it, then set its state."""

    code: str | None  # of a dtype; None for an array
    places: list[int] = field(default_factory=list)  # in the memo


@dataclass(slots=True)
class Budget:
    """Limit on the bytes that builders create. A regular file contains all that is built from it."""

    total: int
    spent: int = 0

    def spend(self, count: int) -> None:
        """Count created bytes; raise if they exceed the total."""
        self.spent += count
        if self.spent > self.total:
            raise Refused("builds far more than it holds")


Args = tuple[Any, ...]
Builder = Callable[[Budget, Args], object]


def finish_build(shell: Shell, state: Any, budget: Budget) -> object:
    """The array or dtype of a shell and its state."""
    if not isinstance(state, tuple):
        raise TypeError(f"a state of type {type(state).__name__}")
    if shell.code is not None:
        return _dtype(shell.code, state)
    _, shape, dtype, is_fortran, raw = state
    return _array(budget, shape, dtype, raw, "F" if is_fortran else "C")


def _dtype(code: str, state: Args) -> np.dtype[Any]:
    if len(state) < 8 or any(part is not None for part in state[2:5]):
        raise Refused(f"holds a structured array ({code})")
    if state[1] not in {"<", ">", "|", "="}:
        raise ValueError(f"byte order {reprlib.repr(state[1])}")
    return np.dtype(code).newbyteorder(state[1])


def _array(budget: Budget, shape: Any, dtype: Any, raw: Any, order: Any) -> np.ndarray[Any, Any]:
    """A view of bytes of the file as an array; their number must match the shape."""
    if not isinstance(dtype, np.dtype) or not isinstance(shape, tuple) or order not in {"C", "F"}:
        raise TypeError("an array without shape, dtype and order")
    if not all(type(side) is int and 0 <= side <= budget.total for side in shape):
        raise ValueError(f"an array of shape {reprlib.repr(shape)}")
    if dtype.hasobject:
        return _object_array(shape, raw)
    content = _raw(raw)
    budget.spend(len(content))
    if len(content) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"an array of shape {reprlib.repr(shape)} {dtype} in {len(content)} bytes")
    flat = np.frombuffer(content, dtype) if content else np.zeros(0, dtype)
    native = flat.astype(dtype.newbyteorder("="), copy=False)
    if dtype.kind == "U" and native.size and native.view(np.uint32).max() > _UNICODE:
        raise ValueError("text that is not Unicode")
    native.flags.writeable = False
    return native.reshape(shape, order=order)


def _object_array(shape: tuple[int, ...], items: Any) -> np.ndarray[Any, Any]:
    if not isinstance(items, list) or len(items) != math.prod(shape):
        raise ValueError(f"an array of shape {reprlib.repr(shape)} of objects without as many")
    if any(isinstance(item, np.ndarray) and item.dtype.hasobject for item in items):
        raise Refused("nests arrays of objects in each other")  # numpy frees them recursively: deep nesting would crash
    flat = np.empty(len(items), object)
    for place, item in enumerate(items):
        flat[place] = item
    return flat.reshape(shape)


def _raw(value: object) -> bytes | bytearray:
    """The bytes of an array; Python 2 stores them as text."""
    if isinstance(value, str):
        return value.encode("latin-1")
    if isinstance(value, bytes | bytearray):
        return value
    raise TypeError(f"bytes expected, got a {type(value).__name__}")


def _array_shell(budget: Budget, args: Args) -> Shell:
    if not args or not isinstance(args[0], Name) or args[0] != NDARRAY:
        raise Refused(f"rebuilds something that is not an array ({reprlib.repr(args[:1])})")
    return Shell(None)


def _dtype_shell(budget: Budget, args: Args) -> Shell:
    if not args or not isinstance(args[0], str) or not _DTYPE.fullmatch(args[0]):
        raise Refused(f"holds an array of dtype {reprlib.repr(args[:1])}")
    return Shell("O" if args[0].startswith("O") else args[0])


def _frombuffer(budget: Budget, args: Args) -> np.ndarray[Any, Any]:
    raw, dtype, shape, order = args[:4]
    if any(axes is not None for axes in args[4:]):
        raise Refused("holds an array with permuted axes")
    return _array(budget, shape, dtype, raw, order)


def _scalar(budget: Budget, args: Args) -> object:
    dtype, raw = args
    return _array(budget, (), dtype, raw, "C")[()]


def _bytes(budget: Budget, args: Args) -> bytes:
    """``bytes()``, ``bytearray(b"...")`` and ``encode("...", "latin1")``: bytes in older protocols."""
    if len(args) > 1 and args[1] not in {"latin1", "latin-1"}:
        raise Refused(f"encodes text as {reprlib.repr(args[1])}")
    content = bytes(_raw(args[0])) if args else b""
    budget.spend(len(content))
    return content


def _bytearray(budget: Budget, args: Args) -> bytearray:
    return bytearray(_bytes(budget, args))


def _complex(budget: Budget, args: Args) -> complex:
    real, imaginary = args
    return complex(float(real), float(imaginary))


def _set(budget: Budget, args: Args) -> set[object]:
    items = args[0] if args else []
    if not isinstance(items, list | tuple):
        raise TypeError(f"a set of a {type(items).__name__}")
    budget.spend(len(items))
    return {checked_key(item) for item in items}


def _frozenset(budget: Budget, args: Args) -> frozenset[object]:
    return frozenset(_set(budget, args))


def _ordered(budget: Budget, args: Args) -> OrderedDict[object, object]:
    pairs = args[0] if args else []
    if not isinstance(pairs, list | tuple):
        raise TypeError(f"a dictionary of a {type(pairs).__name__}")
    budget.spend(len(pairs))
    return OrderedDict((checked_key(name), value) for name, value in pairs)


def checked_key(value: object) -> object:
    """A value that is safe as a key: hashing tuples nested a million deep would overflow the C stack."""
    parts = value if isinstance(value, tuple) else (value,)
    if len(parts) > _MAX_KEY_PARTS or not all(type(part) in _KEYS or isinstance(part, np.generic) for part in parts):
        raise Refused(f"uses a {type(value).__name__} as a key")
    return value


NDARRAY = Name("numpy", "ndarray")
BUILDERS: dict[Name, Builder] = {
    Name("numpy", "dtype"): _dtype_shell,
    Name("numpy.core.multiarray", "_reconstruct"): _array_shell,
    Name("numpy.core.multiarray", "scalar"): _scalar,
    Name("numpy.core.numeric", "_frombuffer"): _frombuffer,
    Name("_codecs", "encode"): _bytes,
    Name("builtins", "bytes"): _bytes,
    Name("builtins", "bytearray"): _bytearray,
    Name("builtins", "complex"): _complex,
    Name("builtins", "set"): _set,
    Name("builtins", "frozenset"): _frozenset,
    Name("collections", "OrderedDict"): _ordered,
}
"""All names that build something."""
