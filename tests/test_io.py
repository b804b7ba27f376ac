from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from tag2box.errors import UserError
from tag2box.io import apply_umask, read_json, replacing, write_json, write_text


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


def test_a_folder_in_place_of_a_file_is_a_mistake_of_the_user(tmp_path):
    with pytest.raises(UserError, match="expected proposals"):
        read_json(tmp_path, "proposals")


def test_a_write_through_a_relative_path_lands_in_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_text(Path("here.txt"), "x")
    assert list(Path().iterdir()) == [Path("here.txt")]
