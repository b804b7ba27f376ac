"""Ray Data pipelines: work on the nodes of an existing cluster, or of a temporary one on this machine."""

import importlib.util
import logging
import os
import re
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from tag2box.parallel.pool import Item, Result

RETRIES = 3
"""How often a task is repeated after its worker or node died."""

_ADDRESS_VARIABLE = "RAY_ADDRESS"  # environment variable with the cluster's address, if none is given
_CONNECT_TIMEOUT = 5.0  # seconds
_OBJECT_STORE = 100 * 2**20  # bytes of shared memory of a temporary cluster; more is spilled to disk
_MAX_LOST = 3  # items whose process always died, and none that succeeded: then the cluster is at fault
_WINDOW = 4096  # tasks of a pipeline: their items are held in Ray's object store
_LAST_PORT = 65535
_ADDRESS = re.compile(r"(?P<host>[\w.\-]+|\[[0-9a-fA-F:]+\]):(?P<port>\d{1,5})")
_SETTINGS_FRAME = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # first frame of both sides of HTTP/2; 4 is its type
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS_FRAME
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no telemetry
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's future default; silences a warning
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # of this process: what fails is reported by tag2box
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
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    ray.data.DataContext.get_current().enable_progress_bars = False
    if ray.is_initialized():  # by the caller, which also shuts it down
        yield ray
        return
    target = _target(address)
    # The path must be short, because it contains Unix sockets.
    with tempfile.TemporaryDirectory(prefix="t2b-", ignore_cleanup_errors=True) as folder:
        try:
            with _quiet():
                _start(ray, cpus, Path(folder)) if target is None else _join(ray, target)
            yield ray
        finally:
            ray.shutdown()


@contextmanager
def _quiet() -> Iterator[None]:
    """Discard what libraries write to the file of standard error: Ray reports its log level there."""
    sys.stderr.flush()
    before, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nowhere)


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
    """Actors of a Ray Data pipeline. Files must have the same path on all nodes; results do not depend on the nodes.

    A pipeline has some thousands of tasks; Ray Data decides how many are in flight, and repeats those of dead workers.
    """

    address: str | None = None
    """HOST:PORT; None takes RAY_ADDRESS, or starts a temporary cluster on this machine."""
    workers: int | None = None
    """Maximum number of actors; None is one per processor."""
    chunk: int = 4
    """Items per task, that is, the work lost with a worker."""
    gpus: float = 1
    """GPUs of each actor whose work uses one, on clusters that have any."""

    def __call__(
        self,
        work: Callable[[Item], Result],
        items: Iterable[Item],
        *,
        lost: Callable[[Item, int], Result],
        threads: int = 1,
    ) -> Generator[tuple[Item, Result], None, None]:
        """Yield every item with its result, in the order of completion."""
        remaining = iter(items)
        window = list(islice(remaining, _WINDOW * self.chunk))
        if not window:
            return
        with ray_cluster(self.address, self.workers) as ray:
            gpus = self.gpus if getattr(work, "is_gpu_used", False) and ray.cluster_resources().get("GPU") else 0
            job = _Job(ray, [ray.put(work)], _task_context(threads), self, gpus)
            while window:
                yield from job.results(window, lost)
                window = list(islice(remaining, _WINDOW * self.chunk))


