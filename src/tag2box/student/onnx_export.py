"""Export of a student: as an ONNX file, or as a program of ``torch.export``.

The preprocessing of the weights is part of the graph: pixels go in as they are, letterboxed by the caller
(``Canvas``). ``detections`` also has class-wise NMS in it, as ``StudentDetector`` does it. What is written is loaded
again and compared with torch before it gets its name, so that no file is left that detects something else.
"""

import copy
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Shaped, UInt8
from torch import Tensor, nn
from torch.nn.functional import interpolate

from tag2box import errors, images, io
from tag2box.annotations import Photo
from tag2box.inference.predict import Inference, Predict
from tag2box.ops.boxes import class_nms
from tag2box.student.network import StudentModule, decode
from tag2box.student.student_detector import CANDIDATES, StudentDetector
from tag2box.training.feature_cache import weights_digest

if TYPE_CHECKING:
    import onnx

OPSET = 18
"""The first opset that torch's exporter writes without conversion; ONNX Runtime reads it since 1.14, OpenVINO since 2023."""
TOLERANCE = 1e-4
"""Largest difference from torch, of scores and of boxes relative to the side of the input."""
INPUT = "images"
Outputs = Literal["detections", "raw", "yolov8"]
OUTPUT_NAMES: Mapping[Outputs, tuple[str, ...]] = {
    "detections": ("boxes", "scores", "labels"),
    "raw": ("boxes", "scores"),
    "yolov8": ("output0",),
}
_CELLS = ("cell_boxes", "cell_scores")  # what NMS reads, where it is part of the graph
_SAME_ROWS = 0.98  # of detections: rounding of an IoU at the threshold may let another box pass
_LEAST_SIDE, _MOST_SIDE, _MOST_PHOTOS = 128, 4096, 1024  # of an input that is not fixed; 128 pixels have 336 cells
_USUAL_ASPECT = 4 / 3


# ---------------------------------------------------------------- what goes in


