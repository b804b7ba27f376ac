"""The storage layer: folders that appear whole, leftovers that are removed, and damage that is found."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from tag2box import io, storage
from tag2box.errors import UserError

REMEDY = "write it again"


def flip(path: Path, place: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(bytes(content))


# ---------------------------------------------------------------- folders that appear whole


def test_a_folder_appears_with_all_its_files_and_nothing_beside_it(tmp_path: Path) -> None:
    with io.replacing_folder(tmp_path / "a" / "made") as temporary:
        assert temporary.parent == tmp_path / "a" and not (tmp_path / "a" / "made").exists()
        (temporary / "file").write_text("x")
    assert [p.relative_to(tmp_path).as_posix() for p in sorted(tmp_path.rglob("*"))] == ["a", "a/made", "a/made/file"]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_folder_that_fails_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), io.replacing_folder(tmp_path / "made") as temporary:
        (temporary / "file").write_text("half")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_files_of_other_libraries_get_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with io.replacing_folder(tmp_path / "made") as temporary:
            (temporary / "file").touch(mode=0o600)
    finally:
        os.umask(before)
    assert (tmp_path / "made" / "file").stat().st_mode & 0o777 == 0o640


def test_new_folders_are_flushed_from_the_first_that_existed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[Path] = []
    monkeypatch.setattr(io, "sync", flushed.append)
    io.make_folder(tmp_path / "a" / "b")
    assert set(flushed) == {tmp_path, tmp_path / "a"}
    flushed.clear()
    io.make_folder(tmp_path / "a" / "b")
    assert flushed == []


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are counted")
def test_no_file_stays_open(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    with io.locked(tmp_path / ".lock", "works"):
        for _ in range(5):
            io.sync(tmp_path)
            with pytest.raises(UserError), io.locked(tmp_path / ".lock", "works"):
                pass
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# ---------------------------------------------------------------- leftovers


def dead_process() -> int:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def test_leftovers_of_killed_processes_are_removed_and_nothing_else(tmp_path: Path) -> None:
    assert io.sweep(tmp_path) == io.sweep(tmp_path / "missing") == []
    own = io.temporary_path(tmp_path / "file")
    dead = tmp_path / own.name.replace(f"-{os.getpid()}-", f"-{dead_process()}-")
    folder = tmp_path / dead.name.replace(".file.", ".folder.")
    others = [own, tmp_path / ".lock", tmp_path / ".hidden-1-2", tmp_path / "file"]
    foreign = tmp_path / dead.name.replace(f".{own.name.split('.')[2][:6]}-", ".000000-")  # of another machine
    for path in (dead, foreign, *others):
        path.write_text("x")
    folder.mkdir()
    (folder / "inside").write_text("x")
    assert io.sweep(tmp_path) == [dead, folder]
    assert set(tmp_path.iterdir()) == {foreign, *others}
    os.utime(foreign, (0, 0))  # a week and more ago
    assert io.sweep(tmp_path) == [foreign]


def test_a_link_is_removed_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").write_text("x")
    name = io.temporary_path(tmp_path / "link").name.replace(f"-{os.getpid()}-", f"-{dead_process()}-")
    (tmp_path / name).symlink_to(tmp_path / "kept")
    io.sweep(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["kept"] and (tmp_path / "kept" / "file").exists()


# ---------------------------------------------------------------- manifests


def made_folder(folder: Path) -> Path:
    folder.mkdir()
    for name in ("a", "b"):
        (folder / name).write_text(f"content of {name}")
    storage.write_manifest(folder)
    return folder


def test_an_intact_folder_and_an_empty_one(tmp_path: Path) -> None:
    storage.verify_folder(made_folder(tmp_path / "made"), REMEDY)
    (tmp_path / "empty").mkdir()
    digest = storage.write_manifest(tmp_path / "empty")
    assert digest == storage.file_digest(tmp_path / "empty" / storage.MANIFEST)
    storage.verify_folder(tmp_path / "empty", REMEDY)


@pytest.mark.parametrize("name", ["a", "b", storage.MANIFEST])
@pytest.mark.parametrize("place", [0, 5, -1])
def test_one_flipped_bit_is_found(tmp_path: Path, name: str, place: int) -> None:
    folder = made_folder(tmp_path / "made")
    flip(folder / name, place)
    with pytest.raises(UserError, match=f"{name}: .*{REMEDY}|{name}: not readable as JSON"):
        storage.verify_folder(folder, REMEDY)


def test_files_that_are_gone_longer_shorter_or_unknown(tmp_path: Path) -> None:
    folder = made_folder(tmp_path / "made")
    (folder / "c").write_text("new")
    with pytest.raises(UserError, match=r"c: manifest.json does not name it; write it again"):
        storage.verify_file(folder / "c", REMEDY)
    for content in ("", "content of a!", "content of b"):
        (folder / "a").write_text(content)
        with pytest.raises(UserError, match="a: damaged"):
            storage.verify_file(folder / "a", REMEDY)
    storage.verify_file(folder / "b", REMEDY)
    (folder / "b").unlink()
    with pytest.raises(UserError, match="b: no such file"):
        storage.verify_file(folder / "b", REMEDY)


def test_a_folder_of_an_older_version_is_not_verified(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    storage.verify_file(tmp_path / "a", REMEDY)


@pytest.mark.parametrize("files", [None, [], "a", {"a": None}, {"a": {}}, {"a": {"bytes": 12, "sha256": 1}}])
def test_a_forged_manifest_is_refused(tmp_path: Path, files: object) -> None:
    folder = made_folder(tmp_path / "made")
    storage.write_checked_json(folder / storage.MANIFEST, {"format": 1} | ({} if files is None else {"files": files}))
    with pytest.raises(UserError, match=REMEDY):
        storage.verify_folder(folder, REMEDY) if files != [] else storage.verify_file(folder / "a", REMEDY)


# ---------------------------------------------------------------- small JSON files


@given(
    st.dictionaries(st.text().filter(lambda key: key != "sha256"), st.integers() | st.text() | st.lists(st.booleans()))
)
def test_checked_json_comes_back(tmp_path_factory: pytest.TempPathFactory, value: dict[str, object]) -> None:
    path = tmp_path_factory.getbasetemp() / "checked.json"
    storage.write_checked_json(path, value)
    assert storage.read_checked_json(path, "a value", REMEDY) == value


@pytest.mark.parametrize(
    ("content", "since", "is_read"),
    [
        ({}, 1, True),  # of a version that wrote no format and no digest
        ({"format": 1}, 2, True),
        ({"format": 2}, 2, False),
        ({"format": 3}, 2, False),
        ({"format": True}, 2, False),
        ({"format": "1"}, 2, False),
        ({"sha256": None}, 1, True),
        ({"sha256": "0" * 64}, 1, False),
        ({"format": 1, "sha256": "0" * 64}, 2, False),
        ([], 1, False),
    ],
)
def test_what_may_lack_a_digest(tmp_path: Path, content: object, since: int, is_read: bool) -> None:
    path = tmp_path / "state.json"
    path.write_text(json.dumps(content))
    if is_read:
        storage.read_checked_json(path, "a state", REMEDY, since=since)
        return
    with pytest.raises(UserError, match=REMEDY):
        storage.read_checked_json(path, "a state", REMEDY, since=since)


# ---------------------------------------------------------------- large files


@pytest.mark.parametrize("size", [0, 1, 9, 10, 11, 35])
def test_blocks_are_verified_when_they_are_read_and_once(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(size)))
    stored = json.loads(json.dumps(storage.BlockDigests.of_file(path, block=10).to_json()))
    digests = storage.BlockDigests.from_json(path, stored)
    assert digests == storage.BlockDigests.of_file(path, block=10)
    asked: list[tuple[int, int]] = []

    def read(first: int, last: int) -> bytes:
        asked.append((first, last))
        return path.read_bytes()[first:last]

    digests.verify(read, 0, size, REMEDY)
    assert asked == [(start, min(start + 10, size)) for start in range(0, size, 10)]
    digests.verify(read, 0, size, REMEDY)
    assert len(asked) == -(-size // 10)
    digests.verify_all(REMEDY)
    assert digests == storage.BlockDigests.of_file(path, block=10)  # whatever was verified
    with pytest.raises(UserError, match="damaged in bytes"):
        digests.verify(read, 0, size + 10, REMEDY)  # beyond the end


@pytest.mark.parametrize(
    ("first", "last", "is_found"), [(0, 10, False), (0, 11, True), (19, 20, True), (20, 35, False)]
)
def test_damage_is_found_in_the_block_that_has_it(tmp_path: Path, first: int, last: int, is_found: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(35))
    digests = storage.BlockDigests.of_file(path, block=10)
    flip(path, 15)
    content = path.read_bytes()
    if is_found:
        with pytest.raises(UserError, match="file: damaged in bytes 10 and following; write it again"):
            digests.verify(lambda a, b: content[a:b], first, last, REMEDY)
    else:
        digests.verify(lambda a, b: content[a:b], first, last, REMEDY)
    with pytest.raises(UserError, match="damaged in bytes 10"):
        digests.verify_all(REMEDY)


@pytest.mark.parametrize("size", [0, 34, 36, 45])
def test_a_file_of_another_size(tmp_path: Path, size: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(35))
    digests = storage.BlockDigests.of_file(path, block=10)
    path.write_bytes(bytes(size))
    with pytest.raises(UserError, match="cut short or overlong"):
        digests.verify_all(REMEDY)


@pytest.mark.parametrize(
    "value",
    [
        None, {}, {"bytes": 10, "block": 0, "blocks": []}, {"bytes": 10, "block": 10, "blocks": []},
        {"bytes": 10, "block": 10, "blocks": ["a", "b"]}, {"bytes": -10, "block": 10, "blocks": ["a"]},
    ],
)  # fmt: skip
def test_digests_that_are_none(tmp_path: Path, value: object) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        storage.BlockDigests.from_json(tmp_path, value)


# ---------------------------------------------------------------- files of users


def test_a_stamp_follows_the_content_and_is_not_computed_twice(tmp_path: Path) -> None:
    path = tmp_path / "photo"
    path.write_text("one")
    stamp = storage.FileStamp.of(path)
    assert storage.FileStamp.from_json(json.loads(json.dumps(stamp.to_json()))) == stamp
    assert storage.FileStamp.of(path, stamp) is stamp
    os.utime(path, ns=(0, stamp.mtime_ns + 1))  # touched
    assert storage.FileStamp.of(path, stamp).sha256 == stamp.sha256
    path.write_text("two")  # another photo of the same size
    os.utime(path, ns=(0, stamp.mtime_ns + 1))
    assert storage.FileStamp.of(path, stamp).sha256 != stamp.sha256
    path.write_text("more")
    os.utime(path, ns=(0, stamp.mtime_ns))
    assert storage.FileStamp.of(path, stamp).size == 4
    path.unlink()
    with pytest.raises(UserError, match="photo: no such file"):
        storage.FileStamp.of(path, stamp)


@pytest.mark.parametrize("value", [[], [1, 2], [1, 2, 3], [True, 2, "a"], [1, 2.0, "a"], ["1", 2, "a"]])
def test_stamps_that_are_none(value: object) -> None:
    with pytest.raises(ValueError):
        storage.FileStamp.from_json(value)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files whose content was read; files count as settled however new they are."""
    names: list[str] = []
    real = storage.file_digest
    monkeypatch.setattr(storage, "file_digest", lambda path: names.append(path.name) or real(path))
    monkeypatch.setattr(storage, "_SETTLED", -(10**18))
    return names


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_no_files_have_no_digests(tmp_path: Path, read: list[str]) -> None:
    assert storage.content_digests([], tmp_path / "memory") == []
    assert not (tmp_path / "memory").exists()


