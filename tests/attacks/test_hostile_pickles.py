"""Hostile and broken pickles: refused in one line that names the reason, and nothing in them ever runs."""

from __future__ import annotations

import builtins
import functools
import io
import operator
import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tag2box.errors import UserError
from tag2box.safe_pickle import read_pickle

PROTOCOLS = range(6)


def refusal(content: bytes, folder: Path) -> str:
    path = folder / "file.pkl"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_pickle(path, "a dictionary of boxes")
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(f"{path}: ")
    assert "a dictionary of boxes" in line
    return line


# ---------------------------------------------------------------- hostile files: nothing may run


class Calls:
    """Pickles as a call."""

    def __init__(self, function: object, *args: object) -> None:
        self.call = (function, args)

    def __reduce__(self) -> tuple[object, ...]:
        return self.call


def touch(path: Path) -> str:
    return f"open({str(path)!r}, 'w').close()"


def hostile(sentinel: Path) -> dict[str, tuple[object, str]]:
    run, evaluate = touch(sentinel), vars(builtins)["eval"]
    return {
        "os.system": (Calls(os.system, f"touch {sentinel}"), f"{os.system.__module__}.system"),
        "subprocess": (Calls(subprocess.check_output, ["touch", str(sentinel)]), "check_output"),
        "Popen": (Calls(subprocess.Popen, ["touch", str(sentinel)]), ".Popen"),
        "eval": (Calls(evaluate, run), "eval"),
        "exec": (Calls(exec, run), "exec"),
        "__import__": (Calls(__import__, "os"), "__import__"),
        "getattr": (Calls(getattr, Calls(__import__, "os"), "system"), "getattr"),
        "open": (Calls(open, str(sentinel), "w"), "open"),
        "partial": (functools.partial(os.system, f"touch {sentinel}"), "functools.partial"),
        "methodcaller": (operator.methodcaller("system", f"touch {sentinel}"), "methodcaller"),
        "attrgetter": (operator.attrgetter("x"), "operator.attrgetter"),
        "numpy.load": (Calls(np.load, str(sentinel)), "numpy.load"),
        "memmap": (Calls(np.memmap, str(sentinel), "u1", "w+", 0, (1,)), "numpy.memmap"),
        "tofile": (Calls(np.ndarray.tofile, np.zeros(1), str(sentinel)), "getattr"),
        "fromfunction": (Calls(np.fromfunction, evaluate, (1,)), "numpy.fromfunction"),
        "map": (Calls(map, evaluate, [run]), "map"),
        "a class": (UserError("x"), "tag2box.errors.UserError"),
        "a record": (np.rec.array([(1, 2.0)]), "recarray"),  # type: ignore[call-overload]
        "a path": (Path("x"), "pathlib"),
        "range": (range(3), "range"),
    }


NAMES = list(hostile(Path("x")))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", NAMES)
def test_hostile_objects_are_refused_and_nothing_runs(name: str, protocol: int, tmp_path: Path) -> None:
    sentinel = tmp_path / "sentinel"
    value, asked = hostile(sentinel)[name]
    buffer = io.BytesIO()
    pickle.Pickler(buffer, protocol).dump({"boxes": [np.zeros((1, 4)), value], "ids": ["1"]})
    line = refusal(buffer.getvalue(), tmp_path)
    assert asked in line
    assert "nothing was run" in line
    assert not sentinel.exists()


def test_the_sentinel_would_appear_with_a_careless_unpickler(tmp_path: Path) -> None:
    sentinel = tmp_path / "sentinel"
    pickle.loads(pickle.dumps(Calls(os.system, f"touch {sentinel}")))  # noqa: S301 - that is the point
    assert sentinel.exists()


def op_name(module: str, name: str) -> bytes:
    return b"\x8c" + bytes([len(module)]) + module.encode() + b"\x8c" + bytes([len(name)]) + name.encode() + b"\x93"


F4 = b"cnumpy\ndtype\n(Vf4\nI0\nI1\ntR(I3\nV<\nNNNI-1\nI-1\nI0\ntb"
OBJECT = F4.replace(b"Vf4", b"VO8").replace(b"V<", b"V|")
SHELL = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntVb\ntR"


def array_of(shape: bytes, dtype: bytes, raw: bytes) -> bytes:
    return SHELL + b"(I1\n(" + shape + b"t" + dtype + b"I00\n" + raw + b"tb"


