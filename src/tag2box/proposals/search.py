"""The search of one photo: whatever is wrong with it becomes a line about it."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from jaxtyping import Float32, UInt8
from numpy import ndarray
from torch import Tensor

from tag2box.errors import UserError
from tag2box.proposals.candidates import Candidates
from tag2box.proposals.policy import ProposalMethod
from tag2box.proposals.store import check_candidates
from tag2box.types import Photo

_REDUCTIONS = 16  # powers of two by which a photo may come reduced


class ReadPhoto(Protocol):
    """Reads a photo, or a copy of it reduced by a power of two that is still as large as asked for."""

    def __call__(self, path: Path, at_least: tuple[int, int] | None = None) -> UInt8[Tensor, "3 H W"]:
        """Upright RGB; ``at_least`` is (width, height)."""
        ...


@dataclass(frozen=True, slots=True)
class Searched:
    """Boxes and scores of a photo, or the problem with it. Arrays: tensors cross between processes less cheaply."""

    boxes: Float32[ndarray, "P 4"] | None
    scores: Float32[ndarray, " P"] | None
    problem: str = ""

    def candidates(self) -> Candidates | None:
        """What was found; None where there was a problem."""
        if self.boxes is None or self.scores is None:
            return None
        # Copies: what comes from another process may be memory that is not to be written.
        return Candidates(torch.from_numpy(self.boxes.copy()), torch.from_numpy(self.scores.copy()))


def search_photo(method: ProposalMethod, read: ReadPhoto, photo: Photo) -> Searched:
    """Propose boxes for a photo."""
    size = (photo.width, photo.height)
    try:
        wanted = method.working_size(size)
        image = read(photo.path, None if wanted == size else wanted)
        _check_size(photo, (image.shape[2], image.shape[1]))
        found = method(image, size)
        check_candidates(f"{photo.path}: photo {photo.id}", size, found)
    except UserError as error:
        return Searched(None, None, str(error))
    except Exception as error:
        # Also what a decoder, OpenCV or an allocator may say of a strange photo: the others must not suffer for it.
        reason = (str(error).splitlines() or [""])[0]
        return Searched(None, None, f"{photo.path}: not searched ({type(error).__name__}: {reason}); mend or remove it")
    return Searched(found.boxes.numpy(), found.scores.numpy())


def crashed(photo: Photo, number: int) -> Searched:
    """A photo whose process did not survive it; the number of the signal is 0 where nobody saw it."""
    name = next((known.name for known in signal.Signals if known.value == number), f"signal {number}")
    ended = f"was ended by {name}" if number else "died, each time it was tried"
    is_memory = name == "SIGKILL" or not number
    hint = "perhaps out of memory; a smaller short_side needs less" if is_memory else "mend or remove it"
    return Searched(None, None, f"{photo.path}: the process that searched it {ended}; {hint}")


def _check_size(photo: Photo, size: tuple[int, int]) -> None:
    """Raise unless an image is the photo, or the photo reduced by a power of two."""
    whole = (photo.width, photo.height)
    for factor in (1 << power for power in range(_REDUCTIONS)):
        if all(abs(side * factor - full) < factor for side, full in zip(size, whole, strict=True)):
            return
    raise UserError(
        f"{photo.path}: {size[0]}x{size[1]} pixels, expected {photo.width}x{photo.height}; read the dataset anew"
    )
