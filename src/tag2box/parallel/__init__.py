"""Process pools: the cores of this machine, or a Ray cluster; and the thread policy of every process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

PASSIVE_WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
"""OpenMP's threads sleep while they wait for work: spinning, the default, takes the cores from other processes.

The three names are those of the standard, of GNU's library and of Intel's and LLVM's.
"""


def wait_passively() -> None:
    """Set passive waiting for OpenMP libraries that this process, or one that it starts, has yet to load.

    They read it once, as they are loaded: call this before torch, numba or OpenCV is imported. What the user has set
    stays.
    """
    for name, value in PASSIVE_WAITING.items():
        os.environ.setdefault(name, value)


def set_threads(count: int) -> None:
    """Set the CPU threads of this process for torch, for the compiled kernels, which take torch's, and for OpenCV."""
    import cv2
    import torch

    torch.set_num_threads(count)
    cv2.setNumThreads(count)


@contextmanager
def without_opencv_threads() -> Iterator[None]:
    """A block in which OpenCV has no threads, so that processes may be forked; they compute on one.

    A forked process lacks the threads of its parent, and may wait for their locks for ever: also where it sets their
    number, which therefore has to happen in the parent.
    """
    import cv2

    before = cv2.getNumThreads()
    cv2.setNumThreads(1)
    try:
        yield
    finally:
        cv2.setNumThreads(before)
