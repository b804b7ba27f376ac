"""Export of a student: as an ONNX file, or as a program of ``torch.export``.

What is written is loaded again and compared with torch before it gets its name, so that no file is left that detects
something else.

In eight bits: static quantization by ONNX Runtime, calibrated on photos. Activations are unsigned bytes, weights signed
ones with a scale per channel, in QDQ form: pairs of QuantizeLinear and DequantizeLinear around operators that other
runtimes read, too (Jacob et al., CVPR 2018).
"""

import json
import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from tag2box import errors, io
from tag2box.annotations import Photo
from tag2box.inference.predict import Predict
from tag2box.ops.boxes import class_nms
from tag2box.progress import Progress, silent
from tag2box.student.network import CANDIDATES, StudentDetector, StudentModule
from tag2box.student.onnx_graph import (
    CELLS,
    INPUT,
    OPSET,
    ExportedStudent,
    ExportOutputs,
    InputCanvas,
    count_cells,
    exported_program,
    need_onnx,
    onnx_model,
    quiet,
    with_nms,
)
from tag2box.training.feature_cache import weights_digest

if TYPE_CHECKING:
    from onnx import ModelProto

TOLERANCE = 1e-4
"""Largest difference from torch, of scores and of boxes relative to the side of the input."""
_SAME_ROWS = 0.98  # of detections: rounding of an IoU at the threshold may let another box pass


# ---------------------------------------------------------------- what is written about it


def metadata(
    student: StudentDetector, canvas: InputCanvas, outputs: ExportOutputs, *, precision: str = "fp32"
) -> dict[str, str]:
    """What a program needs to know to run an export: texts, JSON where they are more than a word."""
    network, predict = student.network, student.inference.predict
    assert isinstance(network, StudentModule)
    how = network.backbone.preprocess
    known: dict[str, object] = {
        "classes": student.classes,
        "outputs": outputs,
        "size": canvas.size,
        "short": canvas.short,
        "long_max": canvas.long_max,
        "multiple": canvas.multiple,
        "least_side": canvas.least_side,
        "colour": canvas.colour,
        "strides": network.strides,
        "preprocess": {"order": how.order, "scale": how.scale, "mean": how.mean, "std": how.std, "inside": True},
        "nms_iou": predict.nms_iou,
        "score_threshold": predict.score_threshold,
        "max_detections": predict.max_detections,
        "precision": precision,
        "opset": OPSET,
        "tag2box": version("tag2box"),
        "weights": weights_digest("student", [network]),
    }
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in known.items()}
    if outputs == "yolov8":  # as readers of YOLOv8 files expect them: Python literals
        texts |= {"names": repr(dict(enumerate(student.classes))), "task": "detect", "channels": "3"}
        texts |= {"stride": str(canvas.multiple), "batch": "1", "imgsz": repr(list(canvas.size or ()))}
    return texts


# ---------------------------------------------------------------- comparison with torch


@dataclass(frozen=True, slots=True)
class Difference:
    """Largest and mean difference of an export from torch: of scores, and of boxes relative to the input's side."""

    scores: float
    boxes: float
    mean_score: float = 0.0

    @property
    def is_small(self) -> bool:
        """Whether it is within ``TOLERANCE``; false for NaN."""
        return self.scores <= TOLERANCE and self.boxes <= TOLERANCE

    @classmethod
    def of(cls, found: Sequence[np.ndarray], wanted: Sequence[np.ndarray], side: int) -> "Difference":
        """Of boxes and scores, or of the rows of YOLOv8, which begin with four numbers of a box."""
        if len(wanted) == 1:
            found, wanted = (np.split(rows[0], [4], axis=1) for rows in (found, wanted))
        boxes, scores = (np.abs(own - true) for own, true in zip(found, wanted, strict=True))
        return cls(float(scores.max()), float(boxes.max()) / side, float(scores.mean()))


def compare_onnx(path: Path, module: ExportedStudent, canvas: InputCanvas, predict: Predict) -> Difference:
    """The largest difference of an ONNX file from torch on made-up photos; raises if its NMS is not torch's."""
    onnx = need_onnx()
    model = onnx.load(path)
    if module.outputs == "detections":  # one session for both, so that NMS is compared on equal scores
        names = {output.name for output in model.graph.output}
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in CELLS if name not in names)
    session = onnx_session(model.SerializeToString())
    least = canvas.least_side
    shapes = [(1, *canvas.size)] if canvas.size else [(1, 2 * least, least), (3, least, 2 * least)]
    found = []
    for seed, shape in enumerate([*shapes, shapes[0]]):
        pixels = module.example(shape, seed)
        outputs = session.run(None, {INPUT: pixels.numpy()})
        raw = outputs[3:] if module.outputs == "detections" else outputs
        found.append(Difference.of(raw, run_torch(module, pixels), max(shape[1:])))
        if module.outputs == "detections":
            _check_nms(path, outputs, predict)
    return max(found, key=lambda difference: max(difference.scores, difference.boxes))


