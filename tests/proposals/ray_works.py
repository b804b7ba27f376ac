"""Work for the processes of a Ray cluster, which import it from here."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tag2box.annotations import Photo


def width(photo: Photo) -> int:
    return photo.width


def lost(photo: Photo, number: int) -> int:
    return -1 - number


def threads(photo: Photo) -> str:
    """Properties of the process."""
    import cv2
    import torch

    return f"{os.getpid()} {Path.cwd()} {cv2.getNumThreads()} {torch.get_num_threads()}"


def die_once(photo: Photo) -> int:
    """A photo of width 13 ends the first process that reads it."""
    mark = photo.path.with_suffix(".met")
    if photo.width == 13 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return photo.width


def die(photo: Photo) -> int:
    """A photo of width 13 ends every process that reads it."""
    if photo.width == 13:
        os.kill(os.getpid(), signal.SIGKILL)
    return photo.width


def err(photo: Photo) -> int:
    """A mistake of ours."""
    raise ZeroDivisionError(f"no {photo.width}")


class Unimportable:
    """Work that cannot be found there."""

    def __reduce__(self):
        return (__import__, ("no_such_module_anywhere",))

    def __call__(self, photo: Photo) -> int:
        return 0


class UsesGpu:
    """The GPUs that Ray gives to the process; no driver is needed to be told of them."""

    def __init__(self, *, is_gpu_used: bool) -> None:
        self.is_gpu_used = is_gpu_used

    def __call__(self, photo: Photo) -> str:
        import ray

        return ",".join(ray.get_runtime_context().get_accelerator_ids()["GPU"])


def no_gpus(photo: Photo, number: int) -> str:
    return "lost"
