"""The graph of an exported student, in ``torch.export`` and in ONNX, and the input that it expects.

The preprocessing of the weights is part of the graph: pixels go in as they are, letterboxed by the caller
(``InputCanvas``). ``detections`` also has class-wise NMS in it, as ``StudentDetector`` does it.
"""

import copy
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import count
from string import Template
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from jaxtyping import Shaped, UInt8
from torch import Tensor, nn
from torch.nn.functional import interpolate

from tag2box import errors, images
from tag2box.annotations import Photo
from tag2box.inference.predict import Inference, Predict
from tag2box.student.network import CANDIDATES, StudentDetector, StudentModule, decode_levels

if TYPE_CHECKING:
    from onnx import ModelProto

OPSET = 18
"""The oldest opset that torch's exporter writes without conversion, so that most runtimes read it."""
INPUT = "images"
ExportOutputs = Literal["detections", "raw", "yolov8"]
OUTPUT_NAMES: Mapping[ExportOutputs, tuple[str, ...]] = {
    "detections": ("boxes", "scores", "labels"),
    "raw": ("boxes", "scores"),
    "yolov8": ("output0",),
}
CELLS = ("cell_boxes", "cell_scores")
"""What NMS reads, where it is part of the graph."""
_MOST_SIDE, _MOST_PHOTOS = 4096, 1024
_USUAL_ASPECT = 4 / 3


# ---------------------------------------------------------------- what goes in


