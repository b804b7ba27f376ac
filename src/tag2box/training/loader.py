"""Worker processes that build batches of pixels ahead of the training loop."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from tag2box.errors import UserError
from tag2box.parallel import set_threads, without_opencv_threads
from tag2box.types import Batch

MakeBatch = Callable[[int], Batch]
"""The batch of an iteration, from its number alone."""

_PREFETCH = 2  # batches per worker
_MAX_WORKERS = 4  # by default
_GRACE_SECONDS = 30  # that a worker outlives SIGTERM
_PR_SET_PDEATHSIG = 1  # of Linux: the signal that a process gets when its parent dies
_SHARED = Path("/dev/shm")  # shared memory on Linux


@contextmanager
def worker_batches(make: MakeBatch, iterations: range, workers: int) -> Iterator[Iterator[Batch]]:
    """Batches from worker processes, which end with the block; an error is raised at the batch it belongs to."""
    try:
        with _processes(make, iterations, workers) as batches:
            yield batches
    except RuntimeError as error:  # raised by a signal handler when a worker dies
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
        prefetch_factor=_PREFETCH,
        worker_init_fn=_start_worker,
        # fork shares the list of photos and the mapped proposals instead of copying them to each worker
        multiprocessing_context="fork" if sys.platform == "linux" else None,
        generator=torch.Generator(),  # keeps the global RNG untouched
    )
    with without_opencv_threads():  # a forked process might wait for them for ever
        made = iter(loader)
    delivered = _delivered(made)
    try:
        yield delivered
    finally:
        # release workers and pipes now: the traceback of an exception may keep this frame alive
        delivered.close()
        made._shutdown_workers()  # type: ignore[attr-defined]
        del made


def count_workers(wanted: int | None, batch_bytes: int, *, ranks: int = 1) -> int:
    """Worker processes to start: as set, or (None) half the cores and at most 4; batches must fit in shared memory.

    Cores and shared memory are divided among the ``ranks`` of this machine.
    """
    most = (_shared_bytes() // ranks // max(1, batch_bytes) - 1) // _PREFETCH  # one more batch is in use
    if wanted is None:
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 0
        return max(0, min(_MAX_WORKERS, cores // ranks // 2, most))
    if wanted > max(0, most):
        need = (wanted * _PREFETCH + 1) * batch_bytes / 1e9
        raise UserError(
            f"loader.workers: {wanted} processes may need {need:.1f} GB in {_SHARED}, which has "
            f"{_shared_bytes() / 1e9:.1f} GB free; give it more (docker: --shm-size), or set loader.workers=0"
        )
    return wanted


def _shared_bytes() -> int:
    if not _SHARED.exists():
        return sys.maxsize  # not a mounted folder on this system: no limit of its own
    free = os.statvfs(_SHARED)
    return free.f_bavail * free.f_frsize


@dataclass(frozen=True)
class _Failed:
    """An error of a worker in one line; raised in the worker, it would arrive as the text of a traceback."""

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
        except (OSError, EOFError) as error:  # tensors are fetched from the worker
            raise UserError(_dead(type(error).__name__)) from None
        if isinstance(batch, _Failed):
            raise UserError(batch.line)
        yield batch


def _start_worker(number: int) -> None:
    """Compute on one thread, and leave signals to the training process.

    Ctrl-C, and SIGTERM of a batch system, reach all processes at once.
    """
    set_threads(1)  # the processes share the cores already; DataLoader sets torch's threads alone
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(_GRACE_SECONDS))
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # an orphan would keep the lock of the run


def _dead(reason: str) -> str:
    return (
        f"a worker process that reads photos died ({reason}), perhaps out of memory; "
        "lower loader.workers (0 for none) in the run's config.toml and continue with --resume"
    )
