"""Process pool of this machine: items are assigned one by one, so a slow one delays no other and a crash costs one."""

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Generic, Protocol, TypeVar

from tag2box import errors
from tag2box.parallel import set_threads

_ITEMS_PER_WORKER = 16  # one process finishes this many items before another one has started


Item = TypeVar("Item")
Result = TypeVar("Result")


class Pool(Protocol):
    """Executor of work on items, such as photos: processes of this machine (``LocalPool``) or of Ray (``RayPool``)."""

    def __call__(
        self,
        work: Callable[[Item], Result],
        items: Iterable[Item],
        *,
        lost: Callable[[Item, int], Result],
        threads: int = 1,
    ) -> Generator[tuple[Item, Result], None, None]:
        """Yield every item with its result, in the order of completion.

        Args:
            work: importable by name, because it is pickled for other processes; it must handle its own errors. One with
                a true attribute ``is_gpu_used`` gets a GPU, on clusters that have any.
            lost: result for an item whose process died, given the signal that ended the process (0 if unknown).
            threads: CPU threads that the work on one item uses.
        """
        ...


@dataclass(frozen=True, slots=True)
class LocalPool:
    """Processes of this machine; None starts up to one per core, and none for a few."""

    workers: int | None = None

    def __call__(
        self,
        work: Callable[[Item], Result],
        items: Iterable[Item],
        *,
        lost: Callable[[Item, int], Result],
        threads: int = 1,
    ) -> Generator[tuple[Item, Result], None, None]:
        """Yield every item with its result, in the order of completion."""
        most = self.workers or max(1, (os.cpu_count() or 1) // threads)
        remaining = iter(items)
        first = list(islice(remaining, most * _ITEMS_PER_WORKER))
        workers = min(self.workers or min(most, 1 + len(first) // _ITEMS_PER_WORKER), len(first))
        yield from run_in_pool(work, chain(first, remaining), workers=workers, lost=lost)


def run_in_pool(
    work: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    workers: int,
    lost: Callable[[Item, int], Result],
) -> Iterator[tuple[Item, Result]]:
    """Yield every item with its result, in the order of completion.

    Args:
        work: importable by name, because it is pickled for other processes; it must handle its own errors.
        workers: number of processes; 1 works in the calling process.
        lost: result for an item whose process was ended by a signal, given the signal's number.
    """
    if workers <= 1:
        yield from ((item, work(item)) for item in items)
        return
    remaining = iter(items)
    busy: dict[Connection, _Worker[Item]] = {}
    started: dict[Connection, SpawnProcess] = {}
    try:
        for item in islice(remaining, workers):
            _register(busy, started, _start(work, item))
        while busy:
            ready = wait(list(busy))
            for pipe in [pipe for pipe in busy if pipe in ready]:
                worker = busy.pop(pipe)
                result = _receive(worker, lost)
                for item in islice(remaining, 1):  # before the result is yielded, so that the worker does not idle
                    _register(busy, started, _assign(work, worker, item))
                yield worker.item, result
    finally:
        for worker in busy.values():
            worker.process.kill()  # safe: workers only compute, they write no files
        for pipe, process in started.items():
            pipe.close()  # ends an idle worker
            process.join()


@dataclass(frozen=True, slots=True)
class _Worker(Generic[Item]):
    process: SpawnProcess
    pipe: Connection
    item: Item  # in progress


def _register(
    busy: dict[Connection, _Worker[Item]], started: dict[Connection, SpawnProcess], worker: _Worker[Item]
) -> None:
    busy[worker.pipe] = worker
    started[worker.pipe] = worker.process


def _start(work: Callable[[Item], Result], item: Item) -> _Worker[Item]:
    # Spawn, because a fork of a process that has used torch's or OpenCV's threads may hang.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, work), daemon=True)
    with _blocked(signal.SIGINT, signal.SIGTERM):  # the child inherits the mask, until it ignores them itself
        process.start()
    theirs.close()  # the child then holds the only other end, so its death closes the pipe
    with suppress(OSError):  # it has ended already: so says the pipe
        ours.send(item)
    return _Worker(process, ours, item)


@contextmanager
def _blocked(*numbers: signal.Signals) -> Iterator[None]:
    """Defer signals to the end of the block, on systems that can mask signals."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # its start, on the first spawn, would unblock SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _assign(work: Callable[[Item], Result], worker: _Worker[Item], item: Item) -> _Worker[Item]:
    try:
        worker.pipe.send(item)
    except OSError:  # the process has ended
        return _start(work, item)
    return _Worker(worker.process, worker.pipe, item)


def _receive(worker: _Worker[Item], lost: Callable[[Item, int], Result]) -> Result:
    try:
        result: Result | _Failure = worker.pipe.recv()
    except (EOFError, OSError):
        worker.process.join()
        code = worker.process.exitcode or 0
        if code >= 0:  # Python itself exited, which is not caused by an item
            raise RuntimeError(f"a worker process ended with exit code {code} before its work") from None
        return lost(worker.item, -code)
    if isinstance(result, _Failure):
        raise result.error
    return result


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error that the work did not handle itself: a bug, or a machine without memory or disk space."""

    error: Exception


def _serve(pipe: Connection, work: Callable[[Item], Result]) -> None:
    """Main loop of a worker. It ends when the pipe closes, so workers never outlive their parent."""
    for number in (signal.SIGINT, signal.SIGTERM):  # these may reach every process of a job; the parent handles them
        signal.signal(number, signal.SIG_IGN)
    set_threads(1)  # the processes share the cores already
    while True:
        try:
            item = pipe.recv()
        except (EOFError, OSError):
            return
        with suppress(OSError):  # the parent has ended: the next item says so, too
            pipe.send(_attempt(work, item))


def _attempt(work: Callable[[Item], Result], item: Item) -> Result | _Failure:
    try:
        return work(item)
    except Exception as error:
        is_plain = type(error).__module__ in {"builtins", errors.__name__}  # others may not survive the pipe
        failure = _Failure(error if is_plain else RuntimeError(f"{type(error).__name__}: {error}"))
        failure.error.add_note(traceback.format_exc())  # a traceback itself cannot be sent
        return failure
