"""Photos per second from file to boxes: teacher, student in torch, in ONNX Runtime, and there in eight bits.

    python benchmarks/student_speed.py --teacher runs/mine --student runs/student --calibrate VOC2007/JPEGImages \
        --data VOC2007 --split test --out docs/results/student-speed.json

    teacher    the pipeline of `tag2box detect`: proposals, class maps, network
    torch      the same command with a student run
    onnx       an ONNX file of the student, in ONNX Runtime
    int8       the same in eight bits, calibrated on --calibrate

All of them read the same photo files, one photo ahead, and alternate, so that other load on the machine affects all.
For each number of threads the process, and those that it starts, are bound to as many cores. Without --teacher or
--student, a network with ImageNet's backbone and random heads is measured: time does not depend on the weights. With a
--student and a --split of a dataset with boxes, mAP50 of its three forms is measured too, on all photos of the split.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench_parts import provenance
from measuring import Row, machine, spread_of
from tag2box import runs
from tag2box.annotations import Detections, Photo
from tag2box.cli.inputs import find_photos
from tag2box.cli.model_export import load_student
from tag2box.formats.datasets import read_photos, read_truth
from tag2box.formats.listing import DataSource
from tag2box.io import write_json
from tag2box.metrics.evaluation import evaluate_detections
from tag2box.recipes import photos as photos_recipe
from tag2box.run_detect import detect_photos
from tag2box.student.network import StudentDetector, StudentModule
from tag2box.student.onnx_export import onnx_session, write_int8, write_onnx
from tag2box.student.onnx_graph import INPUT, InputCanvas, canvas_of
from tag2box.student.student_training import StudentConfig, build_student
from tag2box.training.batches import prefetch

Detect = Callable[[Sequence[Photo]], Mapping[str, Detections]]
CLASSES = tuple(f"class {number}" for number in range(20))  # of networks with random heads


@dataclass(frozen=True)
class OnnxStudent:
    """An ONNX file of a student at work, as ``run_onnx.py`` does it, with the product's decoding of photos."""

    session: Any
    canvas: InputCanvas

    def __call__(self, photos: Sequence[Photo]) -> dict[str, Detections]:
        found = {}
        with ThreadPoolExecutor(1) as pool:
            for photo, pixels in zip(photos, prefetch(pool, self.canvas.place, photos), strict=True):
                boxes, scores, labels = (output[0] for output in self.session.run(None, {INPUT: pixels[None]}))
                height, width = self.canvas.fitted((photo.height, photo.width))
                scale = np.array([photo.width / width, photo.height / height] * 2, np.float32)
                boxes = np.clip(boxes * scale, 0, np.array([photo.width, photo.height] * 2, np.float32))
                kept = (labels >= 0) & (boxes[:, 2:] > boxes[:, :2]).all(axis=1)
                found[photo.id] = Detections(*(torch.from_numpy(x[kept].copy()) for x in (boxes, scores, labels)))
        return found


def teacher_of(run: Path | None) -> runs.AnyRun:
    """A run of `tag2box train`, or the network of the recipe ``photos`` before training."""
    if run is not None:
        return runs.open_run(run)
    config = photos_recipe()
    return runs.TrainedRun(Path(), config, CLASSES, runs.build_detector(config, len(CLASSES), pretrained=True).eval())


def student_of(run: Path | None) -> StudentDetector:
    """A student run, or its network before training."""
    if run is not None:
        return load_student(run)
    config = StudentConfig()
    network = build_student(config, len(CLASSES), pretrained=True).eval()
    assert isinstance(network, StudentModule)
    return StudentDetector(network, CLASSES, config.inference)


def ways_of(
    teacher: runs.AnyRun, student: StudentDetector, files: tuple[Path, Path], threads: int
) -> dict[str, Detect]:
    """Everything that is compared, by name."""
    canvas = canvas_of(student)
    onnx, int8 = (OnnxStudent(onnx_session(str(file), threads), canvas) for file in files)
    return {"teacher": partial(detect_photos, teacher), "torch": student.detect, "onnx": onnx, "int8": int8}


