"""A student in eight bits: static quantization of its ONNX graph by ONNX Runtime, calibrated on photos.

Activations are unsigned bytes, weights signed ones with a scale per channel, in QDQ form: pairs of QuantizeLinear and
DequantizeLinear around operators that other runtimes read, too (Jacob et al., CVPR 2018).
"""

import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from tag2box import errors
from tag2box.annotations import Photo
from tag2box.progress import Progress, silent
from tag2box.student.onnx_export import Difference, save_onnx
from tag2box.student.onnx_graph import (
    INPUT,
    ExportedStudent,
    ExportOutputs,
    InputCanvas,
    exported_program,
    need_onnx,
    onnx_model,
)
from tag2box.student.student_detector import StudentDetector

if TYPE_CHECKING:
    from onnx import ModelProto

MOST_PHOTOS = 64
"""Photos that ranges of activations are read from; more change them little."""
_OPERATORS = ["Conv", "Clip", "Add", "Resize"]


def write_int8(
    student: StudentDetector,
    out: Path,
    canvas: InputCanvas,
    photos: Sequence[Photo],
    outputs: ExportOutputs = "detections",
    *,
    progress: Progress = silent,
) -> Difference:
    """Write a student as an ONNX file in eight bits; returns how much it differs from torch on made-up pictures.

    Args:
        photos: ranges of activations are those on these photos, or on ``MOST_PHOTOS`` spread over them.
    """
    if not photos:
        raise errors.UserError("--calibrate: no photos given; name some of those that the student was trained on")
    chosen = photos[:: -(-len(photos) // MOST_PHOTOS)]
    module = ExportedStudent(student, outputs)
    model = onnx_model(exported_program(module, canvas), outputs)
    small = quantized(model, canvas, chosen, is_unit=outputs == "yolov8", progress=progress)
    return save_onnx(small, student, out, canvas, module, precision="int8")


def quantized(
    model: "ModelProto", canvas: InputCanvas, photos: Sequence[Photo], *, is_unit: bool, progress: Progress = silent
) -> "ModelProto":
    """A graph whose convolutions compute in eight bits, without NMS.

    What no convolution follows stays as it is: the last ones, and the boxes and scores behind them, which a byte would
    round to whole cells.

    Args:
        is_unit: the input is 0 .. 1 instead of 0 .. 255.
    """
    onnx = need_onnx()
    tools, shapes = (import_module(f"onnxruntime.quantization{part}") for part in ("", ".shape_inference"))
    with tempfile.TemporaryDirectory() as folder, progress("calibrating", len(photos)) as bar, _quiet():
        before, typed, after = (Path(folder) / f"{name}.onnx" for name in ("before", "typed", "after"))
        onnx.save(model, before)
        shapes.quant_pre_process(before, typed, skip_optimization=True, skip_symbolic_shape=True)
        named = onnx.load(typed)

        class Pictures(tools.CalibrationDataReader):  # type: ignore[name-defined,misc]
            """The photos, one at a time."""

            left = iter(photos)

            def get_next(self) -> dict[str, object] | None:
                """The next input; None at the end."""
                photo = next(self.left, None)
                if photo is None:
                    return None
                bar.advance()
                pixels = canvas.place(photo)[None]
                return {INPUT: (pixels / 255).astype("float32") if is_unit else pixels}

        tools.quantize_static(
            typed,
            after,
            Pictures(),
            quant_format=tools.QuantFormat.QDQ,
            op_types_to_quantize=_OPERATORS,
            nodes_to_exclude=sorted(last_nodes(named)),
            activation_type=tools.QuantType.QUInt8,
            weight_type=tools.QuantType.QInt8,
            per_channel=True,
            reduce_range=True,  # seven bits of weights: sums of pairs fit 16 bits on processors without VNNI
        )
        small: ModelProto = onnx.load(after)
    return small


def last_nodes(model: "ModelProto") -> set[str]:
    """Names of the nodes whose outputs reach no convolution."""
    wanted: set[str] = set()  # tensors that a convolution needs
    last = set()
    for node in reversed(model.graph.node):  # consumers come before producers
        if wanted.isdisjoint(node.output):
            last.add(node.name)
        if node.op_type == "Conv" or node.name not in last:
            wanted.update(node.input)
    return last


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep advice about preparing the model, which it is, from the terminal."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
