"""Batches made ahead of the loop that asks for them, by processes or by a thread; the same batches however made."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from tag2box.errors import UserError
from tag2box.types import Batch

MakeBatch = Callable[[int], Batch]
"""The batch of an iteration, from its number alone."""

_AHEAD = 2  # batches each process has ready
_MOST = 4  # processes, unless more are asked for
_SHARED = Path("/dev/shm")  # where Linux keeps what processes share


@contextmanager
def serial_batches(make: MakeBatch, iterations: range) -> Iterator[Iterator[Batch]]:
    """Each batch when it is asked for."""
    yield (make(iteration) for iteration in iterations)


@contextmanager
def thread_batches(make: MakeBatch, iterations: range) -> Iterator[Iterator[Batch]]:
    """One batch ahead, by a thread of this process."""
    with ThreadPoolExecutor(1, thread_name_prefix="tag2box-batches") as pool:
        yield _one_ahead(pool, make, iterations)


def _one_ahead(pool: ThreadPoolExecutor, make: MakeBatch, iterations: range) -> Iterator[Batch]:
    if not iterations:
        return
    coming = pool.submit(make, iterations[0])
    for iteration in iterations[1:]:
        batch = coming.result()
        coming = pool.submit(make, iteration)
        yield batch
    yield coming.result()


@contextmanager
def worker_batches(make: MakeBatch, iterations: range, workers: int) -> Iterator[Iterator[Batch]]:
    """Two batches ahead a process. They end with the block, whatever ends it; a photo's error comes in its turn."""
    try:
        with _processes(make, iterations, workers) as batches:
            yield batches
    except RuntimeError as error:  # a signal of the process that died; it may come at any moment
        if str(error).startswith("DataLoader worker (pid"):
            raise UserError(_dead(str(error).split(". ", maxsplit=1)[0])) from None
        raise


@contextmanager
def _processes(make: MakeBatch, iterations: range, workers: int) -> Iterator[Iterator[Batch]]:
    loader = DataLoader(
        _Numbered(make),
        batch_size=None,  # an item is a batch
        sampler=iterations,
        num_workers=workers,
        prefetch_factor=_AHEAD,
        worker_init_fn=_start_worker,
        # A fork shares the list of photos and the mapped proposals, which would otherwise be copied to each process.
        multiprocessing_context="fork" if sys.platform == "linux" else None,
        generator=torch.Generator(),  # else it would draw from the training's
    )
    made = iter(loader)
    delivered = _delivered(made)
    try:
        yield delivered
    finally:
        # All that holds the processes and their pipes goes now, though an exception's traceback may hold this frame.
        delivered.close()
        made._shutdown_workers()  # type: ignore[attr-defined]
        del made


def count_workers(wanted: int | None, batch_bytes: int, *, dist: int = 1) -> int:
    """Processes to start: as many as wanted, or (None) half the cores and at most 4; batches must fit shared memory.

    Cores and shared memory are divided among the training ``processes`` of this machine.
    """
    most = (_shared_bytes() // dist // max(1, batch_bytes) - 1) // _AHEAD  # one more batch is in use
    if wanted is None:
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 0
        return max(0, min(_MOST, cores // dist // 2, most))
    if wanted > max(0, most):
        need = (wanted * _AHEAD + 1) * batch_bytes / 1e9
        raise UserError(
            f"loader.workers: {wanted} processes may need {need:.1f} GB in {_SHARED}, which has "
            f"{_shared_bytes() / 1e9:.1f} GB free; give it more (docker: --shm-size), or set loader.workers=0"
        )
    return wanted


def _shared_bytes() -> int:
    if not _SHARED.exists():
        return sys.maxsize  # shared memory is not a mounted folder here, and has no limit of its own
    free = os.statvfs(_SHARED)
    return free.f_bavail * free.f_frsize


@dataclass(frozen=True)
class _Failed:
    """What a process could not make, in a line. Raised there, it would arrive as the text of a traceback."""

    line: str


class _Numbered(Dataset[Batch | _Failed]):
    """Batches by iteration."""

    def __init__(self, make: MakeBatch) -> None:
        self._make = make

    def __getitem__(self, iteration: int) -> Batch | _Failed:
        try:
            return self._make(iteration)
        except UserError as error:
            return _Failed(str(error))


def _delivered(made: Iterator[Batch | _Failed]) -> Generator[Batch, None, None]:
    while True:
        try:
            batch = next(made)
        except StopIteration:
            return
        except (OSError, EOFError) as error:  # tensors are fetched from the process that made them
            raise UserError(_dead(type(error).__name__)) from None
        if isinstance(batch, _Failed):
            raise UserError(batch.line)
        yield batch


def _start_worker(number: int) -> None:
    """Ctrl-C reaches all processes at once; the one that trains decides what it means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _dead(reason: str) -> str:
    return (
        f"a process that reads photos died ({reason}), perhaps for want of memory; "
        "set loader.workers to less, or 0, in the run's config.toml and go on with --resume"
    )
