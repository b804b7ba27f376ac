"""On what, and in which way, a step is computed. None of it changes what is computed, but for rounding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from tag2box.engine.passes import Precision
from tag2box.engine.step import Memory
from tag2box.errors import UserError


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
