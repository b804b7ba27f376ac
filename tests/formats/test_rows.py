"""Rows: every photo once, whatever is interrupted, repeated or unreadable, on disk and in object storage."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import fsspec
import hypothesis
import pytest
from hypothesis import strategies as st
from PIL import Image
from row_works import Deadly, Faulty, Header

from storage_server import forget_connections, s3_server
from tag2box.errors import UserError
from tag2box.formats import addresses, row_parts, rows
from tag2box.formats.addresses import Address, list_addresses
from tag2box.parallel.pool import LocalPool, run_in_pool

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

ABOUT = {"format": 1, "kind": "test"}
HERE = LocalPool(1)


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    patch = pytest.MonkeyPatch()
    with s3_server(patch) as address:
        yield address
    patch.undo()


@pytest.fixture
def prefix(bucket: str, request: pytest.FixtureRequest) -> str:
    return f"{bucket}/{request.node.name.partition('[')[0]}"


def jpeg(width: int = 9, height: int = 7) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", (width, height), (width % 256, 9, 9)).save(content, "JPEG")
    return content.getvalue()


def photos_in(folder: Path, count: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / f"{number:05}.jpg").write_bytes(jpeg(8 + number % 50))
    return folder


def tar_of(members: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return content.getvalue()


def compute(out: object, places: list[str], work: Header | None = None, pool=HERE) -> row_parts.GroupResult:
    folder = rows.RowFolder.open(str(out), ABOUT)
    folder.plan(list_addresses(places))
    return folder.compute(work or Header(), pool)


def found(out: object) -> dict[str, dict]:
    """All rows by address; none may be there twice."""
    content = list(rows.RowFolder.open(str(out), ABOUT).rows())
    assert len({row["address"] for row in content}) == len(content)
    return {row["address"]: row for row in content}


# ---------------------------------------------------------------- which photos


def test_a_place_without_photos_is_refused_and_nothing_is_listed_of_no_place(tmp_path: Path) -> None:
    assert list(list_addresses([])) == []
    with pytest.raises(UserError, match=r"no photos here; expected \.bmp"):
        list(list_addresses([str(tmp_path)]))


def test_folders_patterns_files_and_ranges_are_listed_in_the_order_of_names(tmp_path: Path) -> None:
    folder = photos_in(tmp_path / "a", 3)
    (folder / "notes.txt").touch()
    wanted = [f"{folder}/{number:05}.jpg" for number in range(3)]
    for place in (f"{folder}", f"{folder}/*.jpg", f"{folder}/{{00000..00002}}.jpg", f"{tmp_path}/**/*.jpg"):
        assert [one.text for one in list_addresses([place])] == wanted
        assert all(one.is_here for one in list_addresses([place]))


BAD_PLACES = {
    "missing": ("none.jpg", "no such photo, folder or pattern"),
    "scheme": ("ftp://host/a.jpg", "not an address that is read; expected s3://"),
    "chain": ("s3://b/x.zip::file:///etc/passwd", "not an address that is read"),
    "bucket": ("s3://no-such-bucket-here/", "no such file, folder or bucket"),
    "up": ("s3://bucket/../x.jpg", "leads out of its folder"),
    "control": ("s3://bucket/a\x1bb.jpg", "control characters in its name"),
}


@pytest.mark.parametrize(("place", "says"), BAD_PLACES.values(), ids=BAD_PLACES)
def test_a_bad_place_is_one_line(bucket: str, place: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        list(list_addresses([place]))
    assert "\n" not in str(error.value) and "\x1b" not in str(error.value)


def test_missing_credentials_are_one_line(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setattr(addresses, "_PAUSE", 0)
    forget_connections()
    try:
        with pytest.raises(
            addresses.StorageError, match="no credentials; set those of s3 in the environment, or log in"
        ):
            list(list_addresses([f"{bucket}/photos/"]))
    finally:
        forget_connections()


def test_a_list_of_addresses_is_read_and_bad_ones_are_rows(tmp_path: Path, prefix: str) -> None:
    folder = photos_in(tmp_path / "photos", 2)
    fsspec.filesystem("s3").pipe_file(f"{prefix}/far.jpg", jpeg(20))
    bad = ["/etc/passwd", "../x.jpg", "file:///etc/passwd", None, "a\x07.jpg", "photos/none.jpg"]
    names = ["photos/00000.jpg", f"{prefix}/far.jpg", *bad, "photos/00000.jpg"]
    pq.write_table(pa.table({"n": range(len(names)), "url": names}), tmp_path / "list.parquet")
    done = compute(tmp_path / "out", [str(tmp_path / "list.parquet")])
    assert (done.rows, done.bad) == (8, 6)
    by_address = found(tmp_path / "out")
    good = {address: row["width"] for address, row in by_address.items() if row["status"] == "ok"}
    assert good == {f"{folder}/00000.jpg": 8, f"{prefix}/far.jpg": 20}
    assert (
        "outside the folder of the list" in by_address["/etc/passwd"]["error"]
        or "leads out" in (by_address["/etc/passwd"]["error"])
    )
    assert "not an address that is read" in by_address["file:///etc/passwd"]["error"]
    assert "no address in this row" in by_address[f"{tmp_path / 'list.parquet'}#5"]["error"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"not Parquet", "not readable as Parquet"),
        (pa.table({"a": [1], "b\x1b": ["x"]}), "columns a, b.+; expected addresses as text in one named address"),
        (pa.table({"address": [1]}), "expected addresses as text"),
    ],
)
def test_a_list_that_is_none_is_one_line(tmp_path: Path, content: object, says: str) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(content) if isinstance(content, bytes) else pq.write_table(content, path)
    with pytest.raises(UserError, match=says):
        list(list_addresses([str(path)]))


@pytest.mark.parametrize(
    "name", ["", "/", "/a.jpg", "../a.jpg", "a/../../b.jpg", "a\x00.jpg", "a\nb.jpg", "\ud800.jpg"]
)
def test_names_that_are_not_used(name: str) -> None:
    assert addresses.bad_name(name)


@hypothesis.given(st.lists(st.lists(st.text(max_size=3), max_size=30), max_size=12))
def test_an_address_is_new_once(batches: list[list[str]]) -> None:
    seen, known = rows.SeenAddresses(), set()
    for batch in batches:
        wanted = []
        for text in batch:
            wanted.append(text not in known)
            known.add(text)
        assert seen.new(batch) == wanted


# ---------------------------------------------------------------- computed once


@pytest.mark.parametrize("count", [1, 4, 5, 300])
def test_every_photo_is_a_row(tmp_path: Path, count: int) -> None:
    folder = photos_in(tmp_path / "photos", count)
    done = compute(tmp_path / "out", [str(folder)])
    assert (done.rows, done.bad) == (count, 0)
    by_address = found(tmp_path / "out")
    assert list(by_address) == [f"{folder}/{number:05}.jpg" for number in range(count)]
    first = by_address[f"{folder}/00000.jpg"]
    assert (first["width"], first["height"], first["boxes"], first["scores"]) == (8, 7, [[0, 0, 8, 7]], [0.5])
    assert first["bytes"] == len(jpeg(8)) and first["modified_ns"] and len(first["sha256"]) == 64
    assert pq.read_table(tmp_path / "out" / "").num_rows == count  # readers skip names with _ in front


def test_the_same_call_computes_what_is_missing(tmp_path: Path) -> None:
    folder, out, notes = photos_in(tmp_path / "photos", 11), tmp_path / "out", tmp_path / "notes"
    compute(out, [str(folder)], Header(notes))
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("part*")}
    assert compute(out, [str(folder)], Header(notes)).rows == 0
    lost = sorted(out.glob("part*"))[0]
    gone = pq.read_table(lost).num_rows
    lost.unlink()
    (folder / "00003x.jpg").write_bytes(jpeg(30))  # a new one between the others
    assert compute(out, [str(folder)], Header(notes)).rows == gone + 1
    assert len(found(out)) == 12 and len(notes.read_text().split()) == 11 + gone + 1
    assert sum(path.stat().st_mtime_ns != before.get(path.name) for path in out.glob("part*")) == 2
    assert not list((out / "_attempts").glob("*"))


def test_a_second_attempt_at_a_unit_replaces_its_part(tmp_path: Path) -> None:
    folder, out = photos_in(tmp_path / "photos", 10), tmp_path / "out"
    opened = rows.RowFolder.open(str(out), ABOUT)
    opened.plan(list_addresses([str(folder)]))
    task = row_parts.RowTask(opened.folder, opened.about, Header())
    for group in [*opened.missing, *opened.missing]:
        for unit in group.units(opened.folder):
            list(task._parts(unit))
    assert len(found(out)) == 10 and len(list(out.glob("part*"))) == 3


def test_other_settings_and_other_files_are_refused(tmp_path: Path) -> None:
    folder, out = photos_in(tmp_path / "photos", 2), tmp_path / "out"
    with pytest.raises(UserError, match="holds other files than rows; name a folder of its own"):
        rows.RowFolder.open(str(folder), ABOUT)
    compute(out, [str(folder)])
    with pytest.raises(UserError, match="holds rows of another kind; name another folder"):
        rows.RowFolder.open(str(out), {**ABOUT, "kind": "x"})
    with pytest.raises(UserError, match="no rows here"):
        rows.RowFolder.open(str(folder))
    with pytest.raises(UserError, match="cannot be written to; expected a folder, s3:// or gs://"):
        rows.RowFolder.open("https://host/x", ABOUT)


def test_bad_photos_are_rows_with_their_error(tmp_path: Path) -> None:
    folder, out = photos_in(tmp_path / "photos", 3), tmp_path / "out"
    (folder / "empty.jpg").touch()
    (folder / "faulty.jpg").write_bytes(jpeg())
    (folder / "text.jpg").write_text("no photo")
    done = compute(out, [str(folder)], Faulty())
    by_name = {Path(address).name: row for address, row in found(out).items()}
    assert (done.rows, done.bad) == (6, 3)
    assert "the file is empty" in by_name["empty.jpg"]["error"] and "not readable as a" in by_name["text.jpg"]["error"]
    assert by_name["faulty.jpg"]["error"].endswith("faulty.jpg: not computed (ValueError: first line)")
    assert all(row["boxes"] == [] and row["width"] is None for row in by_name.values() if row["status"] == "error")


def test_a_photo_that_vanishes_on_a_node_stops_the_work_and_is_no_row(tmp_path: Path) -> None:
    folder, out = photos_in(tmp_path / "photos", 2), tmp_path / "out"
    opened = rows.RowFolder.open(str(out), ABOUT)
    opened.plan(list_addresses([str(folder)]))
    (folder / "00001.jpg").unlink()
    with pytest.raises(
        UserError, match=r"cannot read .+00001\.jpg, which was there; photos must lie under the same path"
    ):
        opened.compute(Header(), LocalPool(1))
    assert not list(out.glob("part*"))


def deadly_rows(tmp_path: Path) -> None:
    """Runs in a process of its own: what ends there must not end the tests."""
    folder, out = photos_in(tmp_path / "photos", 6), tmp_path / "out"
    (folder / "00002-deadly.jpg").write_bytes(jpeg())

    def in_processes(work, items, *, lost, threads=1):
        yield from run_in_pool(work, items, workers=2, lost=lost)

    for _ in range(4):  # two attempts, then two at the photo itself
        with pytest.raises(UserError, match="died at every attempt; then rerun the same command to resume"):
            compute(out, [str(folder)], Deadly(), in_processes)
    compute(out, [str(folder)], Deadly(), in_processes)
    bad = {address: row["error"] for address, row in found(out).items() if row["status"] != "ok"}
    assert len(found(out)) == 7 and list(bad) == [f"{folder}/00002-deadly.jpg"]
    assert "the process that worked on it died at every attempt" in next(iter(bad.values()))


def test_a_photo_that_ends_its_process_is_a_row_after_some_attempts(tmp_path: Path) -> None:
    # ended without a teardown: after killed workers, a native thread of some library may abort the interpreter's exit
    run = f"test_rows.deadly_rows(Path({str(tmp_path)!r}))"
    code = f"import os; from pathlib import Path; import test_rows; {run}; os._exit(0)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- storage, shards


def test_rows_from_storage_to_storage(prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = fsspec.filesystem("s3")
    for number in range(9):
        remote.pipe_file(f"{prefix}/photos/{number}.jpg", jpeg(8 + number))
    remote.pipe_file(f"{prefix}/photos/readme.txt", b"no photo")
    remote.pipe_file(f"{prefix}/photos/a/bad.png", b"no photo")
    done = compute(f"{prefix}/out", [f"{prefix}/photos/"])
    assert (done.rows, done.bad) == (10, 1)
    assert {row["width"] for row in found(f"{prefix}/out").values() if row["status"] == "ok"} == set(range(8, 17))
    bad = found(f"{prefix}/out")[f"{prefix}/photos/a/bad.png"]["error"]
    assert bad.startswith(f"{prefix}/photos/a/bad.png: not readable as a photo") and "/tmp" not in bad
    assert compute(f"{prefix}/out", [f"{prefix}/photos/*.jpg"]).rows == 0
    part = next(rows.RowFolder.open(f"{prefix}/out").parts())
    remote.rm_file(f"{prefix}/out/{part}")
    assert compute(f"{prefix}/out", [f"{prefix}/photos/"]).rows == 4
    assert len(found(f"{prefix}/out")) == 10
    monkeypatch.setattr(addresses, "MAX_BYTES", 100)
    assert compute(tmp_path / "small", [f"{prefix}/photos/1.jpg"]).bad == 1


@pytest.mark.parametrize("is_remote", [False, True])
def test_the_photos_of_shards_are_rows(
    tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch, is_remote: bool
) -> None:
    monkeypatch.setattr(row_parts, "LARGEST_UNIT", 3)
    whole = {f"{key:03}.{suffix}": jpeg(8 + key) for key in range(7) for suffix in ("jpg", "json")}
    hostile = {"../up.jpg": jpeg(), "/abs.jpg": jpeg(), "a\x1b.jpg": jpeg(), "ok/x.jpg": jpeg(40)}
    content = {
        "s-000.tar": tar_of(whole),
        "s-001.tar": tar_of(hostile),
        "s-002.tar": tar_of(whole)[:3000],
        "s-003.tar": tar_of({}),
    }
    if is_remote:
        for name, data in content.items():
            fsspec.filesystem("s3").pipe_file(f"{prefix}/{name}", data)
    else:
        for name, data in content.items():
            (tmp_path / name).write_bytes(data)
    where, out = (prefix, f"{prefix}/out") if is_remote else (str(tmp_path), tmp_path / "out")
    compute(out, [f"{where}/s-{{000..003}}.tar"])
    by_address = found(out)
    good = {address: row["width"] for address, row in by_address.items() if row["status"] == "ok"}
    first = {f"tar://{key:03}.jpg::{where}/s-000.tar": 8 + key for key in range(7)}
    assert first.items() <= good.items() and good[f"tar://ok/x.jpg::{where}/s-001.tar"] == 40
    errors = [row["error"] for row in by_address.values() if row["status"] != "ok"]
    assert sum("leads out of its folder" in line for line in errors) == 2
    assert sum("control characters" in line for line in errors) == 1
    assert any("no photo in this shard" in line for line in errors)
    assert by_address[f"{where}/s-002.tar"]["error"].startswith(f"{where}/s-002.tar: not readable as a tar file after")
    count = len(by_address)
    assert compute(out, [f"{where}/s-{{000..003}}.tar"]).rows == 0
    opened = rows.RowFolder.open(str(out))
    middle = next(part for part in opened.parts() if "-00000003." in part)
    last = f"{middle.rpartition('-')[0]}.parquet"
    for part in (middle, last):
        opened.folder.remove(part)
    assert compute(out, [f"{where}/s-{{000..003}}.tar"]).rows == 3 + 1  # the first part of the shard is kept
    assert len(found(out)) == count


def test_an_address_in_a_shard_opens_with_fsspec(tmp_path: Path) -> None:
    (tmp_path / "s.tar").write_bytes(tar_of({"a/x.jpg": b"content"}))
    [(address, content)] = addresses.shard_photos(str(tmp_path / "s.tar"))
    with fsspec.open(address.text) as file:
        assert file.read() == content == b"content"


def test_storage_that_is_away_stops_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_PAUSE", 0)
    tries = []

    def away() -> None:
        tries.append(1)
        raise addresses.StorageError("away")

    with pytest.raises(addresses.StorageError, match="away"):
        addresses.tried(away)
    assert len(tries) == 3


def test_plans_of_many_photos_are_small_tasks_first_and_large_ones_later(tmp_path: Path) -> None:
    opened = rows.RowFolder.open(str(tmp_path / "out"), ABOUT)
    opened.plan(Address(f"/x/{number}.jpg") for number in range(60_000))
    sizes = [group.photos for group in opened.missing]
    assert sum(sizes) == 60_000 and sizes[0] == 4 and max(sizes) == 1024
    again = rows.RowFolder.open(str(tmp_path / "out"), ABOUT)
    assert list(again.missing) == list(opened.missing)
    again.plan(Address(f"/x/{number}.jpg") for number in range(60_001))
    assert sum(group.photos for group in again.missing) == 60_001
