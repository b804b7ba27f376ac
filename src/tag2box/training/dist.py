"""Compute settings (memory, precision, device) and the distributed context: rank, world size, collectives.

A single process needs no torchrun and exchanges nothing. Under torchrun the photos of a batch are sharded in order, so
that what the ranks hold, concatenated by rank, is in the order of the photos.
"""

import math
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, distributed, nn

from tag2box import io
from tag2box.errors import Interrupted, UserError
from tag2box.models.backbone import BackboneSettings
from tag2box.models.runtime import Engine, Precision, Runtime, autocast, has_bf16, has_openvino, load_openvino
from tag2box.models.weights.weight_cache import weights_folder
from tag2box.parallel import set_threads
from tag2box.types import Proposals

Memory = Literal["plain", "exact"]
Parts = Mapping[str, Callable[[], object]]
"""Parts of a network by name: calls whose time is measured."""
T = TypeVar("T")
_CHOICES = "precision.json"  # beside the weight cache
_GAIN, _NOISE = 0.9, 1.1  # of the time in fp32: most of all parts, most of each
_TIMEOUT = timedelta(days=2)  # ranks wait while rank 0 builds proposals and caches; torchrun ends them if it dies


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Memory, precision and device of a training step. The exemplars S_c span the whole batch in every mode."""

    memory: Memory | None = None
    """``plain`` stores the autograd graph of the whole batch; ``exact`` recomputes photo by photo (GradCache).

    ``exact`` needs the memory of one photo and about a third more time. Default: ``plain`` if RoI maps are cached,
    ``exact`` if the trunk runs at every step.
    """
    precision: Precision | Literal["auto"] = "fp32"
    """Autocast precision of the network: training, adaptation, feature cache, class maps, detection.

    Softmaxes, logarithms and sums of losses stay in fp32; fp16 needs a GPU. ``auto`` is settled by a short measurement
    when a run starts, and recorded: bf16 where it is faster than fp32. It is not the default because runs of different
    machines would then differ.
    """
    engine: Engine = "torch"
    """What runs the frozen network of feature cache, class maps and detection: ``torch``, or ``openvino`` (lite0, CPU).

    Features differ in rounding, so caches of each are separate. Needs ``pip install tag2box[openvino]``.
    """
    cache_precision: Precision = "fp16"
    """Precision of cached features; detection rounds features alike. bf16 has more range and fewer digits than fp16."""
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
        if self.engine == "openvino":
            load_openvino()
            if device.type != "cpu":
                raise UserError("compute.engine = openvino: runs on CPUs; set compute.device to cpu, or it to torch")
        return device

    def runtime(self) -> Runtime:
        """The runtime of frozen networks; ``precision`` is settled."""
        if self.precision == "auto":
            raise UserError("compute.precision = auto: is settled when a run starts; set it to fp32 or bf16")
        return Runtime(precision=self.precision, engine=self.engine, stored=self.cache_precision)

    def usable(self) -> Self:
        """The settings with what this machine lacks replaced, with a warning: for detection with a trained run."""
        made = self
        if self.precision == "fp16" or (self.precision == "bf16" and not has_bf16()):
            problem = f"compute.precision = {self.precision} needs hardware that is missing here; fp32 is used"
            warnings.warn(f"{problem}, scores differ slightly", stacklevel=2)
            made = replace(made, precision="fp32")
        if self.engine == "openvino" and not has_openvino():
            warnings.warn(
                "compute.engine = openvino: not installed; torch is used, scores differ slightly; pip install "
                "tag2box[openvino]",
                stacklevel=2,
            )
            made = replace(made, engine="torch")
        return made


# ---------------------------------------------------------------- the measured precision


@dataclass(frozen=True, slots=True)
class PrecisionChoice:
    """The precision that ``auto`` takes on this machine, and why."""

    precision: Literal["fp32", "bf16"]
    reason: str


def choose_precision(name: str, build: Callable[[], Parts], *, store: bool = True) -> PrecisionChoice:
    """bf16 if it is faster than fp32 here: CPU seconds of some parts of a network, alternating, medians of three.

    It is taken if all parts together need at most nine tenths of the time, and none needs more than in fp32 (a tenth is
    allowed for noise). The choice is remembered for this processor, its threads and this version of torch.

    Args:
        name: of the network.
        build: makes the parts; called only if there is something to measure.
        store: remember the choice.
    """
    if not has_bf16():
        return PrecisionChoice("fp32", "this processor has no bf16 instructions")
    path = weights_folder().parent / _CHOICES
    key = f"{name} | {processor_name()} | {torch.get_num_threads()} threads | torch {torch.__version__}"
    known = _read_choices(path)
    if key not in known:
        known[key] = asdict(choice_of(_measured(build())))
        if store:
            with suppress(OSError, UserError):
                io.write_json(path, known)
    return PrecisionChoice(**known[key])


def choice_of(ratios: Mapping[str, tuple[float, float]]) -> PrecisionChoice:
    """The choice from the seconds of each part in fp32 and in bf16.

    >>> choice_of({"trunk": (2.0, 1.0), "neck": (1.0, 0.9)})
    PrecisionChoice(precision='bf16', reason='times as fast as fp32: trunk 2.0, neck 1.1')
    """
    total = [sum(seconds) for seconds in zip(*ratios.values(), strict=True)]
    slowest = max((half / single for single, half in ratios.values()), default=math.inf)
    pays = bool(total) and total[1] <= _GAIN * total[0] and slowest <= _NOISE
    parts = ", ".join(f"{name} {single / half:.1f}" for name, (single, half) in ratios.items())
    return PrecisionChoice("bf16" if pays else "fp32", f"times as fast as fp32: {parts}")


def _measured(parts: Parts) -> dict[str, tuple[float, float]]:
    """CPU seconds of each part in fp32 and in bf16."""
    found = {}
    for name, part in parts.items():
        seconds: dict[str, list[float]] = {"fp32": [], "bf16": []}
        for number in range(4):  # the first warms up
            for precision, own in seconds.items():
                begin = time.process_time()
                with autocast(torch.device("cpu"), precision):
                    part()
                if number:
                    own.append(time.process_time() - begin)
        found[name] = (sorted(seconds["fp32"])[1], sorted(seconds["bf16"])[1])
    return found


def _read_choices(path: Path) -> dict[str, dict[str, Any]]:
    with suppress(UserError, OSError):
        found = io.read_json(path, "measured precisions")
        if isinstance(found, dict):
            return {
                key: value
                for key, value in found.items()
                if isinstance(value, dict)
                and value.keys() == {"precision", "reason"}
                and value["precision"] in {"fp32", "bf16"}
            }
    return {}


def backbone_parts(settings: BackboneSettings) -> Parts:
    """Trunk, RoI maps and neck of a backbone; the neck with its gradients if it is trained."""
    backbone = settings.build(pretrained=False)
    pixels, side = torch.rand(1, 3, 256, 256) * 255, torch.linspace(32, 128, 32)
    boxes = torch.stack([side, side, 2 * side, 2 * side], dim=1)
    with torch.no_grad():
        trunk = backbone.trunk(pixels)
        maps = backbone.roi_maps(trunk, Proposals(boxes, (len(boxes),)))

    def run_frozen(part: Callable[[], Tensor]) -> Callable[[], object]:
        return torch.no_grad()(part)

    def run_neck() -> None:
        made = backbone.neck(maps)
        if made.requires_grad:
            made.float().square().mean().backward()

    return {
        "trunk": run_frozen(lambda: backbone.trunk(pixels)),
        "RoI maps": run_frozen(lambda: backbone.roi_maps(trunk, Proposals(boxes, (len(boxes),)))),
        "neck": run_neck,
    }


def processor_name() -> str:
    """The model of the processor."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return platform.processor()


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
    # The first optimizer step imports it. If a process group exists then, it keeps a reference to the group, whose
    # threads are still there when the interpreter ends, and may abort the process.
    import_module("torch._dynamo")
    distributed.init_process_group("nccl" if has_own_gpu else "gloo", timeout=_TIMEOUT)
    try:
        yield DistContext(distributed.get_rank(), distributed.get_world_size(), local_world_size)
    except RuntimeError as error:
        if "gloo" in str(error) or isinstance(error, distributed.DistBackendError):
            raise Interrupted("another process of this training ended; rerun the same command to resume") from None
        raise
    finally:
        distributed.destroy_process_group()