def alternate(ways: Mapping[str, Detect], photos: Sequence[Photo], repeats: int, teacher_photos: int) -> Row:
    """Photos per second of each way; the teacher, whose proposals take seconds, works on the first few photos alone."""
    laps: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for lap in range(repeats + 1):
        for name, way in ways.items():
            chosen = photos[:teacher_photos] if name == "teacher" else photos
            before = time.perf_counter(), _cpu_seconds()
            way(chosen)
            spent = time.perf_counter() - before[0], _cpu_seconds() - before[1]
            laps[name] += [(spent[0] / len(chosen), spent[1] / len(chosen))] if lap else []  # the first is a warm-up
    rows: Row = {}
    for name, own in laps.items():
        wall, cpu = ([lap[clock] for lap in own] for clock in (0, 1))
        per_second = {
            "wall": spread_of([1 / one for one in wall]),
            "cpu": spread_of([1 / max(one, 1e-9) for one in cpu]),
        }
        rows[name] = {"photos_per_second": per_second["wall"], "photos_per_cpu_second": per_second["cpu"]}
    medians = {name: row["photos_per_second"]["median"] for name, row in rows.items()}
    return {**rows, "times_faster_than_teacher": {n: round(m / medians["teacher"], 2) for n, m in medians.items()}}


def _cpu_seconds() -> float:
    """Of this process and of those that it started and that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def bind(threads: int, cores: Sequence[int]) -> None:
    """Use as many cores and threads; processes that start later inherit the cores."""
    os.sched_setaffinity(0, set(cores[:threads]))
    torch.set_num_threads(threads)


def accuracy(ways: Mapping[str, Detect], data: DataSource, classes: Sequence[str]) -> Row:
    """mAP50 (VOC 2007) of each form of a student on all photos of a dataset."""
    truth = read_truth(data)
    if tuple(truth.classes) != tuple(classes):
        raise SystemExit(f"{data.path}: its classes are not those of the student")
    known = {photo.id: photo for photo in read_photos(data)}
    photos = [known[name] for name in truth.ids]
    rows: Row = {"photos": len(photos)}
    for name in ("torch", "onnx", "int8"):
        rows[name] = evaluate_detections(truth, dict(ways[name](photos)), ("voc07",)).to_json()["voc07"]
    return rows


def measured(
    teacher: runs.AnyRun,
    student: StudentDetector,
    photos: Sequence[Photo],
    calibration: Sequence[Photo],
    *,
    threads: Sequence[int],
    repeats: int,
    teacher_photos: int,
    data: DataSource | None = None,
) -> Row:
    """The speed of all ways at each number of threads, and the accuracy of the student's if there is a dataset."""
    before = torch.get_num_threads()
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "fp32.onnx", Path(folder) / "int8.onnx"
        canvas = canvas_of(student)
        write_onnx(student, files[0], canvas)
        write_int8(student, files[1], canvas, calibration)
        rows: Row = {"bytes": {file.stem: file.stat().st_size for file in files}, "size": canvas.size}
        try:
            for number in threads:
                bind(min(number, len(cores)), cores)
                ways = ways_of(teacher, student, files, number)
                rows[f"{number} threads"] = alternate(ways, photos, repeats, teacher_photos)
        finally:
            bind(len(cores), cores)
            torch.set_num_threads(before)
        if data is not None:
            rows["mAP50"] = accuracy(ways_of(teacher, student, files, len(cores)), data, student.classes)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", type=Path, help="a run of `tag2box train --recipe photos`")
    parser.add_argument("--student", type=Path, help="a run of `tag2box student`")
    parser.add_argument("--data", type=Path, required=True, help="a dataset, or a folder of photos")
    parser.add_argument("--split", help="of the dataset, to read photos from")
    parser.add_argument("--calibrate", type=Path, help="photos for eight bits; default: those of --data that are left")
    parser.add_argument("--photos", type=int, default=40)
    parser.add_argument("--teacher-photos", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    student = student_of(args.student)
    classes = student.classes if args.student else None
    source = DataSource(path=args.data, split=args.split, classes=classes)
    found = read_photos(source)
    step = max(1, len(found) // args.photos)
    photos = found[::step][: args.photos]
    rest = find_photos([args.calibrate]) if args.calibrate else tuple(p for p in found if p not in photos) or photos
    result: Row = {
        **provenance(__file__),
        "machine": machine(),
        "teacher": args.teacher.name if args.teacher else "recipe photos, random heads",
        "student": args.student.name if args.student else "random heads",
        "photos": len(photos),
        "teacher_photos": args.teacher_photos,
        "repeats": args.repeats,
        **measured(
            teacher_of(args.teacher),
            student,
            photos,
            rest,
            threads=args.threads,
            repeats=args.repeats,
            teacher_photos=args.teacher_photos,
            data=source if args.student and args.split else None,
        ),
    }
    print(result)
    if args.out:
        write_json(args.out, result)


if __name__ == "__main__":
    main()
