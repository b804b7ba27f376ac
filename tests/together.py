"""Real processes of a test, joined by gloo on this machine; forked, so that their work may be any function."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from torch import distributed

from tag2box.training.dist import DistContext

T = TypeVar("T")
PATIENCE = 300  # seconds: only a hang takes that long, also on a busy machine


def together(count: int, work: Callable[[DistContext], T]) -> list[T]:
    """Return values of all processes, by rank; fails if one of them failed or hung."""
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        started = [
            context.Process(
                target=_run, args=(DistContext(rank, count, count), Path(folder) / "meet", work, pipes[rank][1])
            )
            for rank in range(count)
        ]
        for process in started:
            process.start()
        try:
            answers: list[tuple[bool, Any]] = [
                _load(pipe) if pipe.poll(PATIENCE) else (False, "hung") for pipe, _ in pipes
            ]
        finally:
            for process in started:
                process.kill()
                process.join()
    failed = [answer for is_done, answer in answers if not is_done]
    assert not failed, "\n".join(str(answer) for answer in failed)
    return [answer for _, answer in answers]


def _load(pipe: Connection) -> tuple[bool, Any]:
    is_done, answer = pickle.loads(pipe.recv_bytes())  # noqa: S301 - from our own child
    return is_done, answer


def _run(dist: DistContext, meeting: Path, work: Callable[[DistContext], T], answer: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        store = distributed.FileStore(str(meeting), dist.world_size)  # type: ignore[attr-defined]
        patience = timedelta(seconds=PATIENCE)
        distributed.init_process_group(
            "gloo", store=store, rank=dist.rank, world_size=dist.world_size, timeout=patience
        )
        answer.send_bytes(pickle.dumps((True, work(dist))))  # pickled here: tensors must outlive this process
        distributed.barrier()  # others may not have finished yet
    except BaseException:  # the parent reports it
        answer.send_bytes(pickle.dumps((False, f"rank {dist.rank}: {traceback.format_exc()}")))
