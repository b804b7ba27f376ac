"""A Ray cluster to work on: one that is there, or one on this machine for as long as it is needed."""

from __future__ import annotations

import importlib.util
import logging
import os
import platform
import re
import socket
import sys
import tempfile
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
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

ADDRESS = "RAY_ADDRESS"
"""The environment's word for the cluster, where no address is given."""

_PATIENCE = 5.0  # seconds in which a cluster must answer
_STORE = 100 * 2**20  # bytes of shared memory of a cluster on this machine; more goes to its disk
_LAST_PORT = 65535
_ADDRESS = re.compile(r"(?P<host>[\w.\-]+|\[[0-9a-fA-F:]+\]):(?P<port>\d{1,5})")
_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # the frame with which both sides of HTTP/2 begin; 4 is its type
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nobody is told of this work
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # what Ray will do in future, and warns of until told so
    "RAY_task_oom_retries": "3",  # without end otherwise: one photo too large would be tried for ever
}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a cluster is, and which option says so."""

    said_by: str
    address: str

    def __str__(self) -> str:
        return f"{self.said_by} {self.address}"


def check_ray(address: str | None) -> None:
    """Raise at once, before any work, if Ray is not installed or nobody listens at the address."""
    if importlib.util.find_spec("ray") is None:
        raise UserError("--on ray: Ray is not installed; pip install 'tag2box[ray]' here and on every node")
    place = _place(address)
    if place is None or place.address == "auto":
        return
    found = _ADDRESS.fullmatch(place.address)
    if found is None or int(found["port"]) > _LAST_PORT:
        raise UserError(f"{place}: expected HOST:PORT, as `ray start --head` prints it")
    try:
        _greet(found["host"].strip("[]"), int(found["port"]))
    except OSError as error:
        reason = error.strerror or f"{error}"
        raise UserError(f"{place}: no answer ({reason}); see whether `ray status` finds the cluster") from None


def _greet(host: str, port: int) -> None:
    """Raise unless somebody at an address speaks HTTP/2, as Ray does: Ray itself would try for many minutes."""
    with socket.create_connection((host, port), timeout=_PATIENCE) as line:
        if os.environ.get("RAY_USE_TLS", "0").lower() not in {"0", "false", ""}:
            return  # what it says is not for us
        line.sendall(_HELLO)
        said = line.recv(len(_SETTINGS))
        if said[3:4] != _SETTINGS[3:4]:
            raise OSError("whoever listens there is no Ray cluster")


@contextmanager
def connected(address: str | None, cpus: int | None) -> Iterator[Any]:
    """The ``ray`` module, connected for the length of a with block.

    Args:
        address: HOST:PORT of a cluster, or ``auto`` for the one this machine is part of; None takes RAY_ADDRESS, or
            starts a cluster on this machine and stops it in the end.
        cpus: of the cluster that is started; None is one per core.
    """
    check_ray(address)
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():  # by whoever called: theirs to end
        yield ray
        return
    place = _place(address)
    with tempfile.TemporaryDirectory(prefix="t2b-", ignore_cleanup_errors=True) as folder:  # short: sockets live there
        try:
            _start(ray, cpus, Path(folder)) if place is None else _join(ray, place)
            yield ray
        finally:
            ray.shutdown()


def _place(address: str | None) -> _Place | None:
    if address is not None:
        return _Place("--address", address)
    return _Place(ADDRESS, os.environ[ADDRESS]) if os.environ.get(ADDRESS) else None


def _start(ray: Any, cpus: int | None, folder: Path) -> None:
    try:
        ray.init(
            address="local",  # else a cluster that happens to run here would be taken
            num_cpus=cpus or os.cpu_count() or 1,
            object_store_memory=_STORE,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=f"{folder}",
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"--on ray: no cluster could be started here ({_line(error)}); work without --on ray") from None


def _join(ray: Any, place: _Place) -> None:
    try:
        ray.init(address=place.address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        remedy = "start Ray of the same version here with `ray start --address HOST:PORT`, then try again"
        raise UserError(f"{place}: not joined ({_line(error)}); {remedy}") from None


def _line(error: BaseException) -> str:
    return (f"{error}".strip().splitlines() or [type(error).__name__])[0].rstrip(".")


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
