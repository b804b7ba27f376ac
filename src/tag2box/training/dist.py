"""On what, and in which way, a step is computed. None of it changes what is computed, but for rounding."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, distributed, nn

from tag2box.errors import Interrupted, UserError

Memory = Literal["plain", "exact"]
Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How the mathematics are run. S_c spans the batch whatever is chosen here."""

    memory: Memory | None = None
    """``plain`` keeps the graph of the whole batch; ``exact`` runs photo by photo, in the memory of one.

    ``exact`` takes about a third more time. By default it is taken where the trunk runs at every step, and ``plain``
    where maps of proposals were kept.
    """
    precision: Precision = "fp32"
    """What the network multiplies in. Softmaxes, logarithms and sums of the losses stay in fp32; fp16 needs a GPU."""
    device: Literal["cpu", "cuda"] | None = None
    """Where to compute; by default a GPU where there is one."""

    def memory_for(self, *, keeps_maps: bool) -> Memory:
        """What is meant by the default."""
        return self.memory or ("plain" if keeps_maps else "exact")

    def place(self) -> torch.device:
        """The device; raises where it cannot do what is asked of it."""
        has_gpu = torch.cuda.is_available()
        if self.device == "cuda" and not has_gpu:
            raise UserError("compute.device = cuda: torch sees no GPU here; set it to cpu, or install torch with CUDA")
        place = torch.device("cuda" if has_gpu and self.device != "cpu" else "cpu")
        if self.precision == "fp16" and place.type == "cpu":
            raise UserError("compute.precision = fp16: needs a GPU; on a CPU take bf16 or fp32")
        if self.precision == "bf16" and place.type == "cpu" and not has_bf16():
            raise UserError("compute.precision = bf16: this processor has no bf16 instructions; set it to fp32")
        return place


def has_bf16() -> bool:
    """Whether this CPU multiplies in bf16; one that does not takes hundreds of times as long as in fp32."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


T = TypeVar("T")
_TIMEOUT = timedelta(days=2)  # the first makes proposals and maps while the others wait; torchrun ends them if it dies


@dataclass(frozen=True, slots=True)
class DistContext:
    """Who this process is among those that work together; alone, nothing is exchanged."""

    rank: int = 0
    size: int = 1
    here: int = 1  # how many of them share this machine

    @property
    def is_main(self) -> bool:
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

    def all_gather_object(self, mine: T) -> list[T]:
        """What each of them says, in order."""
        if self.size == 1:
            return [mine]
        said: list[T | None] = [None] * self.size
        distributed.all_gather_object(said, mine)
        return said  # type: ignore[return-value]  # all of them have spoken

    def any(self, mine: bool) -> bool:
        """Whether one of them says yes."""
        return any(self.all_gather_object(mine))

    def all_reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum gradients over the processes, in place. A parameter that nobody has a gradient of stays without."""
        if self.size == 1:
            return
        learning = [p for p in parameters if p.requires_grad]
        known = self.all_gather_object([p.grad is not None for p in learning])
        for p, flags in zip(learning, zip(*known, strict=True), strict=True):
            if any(flags):
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad.contiguous()
                distributed.all_reduce(p.grad)

    def wait(self) -> None:
        """Wait until all have come here."""
        if self.size > 1:
            distributed.barrier()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The leader runs the block before the others do: what it makes on disk, they find."""
        if not self.is_main:
            self.wait()
        yield
        if self.is_main:
            self.wait()


SINGLE_PROCESS = DistContext()


def is_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


@contextmanager
def init_distributed() -> Iterator[DistContext]:
    """Work together with the processes that torchrun started beside this one, for the length of a with block."""
    if not is_torchrun() or int(os.environ["WORLD_SIZE"]) == 1:
        yield SINGLE_PROCESS
        return
    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.is_available():
        torch.cuda.set_device(local % torch.cuda.device_count())
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // here))
    has_own_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= here
    distributed.init_process_group("nccl" if has_own_gpu else "gloo", timeout=_TIMEOUT)
    try:
        yield DistContext(distributed.get_rank(), distributed.get_world_size(), here)
    except RuntimeError as error:
        if "gloo" in str(error) or isinstance(error, distributed.DistBackendError):
            raise Interrupted("another process of this training has gone; the same command goes on with it") from None
        raise
    finally:
        distributed.destroy_process_group()