def run_torch(module: nn.Module, pixels: Tensor) -> list[np.ndarray]:
    """The outputs of the network itself."""
    with torch.no_grad():
        outputs = module(pixels)
    return [output.numpy() for output in (outputs if isinstance(outputs, tuple) else (outputs,))]


def onnx_session(model: bytes | str, threads: int = 1) -> Any:
    """A session of ONNX Runtime, on CPUs, of a file or of its content."""
    need_onnx()
    runtime = import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    return runtime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _check_nms(path: Path, outputs: Sequence[np.ndarray], predict: Predict) -> None:
    """Raise unless the detections are those that ``suppress`` makes of the cells."""
    boxes, scores, labels, cell_boxes, cell_scores = (torch.from_numpy(output) for output in outputs)
    for photo in range(len(boxes)):
        wanted = suppress(cell_boxes[photo], cell_scores[photo], predict)
        own = zip(labels[photo].tolist(), scores[photo].tolist(), boxes[photo].tolist(), strict=True)
        rows = {(label, score, *box) for label, score, box in own if label >= 0}
        same = rows & {(label, score, *box) for box, score, label in zip(*(x.tolist() for x in wanted), strict=True)}
        if len(same) < _SAME_ROWS * max(len(rows), len(wanted[0])):
            raise errors.UserError(f"{path.name}: its NMS differs from torch's; please report it, nothing was written")


def suppress(
    boxes: Float[Tensor, "A 4"], scores: Float[Tensor, "A C"], predict: Predict
) -> tuple[Tensor, Tensor, Tensor]:
    """Boxes, scores and labels that remain of the cells of one photo: the NMS of an export, in torch."""
    best, rows = scores.topk(min(CANDIDATES, len(scores)), dim=0)  # (k, C)
    labels = torch.arange(scores.shape[1]).expand_as(rows).T.flatten()
    own, found = best.T.flatten(), boxes[rows.T.flatten()]
    is_kept = own > predict.score_threshold
    own, found, labels = own[is_kept], found[is_kept], labels[is_kept]
    kept = class_nms(found, own, labels, predict.nms_iou)[: predict.max_detections]
    return found[kept], own[kept], labels[kept]


# ---------------------------------------------------------------- files


def write_onnx(
    student: StudentDetector, out: Path, canvas: InputCanvas, outputs: ExportOutputs = "detections"
) -> Difference:
    """Write a student as an ONNX file, unless what is written differs from torch; returns how much it does."""
    module = ExportedStudent(student, outputs)
    model = onnx_model(exported_program(module, canvas), outputs)
    return save_onnx(model, student, out, canvas, module)


def save_onnx(
    model: "ModelProto",
    student: StudentDetector,
    out: Path,
    canvas: InputCanvas,
    module: ExportedStudent,
    *,
    precision: str = "fp32",
) -> Difference:
    """Write a graph with its NMS and metadata. One of another ``precision`` may differ from torch."""
    onnx, outputs, predict = need_onnx(), module.outputs, student.inference.predict
    if outputs == "detections":
        assert isinstance(module.network, StudentModule)
        cells = None if canvas.size is None else count_cells(canvas.size, module.network.strides)
        model = with_nms(model, predict, len(student.classes), cells)
    onnx.helper.set_model_props(model, metadata(student, canvas, outputs, precision=precision))
    model.producer_name, model.producer_version = "tag2box", version("tag2box")
    onnx.checker.check_model(model)
    with io.replacing(out) as temporary:
        temporary.write_bytes(model.SerializeToString())
        difference = compare_onnx(temporary, module, canvas, predict)
        if precision == "fp32" and not difference.is_small:
            raise _differs(out, difference)
    return difference


def write_program(
    student: StudentDetector, out: Path, canvas: InputCanvas, outputs: ExportOutputs = "raw"
) -> Difference:
    """Write a student as a program of ``torch.export``, unless what is written differs; there is no NMS in it."""
    module = ExportedStudent(student, outputs)
    program = exported_program(module, canvas)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it names the folders of this machine
    content = BytesIO()
    with quiet():
        torch.export.save(
            program, content, extra_files={"tag2box.json": json.dumps(metadata(student, canvas, outputs))}
        )
    with io.replacing(out) as temporary:
        temporary.write_bytes(content.getvalue())
        with quiet():
            loaded = torch.export.load(BytesIO(temporary.read_bytes())).module()
        shape = (1, *(canvas.size or (canvas.least_side, 2 * canvas.least_side)))
        pixels = module.example(shape)
        difference = Difference.of(run_torch(loaded, pixels), run_torch(module, pixels), max(shape[1:]))
        if not difference.is_small:
            raise _differs(out, difference)
    return difference


def _differs(out: Path, difference: Difference) -> errors.UserError:
    return errors.UserError(
        f"{out}: differs from torch, scores by {difference.scores:.1g}, boxes by {difference.boxes:.1g} of the side, "
        f"more than {TOLERANCE:g}; nothing was written, please report it"
    )


# ---------------------------------------------------------------- eight bits

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
