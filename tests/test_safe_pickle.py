"""Pickles: what data comes out of honest files, of all protocols and of Python 2."""

from __future__ import annotations

import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tag2box.errors import UserError
from tag2box.safe_pickle import read_pickle

PROTOCOLS = range(6)


def read(content: bytes, folder: Path) -> Any:
    path = folder / "file.pkl"
    path.write_bytes(content)
    return read_pickle(path, "a dictionary of boxes")


def alike(a: Any, b: Any) -> bool:
    """Equal with equal types all the way down: True is not 1, OrderedDict is not dict."""
    if type(a) is not type(b) or a != b:
        return False
    if isinstance(a, dict):
        return all(alike(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    return all(map(alike, a, b)) if isinstance(a, list | tuple) else True


# ---------------------------------------------------------------- what comes out

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.text() | st.integers() | st.booleans() | st.none() | st.tuples(st.text(), st.integers())
nested = st.recursive(
    plain | st.complex_numbers(allow_nan=False) | st.builds(bytearray, st.binary()),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.dictionaries(keys, inner).map(OrderedDict)
        | st.sets(keys)
        | st.frozensets(keys)
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(value=nested, protocol=st.sampled_from(PROTOCOLS))
def test_plain_values_are_those_of_the_real_unpickler(
    value: object, protocol: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = pickle.dumps(value, protocol)
    found = read(content, tmp_path_factory.getbasetemp())
    assert alike(found, pickle.loads(content))  # noqa: S301 - the twin, on our own bytes


ARRAYS = [
    np.zeros((0, 4), np.float32),
    np.zeros((0,), np.int64),
    np.array(3.5),
    np.arange(12, dtype=np.float32).reshape(3, 4),
    np.asfortranarray(np.arange(12, dtype=np.uint16).reshape(3, 4)),
    np.arange(24).reshape(2, 3, 4)[:, ::2],
    np.arange(4, dtype=">f8"),
    np.array([True, False]),
    np.array([1 + 2j]),
    np.array(["000005", "9"]),
    np.array([b"ab", b"c"]),
    np.array(["a", None, 3, b"x"], object),
    np.array([[np.zeros((2, 4)), "x"]], object),
]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: f"{a.dtype}{a.shape}")
def test_arrays_are_those_that_were_written(array: np.ndarray, protocol: int, tmp_path: Path) -> None:
    found = read(pickle.dumps({"boxes": [array, array]}, protocol), tmp_path)
    first, second = found["boxes"]
    assert first is second
    assert type(first) is np.ndarray
    assert first.shape == array.shape
    assert first.dtype == array.dtype.newbyteorder("=")
    if array.dtype.hasobject:
        assert repr(first) == repr(array)
    else:
        np.testing.assert_array_equal(first, array)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("scalar", [np.float32(1.5), np.int64(-3), np.bool_(True), np.str_("a"), np.uint16(9)])
def test_scalars_keep_their_type(scalar: np.generic, protocol: int, tmp_path: Path) -> None:
    found = read(pickle.dumps([scalar, {scalar: 1}], protocol), tmp_path)
    assert found == [scalar, {scalar: 1}]
    assert type(found[0]) is type(scalar)


def test_a_dtype_comes_as_a_dtype(tmp_path: Path) -> None:
    assert read(pickle.dumps(np.dtype("<i4")), tmp_path) == np.dtype("<i4")


def test_names_of_numpy_before_its_second_version(tmp_path: Path) -> None:
    content = pickle.dumps(np.arange(3.0), 2)
    assert b"numpy._core.multiarray" in content
    found = read(content.replace(b"numpy._core.multiarray", b"numpy.core.multiarray"), tmp_path)
    np.testing.assert_array_equal(found, np.arange(3.0))


# ---------------------------------------------------------------- Python 2, which had bytes for texts


def py2_text(text: bytes) -> bytes:
    return b"T" + struct.pack("<i", len(text)) + text


def py2_line(text: bytes) -> bytes:
    """A text of protocol 0, as repr() of Python 2 wrote it."""
    return b"S'" + "".join(f"\\x{byte:02x}" for byte in text).encode() + b"'\n"


def py2_array(array: np.ndarray, text: Callable[[bytes], bytes]) -> bytes:
    """An array as Python 2 wrote it: names of old numpy, the data in a text."""
    code = array.dtype.str[1:].encode()
    shape = b"(" + b"".join(b"I%d\n" % side for side in array.shape) + b"t"
    dtype = b"cnumpy\ndtype\n(" + text(code) + b"I0\nI1\ntR(I3\n" + text(b"<") + b"NNNI-1\nI-1\nI0\ntb"
    begin = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\nt" + text(b"b") + b"tR"
    return begin + b"(I1\n" + shape + dtype + b"I00\n" + text(array.tobytes()) + b"tb"


@pytest.mark.parametrize("text", [py2_text, py2_line])
def test_python_2_dictionaries(text: Callable[[bytes], bytes], tmp_path: Path) -> None:
    boxes = np.array([[1, 2, 30, 250], [200, 0, 255, 65535]], np.uint16)
    content = b"(d" + text(b"boxes") + b"(l" + py2_array(boxes, text) + b"as"
    content += text(b"indexes") + b"(l" + text(b"000005") + b"aI9\naL12L\nas."
    found = read(content, tmp_path)
    np.testing.assert_array_equal(found["boxes"][0], boxes)
    assert found["indexes"] == ["000005", 9, 12]
    twin = pickle.loads(content, encoding="latin1")  # noqa: S301 - on our own bytes
    np.testing.assert_array_equal(twin["boxes"][0], boxes)


def test_a_hundred_thousand_lists_in_each_other_are_only_data(tmp_path: Path) -> None:
    found = read(b"]" * 100_000 + b"a" * 99_999 + b".", tmp_path)
    assert isinstance(found, list)
    assert len(found) == 1


def test_values_shared_a_billion_times_stay_shared(tmp_path: Path) -> None:
    found = read(b"]" + b"2\x86" * 60 + b".", tmp_path)
    assert isinstance(found, tuple)
    assert found[0] is found[1]


def test_arrays_of_a_file_are_read_only(tmp_path: Path) -> None:
    found = read(pickle.dumps(np.arange(3.0)), tmp_path)
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1


def test_a_file_that_is_not_there_or_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such file; expected weights"):
        read_pickle(tmp_path / "none.pkl", "weights")
    with pytest.raises(UserError, match=r"not readable"):
        read_pickle(tmp_path, "weights")