@dataclass(frozen=True, slots=True)
class _TaskContext:
    """State of this process that a worker reproduces."""

    folder: Path  # working directory, which relative paths refer to
    threads: int
    versions: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class _TaskResult(Generic[Result]):
    """Reply of a task: numbers and results of its items, or the reason why its node is unfit."""

    node: str
    results: tuple[tuple[int, Result], ...] = ()
    unfit: str = ""
    unreadable: Path | None = None  # a file that the node cannot read
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class _Job:
    """A cluster, and the work that its actors do."""

    ray: Any
    work: list[Any]  # an object reference inside a list: fetched by each actor, not sent to it
    context: _TaskContext
    pool: RayPool
    gpus: float  # of an actor

    def results(
        self, items: Sequence[Item], lost: Callable[[Item, int], Result]
    ) -> Generator[tuple[Item, Result], None, None]:
        """Yield every item with its result: in tasks of several, then those of dead workers one by one."""
        left = dict(enumerate(items))
        for chunk, in_flight in ((self.pool.chunk, 2), (1, 1)):  # a task that waits behind a killer dies with it
            before = len(left)
            for number, result in self._pipeline(left, chunk, in_flight) if left else ():
                if number in left:
                    yield left.pop(number), result
        if len(left) == before and before >= _MAX_LOST:
            where = f"ray cluster {self.ray.get_runtime_context().gcs_address}"
            tries = f"{before} tasks were tried {2 * (1 + RETRIES)} times each, and their process always died"
            raise UserError(f"{where}: {tries}; find the reason on its nodes, then rerun the same command to resume")
        for item in left.values():
            yield item, lost(item, 0)

    def _pipeline(self, items: Mapping[int, Item], chunk: int, in_flight: int) -> Iterator[tuple[int, Any]]:
        """Numbers and results of some items, as one Ray Data pipeline finishes them; none of tasks that died."""
        data, cpus = self.ray.data, self._cpus()
        data.DataContext.get_current().max_errored_blocks = -1  # a task whose worker always died
        numbered = iter(items.items())
        tasks = [{"task": pickled(part)} for part in iter(lambda: list(islice(numbered, chunk)), [])]
        most = min(sum(count // cpus for count in _node_cpus(self.ray)), len(tasks), self.pool.workers or len(tasks))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # newer versions of Ray warn of max_restarts
            pipeline = data.from_items(tasks, override_num_blocks=len(tasks)).map_batches(
                _Actor,
                fn_constructor_args=(self.work, self.context),
                batch_size=1,
                compute=data.ActorPoolStrategy(
                    min_size=1, max_size=max(1, most), max_tasks_in_flight_per_actor=in_flight
                ),
                num_cpus=cpus,
                num_gpus=self.gpus or None,
                max_restarts=-1,
                max_task_retries=RETRIES,
            )
        for batch in pipeline.iter_batches(batch_size=None, prefetch_batches=0):
            for reply in batch["reply"]:
                yield from self._checked(self.ray.cloudpickle.loads(reply))

    def _cpus(self) -> int:
        """Processors of an actor: one with more than a node has would never start."""
        return max(1, min(self.context.threads, max(_node_cpus(self.ray), default=1)))

    def _checked(self, reply: _TaskResult[Any]) -> tuple[tuple[int, Any], ...]:
        if reply.unfit:
            raise UserError(f"ray node {reply.node}: {reply.unfit}")
        if reply.unreadable is not None and os.access(reply.unreadable, os.R_OK):
            remedy = "photos must lie under the same path on all nodes: share the folder, or copy it there"
            raise UserError(f"ray node {reply.node}: cannot read {reply.unreadable}, which is here; {remedy}")
        if reply.error is not None:
            raise reply.error
        return reply.results


def _node_cpus(ray: Any) -> list[int]:
    """Processors of every live node."""
    return [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]


def _task_context(threads: int = 1) -> _TaskContext:
    return _TaskContext(Path.cwd(), threads, _versions())


def pickled(value: object) -> bytes:
    """A value for another process of this command."""
    import ray

    return bytes(ray.cloudpickle.dumps(value))


@cache
def _versions() -> tuple[tuple[str, str], ...]:
    """Packages that results may depend on, so that all nodes need the same versions."""
    here = {"torch": torch.__version__, "numpy": np.__version__, "opencv": cv2.__version__, "pillow": PIL.__version__}
    plain = {name: found.partition("+")[0] for name, found in here.items()}  # torch 2.13.0+cpu is 2.13.0
    return tuple({"tag2box": version("tag2box"), **plain}.items())


# ---------------------------------------------------------------- on the nodes


class _Actor:
    """A process of a node: it loads the work, such as a network, once."""

    def __init__(self, work: list[Any], context: _TaskContext) -> None:
        self._node = socket.gethostname()
        self._work: Callable[[Any], Any] | None = None
        self._unfit = _unfit(context)
        if self._unfit:
            return
        set_threads(1)  # actors share the cores already; work that needs more sets them itself
        if context.folder.is_dir():
            os.chdir(context.folder)  # so that relative paths work, and messages name files as the caller does
        import ray

        try:
            self._work = ray.get(work[0])
        except Exception as error:
            # Usually a missing module, wrapped by Ray in various ways.
            reason = next((line for line in reversed(f"{error}".splitlines()) if line.strip()), type(error).__name__)
            self._unfit = f"cannot load the work ({reason.strip()}); install the same packages there as here"

    def __call__(self, batch: dict[str, Any]) -> Iterator[dict[str, list[bytes]]]:
        import ray

        for task in batch["task"]:
            yield {"reply": [pickled(self._reply(ray.cloudpickle.loads(task)))]}

    def _reply(self, items: Sequence[tuple[int, Any]]) -> _TaskResult[Any]:
        if self._work is None:
            return _TaskResult(self._node, unfit=self._unfit)
        paths = (getattr(item, "path", None) for _, item in items)
        unreadable = next((path for path in paths if path is not None and not os.access(path, os.R_OK)), None)
        try:
            results = tuple((number, self._work(item)) for number, item in items)
        except Exception as error:  # raised where the command was typed
            return _TaskResult(self._node, error=error, unreadable=unreadable)
        return _TaskResult(self._node, results, unreadable=unreadable)


def _unfit(context: _TaskContext) -> str:
    """Reason why this node might give other results; empty if there is none."""
    for (name, wanted), (_, found) in zip(context.versions, _versions(), strict=True):
        if wanted != found:
            return f"{name} {found}, expected {wanted} as where the command was typed; install the same everywhere"
    return ""
