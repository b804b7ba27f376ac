"""Exported students detect what torch does: ONNX files, eight bits, programs, and the files beside them."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
import yaml
from hypothesis import given, strategies as st
from onnx import TensorProto, helper
from PIL import Image

from bench_figures import bench as load_bench
from pages import ROOT
from tag2box import runs
from tag2box.annotations import Photo
from tag2box.cli import model_export
from tag2box.cli.inputs import find_photos
from tag2box.cli.model_export import export_model, parse_size, run_script, xanylabeling_config
from tag2box.cli.student import train_student
from tag2box.errors import UserError
from tag2box.inference.predict import Inference, Predict
from tag2box.models.backbone import Preprocess
from tag2box.ops.boxes import iou
from tag2box.recipes import photos as photos_recipe
from tag2box.student import onnx_export, onnx_graph
from tag2box.student.network import CANDIDATES, AnchorFree, StudentDetector, decode_levels
from tag2box.student.onnx_export import (
    TOLERANCE,
    Difference,
    compare_onnx,
    last_nodes,
    onnx_session,
    save_onnx,
    suppress,
    write_int8,
    write_program,
)
from tag2box.student.onnx_graph import CELLS, ExportedStudent, InputCanvas, canvas_of, count_cells
from tiny import tiny_detector, tiny_photos
from tiny_student import SMALL, TinyTrunk, tiny_labels
from tiny_world import call

CLASSES = ("disc", "box: 'é\"\\", "- \u202ebar\n")
SIZE = (64, 96)
FIXED = InputCanvas(size=SIZE, short=64, long_max=96, multiple=32, least_side=128, colour=(128, 102, 76))


class BufferTrunk(TinyTrunk):
    """A backbone that keeps its preprocessing among its weights, as VGG16 does."""

    def __init__(self) -> None:
        super().__init__(frozen=False)
        numbers = Preprocess(order="bgr", scale=1 / 255, mean=(0.3, 0.4, 0.5), std=(0.5, 0.5, 0.4)).to_tensor()
        self.register_buffer("pixels", numbers)

    @property
    def preprocess(self) -> Preprocess:
        return Preprocess.from_tensor(self.pixels)


def made_student(seed: int = 0) -> StudentDetector:
    """A student whose scores and boxes are of all sizes: its weights are random, and wide."""
    network = AnchorFree(width=8, depth=1, frozen_stages=0).build(BufferTrunk(), len(CLASSES)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    inference = Inference(
        scales=(64,), long_max=96, mirror=False, predict=Predict(nms_iou=0.5, score_threshold=1e-05, max_detections=30)
    )
    return StudentDetector(network, CLASSES, inference)


@pytest.fixture(scope="module")
def student() -> StudentDetector:
    return made_student()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exported")


@pytest.fixture(scope="module")
def graph(student: StudentDetector) -> onnx.ModelProto:
    """The graph of a fixed size before NMS."""
    module = ExportedStudent(student, "detections")
    return onnx_graph.onnx_model(onnx_graph.exported_program(module, FIXED), "detections")


def copied(graph: onnx.ModelProto) -> onnx.ModelProto:
    other = onnx.ModelProto()
    other.CopyFrom(graph)
    return other


@pytest.fixture(scope="module")
def fixed(student: StudentDetector, graph: onnx.ModelProto, folder: Path) -> Path:
    save_onnx(copied(graph), student, folder / "fixed.onnx", FIXED, ExportedStudent(student, "detections"))
    return folder / "fixed.onnx"


@pytest.fixture(scope="module")
def squared(student: StudentDetector) -> StudentDetector:
    """The student with the photos in a square of 96 pixels."""
    return replace(student, inference=replace(student.inference, scales=(96,)))


@pytest.fixture(scope="module")
def square(squared: StudentDetector, folder: Path) -> Path:
    export_model(squared, folder / "square.onnx")
    return folder / "square.onnx"


@pytest.fixture(scope="module")
def dynamic(student: StudentDetector, folder: Path) -> Path:
    export_model(student, folder / "dynamic.onnx", is_dynamic=True)
    return folder / "dynamic.onnx"


@pytest.fixture(scope="module")
def yolo(student: StudentDetector, folder: Path) -> Path:
    export_model(student, folder / "yolo.onnx", outputs="yolov8", size=SIZE)
    return folder / "yolo.onnx"


def props(path: Path) -> dict[str, str]:
    return {prop.key: prop.value for prop in onnx.load(path).metadata_props}


def pixels_of(shape: tuple[int, ...], seed: int = 5) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def with_cells(path: Path) -> bytes:
    """A file that also gives what its NMS reads."""
    model = onnx.load(path)
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in CELLS)
    return model.SerializeToString()


def slow_nms(boxes: torch.Tensor, scores: torch.Tensor, how: Predict) -> list[tuple[int, float, list[float]]]:
    """Greedy NMS per class, box by box."""
    found, values, overlaps = [], scores.tolist(), iou(boxes, boxes).tolist()
    for label in range(scores.shape[1]):
        kept: list[int] = []
        for cell in sorted(range(len(values)), key=lambda one: -values[one][label])[:CANDIDATES]:
            if values[cell][label] > how.score_threshold and all(overlaps[cell][o] <= how.nms_iou for o in kept):
                kept.append(cell)
        found += [(label, values[cell][label], boxes[cell].tolist()) for cell in kept]
    return sorted(found, key=lambda row: -row[1])[: how.max_detections]


# ---------------------------------------------------------------- ONNX against torch


@pytest.mark.parametrize("shape", [(1, 3, 128, 128), (1, 3, 160, 224), (3, 3, 192, 128), (2, 3, 128, 352)])
def test_boxes_and_scores_are_those_of_torch_at_any_size_and_number(
    student: StudentDetector, dynamic: Path, shape: tuple[int, ...]
) -> None:
    pixels = pixels_of(shape)
    *_, boxes, scores = onnx_session(with_cells(dynamic)).run(None, {"images": pixels.numpy()})
    with torch.no_grad():
        logits, wanted, _ = decode_levels(student.network(pixels.float()), student.network.strides)
    limit = torch.tensor([shape[3], shape[2]] * 2)
    assert np.abs(scores - logits.sigmoid().numpy()).max() <= TOLERANCE
    assert np.abs(boxes - torch.minimum(wanted.clamp(min=0), limit).numpy()).max() <= TOLERANCE * max(shape[2:])
    assert scores.std() > 0.05  # else nothing is compared


@pytest.mark.parametrize(("name", "shape"), [("fixed", (1, 3, *SIZE)), ("dynamic", (2, 3, 128, 160))])
def test_detections_are_those_of_an_nms_written_with_loops(
    student: StudentDetector, name: str, shape: tuple[int, ...], request: pytest.FixtureRequest
) -> None:
    session = onnx_session(with_cells(request.getfixturevalue(name)))
    outputs = [torch.from_numpy(x) for x in session.run(None, {"images": pixels_of(shape).numpy()})]
    boxes, scores, labels, cell_boxes, cell_scores = outputs
    for photo in range(shape[0]):
        wanted = slow_nms(cell_boxes[photo], cell_scores[photo], student.inference.predict)
        count = len(wanted)
        assert 5 < count <= 30
        assert labels[photo, :count].tolist() == [row[0] for row in wanted]
        assert scores[photo, :count].tolist() == [row[1] for row in wanted]
        assert boxes[photo, :count].tolist() == [row[2] for row in wanted]
        assert labels[photo, count:].eq(-1).all() and scores[photo, count:].eq(0).all()


@given(st.integers(0, 2**31), st.sampled_from([0, 1, 3, 40]), st.sampled_from([0.0, 0.4, 0.999]))
def test_the_nms_that_files_are_compared_with_is_the_slow_one(seed: int, cells: int, least: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    corners = torch.rand(cells, 2, generator=generator) * 20
    boxes = torch.cat([corners, corners + 1 + torch.rand(cells, 2, generator=generator) * 20], dim=1)
    scores, how = torch.rand(cells, 2, generator=generator), Predict(score_threshold=least, max_detections=7)
    found = suppress(boxes, scores, how)
    rows = [(label, score, box) for box, score, label in zip(*(x.tolist() for x in found), strict=True)]
    assert rows == slow_nms(boxes, scores, how)


def test_rows_that_are_left_have_no_class(student: StudentDetector, graph: onnx.ModelProto, tmp_path: Path) -> None:
    strict = replace(student, inference=replace(student.inference, predict=Predict(score_threshold=1.0)))
    save_onnx(copied(graph), strict, tmp_path / "none.onnx", FIXED, ExportedStudent(strict, "detections"))
    session = onnx_session(str(tmp_path / "none.onnx"))
    boxes, scores, labels = session.run(None, {"images": pixels_of((1, 3, *SIZE)).numpy()})
    assert boxes.shape == (1, 100, 4) and not boxes.any() and not scores.any() and (labels == -1).all()


def test_readers_of_yolov8_get_centres_sizes_and_scores(student: StudentDetector, yolo: Path) -> None:
    pixels = pixels_of((1, 3, *SIZE)).float()
    (rows,) = onnx_session(str(yolo)).run(None, {"images": (pixels / 255).numpy()})
    with torch.no_grad():
        logits, boxes, _ = decode_levels(student.network(pixels), student.network.strides)
    assert rows.shape == (1, 4 + len(CLASSES), 8 * 12 + 4 * 6 + 2 * 3)
    x, y, width, height, *scores = rows[0]
    corners = np.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2], axis=1)
    assert np.abs(corners - boxes[0].numpy()).max() <= TOLERANCE * max(SIZE)
    assert np.abs(np.stack(scores, axis=1) - logits[0].sigmoid().numpy()).max() <= TOLERANCE


def test_a_file_says_what_it_is(student: StudentDetector, fixed: Path, dynamic: Path, yolo: Path) -> None:
    known = props(fixed)
    assert json.loads(known["classes"]) == list(CLASSES)
    assert (json.loads(known["size"]), known["opset"], known["outputs"]) == ([64, 96], "18", "detections")
    assert json.loads(known["strides"]) == [8, 16, 32] and json.loads(known["colour"]) == [128, 102, 76]
    assert json.loads(known["preprocess"])["mean"] == [0.3, 0.4, 0.5]
    assert (
        len(known["weights"]) == 64
        and known["weights"] != onnx_export.metadata(made_student(1), FIXED, "raw")["weights"]
    )
    assert json.loads(props(dynamic)["size"]) is None
    assert ast.literal_eval(props(yolo)["names"]) == dict(enumerate(CLASSES))
    assert [entry.version for entry in onnx.load(fixed).opset_import if entry.domain == ""] == [18]
    dims = [dim.dim_param or dim.dim_value for dim in onnx.load(dynamic).graph.input[0].type.tensor_type.shape.dim]
    assert dims == ["photos", 3, "height", "width"]


def test_a_file_names_no_folder_of_this_machine(fixed: Path, dynamic: Path, yolo: Path) -> None:
    for path in (fixed, dynamic, yolo):
        assert b"site-packages" not in path.read_bytes() and str(ROOT).encode() not in path.read_bytes()


# ---------------------------------------------------------------- files that differ are not left


def test_a_graph_that_differs_is_refused_and_nothing_is_left(
    student: StudentDetector, graph: onnx.ModelProto, tmp_path: Path
) -> None:
    model, module = copied(graph), ExportedStudent(student, "detections")
    bias = next(own for own in model.graph.initializer if own.name.endswith("class_logits.bias"))
    bias.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(bias) + np.float32(0.01), bias.name))
    with pytest.raises(UserError, match=r"model.onnx: differs from torch, scores by 0\.00"):
        save_onnx(copied(model), student, tmp_path / "model.onnx", FIXED, module)
    assert list(tmp_path.iterdir()) == []
    save_onnx(copied(model), student, tmp_path / "model.onnx", FIXED, module, precision="int8")  # as expected there


def test_an_nms_that_differs_is_refused(student: StudentDetector, fixed: Path) -> None:
    module = ExportedStudent(student, "detections")
    assert compare_onnx(fixed, module, FIXED, student.inference.predict).is_small
    with pytest.raises(UserError, match="its NMS differs"):
        compare_onnx(fixed, module, FIXED, replace(student.inference.predict, nms_iou=0.1))


def test_nan_is_not_small() -> None:
    nan = np.full((1, 2, 3), np.nan, np.float32)
    assert not Difference.of([nan, nan], [nan, nan], 10).is_small
    assert Difference.of([nan * 0, nan * 0], [nan, nan], 10).is_small is False


# ---------------------------------------------------------------- the input


@pytest.mark.parametrize(
    ("size", "photo", "fitted", "room"),
    [
        ((64, 96), (1, 1), (64, 64), (64, 96)),
        ((64, 96), (480, 640), (64, 85), (64, 96)),
        ((64, 96), (3, 4000), (1, 96), (64, 96)),
        (None, (480, 640), (64, 85), (128, 128)),
        (None, (100, 400), (24, 96), (128, 128)),
    ],
)
def test_photos_are_fitted_into_the_input(
    size: tuple[int, int] | None, photo: tuple[int, int], fitted: tuple[int, int], room: tuple[int, int]
) -> None:
    canvas = replace(FIXED, size=size)
    assert canvas.fitted(photo) == fitted and canvas.room(fitted) == room


def test_space_beside_a_photo_is_neutral(tmp_path: Path) -> None:
    Image.new("RGB", (20, 40), "red").save(tmp_path / "photo.png")
    placed = FIXED.place(Photo("photo", tmp_path / "photo.png", 20, 40))
    assert placed.shape == (3, 64, 96)
    assert (placed[:, :, :32] == np.array([255, 0, 0]).reshape(3, 1, 1)).all()
    assert (placed[:, :, 32:] == np.array([128, 102, 76]).reshape(3, 1, 1)).all()


@pytest.mark.parametrize(("strides", "least"), [((8, 16, 32), 128), ((32,), 480), ((4, 8), 56)])
def test_inputs_of_any_size_have_the_cells_that_nms_takes(
    student: StudentDetector, strides: tuple[int, ...], least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(student.network), "strides", strides)
    assert canvas_of(student, is_dynamic=True).least_side == least
    below = least - strides[-1]
    assert count_cells((below, below), strides) < CANDIDATES <= count_cells((least, least), strides)


def test_the_usual_size_is_that_of_photos_as_the_student_sees_them(student: StudentDetector) -> None:
    assert canvas_of(student).size == (96, 96)  # a photo of 4:3 has 64 x 85 pixels
    square = replace(student, inference=replace(student.inference, scales=(320,), long_max=320))
    assert canvas_of(square).size == (320, 320) and canvas_of(square, is_dynamic=True).size is None


@pytest.mark.parametrize("text", ["", "x", "384x", "3 84", "384x384x3", "-32", "1e3", "999999", "38\uff14"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match=r"--size .*: expected"):
        parse_size(text)


@pytest.mark.parametrize("size", [(0, 0), (16, 32), (100, 128), (8192, 8192)])
def test_sizes_that_the_network_cannot_take(student: StudentDetector, size: tuple[int, int]) -> None:
    with pytest.raises(UserError, match="expected multiples of 32 up to 4096, such as 96"):
        canvas_of(student, size=size)


# ---------------------------------------------------------------- without tag2box

BLOCKED = """
import runpy, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"tag2box", "torch", "PIL", "onnx"}:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Block())
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_beside(model: Path, *words: str) -> subprocess.CompletedProcess[str]:
    script = model.with_name("run_onnx.py")
    script.write_text(run_script(), encoding="utf-8")
    argv = [sys.executable, "-c", BLOCKED, str(script), str(model), *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False, env={"PATH": "", "OMP_NUM_THREADS": "1"})