BROKEN: list[tuple[str, bytes, str]] = [
    ("nothing", b"", "empty"),
    ("text", b"hello\n", "not readable as a pickle"),
    ("a zip", b"PK\x03\x04....", "archive"),
    ("a gzip", b"\x1f\x8b\x08....", "archive"),
    ("no end", b"\x80\x02]", "ends too early"),
    ("only the end", b".", "not readable as a pickle"),
    ("too new", b"\x80\x09].", "protocol 9"),
    ("claims a terabyte", b"\x8e" + struct.pack("<Q", 1 << 40) + b"x.", "ends too early"),
    ("claims more than fits", b"\x96" + struct.pack("<Q", 1 << 63) + b"x.", "ends too early"),
    ("negative length", b"T" + struct.pack("<i", -5) + b"x.", "ends too early"),
    ("negative long", b"\x8b" + struct.pack("<i", -5) + b"x.", "ends too early"),
    ("a line without end", b"I12345", "ends too early"),
    ("not a number", b"Iabc\n.", "not readable"),
    ("ten thousand digits", b"L" + b"9" * 10_000 + b"L\n.", "not readable"),
    ("a quote left open", b"S'abc\n.", "without quotes"),
    ("nothing to forget", b"0.", "not readable"),
    ("an empty memo", b"h\x05.", "nothing is stored in the memo"),
    ("a huge memo", b"Nr\xff\xff\xff\xff0h\x05.", "nothing is stored in the memo"),
    ("items for a number", b"K\x01K\x02a.", "items added to a int"),
    ("a key without value", b"}(K\x01u.", "keys and values"),
    ("a key without hash", b"}]K\x01s.", "uses a list as a key"),
    ("a key with a list in it", b"}](K\x01tN" + b"s.", "not readable"),
    ("a persistent id", b"Pabc\n.", "persistent id"),
    ("a binary persistent id", b"K\x01Q.", "persistent id"),
    ("an extension", b"\x82\x01.", "registered extension"),
    ("a long extension", b"\x84\x01\x00\x00\x00.", "registered extension"),
    ("an outside buffer", b"\x97.", "buffer stored elsewhere"),
    ("an instance", b"(ios\nsystem\n.", "os.system"),
    ("an instance of something admitted", b"(inumpy\ndtype\n.", "numpy.dtype"),
    ("an object", b"(cnumpy\ndtype\no.", "a new object"),
    ("newobj", b"cbuiltins\nset\n)\x81.", "a new object"),
    ("newobj_ex", b"cbuiltins\nset\n)}\x92.", "a new object"),
    ("a dotted name", op_name("numpy", "core.multiarray._reconstruct") + b".", "numpy.core.multiarray._reconstruct"),
    ("a dotted way out", op_name("numpy", "dtype.__reduce__") + b".", "numpy.dtype.__reduce__"),
    ("a dotted module", op_name("numpy.core.multiarray.os", "system") + b".", "system"),
    ("another numpy", op_name("numpy._core.multiarray", "fromfile") + b".", "fromfile"),
    ("a name of two lines", op_name("os\n", "system") + b".", "refers to 'os\\n.system'"),
    ("a name that is no text", b"K\x01K\x02\x93.", "name that is not text"),
    ("calls a text", b"U\x03abc)R.", "calls a str"),
    ("calls with a list", b"cbuiltins\nset\n]R.", "calls"),
    ("calls an array class", b"cnumpy\nndarray\n(I5\ntR.", "calls"),
    ("state of a list", b"]}b.", "sets the state of a list"),
    ("state of a name", b"cnumpy\nndarray\n}b.", "sets the state of a Name"),
    ("state of a whole dtype", F4 + b"(I3\nV<\nNNNI-1\nI-1\nI0\ntb.", "sets the state"),
    ("state of a whole array", array_of(b"I0\n", F4, b"C\x00") + b"}b.", "sets the state"),
    ("slots of a set", b"\x8f(N}tb.", "sets the state of a set"),
    ("an array without state", SHELL + b".", "before it is complete"),
    ("an array used before its state", b"]" + SHELL + b"a.", "before it is complete"),
    ("an array in itself", SHELL + b"q\x01(I1\n(I1\nt" + OBJECT + b"I00\n]h\x01atb.", "before it is complete"),
    ("a doubled array", SHELL + b"2.", "before it is complete"),
    ("a terabyte of nothing", array_of(b"L1000000000000L\n", F4, b"C\x04abcd") + b".", "shape"),
    ("a product that overflows", array_of(b"I65536\nI65536\nI65536\nI65536\n", F4, b"C\x00") + b".", "shape"),
    ("a negative side", array_of(b"I-1\n", F4, b"C\x04abcd") + b".", "shape"),
    ("an endless empty array", array_of(b"L1000000000000000000L\nI0\n", F4, b"C\x00") + b".", "shape"),
    ("too few bytes", array_of(b"I2\n", F4, b"C\x04abcd") + b".", "4 bytes"),
    ("too many bytes", array_of(b"I1\n", F4, b"C\x05abcde") + b".", "5 bytes"),
    ("no bytes", array_of(b"I1\n", F4, b"N") + b".", "bytes expected"),
    ("a shape of text", array_of(b"Vabc\n", F4, b"C\x04abcd") + b".", "shape"),
    ("no dtype", array_of(b"I1\n", b"Vf4\n", b"C\x04abcd") + b".", "without shape, dtype"),
    ("objects as bytes", array_of(b"I1\n", OBJECT, b"C\x08abcdefgh") + b".", "objects"),
    ("too few objects", array_of(b"I9\n", OBJECT, b"]") + b".", "objects"),
    ("a short state", SHELL + b"(I1\ntb.", "not readable"),
    ("a state that is no tuple", SHELL + b"]b.", "state"),
    ("a structured dtype", F4.replace(b"NNN", b"N(Va\nt}") + b".", "structured"),
    ("a sub-array dtype", F4.replace(b"NNN", b"(Vf4\nI2\ntNN") + b".", "structured"),
    ("a void dtype", F4.replace(b"Vf4", b"VV8") + b".", "dtype"),
    ("a dtype of fields", F4.replace(b"Vf4", b"Vf4,O") + b".", "dtype"),
    ("a dtype of a million letters", F4.replace(b"Vf4", b"VU9999999") + b".", "dtype"),
    ("a dtype without size", F4.replace(b"Vf4", b"VS0") + b".", "dtype"),
    ("a wrong byte order", F4.replace(b"V<", b"V!") + b".", "byte order"),
    ("text beyond Unicode", array_of(b"I1\n", F4.replace(b"Vf4", b"VU1"), b"C\x04\xff\xff\xff\x7f") + b".", "Unicode"),
    ("a subclass of arrays", SHELL.replace(b"cnumpy\nndarray", b"cnumpy\ndtype") + b".", "not an array"),
    ("a bytearray of a size", b"cbuiltins\nbytearray\n(L99999999999L\ntR.", "bytes expected"),
    ("bytes of a size", b"cbuiltins\nbytes\n(L99999999999L\ntR.", "bytes expected"),
    ("another codec", b"c_codecs\nencode\n(Vx\nVzlib\ntR.", "encodes text"),
    ("a set of a name", b"cbuiltins\nset\n((cnumpy\nndarray\ntt" + b"R.", "key"),
    ("permuted axes", b"cnumpy.core.numeric\n_frombuffer\n(C\x04abcd" + F4 + b"(I1\ntVC\n(I0\nttR.", "permuted"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "reason"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_broken_and_crafted_files_are_refused_in_one_line(content: bytes, reason: str, tmp_path: Path) -> None:
    assert reason in refusal(content, tmp_path)


def test_a_file_cut_anywhere_is_refused_or_whole(tmp_path: Path) -> None:
    content = pickle.dumps({"boxes": [np.ones((2, 4))], "ids": ["a"]}, 4)
    for length in range(len(content)):
        refusal(content[:length], tmp_path)


@given(data=st.data())
def test_bytes_changed_at_random_never_raise_anything_else(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    content = bytearray(
        pickle.dumps({"boxes": [np.ones((2, 4))], "ids": ["a", np.int64(3)]}, data.draw(st.integers(0, 5)))
    )
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "random.pkl"
    path.write_bytes(content)
    try:
        read_pickle(path, "anything")
    except UserError as error:
        assert "\n" not in str(error)


# ---------------------------------------------------------------- bombs: depth and amplification


DEEP = 100_000
BOMBS = [
    ("a deep tuple as a key", b"}" + b")" + b"\x85" * DEEP + b"Ns.", "as a key"),
    ("a deep tuple in a set", b"\x8f()" + b"\x85" * DEEP + b"\x90.", "as a key"),
    ("arrays of arrays", array_of(b"I1\n", OBJECT, b"]" + array_of(b"I1\n", OBJECT, b"]Na") + b"a") + b".", "nests"),
    ("a text encoded often", b"X" + struct.pack("<I", 1 << 16) + b"x" * (1 << 16) + b"q\x010("
     + b"c_codecs\nencode\n(h\x01Vlatin1\ntR" * 200 + b"l.", "far more than it holds"),
    ("bytes laid under many arrays", b"B" + struct.pack("<I", 1 << 16) + b"x" * (1 << 16) + b"q\x010" + F4 + b"q\x020("
     + (SHELL + b"(I1\n(I16384\nth\x02I00\nh\x01tb") * 200 + b"l.", "far more than it holds"),
    ("a key of many parts", b"}(" + b"N" * 99 + b"tNs.", "as a key"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "reason"), [row[1:] for row in BOMBS], ids=[row[0] for row in BOMBS])
def test_bombs_are_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    assert reason in refusal(content, tmp_path)


def test_the_reader_has_no_unpickler_to_fool() -> None:
    modules = {name: module for name, module in sys.modules.items() if name.startswith("tag2box.safe_pickle")}
    files = Path(next(iter(modules.values())).__file__).parent.glob("*.py")  # type: ignore[type-var, arg-type]
    assert {name.rpartition(".")[2] for name in modules} == {"safe_pickle", "unpickler", "builders"}
    assert {file.stem for file in files} == {"__init__", "unpickler", "builders"}
    names = {name for module in modules.values() for name in vars(module)}
    assert names.isdisjoint({"pickle", "pickletools", "importlib", "marshal", "os", "sys"})
