"""Ray process pool: work on the nodes of an existing cluster, or of a temporary one on this machine."""

import importlib.util
import logging
import os
import re
import socket
import sys
import tempfile
import time
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
from tag2box.parallel import set_threads
from tag2box.parallel.pool import File, Result

RETRIES = 3
"""How often a task is repeated after its worker or node died."""

_ADDRESS_VARIABLE = "RAY_ADDRESS"  # environment variable with the cluster's address, if none is given
_CONNECT_TIMEOUT = 5.0  # seconds
_OBJECT_STORE = 100 * 2**20  # bytes of shared memory of a temporary cluster; more is spilled to disk
_MAX_LOST = 3  # lost files in a row: then the cluster is at fault, not the files
_POLL_INTERVAL = 5.0  # seconds between two checks of the cluster
_NODE_TIMEOUT = 120.0  # seconds to wait for a node if none is left
_TASKS_PER_CPU = 2  # queued tasks, so that no processor idles
_LAST_PORT = 65535
_ADDRESS = re.compile(r"(?P<host>[\w.\-]+|\[[0-9a-fA-F:]+\]):(?P<port>\d{1,5})")
_SETTINGS_FRAME = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # first frame of both sides of HTTP/2; 4 is its type
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS_FRAME
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no telemetry
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's future default; silences a warning
    "RAY_task_oom_retries": "3",  # unlimited by default: one oversized photo would be retried forever
}


@dataclass(frozen=True, slots=True)
class _Address:
    """Address of a cluster, and the option it was given by."""

    option: str
    address: str

    def __str__(self) -> str:
        return f"{self.option} {self.address}"


def check_ray(address: str | None) -> None:
    """Fail early: raise a UserError if Ray is not installed or no cluster responds at the address."""
    if importlib.util.find_spec("ray") is None:
        raise UserError("--on ray: Ray is not installed; pip install 'tag2box[ray]' here and on every node")
    target = _target(address)
    if target is None or target.address == "auto":
        return
    found = _ADDRESS.fullmatch(target.address)
    if found is None or int(found["port"]) > _LAST_PORT:
        raise UserError(f"{target}: expected HOST:PORT, as `ray start --head` prints it")
    try:
        _check_http2(found["host"].strip("[]"), int(found["port"]))
    except OSError as error:
        reason = error.strerror or f"{error}"
        raise UserError(f"{target}: no answer ({reason}); see whether `ray status` finds the cluster") from None


def _check_http2(host: str, port: int) -> None:
    """Raise unless an HTTP/2 server, as Ray's is, responds at an address; Ray itself would retry for many minutes."""
    with socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT) as connection:
        if os.environ.get("RAY_USE_TLS", "0").lower() not in {"0", "false", ""}:
            return  # encrypted
        connection.sendall(_PREFACE)
        reply = connection.recv(len(_SETTINGS_FRAME))
        if reply[3:4] != _SETTINGS_FRAME[3:4]:
            raise OSError("the server there is not a Ray cluster")


@contextmanager
def ray_cluster(address: str | None, cpus: int | None) -> Iterator[Any]:
    """Connect to a cluster and yield the ``ray`` module; disconnect at the end of the block.

    Args:
        address: HOST:PORT of a cluster, or ``auto`` for the one this machine is part of; None takes RAY_ADDRESS, or
            starts a temporary cluster on this machine.
        cpus: processors of the temporary cluster; None is one per core.
    """
    check_ray(address)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import ray

    if ray.is_initialized():  # by the caller, which also shuts it down
        yield ray
        return
    target = _target(address)
    # The path must be short, because it contains Unix sockets.
    with tempfile.TemporaryDirectory(prefix="t2b-", ignore_cleanup_errors=True) as folder:
        try:
            _start(ray, cpus, Path(folder)) if target is None else _join(ray, target)
            yield ray
        finally:
            ray.shutdown()


def _target(address: str | None) -> _Address | None:
    if address is not None:
        return _Address("--address", address)
    found = os.environ.get(_ADDRESS_VARIABLE)
    return _Address(_ADDRESS_VARIABLE, found) if found else None


def _start(ray: Any, cpus: int | None, folder: Path) -> None:
    try:
        ray.init(
            address="local",  # otherwise Ray would join any cluster that runs on this machine
            num_cpus=cpus or os.cpu_count() or 1,
            object_store_memory=_OBJECT_STORE,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=f"{folder}",
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"--on ray: no cluster could be started here ({_first_line(error)}); work without --on ray"
        ) from None