@pytest.fixture(scope="module")
def photos(folder: Path) -> Iterator[tuple[Photo, Photo]]:
    """A photo of the size of the input, and one that is resized for it; both smooth, as every method resizes alike."""
    field = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    for name, (width, height) in {"same": (96, 96), "large": (190, 127)}.items():
        Image.fromarray(field).resize((width, height), Image.Resampling.BICUBIC).save(folder / f"{name}.png")
    same, large = find_photos([folder / "same.png", folder / "large.png"])
    yield same, large


def test_the_script_beside_a_file_finds_the_boxes_of_the_product(
    squared: StudentDetector, square: Path, photos: tuple[Photo, Photo]
) -> None:
    wanted = squared.detect(photos)
    done = run_beside(square, "0", *(str(photo.path) for photo in photos))
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["photo"] for row in found] == [str(photo.path) for photo in photos]
    same, large = (wanted[photo.id] for photo in photos)
    rows = found[0]["boxes"]
    assert [row["class"] for row in rows] == [CLASSES[label] for label in same.labels.tolist()]
    assert np.abs(np.array([row["score"] for row in rows]) - same.scores.numpy()).max() < 1e-5
    assert np.abs(np.array([row["box"] for row in rows]) - same.boxes.numpy()).max() < 1e-3
    boxes = torch.tensor([row["box"] for row in found[1]["boxes"]])
    near = iou(large.boxes[:5], boxes).max(dim=1).values  # resized by another library
    assert near.min() > 0.8
    half = float(same.scores[len(same.scores) // 2])
    some = json.loads(run_beside(square, f"{half}", str(photos[0].path)).stdout)["boxes"]
    assert some == [row for row in rows if row["score"] >= half] != rows
    assert len(run_script().splitlines()) <= 40


def test_the_script_runs_files_of_any_size(dynamic: Path, photos: tuple[Photo, Photo]) -> None:
    done = run_beside(dynamic, "0", str(photos[1].path))
    assert done.returncode == 0, done.stderr
    boxes = np.array([row["box"] for row in json.loads(done.stdout)["boxes"]])
    assert len(boxes) > 5 and boxes.min() >= 0 and (boxes <= [190, 127, 190, 127]).all()


def test_the_script_names_a_photo_that_is_none(fixed: Path) -> None:
    done = run_beside(fixed, "0.3", str(fixed))
    assert done.returncode == 1 and done.stderr.strip() == f"{fixed}: not readable as a photo"


def test_the_script_is_the_example() -> None:
    assert (ROOT / "examples" / "onnx_inference.py").read_text(encoding="utf-8") == run_script()


def test_a_script_that_is_there_is_kept(
    student: StudentDetector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_export, "write_onnx", lambda *_: Difference(0, 0))
    assert export_model(student, tmp_path / "a.onnx").files == (tmp_path / "a.onnx", tmp_path / "run_onnx.py")
    (tmp_path / "run_onnx.py").write_text("mine")
    assert export_model(student, tmp_path / "b.onnx").files == (tmp_path / "b.onnx",)
    assert (tmp_path / "run_onnx.py").read_text() == "mine"


def test_the_configuration_of_x_anylabeling(student: StudentDetector, yolo: Path) -> None:
    found = yaml.safe_load(yolo.with_suffix(".yaml").read_text(encoding="utf-8"))
    assert found["type"] == "yolov8" and found["model_path"] == yolo.name and found["name"] == "yolo"
    assert found["classes"] == list(CLASSES)
    assert found["iou_threshold"] == found["nms_threshold"] == 0.5
    assert found["conf_threshold"] == found["confidence_threshold"] == 0.3


@given(st.lists(st.text(max_size=20), max_size=4))
def test_any_class_name_survives_the_configuration(names: list[str]) -> None:
    student = StudentDetector(torch.nn.Identity(), tuple(names), Inference())
    assert (yaml.safe_load(xanylabeling_config(student, "m.onnx"))["classes"] or []) == names


# ---------------------------------------------------------------- other forms


def test_eight_bits(
    student: StudentDetector, graph: onnx.ModelProto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_export, "exported_program", lambda *_: None)
    monkeypatch.setattr(onnx_export, "onnx_model", lambda *_: copied(graph))
    photos, out = tiny_photos(tmp_path, 3).photos, tmp_path / "small.onnx"
    difference = write_int8(student, out, FIXED, photos)
    stored = {own.name: own.data_type for own in onnx.load(out).graph.initializer}
    small = {name for name, kind in stored.items() if kind == TensorProto.INT8 and name.endswith("weight_quantized")}
    assert {"network.backbone.conv.weight_quantized", "network.head.classes.0.0.weight_quantized"} <= small
    assert stored["network.head.class_logits.weight"] == TensorProto.FLOAT
    assert props(out)["precision"] == "int8"
    assert TOLERANCE < difference.scores < 0.5 and 0 < difference.mean_score < 0.05
    boxes, scores, labels = onnx_session(str(out)).run(None, {"images": FIXED.place(photos[0])[None]})
    assert boxes.shape == (1, 30, 4) and scores[0, 0] > 0 and labels[0, 0] >= 0


def test_eight_bits_need_photos(student: StudentDetector, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--calibrate: no photos"):
        write_int8(student, tmp_path / "small.onnx", FIXED, [])


def test_the_last_convolutions_and_all_behind_them_stay_as_they_are() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], name="first"),
        helper.make_node("Add", ["a", "a"], ["b"], name="between"),
        helper.make_node("Add", ["a", "x"], ["side"], name="side"),
        helper.make_node("Conv", ["b", "w"], ["c"], name="last"),
        helper.make_node("Add", ["c", "side"], ["d"], name="boxes"),
    ]
    graph = helper.make_graph(nodes, "g", [], [])
    assert last_nodes(helper.make_model(graph)) == {"last", "boxes", "side"}
    assert last_nodes(helper.make_model(helper.make_graph([], "g", [], []))) == set()


