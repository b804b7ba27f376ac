"""Work spread over a Ray cluster, a few files a task: what a lost worker or node was doing is done again elsewhere."""

from __future__ import annotations

import os
import platform
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, Generic

import cv2
import numpy as np
import PIL
import torch

from tag2box.errors import UserError
from tag2box.proposals.pool import File, Result
from tag2box.proposals.ray_cluster import connected

RETRIES = 3
"""How often a task is done again when its worker or its node died."""

_LOST = 3  # files in a row that cost their worker: then it is the cluster, not the files
_LOOK = 5.0  # seconds between looks at the cluster
_STARVED = 120.0  # seconds to wait for a node, where none is left
_AHEAD = 2  # tasks for each processor, so that none waits for the next


@dataclass(frozen=True, slots=True)
class RayPool:
    """Processes of a Ray cluster. Files must lie under the same path on all nodes; results do not depend on them."""

    address: str | None = None
    """HOST:PORT; None takes RAY_ADDRESS, or starts a cluster on this machine for the time of the work."""
    workers: int | None = None
    """At most so many tasks at a time; None is one per processor."""
    chunk: int = 4
    """Files of a task: what a lost worker costs."""

    def __call__(
        self,
        work: Callable[[File], Result],
        files: Iterable[File],
        *,
        lost: Callable[[File, int], Result],
        threads: int = 1,
    ) -> Generator[tuple[File, Result], None, None]:
        """Every file with its result, in the order they are finished."""
        with connected(self.address, self.workers) as ray:
            where = f"ray cluster {ray.get_runtime_context().gcs_address}"
            cpus = max(1, min(threads, max(_processors(ray), default=1)))  # a task for more would never start
            task = ray.remote(num_cpus=cpus, max_retries=RETRIES)(_do)
            job: _Job[File, Result] = _Job(ray, where, task, cpus, [ray.put(work)], _setting(), self.workers)
            try:
                yield from job.results(iter(files), self.chunk, lost)
            finally:
                job.cancel()


@dataclass(frozen=True, slots=True)
class _Setting:
    """What a worker needs to know of this process to do the same."""

    token: str  # of the work
    folder: Path  # where relative paths begin
    versions: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class _Answer(Generic[Result]):
    """What a task sends back: a result for each file, or why its node is unfit for any."""

    node: str
    results: tuple[Result, ...] = ()
    unfit: str = ""
    unread: Path | None = None  # a file that could not be read there