def test_digests_of_files_are_remembered(tmp_path: Path, read: list[str]) -> None:
    files, memory = [tmp_path / "a", tmp_path / "b"], tmp_path / "memory"
    for file in files:
        file.write_text(file.name)
    for _ in range(3):
        assert storage.content_digests(files, memory) == [sha("a"), sha("b")]
    assert read == ["a", "b"]
    assert storage.content_digests(files[:1], memory) == [sha("a")]
    assert storage.content_digests(files, memory) == [sha("a"), sha("b")]
    assert read == ["a", "b"]
    assert storage.content_digests(files) == [sha("a"), sha("b")]
    assert read == ["a", "b", "a", "b"]


@pytest.mark.parametrize("in_place", [True, False])
def test_a_file_replaced_by_one_of_equal_size_and_time_is_read_again(tmp_path, read, in_place) -> None:
    file, memory = tmp_path / "a", tmp_path / "memory"
    file.write_text("one")
    before = file.stat()
    assert storage.content_digests([file], memory) == [sha("one")]
    while file.stat().st_ctime_ns == before.st_ctime_ns:  # the clock of a file system may tick slowly
        if in_place:
            file.write_text("two")
        else:
            (tmp_path / "b").write_text("two")
            Path(tmp_path / "b").replace(file)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert storage.content_digests([file], memory) == [sha("two")]