@dataclass(frozen=True, kw_only=True)
class Canvas:
    """How a photo is placed in the input: scaled, at the top left, with a neutral colour around it.

    The input has a fixed ``size`` (height, width), into which the photo is fitted; or any multiple of ``multiple``, for
    a photo whose short side is scaled to ``short``, and whose long one to at most ``long_max``.
    """

    size: tuple[int, int] | None
    short: int
    long_max: int
    multiple: int
    colour: tuple[int, int, int]

    def fitted(self, size: tuple[int, int]) -> tuple[int, int]:
        """Height and width to which a photo of a height and width is resized.

        >>> how = {"short": 320, "long_max": 512, "multiple": 32, "colour": (0, 0, 0)}
        >>> Canvas(size=(320, 320), **how).fitted((480, 640)), Canvas(size=None, **how).fitted((480, 640))
        ((240, 320), (320, 427))
        """
        if self.size is None:
            return images.resized(size, self.short, self.long_max)
        scale = min(self.size[0] / size[0], self.size[1] / size[1])
        return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))

    def room(self, fitted: tuple[int, int]) -> tuple[int, int]:
        """Height and width of the input for a photo that is resized to a height and width."""
        if self.size is not None:
            return self.size
        height, width = (max(_LEAST_SIDE, -(-side // self.multiple) * self.multiple) for side in fitted)
        return height, width

    def place(self, photo: Photo) -> UInt8[np.ndarray, "3 H W"]:
        """The input for a photo, decoded from its file."""
        fitted = self.fitted((photo.height, photo.width))
        decoded = images.load_image(photo, [images.View(min(fitted))])
        pixels = interpolate(decoded.pixels[None].float(), fitted, mode="bilinear", align_corners=False, antialias=True)
        room = torch.tensor(self.colour, dtype=torch.uint8).view(3, 1, 1).expand(3, *self.room(fitted)).clone()
        room[:, : fitted[0], : fitted[1]] = pixels[0].round().clamp(0, 255).byte()
        return room.numpy()


def canvas_of(student: StudentDetector, *, size: tuple[int, int] | None = None, is_dynamic: bool = False) -> Canvas:
    """The input of an export; without a size, a square for photos of 4:3 as the student sees them."""
    network = student.network
    assert isinstance(network, StudentModule)
    multiple, inference = network.strides[-1], student.inference
    neutral = [min(255, max(0, round(value))) for value in network.backbone.preprocess.neutral()]
    short = max(inference.scales)
    side = -(-_usual_side(inference, short) // multiple) * multiple
    fixed = None if is_dynamic else (size or (side, side))
    if fixed is not None and (min(fixed) < multiple or max(fixed) > _MOST_SIDE or any(s % multiple for s in fixed)):
        raise errors.UserError(
            f"--size {'x'.join(map(str, fixed))}: expected multiples of {multiple} up to {_MOST_SIDE}, such as {side}"
        )
    colour = (neutral[0], neutral[1], neutral[2])
    return Canvas(size=fixed, short=short, long_max=inference.long_max, multiple=multiple, colour=colour)


def _usual_side(inference: Inference, short: int) -> int:
    return max(images.resized((900, round(900 * _USUAL_ASPECT)), short, inference.long_max))


# ---------------------------------------------------------------- the graph


class ExportedStudent(nn.Module):
    """A network from pixels to boxes: what is exported, without NMS."""

    def __init__(self, student: StudentDetector, outputs: Outputs) -> None:
        super().__init__()
        self.network = copy.deepcopy(student.network).cpu().float().eval().requires_grad_(False)
        self.outputs = outputs

    def forward(self, images: Shaped[Tensor, "N 3 H W"]) -> tuple[Tensor, Tensor] | Tensor:
        """Boxes (xyxy, pixels of the input) and scores of all cells; for YOLOv8, rows of both from pixels 0 .. 1."""
        assert isinstance(self.network, StudentModule)
        pixels = images * 255.0 if self.outputs == "yolov8" else images.float()
        logits, boxes, _ = decode(self.network(pixels), self.network.strides)
        scores = logits.sigmoid()
        if self.outputs == "raw":
            return boxes, scores
        if self.outputs == "detections":
            across, down = boxes[..., 0::2].clamp(0, images.shape[3]), boxes[..., 1::2].clamp(0, images.shape[2])
            return torch.stack([across, down], dim=3).flatten(2), scores
        first, last = boxes[..., :2], boxes[..., 2:]
        return torch.cat([(first + last) / 2, last - first, scores], dim=2).transpose(1, 2)

    def example(self, shape: Sequence[int], seed: int = 0) -> Shaped[Tensor, "N 3 H W"]:
        """A made-up input: blurred blobs and noise, so that both smooth and fine maps are not constant."""
        rng = torch.Generator().manual_seed(seed)
        count, height, width = shape
        blobs = interpolate(torch.rand(count, 3, 5, 6, generator=rng), (height, width), mode="bicubic")
        pixels = (blobs * 0.8 + 0.2 * torch.rand(count, 3, height, width, generator=rng)).clamp(0, 1)
        return pixels if self.outputs == "yolov8" else (pixels * 255).round().byte()


def exported_program(module: ExportedStudent, canvas: Canvas) -> torch.export.ExportedProgram:
    """The graph of a network, for an input of a fixed size and one photo, or of any size and number."""
    if canvas.size is not None:
        with _quiet():
            return torch.export.export(module, (module.example((1, *canvas.size)),))
    dim, least, most = torch.export.Dim, _LEAST_SIDE // canvas.multiple, _MOST_SIDE // canvas.multiple
    sides = {axis: canvas.multiple * dim(name, min=least, max=most) for axis, name in ((2, "h"), (3, "w"))}
    shapes = {INPUT: {0: dim("photos", min=1, max=_MOST_PHOTOS), **sides}}
    example = module.example((2, 2 * _LEAST_SIDE, 2 * _LEAST_SIDE - canvas.multiple))
    with _quiet():
        return torch.export.export(module, (example,), dynamic_shapes=shapes)


def onnx_model(program: torch.export.ExportedProgram, outputs: Outputs) -> "onnx.ModelProto":
    """The graph in ONNX, without NMS."""
    onnx = need_onnx()
    names = _CELLS if outputs == "detections" else OUTPUT_NAMES[outputs]
    with _quiet():
        made = torch.onnx.export(
            program, dynamo=True, opset_version=OPSET, input_names=[INPUT], output_names=list(names), verbose=False
        )
    assert made is not None
    model: onnx.ModelProto = made.model_proto
    del model.graph.value_info[:]  # shapes of the inside, with the names of the exporter
    for own in (*model.graph.node, *model.graph.input, *model.graph.output, *model.graph.initializer, model.graph):
        del own.metadata_props[:]  # stack traces, which name the folders of this machine
    sides = zip(model.graph.input[0].type.tensor_type.shape.dim, ("photos", "", "height", "width"), strict=True)
    for dim, name in sides:
        if dim.dim_param:
            dim.dim_param = name
    return model


def with_nms(model: "onnx.ModelProto", predict: Predict, num_classes: int, cells: int | None) -> "onnx.ModelProto":
    """The graph with class-wise NMS behind it: the best ``predict.max_detections`` boxes per photo, best first.

    As in ``StudentDetector``, the best cells of each class compete. Rows behind the last detection have score 0 and
    class -1.

    Args:
        cells: number of cells; None if the input has no fixed size, and so at least ``CANDIDATES``.
    """
    onnx = need_onnx()
    k = CANDIDATES if cells is None else min(CANDIDATES, cells)
    rows = min(predict.max_detections, k * num_classes)
    tail = onnx.parser.parse_model(f"""
        <ir_version: {model.ir_version}, opset_import: ["" : {OPSET}]>
        nms (float[photos, cells, 4] {_CELLS[0]}, float[photos, cells, {num_classes}] {_CELLS[1]})
        => (float[photos, {rows}, 4] boxes, float[photos, {rows}] scores, int64[photos, {rows}] labels) {{
            k = Constant <value_ints = [{k}]> ()
            best_cells = Transpose <perm = [0, 2, 1]> ({_CELLS[1]})
            best, cell = TopK <axis = 2> (best_cells, k)
            all_of_a_photo = Constant <value_ints = [0, {k * num_classes}, 1]> ()
            flat_cell = Reshape (cell, all_of_a_photo)
            candidates = GatherND <batch_dims = 1> ({_CELLS[0]}, flat_cell)
            boxes_of_a_class = Constant <value_ints = [-1, {k}, 4]> ()
            scores_of_a_class = Constant <value_ints = [-1, 1, {k}]> ()
            class_boxes = Reshape (candidates, boxes_of_a_class)
            class_scores = Reshape (best, scores_of_a_class)
            iou = Constant <value_float = {predict.nms_iou!r}> ()
            least = Constant <value_float = {float(predict.score_threshold)!r}> ()
            chosen = NonMaxSuppression (class_boxes, class_scores, k, iou, least)
            zero = Constant <value_ints = [0]> ()
            one = Constant <value_ints = [1]> ()
            two = Constant <value_ints = [2]> ()
            three = Constant <value_ints = [3]> ()
            photo_and_class = Slice (chosen, zero, one, one)
            rank = Slice (chosen, two, three, one)
            begins = Mul (photo_and_class, k)
            places = Add (begins, rank)
            all = Constant <value_ints = [-1]> ()
            flat_best = Reshape (best, all)
            kept_scores = GatherND (flat_best, places)
            flat_shape = Shape (flat_best)
            nothing = ConstantOfShape (flat_shape)
            kept = ScatterND (nothing, places, kept_scores)
            flat_photo = Constant <value_ints = [-1, {k * num_classes}]> ()
            kept_of_a_photo = Reshape (kept, flat_photo)
            rows = Constant <value_ints = [{rows}]> ()
            scores, row = TopK <axis = 1> (kept_of_a_photo, rows)
            row_index = Unsqueeze (row, all)
            found = GatherND <batch_dims = 1> (candidates, row_index)
            none = Constant <value_float = 0.0> ()
            is_found = Greater (scores, none)
            is_box = Unsqueeze (is_found, all)
            boxes = Where (is_box, found, none)
            class = Div (row, k)
            no_class = Constant <value_int = -1> ()
            labels = Where (is_found, class, no_class)
        }}""")
    return onnx.compose.merge_models(model, tail, io_map=[(name, name) for name in _CELLS])


def need_onnx() -> Any:
    """The package onnx; raises if one of the packages of the extra is missing."""
    try:
        for name in ("onnx", "onnx.compose", "onnx.parser", "onnxscript", "onnxruntime"):
            import_module(name)
    except ImportError as error:
        name = (error.name or "onnx").partition(".")[0]
        raise errors.UserError(f"{name} is not installed; run `pip install tag2box[onnx]`") from None
    return import_module("onnx")


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep torch's remarks about itself, such as packages that it looks for, from the terminal."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


# ---------------------------------------------------------------- what is written about it


def metadata(
    student: StudentDetector, canvas: Canvas, outputs: Outputs, *, precision: str = "fp32"
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


def compare_onnx(path: Path, module: ExportedStudent, canvas: Canvas, predict: Predict) -> Difference:
    """The largest difference of an ONNX file from torch on made-up photos; raises if its NMS is not torch's."""
    onnx = need_onnx()
    model = onnx.load(path)
    if module.outputs == "detections":  # one session for both, so that NMS is compared on equal scores
        names = {output.name for output in model.graph.output}
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in _CELLS if name not in names)
    session = onnx_session(model.SerializeToString())
    shapes = [(1, *canvas.size)] if canvas.size else [(1, 160, 224), (3, 128, 192)]
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


def write_onnx(student: StudentDetector, out: Path, canvas: Canvas, outputs: Outputs = "detections") -> Difference:
    """Write a student as an ONNX file, unless what is written differs from torch; returns how much it does."""
    module = ExportedStudent(student, outputs)
    model = onnx_model(exported_program(module, canvas), outputs)
    return save_onnx(model, student, out, canvas, module)


def save_onnx(
    model: "onnx.ModelProto",
    student: StudentDetector,
    out: Path,
    canvas: Canvas,
    module: ExportedStudent,
    *,
    precision: str = "fp32",
) -> Difference:
    """Write a graph with its NMS and metadata. One of another ``precision`` may differ from torch."""
    onnx, outputs, predict = need_onnx(), module.outputs, student.inference.predict
    if outputs == "detections":
        cells = None if canvas.size is None else sum(
            (canvas.size[0] // stride) * (canvas.size[1] // stride) for stride in module.network.strides  # type: ignore[union-attr]
        )
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


def write_program(student: StudentDetector, out: Path, canvas: Canvas, outputs: Outputs = "raw") -> Difference:
    """Write a student as a program of ``torch.export``, unless what is written differs; there is no NMS in it."""
    module = ExportedStudent(student, outputs)
    program = exported_program(module, canvas)
    content = BytesIO()
    with _quiet():
        torch.export.save(program, content, extra_files={"tag2box.json": json.dumps(metadata(student, canvas, outputs))})
    with io.replacing(out) as temporary:
        temporary.write_bytes(content.getvalue())
        with _quiet():
            loaded = torch.export.load(BytesIO(temporary.read_bytes())).module()
        shape = (1, *(canvas.size or (160, 224)))
        pixels = module.example(shape)
        difference = Difference.of(run_torch(loaded, pixels), run_torch(module, pixels), max(shape[1:]))
        if not difference.is_small:
            raise _differs(out, difference)
    return difference


def _differs(out: Path, difference: Difference) -> errors.UserError:
    return errors.UserError(
        f"{out}: differs from torch by {difference.scores:.1g} in scores and {difference.boxes:.1g} of the side in boxes, "
        f"more than {TOLERANCE:g}; nothing was written, please report it"
    )
