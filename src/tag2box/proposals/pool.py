"""Work spread over processes, item by item, so that none waits for a long one and a crash costs one item."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import cv2
import torch

_FEW = 16  # items that are done before further processes would have started


class OnDisk(Protocol):
    """Work to do on a file: a photo is one."""

    @property
    def path(self) -> Path:
        """The file."""
        ...


Item = TypeVar("Item")
File = TypeVar("File", bound=OnDisk)
Result = TypeVar("Result")


class Pool(Protocol):
    """Where files are worked on: this machine's processes (``LocalPool``) or a Ray cluster's (``RayPool``)."""

    def __call__(
        self,
        work: Callable[[File], Result],
        files: Iterable[File],
        *,
        lost: Callable[[File, int], Result],
        threads: int = 1,
    ) -> Generator[tuple[File, Result], None, None]:
        """Every file with its result, in the order they are finished.

        Args:
            work: importable by name, as it crosses to other processes; it should answer for its errors itself.
            lost: the result of a file that its process did not survive, with the signal that ended it; 0 if unknown.
            threads: that the work on a file keeps busy.
        """
        ...


@dataclass(frozen=True, slots=True)
class LocalPool:
    """Processes of this machine; None is one per core, and for a few files this one."""

    workers: int | None = None

    def __call__(
        self,
        work: Callable[[File], Result],
        files: Iterable[File],
        *,
        lost: Callable[[File, int], Result],
        threads: int = 1,
    ) -> Generator[tuple[File, Result], None, None]:
        """Every file with its result, in the order they are finished."""
        most = self.workers or max(1, (os.cpu_count() or 1) // threads)
        waiting = iter(files)
        first = list(islice(waiting, most * _FEW))
        workers = min(self.workers or min(most, 1 + len(first) // _FEW), len(first))
        yield from run_in_pool(work, chain(first, waiting), workers=workers, lost=lost)


@dataclass(frozen=True, slots=True)
class _Worker(Generic[Item]):
    process: SpawnProcess
    line: Connection
    item: Item  # what it works on


def run_in_pool(
    work: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    workers: int,
    lost: Callable[[Item, int], Result],
) -> Iterator[tuple[Item, Result]]:
    """Every item with its result, in the order they are finished.

    Args:
        work: importable by name, as it crosses to other processes; it should answer for its errors itself.
        workers: processes; 1 works in this one.
        lost: the result of an item whose process was ended by a signal (its number).
    """
    if workers <= 1:
        yield from ((item, work(item)) for item in items)
        return
    waiting = iter(items)
    busy: dict[Connection, _Worker[Item]] = {}
    hired: dict[Connection, SpawnProcess] = {}
    try:
        for item in islice(waiting, workers):
            _give(busy, hired, _start(work, item))
        while busy:
            ready = wait(list(busy))
            for line in [line for line in busy if line in ready]:
                worker = busy.pop(line)
                result = _answer(worker, lost)
                for item in islice(waiting, 1):  # before the result is looked at: nobody shall wait for that
                    _give(busy, hired, _go_on(work, worker, item))
                yield worker.item, result
    finally:
        for worker in busy.values():
            worker.process.kill()  # nothing is lost with it: a worker only computes
        for line, process in hired.items():
            line.close()  # an idle one ends with its line
            process.join()


def _give(busy: dict[Connection, _Worker[Item]], hired: dict[Connection, SpawnProcess], worker: _Worker[Item]) -> None:
    busy[worker.line] = worker
    hired[worker.line] = worker.process


def _start(work: Callable[[Item], Result], item: Item) -> _Worker[Item]:
    # Spawned, for a fork of a process that has already used torch's or OpenCV's threads may hang.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, work), daemon=True)
    with _held_back(signal.SIGINT):  # a new process inherits this, and is deaf until it can say what Ctrl-C means to it
        process.start()
    theirs.close()  # so that the end of the process is the end of the line
    ours.send(item)
    return _Worker(process, ours, item)


@contextmanager
def _held_back(number: signal.Signals) -> Iterator[None]:
    """A signal that comes within the block is delivered after it, where the system can hold signals back."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _go_on(work: Callable[[Item], Result], worker: _Worker[Item], item: Item) -> _Worker[Item]:
    try:
        worker.line.send(item)
    except OSError:  # it is gone
        return _start(work, item)
    return _Worker(worker.process, worker.line, item)


def _answer(worker: _Worker[Item], lost: Callable[[Item, int], Result]) -> Result:
    try:
        result: Result = worker.line.recv()
    except (EOFError, OSError):
        worker.process.join()
        code = worker.process.exitcode or 0
        if code >= 0:  # Python itself gave up, which no item can bring about
            raise RuntimeError(f"a worker process ended with exit code {code} before its work") from None
        return lost(worker.item, -code)
    return result


def _serve(line: Connection, work: Callable[[Item], Result]) -> None:
    """The life of a worker. It ends when the line does: with its parent, however that ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent sees to it
    cv2.setNumThreads(1)  # the processes share the cores already
    torch.set_num_threads(1)
    while True:
        try:
            line.send(work(line.recv()))
        except (EOFError, OSError):
            return
