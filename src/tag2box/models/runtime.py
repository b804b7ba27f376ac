"""How networks run: precision (autocast), and the engine of frozen networks (torch or OpenVINO).

A ``Backbone`` has a ``Runtime``, which applies to passes without gradients: feature cache, class maps, detection.
Training uses ``autocast`` alone.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tag2box.errors import UserError

Precision = Literal["fp32", "bf16", "fp16"]
Engine = Literal["torch", "openvino"]
HALF_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtype of each precision below fp32."""
STORED_TYPES = {**HALF_TYPES, "fp32": torch.float32}
"""The dtype of each precision of the feature cache."""
_OPENVINO_PRECISION = {"fp32": "f32", "bf16": "bf16"}


def has_bf16() -> bool:
    """Whether this CPU has bf16 instructions; without them bf16 is hundreds of times slower than fp32."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def has_openvino() -> bool:
    """Whether OpenVINO is installed."""
    try:
        return bool(version("openvino"))
    except PackageNotFoundError:
        return False


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Half precision inside the block; nothing changes for fp32."""
    dtype = HALF_TYPES.get(precision)
    return torch.autocast(device.type, dtype) if dtype else nullcontext()


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """Precision and engine of a network without gradients, and the precision in which its features are kept."""

    precision: Precision = "fp32"
    engine: Engine = "torch"
    stored: Precision = "fp16"

    @contextmanager
    def frozen(self, device: torch.device) -> Iterator[None]:
        """No gradients, and the runtime's precision and engine, inside the block."""
        token = _ENGINE.set(self if self.engine == "openvino" else None)
        try:
            with torch.no_grad(), autocast(device, self.precision):
                yield
        finally:
            _ENGINE.reset(token)

    def rounded(self, features: Tensor) -> Tensor:
        """Features as a cache returns them: rounded to its precision, contiguous, in fp32."""
        return features.to(STORED_TYPES[self.stored]).contiguous().float()

    def key(self) -> str:
        """What features depend on besides the network: part of the keys of caches. Empty for the defaults."""
        made = "" if self.precision == "fp32" else f" {self.precision}"
        made += "" if self.engine == "torch" else f" openvino {version('openvino')}"
        return made if self.stored == "fp16" else f"{made} stored {self.stored}"


DEFAULT_RUNTIME = Runtime()

# ---------------------------------------------------------------- engines

_ENGINE: ContextVar[Runtime | None] = ContextVar("engine", default=None)
_COMPILED: WeakKeyDictionary[nn.Module, dict[tuple[str, str, int], "_Compiled"]] = WeakKeyDictionary()
_LOCK = threading.Lock()


def run(
    owner: nn.Module, name: str, part: Callable[[Tensor], Tensor], x: Float[Tensor, "N c H W"]
) -> Float[Tensor, "N d h w"]:
    """A part of a network on maps: ``part(x)``, by torch or by the engine of the surrounding ``Runtime.frozen`` block.

    Args:
        owner: the network; it is compiled again if its weights have changed.
        name: of the part, unique in its network.
    """
    runtime = _ENGINE.get()
    if runtime is None or not len(x):
        return part(x)
    key = (name, runtime.precision, torch.get_num_threads())
    with _LOCK:
        compiled = _COMPILED.setdefault(owner, {}).get(key)
        if compiled is None or compiled.weights != _weights(owner):
            compiled = _Compiled(owner, part, x, runtime.precision)
            _COMPILED[owner][key] = compiled
        return compiled(x)


def _weights(owner: nn.Module) -> tuple[tuple[int, int], ...]:
    """Address and version of each weight: they change if any weight does."""
    return tuple((p.data_ptr(), p._version) for p in owner.parameters())


class _Compiled:
    """A part of a network, compiled by OpenVINO for maps of any number and size."""

    def __init__(self, owner: nn.Module, part: Callable[[Tensor], Tensor], x: Tensor, precision: str) -> None:
        openvino, core = load_openvino(), _openvino_core()
        with torch.autocast(x.device.type, enabled=False), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tracing, which the converter uses, is deprecated
            model = openvino.convert_model(
                _Part(owner, part), example_input=x.float(), input=openvino.PartialShape([-1, x.shape[1], -1, -1])
            )
        settings = {
            "INFERENCE_PRECISION_HINT": _OPENVINO_PRECISION[precision],
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
            "NUM_STREAMS": 1,
        }
        self.weights = _weights(owner)
        self.request = core.compile_model(model, "CPU", settings).create_infer_request()

    def __call__(self, x: Tensor) -> Tensor:
        result = self.request.infer([x.float().contiguous().numpy()], share_inputs=True)
        return torch.from_numpy(result[0])  # a copy: the request is used again


class _Part(nn.Module):
    """A part of a network as a module, as the converter expects it."""

    def __init__(self, owner: nn.Module, part: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.owner, self.part = owner, part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


def load_openvino() -> Any:
    """The package; raises if it is not installed."""
    try:
        return import_module("openvino")
    except ImportError:
        raise UserError(
            "compute.engine = openvino: OpenVINO is not installed; pip install tag2box[openvino], or set it to torch"
        ) from None


@cache
def _openvino_core() -> Any:
    """OpenVINO's core, one for the whole life of the process.

    Its CPU plugin gives the thread that loads it a signal stack. Released in another thread, the plugin frees that
    memory but leaves it in use, and the next signal, such as Ctrl-C, ends the process with a segmentation fault.
    """
    return load_openvino().Core()


# ---------------------------------------------------------------- bf16 on CPUs


def depthwise_conv(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """A depthwise convolution; if it is trained in bf16 on a CPU, its gradients are computed in fp32.

    oneDNN has no fast bf16 kernel for them: with it, a training step of depthwise networks is slower than in fp32.
    """
    is_half = x.device.type == "cpu" and torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
    if not is_half:
        plain: Tensor = conv._conv_forward(x, conv.weight, conv.bias)
        return plain
    made: Tensor = _DepthwiseConv.apply(x, conv.weight, conv.bias, conv.stride, conv.padding)  # type: ignore[no-untyped-call]
    return made


class _DepthwiseConv(torch.autograd.Function):
    """Forward in bf16, backward in fp32."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: tuple[int, ...], padding: tuple[int, ...]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride, ctx.padding, ctx.has_bias = stride, padding, bias is not None
        half = (None if one is None else one.bfloat16() for one in (x, weight, bias))
        with torch.autocast("cpu", enabled=False):
            made: Tensor = torch.conv2d(*half, stride, padding, 1, len(weight))  # type: ignore[call-overload]
            return made

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = torch.ops.aten.convolution_backward(
            grads[0].float(),
            x.float(),
            weight.float(),
            [len(weight)],
            ctx.stride,
            ctx.padding,
            (1, 1),
            False,
            (0, 0),
            len(weight),
            [ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.has_bias and ctx.needs_input_grad[2]],
        )
        return None if of_x is None else of_x.to(x.dtype), of_weight, of_bias, None, None
