from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from tag2box.errors import UserError
from tag2box.images import Resize
from tag2box.training import loader
from tag2box.training.batches import BatchSource, FeatureBatches, ImageBatches, Loader, serial, thread_batches
from tag2box.training.feature_cache import FeatureCache, RoiMaps
from tag2box.training.loader import count_workers, worker_batches
from tag2box.types import Batch, Proposals
from tiny import tiny_detector, tiny_photos, tiny_store

RESIZE = Resize(scales=(32, 40, 24), long_max=60)
Ahead = Callable[[Callable[[int], Batch], range], AbstractContextManager[Iterator[Batch]]]
WAYS: dict[str, Ahead] = {
    "in turn": serial,
    "thread": thread_batches,
    "one process": partial(worker_batches, workers=1),
    "two processes": partial(worker_batches, workers=2),
}


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> Iterator[None]:
    """What was there before is no garbage: it need not be looked through again and again."""
    gc.freeze()
    yield
    gc.unfreeze()


def photo_source(folder: Path, *, most: int | None = 4, group: bool = False) -> ImageBatches:
    photos = tiny_photos(folder, 7)
    photos = replace(photos, unsure=~photos.tags)
    loader = Loader(batch_size=3, resize=RESIZE, max_proposals=most, group_aspect=group)
    store = tiny_store(folder, photos.photos, counts=(6, 0, 9, 1, 6, 3, 2))
    return ImageBatches(photos, store, loader, 0, (127.0, 120.0, 110.0))


def parts(batch: Batch) -> list[object]:
    """All that a batch carries, to be compared to the bit."""
    tensors = (batch.tags, batch.proposals.boxes, batch.images, batch.maps, batch.unsure)
    return [batch.ids, batch.proposals.sizes, *(None if t is None else (t.dtype, t.tolist()) for t in tensors)]


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_batches_are_the_same_however_they_are_made(tmp_path: Path, way: str, group: bool) -> None:
    source = photo_source(tmp_path, group=group)
    expected = [parts(source.batch(i)) for i in range(9)]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with WAYS[way](source.batch, range(9)) as batches:
        assert [parts(batch) for batch in batches] == expected
    with WAYS[way](source.batch, range(5, 9)) as batches:  # resumed in the middle
        assert [parts(batch) for batch in batches] == expected[5:]
    assert torch.equal(torch.get_rng_state(), before)  # training draws what it would have drawn


@pytest.mark.parametrize("way", WAYS)
def test_no_iterations_give_no_batches(way: str) -> None:
    with WAYS[way](tiny_batch, range(4, 4)) as batches:
        assert list(batches) == []


@pytest.mark.parametrize("way", WAYS)
def test_a_missing_photo_is_reported_in_its_turn_and_in_one_line(tmp_path: Path, way: str) -> None:
    source = photo_source(tmp_path)
    lost = source.photos.photos[source.sampled(2)[0].index]
    fine = next(i for i in range(9) if lost.id in source.batch(i).ids)
    lost.path.unlink()
    told: list[str] = []
    seen = 0
    with WAYS[way](source.batch, range(9)) as batches:
        try:
            for _ in batches:
                seen += 1
        except UserError as error:
            told.append(str(error))
    assert told == [f"{lost.path}: no such photo; check the name and the photos folder"] and seen == fine


@dataclass(frozen=True)
class Held:
    """What a process holds: open files, children, threads of ours."""

    files: int
    children: int
    threads: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()  # torch's loader holds itself in a circle
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split()
        threads = [t for t in threading.enumerate() if t.name.startswith("tag2box")]
        return cls(len(list(Path("/proc/self/fd").iterdir())), len(children), len(threads))


def tiny_batch(iteration: int) -> Batch:
    images = torch.full((1, 3, 8, 8), float(iteration))
    return Batch(("x",), torch.ones(1, 2, dtype=torch.bool), Proposals(torch.zeros(0, 4), (0,)), images=images)


def comes_back_to(before: Held) -> bool:
    """Whether all is given back; threads of Python's queues take a moment to close their pipes, also earlier ones."""
    deadline = time.monotonic() + 120  # only a leak takes that long
    while (now := Held.now()).files > before.files and time.monotonic() < deadline:
        time.sleep(0.02)
    return now.files <= before.files and (now.children, now.threads) == (before.children, before.threads)


def skip(batches: Iterator[Batch], count: int) -> None:
    """Take batches and hold none: what holds a batch holds its shared memory open."""
    for _ in range(count):
        next(batches)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_stays_open(way: str) -> None:
    with WAYS[way](tiny_batch, range(3)) as batches:
        skip(batches, 3)  # what is set up once and for all
    before = Held.now()
    with WAYS[way](tiny_batch, range(200)) as batches:
        skip(batches, 20)
        early = Held.now()
        skip(batches, 170)
        assert Held.now().files <= early.files + 8  # some batches more or less are on their way
        last = next(batches)
        assert last.images is not None and last.images.unique().item() == 190
        del last
        skip(batches, 9)
    assert comes_back_to(before)


@pytest.mark.parametrize("stop", [ValueError, KeyboardInterrupt, UserError, GeneratorExit])
@pytest.mark.parametrize("way", WAYS)
def test_nothing_stays_open_after_a_loop_that_broke_off(way: str, stop: type[BaseException]) -> None:
    with WAYS[way](tiny_batch, range(3)) as batches:
        skip(batches, 3)
    before = Held.now()
    with pytest.raises(stop) as kept, WAYS[way](tiny_batch, range(1000)) as batches:
        skip(batches, 5)
        raise stop("enough")
    assert comes_back_to(before)  # even while the exception, and its traceback, are held
    assert kept.type is stop


