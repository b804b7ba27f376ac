"""The processes that train or detect together, as torchrun starts them: one, unless it did.

Photos of a batch are shared out in runs, so that what the processes say, put together in the order of their ranks, is
in the order of the photos.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, distributed, nn

from tag2box.errors import Interrupted

T = TypeVar("T")
_PATIENCE = timedelta(days=2)  # the first makes proposals and maps while the others wait; torchrun ends them if it dies


@dataclass(frozen=True, slots=True)
class Processes:
    """Who this process is among those that work together; alone, nothing is exchanged."""

    rank: int = 0
    size: int = 1
    here: int = 1  # how many of them share this machine

    @property
    def leads(self) -> bool:
        """Whether this is the one that writes."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """Which of ``count`` things in a row are this process's."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def gather(self, rows: Float[Tensor, "r w"]) -> Float[Tensor, "R w"]:
        """The rows of all, in order; some may have none. Without a graph."""
        if self.size == 1:
            return rows.detach()
        shapes = [torch.zeros(2, dtype=torch.long, device=rows.device) for _ in range(self.size)]
        distributed.all_gather(shapes, torch.tensor(rows.shape, device=rows.device))
        counts, widths = zip(*(shape.tolist() for shape in shapes), strict=True)
        padded = rows.new_zeros(max(counts), max(widths))
        padded[: rows.shape[0], : rows.shape[1]] = rows.detach()
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        distributed.all_gather(parts, padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def everywhere(self, mine: T) -> list[T]:
        """What each of them says, in order."""
        if self.size == 1:
            return [mine]
        said: list[T | None] = [None] * self.size
        distributed.all_gather_object(said, mine)
        return said  # type: ignore[return-value]  # all of them have spoken

    def any(self, mine: bool) -> bool:
        """Whether one of them says yes."""
        return any(self.everywhere(mine))

    def add_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum gradients over the processes, in place. A parameter that nobody has a gradient of stays without."""
        if self.size == 1:
            return
        learning = [p for p in parameters if p.requires_grad]
        known = self.everywhere([p.grad is not None for p in learning])
        for p, flags in zip(learning, zip(*known, strict=True), strict=True):
            if any(flags):
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad.contiguous()
                distributed.all_reduce(p.grad)

    def wait(self) -> None:
        """Wait until all have come here."""
        if self.size > 1:
            distributed.barrier()

    @contextmanager
    def leader_first(self) -> Iterator[None]:
        """The leader runs the block before the others do: what it makes on disk, they find."""
        if not self.leads:
            self.wait()
        yield
        if self.leads:
            self.wait()


ALONE = Processes()


def by_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


@contextmanager
def joined() -> Iterator[Processes]:
    """Work together with the processes that torchrun started beside this one, for the length of a with block."""
    if not by_torchrun() or int(os.environ["WORLD_SIZE"]) == 1:
        yield ALONE
        return
    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.is_available():
        torch.cuda.set_device(local % torch.cuda.device_count())
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // here))
    has_own_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= here
    distributed.init_process_group("nccl" if has_own_gpu else "gloo", timeout=_PATIENCE)
    try:
        yield Processes(distributed.get_rank(), distributed.get_world_size(), here)
    except RuntimeError as error:
        if "gloo" in str(error) or isinstance(error, distributed.DistBackendError):
            raise Interrupted("another process of this training has gone; the same command goes on with it") from None
        raise
    finally:
        distributed.destroy_process_group()