@dataclass(frozen=True, kw_only=True)
class InputCanvas:
    """How a photo is placed in the input: scaled, at the top left, with a neutral colour around it.

    The input has a fixed ``size`` (height, width), into which the photo is fitted; or is a square, as in training, with
    a side of any multiple of ``multiple`` from ``least_side`` on, for a photo whose short side is scaled to ``short``,
    and whose long one to at most ``long_max``.
    """

    size: tuple[int, int] | None
    short: int
    long_max: int
    multiple: int
    least_side: int
    colour: tuple[int, int, int]

    def fitted(self, size: tuple[int, int]) -> tuple[int, int]:
        """Height and width to which a photo of a height and width is resized.

        >>> how = {"short": 320, "long_max": 512, "multiple": 32, "least_side": 128, "colour": (0, 0, 0)}
        >>> InputCanvas(size=(320, 320), **how).fitted((480, 640)), InputCanvas(size=None, **how).fitted((480, 640))
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
        side = max(self.least_side, -(-max(fitted) // self.multiple) * self.multiple)
        return side, side

    def place(self, photo: Photo) -> UInt8[np.ndarray, "3 H W"]:
        """The input for a photo, decoded from its file."""
        fitted = self.fitted((photo.height, photo.width))
        decoded = images.load_image(photo, [images.View(min(fitted))])
        pixels = interpolate(decoded.pixels[None].float(), fitted, mode="bilinear", align_corners=False, antialias=True)
        room = torch.tensor(self.colour, dtype=torch.uint8).view(3, 1, 1).expand(3, *self.room(fitted)).clone()
        room[:, : fitted[0], : fitted[1]] = pixels[0].round().clamp(0, 255).byte()
        return room.numpy()


def canvas_of(
    student: StudentDetector, *, size: tuple[int, int] | None = None, is_dynamic: bool = False
) -> InputCanvas:
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
    return InputCanvas(
        size=fixed,
        short=short,
        long_max=inference.long_max,
        multiple=multiple,
        least_side=_least_side(network.strides),
        colour=(neutral[0], neutral[1], neutral[2]),
    )


def count_cells(size: tuple[int, int], strides: Sequence[int]) -> int:
    """The number of cells of all levels.

    >>> count_cells((128, 128), (8, 16, 32))
    336
    """
    return sum((size[0] // stride) * (size[1] // stride) for stride in strides)


def _least_side(strides: Sequence[int]) -> int:
    """The least side of a square with as many cells as NMS takes of each class."""
    return next(side for side in count(strides[-1], strides[-1]) if count_cells((side, side), strides) >= CANDIDATES)


def _usual_side(inference: Inference, short: int) -> int:
    return max(images.resized((900, round(900 * _USUAL_ASPECT)), short, inference.long_max))


# ---------------------------------------------------------------- the graph


class ExportedStudent(nn.Module):
    """A network from pixels to boxes: what is exported, without NMS."""

    def __init__(self, student: StudentDetector, outputs: ExportOutputs) -> None:
        super().__init__()
        self.network = copy.deepcopy(student.network).cpu().float().eval().requires_grad_(False)
        assert isinstance(self.network, StudentModule)
        backbone, kind = self.network.backbone, type(self.network.backbone)
        # constants of the graph, also where the network reads them from a buffer
        backbone.__class__ = type(kind.__name__, (kind,), {"preprocess": backbone.preprocess})
        self.outputs = outputs

    def forward(self, images: Shaped[Tensor, "N 3 H W"]) -> tuple[Tensor, Tensor] | Tensor:
        """Boxes (xyxy, pixels of the input) and scores of all cells; for YOLOv8, rows of both from pixels 0 .. 1."""
        assert isinstance(self.network, StudentModule)
        pixels = images * 255.0 if self.outputs == "yolov8" else images.float()
        logits, boxes, _ = decode_levels(self.network(pixels), self.network.strides)
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


def exported_program(module: ExportedStudent, canvas: InputCanvas) -> torch.export.ExportedProgram:
    """The graph of a network, for an input of a fixed size and one photo, or of any size and number."""
    if canvas.size is not None:
        with quiet():
            return torch.export.export(module, (module.example((1, *canvas.size)),))
    dim, least, most = torch.export.Dim, canvas.least_side // canvas.multiple, _MOST_SIDE // canvas.multiple
    sides = {axis: canvas.multiple * dim(name, min=least, max=most) for axis, name in ((2, "h"), (3, "w"))}
    shapes = {INPUT: {0: dim("photos", min=1, max=_MOST_PHOTOS), **sides}}
    example = module.example((2, 2 * canvas.least_side, 3 * canvas.least_side))
    with quiet():
        return torch.export.export(module, (example,), dynamic_shapes=shapes)


def onnx_model(program: torch.export.ExportedProgram, outputs: ExportOutputs) -> "ModelProto":
    """The graph in ONNX, without NMS."""
    need_onnx()
    names = CELLS if outputs == "detections" else OUTPUT_NAMES[outputs]
    with quiet():
        made = torch.onnx.export(
            program, dynamo=True, opset_version=OPSET, input_names=[INPUT], output_names=list(names), verbose=False
        )
    assert made is not None
    model: ModelProto = made.model_proto
    del model.graph.value_info[:]  # shapes of the inside, with the names of the exporter
    for own in (*model.graph.node, *model.graph.input, *model.graph.output, *model.graph.initializer, model.graph):
        del own.metadata_props[:]  # stack traces, which name the folders of this machine
    sides = zip(model.graph.input[0].type.tensor_type.shape.dim, ("photos", "", "height", "width"), strict=True)
    for dim, name in sides:
        if dim.dim_param:
            dim.dim_param = name
    return model


# class-wise NMS, written in ONNX's own text form: k candidates per class; NonMaxSuppression gives rows of (photo and
# class, 0, candidate), whose scores are kept where they were, so that one TopK per photo ranks the boxes of all classes
_NMS = Template("""
<ir_version: $ir, opset_import: ["" : $opset]>
nms (float[photos, cells, 4] cell_boxes, float[photos, cells, $classes] cell_scores)
=> (float[photos, $rows, 4] boxes, float[photos, $rows] scores, int64[photos, $rows] labels) {
    k = Constant <value_ints = [$k]> ()
    best_cells = Transpose <perm = [0, 2, 1]> (cell_scores)
    best, cell = TopK <axis = 2> (best_cells, k)
    all_of_a_photo = Constant <value_ints = [0, $all, 1]> ()
    flat_cell = Reshape (cell, all_of_a_photo)
    candidates = GatherND <batch_dims = 1> (cell_boxes, flat_cell)
    boxes_of_a_class = Constant <value_ints = [-1, $k, 4]> ()
    scores_of_a_class = Constant <value_ints = [-1, 1, $k]> ()
    class_boxes = Reshape (candidates, boxes_of_a_class)
    class_scores = Reshape (best, scores_of_a_class)
    iou = Constant <value_float = $iou> ()
    least = Constant <value_float = $least> ()
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
    flat_photo = Constant <value_ints = [-1, $all]> ()
    kept_of_a_photo = Reshape (kept, flat_photo)
    rows = Constant <value_ints = [$rows]> ()
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
}
""")


def with_nms(model: "ModelProto", predict: Predict, num_classes: int, cells: int | None) -> "ModelProto":
    """The graph with class-wise NMS behind it: the best ``predict.max_detections`` boxes per photo, best first.

    As in ``StudentDetector``, the best cells of each class compete. Rows behind the last detection have score 0 and
    class -1.

    Args:
        cells: number of cells; None if the input has no fixed size, and so at least ``CANDIDATES``.
    """
    onnx = need_onnx()
    k = CANDIDATES if cells is None else min(CANDIDATES, cells)
    rows = min(predict.max_detections, k * num_classes)
    numbers = {"k": k, "all": k * num_classes, "rows": rows, "classes": num_classes, "opset": OPSET}
    limits = {"iou": float(predict.nms_iou), "least": float(predict.score_threshold)}
    tail = onnx.parser.parse_model(_NMS.substitute(numbers, **limits, ir=model.ir_version))
    tail = onnx.compose.add_prefix(tail, "nms/", rename_inputs=False, rename_outputs=False)  # of names in the middle
    merged: ModelProto = onnx.compose.merge_models(model, tail, io_map=[(name, name) for name in CELLS])
    versions = {entry.domain: entry.version for entry in merged.opset_import}  # the parts name the same ones
    del merged.opset_import[:]
    merged.opset_import.extend(onnx.helper.make_opsetid(*entry) for entry in versions.items())
    return merged


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
def quiet() -> Iterator[None]:
    """Keep torch's remarks about itself, such as packages that it misses, from the terminal."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
