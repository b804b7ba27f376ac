"""Kernels in machine code, for what torch has no fast operation for."""

from __future__ import annotations

from collections.abc import Callable

import numba


def compiled(kernel: Callable[..., None]) -> Callable[..., None]:
    """A kernel that is compiled when first called, free of Python's lock, and kept on disk where there is a place."""
    try:
        return numba.njit(nogil=True, cache=True)(kernel)
    except RuntimeError:  # no folder to write to
        return numba.njit(nogil=True)(kernel)
