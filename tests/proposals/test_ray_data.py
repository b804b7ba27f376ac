"""Work spread over a Ray cluster: every photo answered once, whichever process dies, as on this machine."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray_works
from corners import COUNTS, Seen, content, counts, make, paint

from tag2box.annotations import Photo
from tag2box.errors import Interrupted, UserError
from tag2box.parallel import ray_data
from tag2box.parallel.pool import LocalPool
from tag2box.parallel.ray_data import RayPool
from tag2box.proposals.store import ProposalStore

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One small cluster for all tests here; its processes find the modules that are next to this one."""
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    with tempfile.TemporaryDirectory(prefix="t2b-", ignore_cleanup_errors=True) as folder:
        ray.init(
            address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20,
            _temp_dir=folder,
        )  # fmt: skip
        yield
        ray.shutdown()
    patch.undo()


@pytest.fixture
def photos(tmp_path: Path) -> list[Photo]:
    return [paint(tmp_path / "photos", f"p{count}", count) for count in COUNTS]


def some(folder: Path, widths: list[int]) -> list[Photo]:
    return [paint(folder, f"w{i}", 0, (width, 9)) for i, width in enumerate(widths)]


def answers(pool, work, photos: list[Photo]) -> dict[str, int]:
    """Every photo's answer; none may be answered twice."""
    found = [(photo.id, answer) for photo, answer in pool(work, photos, lost=ray_works.lost)]
    assert len(found) == len(dict(found))
    return dict(found)


# ---------------------------------------------------------------- undisturbed


@pytest.mark.parametrize(
    ("count", "chunk", "workers"), [(0, 4, None), (1, 4, None), (5, 2, 1), (9, 4, 2), (7, 1, None)]
)
def test_every_photo_is_answered_once_as_here(tmp_path: Path, count: int, chunk: int, workers: int | None) -> None:
    photos = some(tmp_path, [20 + i for i in range(count)])
    found = answers(RayPool(workers=workers, chunk=chunk), ray_works.width, photos)
    assert found == {f"w{i}": 20 + i for i in range(count)} == answers(LocalPool(1), ray_works.width, photos)


def test_a_store_made_there_is_equal_to_the_byte(photos: list[Photo], tmp_path: Path) -> None:
    seen = Seen()
    make(photos, tmp_path / "here")
    make(photos, tmp_path / "there", pool=RayPool(chunk=2), progress=seen)
    assert content(tmp_path / "here") == content(tmp_path / "there")
    assert seen.opened == [(6, 0)] and seen.done == 6


def test_photos_that_fail_are_reported_in_the_same_words_even_by_relative_names(
    photos: list[Photo], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos[0].path.unlink()
    photos[2].path.write_bytes(photos[2].path.read_bytes()[:60])
    paint(photos[4].path.parent, "p5", 200)
    monkeypatch.chdir(tmp_path)
    near = [Photo(photo.id, photo.path.relative_to(tmp_path), photo.width, photo.height) for photo in photos]
    here, there = make(near, tmp_path / "here"), make(near, tmp_path / "there", pool=RayPool())
    assert here.failed == there.failed and [*there.failed] == ["p3", "p1", "p5"]
    assert content(tmp_path / "here") == content(tmp_path / "there")


def test_a_process_there_has_one_thread_and_serves_many_tasks(tmp_path: Path) -> None:
    said = set(answers(RayPool(chunk=1), ray_works.threads, some(tmp_path, [9] * 8)).values())
    assert len({text.split()[0] for text in said}) <= 3  # processes
    assert all(text.split()[1:] == [f"{Path.cwd()}", "1", "1"] for text in said)


# ---------------------------------------------------------------- deaths


def test_what_a_dead_process_was_doing_is_done_again(tmp_path: Path) -> None:
    photos = some(tmp_path, [10, 13, 11, 12, 14])
    assert answers(RayPool(chunk=2), ray_works.die_once, photos) == dict(enumerate_ids([10, 13, 11, 12, 14]))
    assert (tmp_path / "w1.met").exists()


def enumerate_ids(values: list[int]) -> Iterator[tuple[str, int]]:
    return ((f"w{i}", value) for i, value in enumerate(values))


def test_a_photo_that_ends_every_process_costs_only_itself_and_is_named(
    photos: list[Photo], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_data, "RETRIES", 0)
    paint(photos[0].path.parent, "p3", 201)
    store = make(photos, tmp_path / "s", pool=RayPool(chunk=2))
    assert counts(store) == {f"p{n}": n for n in COUNTS if n != 3}
    assert "p3.png: the process that searched it died on every attempt; perhaps out" in store.failed["p3"]


def test_if_every_process_dies_the_cluster_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_data, "RETRIES", 0)
    monkeypatch.setattr(ray_data, "_MAX_LOST", 2)
    pool = RayPool(chunk=1, workers=1)
    with pytest.raises(UserError, match=r"^ray cluster .+: 2 tasks were tried 2 times each, .+ rerun the same command"):
        answers(pool, ray_works.die, some(tmp_path, [13] * 2))


# ---------------------------------------------------------------- nodes that are unfit


def test_a_file_that_only_this_process_can_read_is_reported(tmp_path: Path) -> None:
    handle = os.open(paint(tmp_path, "p", 1).path, os.O_RDONLY)
    os.dup2(handle, 900)
    near = Photo("p", Path("/proc/self/fd/900"), 30, 20)
    try:
        with pytest.raises(UserError, match=r"^ray node .+: cannot read /proc/self/fd/900, which is here; photos must"):
            answers(RayPool(), ray_works.width, [near])
    finally:
        os.close(900)
        os.close(handle)


def test_other_versions_there_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ray_data._versions()
    monkeypatch.setattr(ray_data, "_versions", lambda: (*ours[:-1], ("pillow", "1.0")))
    with pytest.raises(UserError, match=r"^ray node .+: pillow [\d.]+, expected 1\.0 as where the command was typed"):
        answers(RayPool(), ray_works.width, some(tmp_path, [9]))


def test_work_that_cannot_be_imported_there_is_reported_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^ray node .+: cannot load the work \(.*no_such_module_anywhere.*\); install"):
        answers(RayPool(), ray_works.Unimportable(), some(tmp_path, [9]))


def test_a_mistake_of_ours_is_raised_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="no 9"):
        answers(RayPool(), ray_works.err, some(tmp_path, [9]))


# ---------------------------------------------------------------- interrupted


def test_work_that_is_given_up_can_be_taken_up_again(tmp_path: Path) -> None:
    photos = some(tmp_path, [9] * 12)
    work = RayPool(chunk=1)(ray_works.width, photos, lost=ray_works.lost)
    assert next(work)[1] == 9
    work.close()
    assert len(answers(RayPool(), ray_works.width, photos)) == 12


def test_after_ctrl_c_the_same_call_resumes(photos: list[Photo], tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="3 of 6 photos are done; rerun the same command to resume"):
        make(photos, tmp_path / "s", pool=RayPool(chunk=1), progress=Seen(3, interrupt))
    assert not ProposalStore.exists(tmp_path / "s")
    seen = Seen()
    make(photos, tmp_path / "s", pool=RayPool(chunk=1), progress=seen)
    make(photos, tmp_path / "here")
    assert seen.opened == [(6, 3)] and content(tmp_path / "s") == content(tmp_path / "here")