def _join(ray: Any, target: _Address) -> None:
    try:
        ray.init(address=target.address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        remedy = "start Ray of the same version here with `ray start --address HOST:PORT`, then try again"
        raise UserError(f"{target}: not joined ({_first_line(error)}); {remedy}") from None


def _first_line(error: BaseException) -> str:
    return (f"{error}".strip().splitlines() or [type(error).__name__])[0].rstrip(".")


@dataclass(frozen=True, slots=True)
class RayPool:
    """Processes of a Ray cluster. Files must have the same path on all nodes; results do not depend on the nodes."""

    address: str | None = None
    """HOST:PORT; None takes RAY_ADDRESS, or starts a temporary cluster on this machine."""
    workers: int | None = None
    """Maximum number of concurrent tasks; None is one per processor."""
    chunk: int = 4
    """Files per task, that is, the work lost with a worker."""

    def __call__(
        self,
        work: Callable[[File], Result],
        files: Iterable[File],
        *,
        lost: Callable[[File, int], Result],
        threads: int = 1,
    ) -> Generator[tuple[File, Result], None, None]:
        """Yield every file with its result, in the order of completion."""
        with ray_cluster(self.address, self.workers) as ray:
            where = f"ray cluster {ray.get_runtime_context().gcs_address}"
            cpus = max(1, min(threads, max(_node_cpus(ray), default=1)))  # a task with more would never start
            task = ray.remote(num_cpus=cpus, max_retries=RETRIES)(_run_task)
            job: _Job[File, Result] = _Job(ray, where, task, cpus, [ray.put(work)], _task_context(), self.workers)
            try:
                yield from job.results(iter(files), self.chunk, lost)
            finally:
                job.cancel()


@dataclass(frozen=True, slots=True)
class _TaskContext:
    """State of this process that a worker reproduces."""

    token: str  # identifies the work
    folder: Path  # working directory, which relative paths refer to
    versions: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class _TaskResult(Generic[Result]):
    """Reply of a task: one result per file, or the reason why its node is unfit."""

    node: str
    results: tuple[Result, ...] = ()
    unfit: str = ""
    unreadable: Path | None = None  # a file that the node cannot read


@dataclass(slots=True)
class _Job(Generic[File, Result]):
    """Tasks in flight, and files still to send."""

    ray: Any
    where: str
    task: Any
    cpus: int  # per task
    work: list[Any]  # an object reference inside a list: fetched once per worker, not once per task
    context: _TaskContext
    workers: int | None
    in_flight: dict[Any, tuple[File, ...]] = field(default_factory=dict)
    retry: deque[tuple[File, ...]] = field(default_factory=deque)  # files of lost tasks, one by one
    lost_in_a_row: int = 0
    last_capacity: float = field(default_factory=time.monotonic)  # when a node last had room for a task

    def results(
        self, files: Iterator[File], chunk: int, lost: Callable[[File, int], Result]
    ) -> Generator[tuple[File, Result], None, None]:
        """Yield every file with its result, in the order of completion."""
        while self._send(files, chunk):
            ready, _ = self.ray.wait(list(self.in_flight), num_returns=1, timeout=_POLL_INTERVAL)
            for reference in ready:
                sent = self.in_flight.pop(reference)
                reply = self._fetch(reference)
                if reply is not None:
                    self.lost_in_a_row = 0
                    yield from zip(sent, self._checked(reply), strict=True)
                elif len(sent) > 1:
                    self.retry.extend((file,) for file in sent)  # one by one, to find the one that kills its process
                else:
                    self._count_lost()
                    yield sent[0], lost(sent[0], 0)

    def cancel(self) -> None:
        """Cancel the tasks in flight."""
        for reference in self.in_flight:
            self.ray.cancel(reference, force=True)
        self.in_flight.clear()

    def _send(self, files: Iterator[File], chunk: int) -> bool:
        """Submit tasks until all processors are busy; returns whether any task is in flight."""
        limit = min(_TASKS_PER_CPU * self._capacity(), self.workers or sys.maxsize)
        while len(self.in_flight) < max(1, limit):
            sent = self.retry.popleft() if self.retry else tuple(islice(files, chunk))
            if not sent:
                break
            self.in_flight[self.task.remote(self.work, sent, self.context)] = sent
        return bool(self.in_flight)

    def _capacity(self) -> int:
        """Number of tasks that the cluster can run now; nodes may join and leave."""
        count = sum(processors // self.cpus for processors in _node_cpus(self.ray))
        now = time.monotonic()
        self.last_capacity = now if count else self.last_capacity
        if now - self.last_capacity > _NODE_TIMEOUT:
            raise UserError(f"{self.where}: no node is left to work; start one, then rerun the same command to resume")
        return count

    def _fetch(self, reference: Any) -> _TaskResult[Result] | None:
        """The reply of a task; None if its worker or node died on every attempt."""
        errors = self.ray.exceptions
        try:
            reply: _TaskResult[Result] = self.ray.get(reference)
        except errors.RayTaskError as error:
            if "failed to import" not in f"{error}" and not isinstance(error, ImportError):
                raise
            missing = "a node cannot import tag2box; install the same version of it on every node"
            raise UserError(f"{self.where}: {missing}") from None
        except (errors.WorkerCrashedError, errors.NodeDiedError, errors.ObjectLostError, errors.OutOfMemoryError):
            return None
        return reply

    def _checked(self, reply: _TaskResult[Result]) -> tuple[Result, ...]:
        if reply.unfit:
            raise UserError(f"ray node {reply.node}: {reply.unfit}")
        if reply.unreadable is not None and os.access(reply.unreadable, os.R_OK):
            remedy = "photos must lie under the same path on all nodes: share the folder, or copy it there"
            raise UserError(f"ray node {reply.node}: cannot read {reply.unreadable}, which is here; {remedy}")
        return reply.results

    def _count_lost(self) -> None:
        self.lost_in_a_row += 1
        if self.lost_in_a_row >= _MAX_LOST:
            tries = f"{_MAX_LOST} photos in a row were tried {1 + RETRIES} times each, and their process always died"
            raise UserError(
                f"{self.where}: {tries}; find the reason on its nodes, then rerun the same command to resume"
            )


def _node_cpus(ray: Any) -> list[int]:
    """Processors of every live node."""
    return [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]


def _task_context() -> _TaskContext:
    return _TaskContext(os.urandom(16).hex(), Path.cwd(), _versions())


@cache
def _versions() -> tuple[tuple[str, str], ...]:
    """Packages that results may depend on, so that all nodes need the same versions."""
    here = {"torch": torch.__version__, "numpy": np.__version__, "opencv": cv2.__version__, "pillow": PIL.__version__}
    plain = {name: found.partition("+")[0] for name, found in here.items()}  # torch 2.13.0+cpu is 2.13.0
    return tuple({"tag2box": version("tag2box"), **plain}.items())


# ---------------------------------------------------------------- on the nodes

_LOADED: dict[str, Callable[[Any], Any]] = {}  # the work of this process by token, so that weights are loaded once


def _run_task(work: list[Any], files: tuple[File, ...], context: _TaskContext) -> _TaskResult[Any]:
    """Remote function: the results of a few files."""
    node = socket.gethostname()
    unfit = _unfit(context) or _prepare(work, context)
    if unfit:
        return _TaskResult(node, unfit=unfit)
    unreadable = next((file.path for file in files if not os.access(file.path, os.R_OK)), None)
    return _TaskResult(node, tuple(map(_LOADED[context.token], files)), unreadable=unreadable)


def _unfit(context: _TaskContext) -> str:
    """Reason why this node might give other results; empty if there is none."""
    for (name, wanted), (_, found) in zip(context.versions, _versions(), strict=True):
        if wanted != found:
            return f"{name} {found}, expected {wanted} as where the command was typed; install the same everywhere"
    return ""


def _prepare(work: list[Any], context: _TaskContext) -> str:
    """Fetch the work for the first task of this process; returns the problem, or an empty string."""
    if context.token in _LOADED:
        return ""
    set_threads(1)  # the tasks share the cores already
    if context.folder.is_dir():
        os.chdir(context.folder)  # so that relative paths work, and messages name files as the caller does
    import ray

    try:
        loaded = ray.get(work[0])
    except Exception as error:
        # Usually a missing module, wrapped by Ray in various ways.
        reason = next((line for line in reversed(f"{error}".splitlines()) if line.strip()), type(error).__name__)
        return f"cannot load the work ({reason.strip()}); install the same packages there as here"
    _LOADED.clear()
    _LOADED[context.token] = loaded
    return ""