@dataclass(slots=True)
class _Job(Generic[File, Result]):
    """Tasks on their way, and files still to send."""

    ray: Any
    where: str
    task: Any
    cpus: int  # of a task
    work: list[Any]  # its reference, in a list: fetched once a worker, not once a task
    setting: _Setting
    workers: int | None
    flying: dict[Any, tuple[File, ...]] = field(default_factory=dict)
    again: deque[tuple[File, ...]] = field(default_factory=deque)  # files of tasks that were lost, one by one
    lost_in_a_row: int = 0
    seen: float = field(default_factory=time.monotonic)  # when there was a node for a task last

    def results(
        self, files: Iterator[File], chunk: int, lost: Callable[[File, int], Result]
    ) -> Generator[tuple[File, Result], None, None]:
        """Every file with its result, as they come."""
        while self._send(files, chunk):
            ready, _ = self.ray.wait(list(self.flying), num_returns=1, timeout=_LOOK)
            for reference in ready:
                sent = self.flying.pop(reference)
                answer = self._fetch(reference)
                if answer is not None:
                    self.lost_in_a_row = 0
                    yield from zip(sent, self._checked(answer), strict=True)
                elif len(sent) > 1:
                    self.again.extend((file,) for file in sent)  # to learn which of them it is
                else:
                    self._count_lost()
                    yield sent[0], lost(sent[0], 0)

    def cancel(self) -> None:
        """Give up what is on its way."""
        for reference in self.flying:
            self.ray.cancel(reference, force=True)
        self.flying.clear()

    def _send(self, files: Iterator[File], chunk: int) -> bool:
        """Send tasks until all processors are busy; gives whether any is on its way."""
        room = min(_AHEAD * self._room(), self.workers or sys.maxsize)
        while len(self.flying) < max(1, room):
            sent = self.again.popleft() if self.again else tuple(islice(files, chunk))
            if not sent:
                break
            self.flying[self.task.remote(self.work, sent, self.setting)] = sent
        return bool(self.flying)

    def _room(self) -> int:
        """Tasks that can run at a time in the cluster as it is now: nodes come and go."""
        count = sum(processors // self.cpus for processors in _processors(self.ray))
        now = time.monotonic()
        self.seen = now if count else self.seen
        if now - self.seen > _STARVED:
            raise UserError(f"{self.where}: no node is left to work; start one, and the same command goes on")
        return count

    def _fetch(self, reference: Any) -> _Answer[Result] | None:
        """The answer of a task; None if worker or node died with it, again and again."""
        errors = self.ray.exceptions
        try:
            answer: _Answer[Result] = self.ray.get(reference)
        except errors.RayTaskError as error:
            if "failed to import" not in f"{error}" and not isinstance(error, ImportError):
                raise
            missing = "a node cannot import tag2box; install the same version of it on every node"
            raise UserError(f"{self.where}: {missing}") from None
        except (errors.WorkerCrashedError, errors.NodeDiedError, errors.ObjectLostError, errors.OutOfMemoryError):
            return None
        return answer

    def _checked(self, answer: _Answer[Result]) -> tuple[Result, ...]:
        if answer.unfit:
            raise UserError(f"ray node {answer.node}: {answer.unfit}")
        if answer.unread is not None and os.access(answer.unread, os.R_OK):
            remedy = "photos must lie under the same path on all nodes: share the folder, or copy it there"
            raise UserError(f"ray node {answer.node}: cannot read {answer.unread}, which is here; {remedy}")
        return answer.results

    def _count_lost(self) -> None:
        self.lost_in_a_row += 1
        if self.lost_in_a_row >= _LOST:
            tries = f"{_LOST} photos in a row were tried {1 + RETRIES} times each, and every time their process died"
            raise UserError(f"{self.where}: {tries}; look for the reason on its nodes, then the same command goes on")


def _processors(ray: Any) -> list[int]:
    """Of every node that is alive."""
    return [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]


def _setting() -> _Setting:
    return _Setting(uuid.uuid4().hex, Path.cwd(), _versions())


@cache
def _versions() -> tuple[tuple[str, str], ...]:
    """What results may depend on, so that it must be the same on all nodes."""
    here = {"torch": torch.__version__, "numpy": np.__version__, "opencv": cv2.__version__, "pillow": PIL.__version__}
    plain = {name: found.partition("+")[0] for name, found in here.items()}  # of torch 2.13.0+cpu, that is 2.13.0
    return tuple({"tag2box": version("tag2box"), **plain}.items())


# ---------------------------------------------------------------- on the nodes

_HERE: dict[str, Callable[[Any], Any]] = {}  # the work of this process, by its token: weights are loaded once


def _do(work: list[Any], files: tuple[File, ...], setting: _Setting) -> _Answer[Any]:
    """A task: the results of a few files."""
    node = platform.node()
    unfit = _unfit(setting) or _prepare(work, setting)
    if unfit:
        return _Answer(node, unfit=unfit)
    unread = next((file.path for file in files if not os.access(file.path, os.R_OK)), None)
    return _Answer(node, tuple(map(_HERE[setting.token], files)), unread=unread)


def _unfit(setting: _Setting) -> str:
    """Why this node would give other results; nothing if it would not."""
    for (name, wanted), (_, found) in zip(setting.versions, _versions(), strict=True):
        if wanted != found:
            return f"{name} {found}, expected {wanted} as where the command was typed; install the same everywhere"
    return ""


def _prepare(work: list[Any], setting: _Setting) -> str:
    """Fetch the work on the first task of this process; says what is wrong with it, if anything is."""
    if setting.token in _HERE:
        return ""
    cv2.setNumThreads(1)  # the tasks share the cores already
    torch.set_num_threads(1)
    if setting.folder.is_dir():
        os.chdir(setting.folder)  # so that files have the names they have there, in messages too
    import ray

    try:
        loaded = ray.get(work[0])
    except Exception as error:
        # A module that is not here, mostly, in whatever wrapping Ray gives it.
        reason = next((line for line in reversed(f"{error}".splitlines()) if line.strip()), type(error).__name__)
        return f"cannot load the work ({reason.strip()}); install the same packages there as here"
    _HERE.clear()
    _HERE[setting.token] = loaded
    return ""