def test_a_file_that_has_just_changed_is_not_remembered(tmp_path, read, monkeypatch) -> None:
    (tmp_path / "a").write_text("one")
    monkeypatch.setattr(storage, "_SETTLED", 10**18)
    for _ in range(2):
        assert storage.content_digests([tmp_path / "a"], tmp_path / "memory") == [sha("one")]
    assert read == ["a", "a"]


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"format": 1, "files": {"a": [1]}}'])
def test_a_damaged_memory_is_no_memory(tmp_path, read, content) -> None:
    (tmp_path / "a").write_text("one")
    (tmp_path / "memory").write_bytes(content)
    for _ in range(2):
        assert storage.content_digests([tmp_path / "a"], tmp_path / "memory") == [sha("one")]
    assert read == ["a"]


def test_a_memory_that_cannot_be_written_is_done_without(tmp_path, read) -> None:
    (tmp_path / "a").write_text("one")
    (tmp_path / "file").touch()
    assert storage.content_digests([tmp_path / "a"], tmp_path / "file" / "memory") == [sha("one")]


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(UserError, match="none: no such photo"):
        storage.content_digests([tmp_path / "none"])


def test_failures_of_the_disk_name_the_file_and_the_cause(tmp_path: Path) -> None:
    read = pytest.raises(UserError, match=r"file: cannot be read \(Input/output error\); expected a photo")
    with read, storage.reading(tmp_path / "file", "a photo"):
        raise OSError(5, "Input/output error")
    written = pytest.raises(UserError, match=r"file: cannot be written \(No space left on device\); write it again")
    with written, storage.writing(tmp_path / "file", REMEDY):
        raise OSError(28, "No space left on device")
