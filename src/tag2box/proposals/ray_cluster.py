"""A Ray cluster to work on: one that is there, or one on this machine for as long as it is needed."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tag2box.errors import UserError

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


def check(address: str | None) -> None:
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
    check(address)
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
