"""Compute settings (memory, precision, device) and the distributed context: rank, world size, collectives.

A single process needs no torchrun and exchanges nothing. Under torchrun the photos of a batch are sharded in order, so
that what the ranks hold, concatenated by rank, is in the order of the photos.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, distributed, nn

from tag2box.errors import Interrupted, UserError
from tag2box.parallel import set_threads

Memory = Literal["plain", "exact"]
Precision = Literal["fp32", "bf16", "fp16"]
T = TypeVar("T")
_TIMEOUT = timedelta(days=2)  # ranks wait while rank 0 builds proposals and caches; torchrun ends them if it dies


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Memory, precision and device of a training step. The exemplars S_c span the whole batch in every mode."""

    memory: Memory | None = None
    """``plain`` stores the autograd graph of the whole batch; ``exact`` recomputes photo by photo (GradCache).

    ``exact`` needs the memory of one photo and about a third more time. Default: ``plain`` if RoI maps are cached,
    ``exact`` if the trunk runs at every step.
    """
    precision: Precision = "fp32"
    """Autocast precision of the network. Softmaxes, logarithms and sums of losses stay in fp32; fp16 needs a GPU."""
    device: Literal["cpu", "cuda"] | None = None
    """Device to compute on; default: a GPU if there is one."""

    def memory_for(self, *, has_cached_maps: bool) -> Memory:
        """The memory mode, with the default resolved."""
        return self.memory or ("plain" if has_cached_maps else "exact")

    def torch_device(self) -> torch.device:
        """The device; raises if it cannot do what the settings require."""
        has_gpu = torch.cuda.is_available()
        if self.device == "cuda" and not has_gpu:
            raise UserError("compute.device = cuda: torch sees no GPU here; set it to cpu, or install torch with CUDA")
        device = torch.device("cuda" if has_gpu and self.device != "cpu" else "cpu")
        if self.precision == "fp16" and device.type == "cpu":
            raise UserError("compute.precision = fp16: needs a GPU; on a CPU take bf16 or fp32")
        if self.precision == "bf16" and device.type == "cpu" and not has_bf16():
            raise UserError("compute.precision = bf16: this processor has no bf16 instructions; set it to fp32")
        return device


def has_bf16() -> bool:
    """Whether this CPU has bf16 instructions; without them bf16 is hundreds of times slower than fp32."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


@dataclass(frozen=True, slots=True)
class DistContext:
    """Rank and world size of this process, and the collectives used in training."""

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1  # ranks on this machine

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only one that writes files."""
        return self.rank == 0

    def shard(self, count: int) -> range:
        """The part of ``count`` consecutive items that belongs to this rank."""
        return range(count * self.rank // self.world_size, count * (self.rank + 1) // self.world_size)

    def all_gather(self, rows: Float[Tensor, "r w"]) -> Float[Tensor, "R w"]:
        """The rows of all ranks in order, without a graph; a rank may have none."""
        if self.world_size == 1:
            return rows.detach()
        shapes = [torch.zeros(2, dtype=torch.long, device=rows.device) for _ in range(self.world_size)]
        distributed.all_gather(shapes, torch.tensor(rows.shape, device=rows.device))
        counts, widths = zip(*(shape.tolist() for shape in shapes), strict=True)
        padded = rows.new_zeros(max(counts), max(widths))
        padded[: rows.shape[0], : rows.shape[1]] = rows.detach()
        parts = [torch.empty_like(padded) for _ in range(self.world_size)]
        distributed.all_gather(parts, padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def all_gather_object(self, mine: T) -> list[T]:
        """The object of every rank, in order."""
        if self.world_size == 1:
            return [mine]
        gathered: list[T | None] = [None] * self.world_size
        distributed.all_gather_object(gathered, mine)
        return gathered  # type: ignore[return-value]  # every rank has sent its own

    def any(self, mine: bool) -> bool:
        """Whether the flag is set on any rank."""
        return any(self.all_gather_object(mine))

    def all_reduce_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sum gradients over the ranks, in place. A parameter without a gradient on every rank stays without."""
        if self.world_size == 1:
            return
        trainable = [p for p in parameters if p.requires_grad]
        has_grad = self.all_gather_object([p.grad is not None for p in trainable])
        for p, flags in zip(trainable, zip(*has_grad, strict=True), strict=True):
            if any(flags):
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad.contiguous()
                distributed.all_reduce(p.grad)

    def barrier(self) -> None:
        """Wait until all ranks have arrived here."""
        if self.world_size > 1:
            distributed.barrier()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the block on rank 0 before the other ranks, which then find its files on disk."""
        if not self.is_main:
            self.barrier()
        yield
        if self.is_main:
            self.barrier()


SINGLE_PROCESS = DistContext()


def is_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


@contextmanager
def init_distributed() -> Iterator[DistContext]:
    """The distributed context of torchrun (gloo, or nccl with a GPU per rank), destroyed at the end of the block."""
    if not is_torchrun() or int(os.environ["WORLD_SIZE"]) == 1:
        yield SINGLE_PROCESS
        return
    local_rank, local_world_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    else:
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        set_threads(max(1, cores // local_world_size))
    has_own_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= local_world_size
    distributed.init_process_group("nccl" if has_own_gpu else "gloo", timeout=_TIMEOUT)
    try:
        yield DistContext(distributed.get_rank(), distributed.get_world_size(), local_world_size)
    except RuntimeError as error:
        if "gloo" in str(error) or isinstance(error, distributed.DistBackendError):
            raise Interrupted("another process of this training ended; rerun the same command to resume") from None
        raise
    finally:
        distributed.destroy_process_group()