@pytest.fixture(scope="module")
def program(student: StudentDetector) -> torch.export.ExportedProgram:
    return onnx_graph.exported_program(ExportedStudent(student, "raw"), FIXED)


def test_a_program_of_torch_export(
    student: StudentDetector, program: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_export, "exported_program", lambda *_: program)
    made = export_model(student, tmp_path / "model.pt2", export="torch-export", size=SIZE)
    assert made.files == (tmp_path / "model.pt2",) and made.difference.is_small
    extra = {"tag2box.json": ""}
    loaded = torch.export.load(tmp_path / "model.pt2", extra_files=extra).module()
    pixels = pixels_of((1, 3, *SIZE))
    with torch.no_grad():
        boxes, scores = loaded(pixels)
        logits, wanted, _ = decode_levels(student.network(pixels.float()), student.network.strides)
    assert torch.allclose(boxes, wanted, atol=1e-3) and torch.allclose(scores, logits.sigmoid(), atol=TOLERANCE)
    assert json.loads(json.loads(extra["tag2box.json"])["size"]) == list(SIZE)
    with zipfile.ZipFile(tmp_path / "model.pt2") as archive:
        inside = b"".join(archive.read(name) for name in archive.namelist())
    assert b"site-packages" not in inside and str(ROOT).encode() not in inside