def _dies(iteration: int) -> Batch:
    if iteration == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return tiny_batch(iteration)


def test_a_process_that_dies_is_one_line() -> None:
    before = Held.now()
    with (
        pytest.raises(UserError, match=r"a worker process that reads photos died .*loader\.workers") as error,
        worker_batches(_dies, range(9), 1) as batches,
    ):
        for _ in batches:
            time.sleep(0.01)
    assert "\n" not in str(error.value)
    assert Held.now().children == before.children


def _bug(iteration: int) -> Batch:
    raise RuntimeError("a mistake of ours")


@pytest.mark.parametrize("way", WAYS)
def test_mistakes_of_ours_are_not_taken_for_the_users(way: str) -> None:
    with pytest.raises(RuntimeError, match="a mistake of ours"), WAYS[way](_bug, range(9)) as batches:
        list(batches)


def test_processes_are_ahead_and_each_computes_on_one_thread() -> None:
    """Of torch and of OpenCV, whose threads of this process, which a forked one lacks, have started."""
    made: dict[int, float] = {}
    cv2.setNumThreads(3)
    cv2.GaussianBlur(np.zeros((2000, 2000), np.uint8), (9, 9), 2)
    with worker_batches(_report, range(6), 2) as batches:
        for iteration, batch in enumerate(batches):
            assert batch.images is not None
            threads, of_opencv, pid = batch.images[0, 0, 0, :3].tolist()
            made[iteration] = pid
            assert threads == of_opencv == 1 and pid != os.getpid()
    assert len(set(made.values())) == 2 and cv2.getNumThreads() == 3


def _report(iteration: int) -> Batch:
    batch = tiny_batch(iteration)
    assert batch.images is not None
    batch.images[0, 0, 0, :3] = torch.tensor([torch.get_num_threads(), cv2.getNumThreads(), os.getpid()])
    return batch


CTRL_C = """
import os, signal, sys, time
sys.path[:0] = sys.argv[1:]
from test_loader import tiny_batch
from tag2box.training.loader import worker_batches
from tag2box.training.loop import graceful_stop
with graceful_stop() as stop, worker_batches(tiny_batch, range(10**6), 2) as batches:
    for iteration, batch in enumerate(batches):
        if iteration == 10:
            print("ready", flush=True)
        if stop():
            next(batches), next(batches)  # the processes did not get the signal
            print("saved", flush=True)
            break
print("end", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_training_not_the_processes_that_feed_it(number: signal.Signals) -> None:
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    child = subprocess.Popen(
        [sys.executable, "-c", CTRL_C, *folders],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    os.killpg(child.pid, number)  # as a terminal, or a batch system, does: to all at once
    out, err = child.communicate(timeout=300)
    assert (out, err, child.returncode) == ("saved\nend\n", "", 0)
    with pytest.raises(ProcessLookupError):
        os.killpg(child.pid, 0)  # no process of the group is left


# ---------------------------------------------------------------- how many


@pytest.mark.parametrize(
    ("cores", "room", "expected"),
    [(1, 10**9, 0), (2, 10**9, 1), (4, 10**9, 2), (64, 10**9, 4), (64, 0, 0), (64, 299, 0), (64, 300, 1), (64, 700, 3)],
)
def test_by_default_half_the_cores_work_where_their_batches_fit(
    monkeypatch: pytest.MonkeyPatch, cores: int, room: int, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(loader, "_shared_bytes", lambda: room)
    assert count_workers(None, 100) == expected


def test_a_given_number_is_used_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_workers(0, 10**15) == 0
    monkeypatch.setattr(loader, "_shared_bytes", lambda: 64_000_000)
    assert count_workers(7, 100) == 7
    with pytest.raises(UserError, match=r"loader\.workers: 2 processes may need 0\.5 GB .* 0\.1 GB free.*--shm-size"):
        count_workers(2, 100_000_000)


def test_shared_memory_is_measured_if_it_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 <= loader._shared_bytes() < sys.maxsize
    monkeypatch.setattr(loader, "_SHARED", tmp_path / "none")
    assert loader._shared_bytes() == sys.maxsize


def _children() -> int:
    return Held.now().children


@pytest.mark.parametrize(("workers", "children"), [(0, 0), (1, 1), (2, 2)])
def test_photo_sources_have_the_given_number_of_processes(tmp_path: Path, workers: int, children: int) -> None:
    source: BatchSource = photo_source(tmp_path)
    assert isinstance(source, ImageBatches)
    source = replace(source, loader=replace(source.loader, workers=workers))
    before = _children()
    with source.batches(range(2, 5)) as batches:
        first = next(batches)
        assert _children() == before + children
        assert [parts(b) for b in (first, *batches)] == [parts(source.batch(i)) for i in (2, 3, 4)]
    assert _children() == before


@pytest.mark.parametrize(("workers", "threads"), [(None, 1), (0, 0), (2, 1)])
def test_map_sources_have_a_thread_or_nothing(tmp_path: Path, workers: int | None, threads: int) -> None:
    pixels = photo_source(tmp_path)
    live = RoiMaps(tiny_detector(3).backbone, pixels.photos.photos, pixels.store)
    maps = FeatureCache(live, tmp_path / "maps")
    source = FeatureBatches(pixels.photos, pixels.store, replace(pixels.loader, workers=workers), 0, maps)
    expected = [parts(source.batch(i)) for i in range(6)]
    before = Held.now()
    with source.batches(range(6)) as batches:
        first = next(batches)
        assert Held.now().threads == before.threads + threads and Held.now().children == before.children
        assert [parts(b) for b in (first, *batches)] == expected
    assert comes_back_to(before)
    maps.close()
