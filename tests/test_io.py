from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from tag2box.errors import UserError
from tag2box.io import (
    apply_umask,
    check_writable,
    read_bytes,
    read_json,
    read_lines,
    read_text,
    replacing,
    write_json,
    write_text,
)


def test_a_file_is_written_with_its_folders_and_nothing_beside_it(tmp_path):
    path = tmp_path / "a" / "b" / "c.txt"
    write_text(path, "")
    assert path.read_text() == ""
    write_text(path, "größer\n")
    assert path.read_bytes() == "größer\n".encode()
    assert list(path.parent.iterdir()) == [path]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_have_the_permissions_of_the_umask(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        write_text(tmp_path / "own", "x")
        (tmp_path / "other").touch(mode=0o600)
        apply_umask(tmp_path / "other")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {mode}
    assert {path.name for path in tmp_path.iterdir()} == {"own", "other"}


def test_content_is_flushed_before_the_rename_and_the_folder_after_it(tmp_path, monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace

    def flush(handle):
        done.append(str(Path(f"/proc/self/fd/{handle}").readlink()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("rename"), replace(a, b)))
    write_text(tmp_path / "file", "new")
    temporary, rename, folder = done
    assert Path(temporary).name.startswith(".file.") and rename == "rename" and folder == str(tmp_path)


def test_a_reader_sees_the_old_content_until_the_new_is_whole(tmp_path):
    path = tmp_path / "file"
    write_text(path, "old")
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert temporary.parent == path.parent
        assert path.read_text() == "old"
    assert path.read_text() == "new"


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path, error):
    path = tmp_path / "file"
    write_text(path, "old")
    with pytest.raises(type(error)), replacing(path) as temporary:
        temporary.write_text("half")
        raise error
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_json_without_a_meaning_is_refused_and_keeps_the_old_file(tmp_path):
    path = tmp_path / "file.json"
    write_json(path, {"ap": 0.5})
    for value in (float("nan"), object()):
        with pytest.raises((ValueError, TypeError)):
            write_json(path, {"ap": value})
    assert read_json(path, "results") == {"ap": 0.5}


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(values)
def test_json_comes_back_as_it_was(tmp_path_factory, value):
    path = tmp_path_factory.getbasetemp() / "value.json"
    write_json(path, value)
    assert read_json(path, "a value") == value
    assert json.loads(path.read_text()) == value


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"^set\.json: no such file; expected proposals$"),
        (b"", r"^set\.json: not readable as JSON \(.*\); expected proposals$"),
        (b"{", r"^set\.json: not readable as JSON \(.*line 1 column 2.*\); expected proposals$"),
        (b"[" * 200_000, r"^set\.json: not readable as JSON \(brackets nested.*\); expected proposals$"),
        (b"9" * 9_000, r"^set\.json: not readable as JSON \(.*digits.*\); expected proposals$"),
        (b"\xff\xfe", r"^set\.json: not readable as JSON \(.*\); expected proposals$"),
    ],
)
def test_an_unreadable_file_is_one_line_for_the_user(tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    path = Path("set.json")
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        read_json(path, "proposals")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("read", [read_text, read_json, read_lines])
def test_only_files_are_read(tmp_path, monkeypatch, read):
    """A pipe without a writer would wait for ever, a device may have no end."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("folder").mkdir()
    for name, got in (("folder", "a folder"), ("pipe", "a device or a pipe"), ("/dev/zero", "a device or a pipe")):
        with pytest.raises(UserError, match=rf"^{name}: not readable \({got}.*\); expected proposals$"):
            read(Path(name), "proposals")
    with pytest.raises(UserError, match=r"not readable \(.*embedded null .*\); expected proposals$"):
        read(Path("a\0b"), "proposals")
    with pytest.raises(UserError, match=r"^x+: not readable \(File name too long\); expected proposals$"):
        read(Path("x" * 300), "proposals")


@pytest.mark.parametrize(("size", "fits"), [(0, True), (1 << 20, True), ((1 << 20) + 1, False), (1 << 40, False)])
def test_a_file_beyond_the_limit_is_not_read(tmp_path, size, fits):
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, size)  # the file has no blocks: it takes no space
    if fits:
        assert len(read_bytes(path, "a table", 1 << 20)) == size
    else:
        with pytest.raises(UserError, match=r"file: not readable \(larger than 1 MB\); expected a table$"):
            read_bytes(path, "a table", 1 << 20)


def test_text_is_read_no_further_than_its_first_nul(tmp_path):
    path = tmp_path / "file"
    path.write_text("image,tags\n")
    os.truncate(path, 1 << 29)
    with pytest.raises(UserError, match=r"file: not readable \(holds NUL bytes, so it is no text\)"):
        read_text(path, "a table")


WINDOWS = "it seems to be Windows-1252"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff", "line 1, byte 0xff); it seems to be Windows-1252"),
        ("image;tags\r\na.jpg;Gr\xfcn\xa0\u20ac\r\n".encode("cp1252"), f"line 2, byte 0xfc); {WINDOWS}"),
        ("\ufeffa\n".encode() + b"b\n\xe9", f"line 3, byte 0xe9); {WINDOWS}"),
        ("image\tGr\xfcn".encode("utf-16"), 'line 1, byte 0xff); it seems to be UTF-16 ("Unicode Text" of Excel)'),
        (b"\xfe\xff\0a", "it seems to be UTF-16"),
        (b"caf\xe9\x81", "line 1, byte 0xe9); expected a table"),
        (b"caf\xe9\x1b", "line 1, byte 0xe9); expected a table"),
    ],
)
def test_text_of_another_encoding_is_refused_with_the_cure(tmp_path, content, says):
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_text(path, "a table")
    assert f"{path}: not readable as UTF-8 text (" in str(caught.value) and says in str(caught.value)
    assert ("save it as UTF-8" in str(caught.value)) == ("it seems" in says)


@given(st.binary(max_size=200))
def test_any_bytes_are_text_or_one_line(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "bytes.txt"
    path.write_bytes(content)
    try:
        assert read_text(path, "a table") == content.decode("utf-8-sig")
    except UserError as error:
        assert "\n" not in str(error)


def test_a_write_through_a_relative_path_lands_in_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_text(Path("here.txt"), "x")
    assert list(Path().iterdir()) == [Path("here.txt")]


# ---------------------------------------------------------------- places to write to


@pytest.mark.parametrize(
    ("place", "is_folder", "message"),
    [
        ("new.json", False, None),
        ("new/deep/er.json", False, None),
        ("file", False, None),
        ("link", False, None),
        ("new", True, None),
        ("folder", True, None),
        ("folder", False, "^folder: is a folder; expected a file to write, name another$"),
        ("file", True, "^file: is a file; expected a folder to write, name another$"),
        ("file/x.json", False, "^file/x.json: file is no folder; name another place$"),
        ("file/x/y", True, "^file/x/y: file is no folder; name another place$"),
        ("pipe", False, "^pipe: is a device or a pipe; expected a file to write, name another$"),
        ("x" * 250, False, r"^x+: cannot be written \(File name too long\); name another place, or correct this one$"),
        ("new/" + "x" * 250, True, r"cannot be written \(File name too long\)"),
    ],
)
def test_a_place_is_checked_without_a_trace(tmp_path, monkeypatch, place, is_folder, message):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").write_text("kept")
    Path("link").symlink_to("nowhere")
    os.mkfifo("pipe")
    before = sorted(tmp_path.rglob("*"))
    if message is None:
        check_writable(Path(place), is_folder=is_folder)
    else:
        with pytest.raises(UserError, match=message):
            check_writable(Path(place), is_folder=is_folder)
    assert sorted(tmp_path.rglob("*")) == before and Path("file").read_text() == "kept"


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_a_place_that_takes_nothing_is_one_line_with_the_cause(tmp_path, monkeypatch, code):
    def refuse(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(UserError) as caught:
        check_writable(tmp_path / "x.json")
    assert f"x.json: cannot be written ({os.strerror(code)}); name another place" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