def test_a_program_that_differs_is_refused(program: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_export, "exported_program", lambda *_: program)
    with pytest.raises(UserError, match="differs from torch"):
        write_program(made_student(1), tmp_path / "model.pt2", FIXED)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("world")
    tiny_labels(base)
    train_student(base / "labels", base / "run", overrides=(*SMALL, "plan.iterations=1"))
    return base


def test_a_run_is_exported_by_the_command(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = world / "model.onnx"
    done = call(["export", f"{world / 'run'}", "--size", "64x96", "--out", f"{out}"], monkeypatch, capsys)
    assert done.code == 0, done.err
    assert "scores differ from torch by at most" in done.out and "beside it: run_onnx.py" in done.out
    assert done.err == ""
    assert json.loads(props(out)["classes"]) == ["disc", "box", "bar"]
    assert {path.name for path in world.iterdir()} == {"labels", "photos", "run", "model.onnx", "run_onnx.py"}
    assert (world / "run_onnx.py").read_text(encoding="utf-8") == run_script()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("labels", "--format", "onnx"), "a label set, --format onnx is for runs"),
        (("labels", "--size", "64"), "--size: has no effect"),
        (("labels", "--calibrate", "x"), "--calibrate: has no effect"),
        (("run", "--format", "yolo"), "a run, --format yolo is for label sets; expected onnx or torch-export"),
        (("run", "--splits", "train=1"), "--splits: has no effect"),
        (("run", "--copy", "copy"), "--copy: has no effect"),
        (("run", "--int8"), "--int8 and --calibrate PHOTOS belong together"),
        (("run", "--size", "64", "--dynamic"), "give one of them"),
        (("run", "--size", "65"), "--size 65x65: expected multiples of 32 up to 4096"),
        (("run", "--size", "big"), "--size big: expected pixels"),
        (("run", "--out", "model.bin"), "model.bin: expected a file that ends in .onnx"),
        (("run", "--format", "torch-export", "--outputs", "detections", "--out", "m.pt2"), "has neither NMS"),
        (("run", "--int8", "--calibrate", "nothing"), "nothing: no such photo"),
        (("nothing", "--format", "onnx"), "nothing: no run here"),
    ],
)
def test_what_cannot_be_exported(
    world: Path, words: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(world)
    before = {path.name for path in world.iterdir()}
    given = () if "--out" in words else ("--out", "other.onnx")
    done = call(["export", *words, *given], monkeypatch, capsys)
    assert done.code == 2 and len(done.err.strip().splitlines()) == 1 and said in done.err
    assert {path.name for path in world.iterdir()} == before


def test_a_run_with_proposals_cannot_be_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = runs.TrainedRun(tmp_path, photos_recipe(), CLASSES, tiny_detector(len(CLASSES)))
    monkeypatch.setattr(runs, "open_run", lambda _: teacher)
    with pytest.raises(UserError, match=r"needs proposals, .* train a student with `tag2box student`"):
        export_model(tmp_path / "run", tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_exists_is_kept(world: Path, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_text("mine")
    with pytest.raises(UserError, match=r"model.onnx: exists"):
        export_model(world / "run", tmp_path / "model.onnx")


@pytest.mark.parametrize("missing", ["onnx", "onnxscript", "onnxruntime"])
def test_a_missing_extra_is_one_line(
    student: StudentDetector, tmp_path: Path, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)  # as if it were not installed
    with pytest.raises(UserError, match=rf"^{missing} is not installed; run `pip install tag2box\[onnx\]`$"):
        export_model(student, tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- the benchmark


def test_the_benchmark_measures_all_forms_alternately(
    squared: StudentDetector,
    square: Path,
    photos: tuple[Photo, Photo],
    world: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = load_bench("student_speed")
    monkeypatch.setattr(bench, "write_onnx", lambda _, out, *__: out.write_bytes(square.read_bytes()))
    monkeypatch.setattr(bench, "write_int8", lambda _, out, *__: out.write_bytes(square.read_bytes()))
    cores = os.sched_getaffinity(0)
    rows = bench.measured(
        runs.open_run(world / "run"), squared, photos, photos, threads=[1], repeats=1, teacher_photos=1
    )
    assert os.sched_getaffinity(0) == cores
    assert set(rows["1 threads"]) == {"teacher", "torch", "onnx", "int8", "times_faster_than_teacher"}
    assert all(rows["1 threads"][name]["photos_per_second"]["median"] > 0 for name in ("teacher", "torch", "onnx"))
    found = bench.OnnxStudent(onnx_session(str(square)), canvas_of(squared))(photos[:1])["same"]
    wanted = squared.detect(photos[:1])["same"]
    assert found.labels.tolist() == wanted.labels.tolist()
    assert torch.allclose(found.boxes, wanted.boxes, atol=1e-3) and torch.allclose(found.scores, wanted.scores)
