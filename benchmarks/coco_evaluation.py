"""COCO evaluation end to end, from files to the twelve numbers: tag2box and pycocotools, alternating in one process.

    python benchmarks/coco_evaluation.py --out docs/results/coco-evaluation.json

The files are generated: objects at random, detections near them and elsewhere, a hundred per photo. Figures are CPU
seconds. A warm-up on a few photos compiles the kernels, which are cached on disk between runs.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import time
from dataclasses import astuple
from pathlib import Path

import numpy as np
from pycocotools.coco import COCO  # type: ignore[import-untyped]
from pycocotools.cocoeval import COCOeval  # type: ignore[import-untyped]

from measuring import Row, arguments, machine, set_threads, spread_of
from tag2box.formats.coco_boxes import read_coco
from tag2box.formats.detection_files import read_detections
from tag2box.io import write_json
from tag2box.metrics.coco_ap import coco_scores

CLASSES = 80
OBJECTS, DETECTIONS = 7, 100  # per photo
WIDTH, HEIGHT = 640, 480


def write_files(folder: Path, images: int) -> tuple[Path, Path]:
    """A COCO file of true boxes and one of results."""
    draw = np.random.default_rng(0)
    photos = [{"id": i + 1, "file_name": f"{i + 1:012d}.jpg", "width": WIDTH, "height": HEIGHT} for i in range(images)]
    objects: list[Row] = []
    results: list[Row] = []
    for photo in photos:
        side = np.array([WIDTH, HEIGHT]) * (0.03 + 0.5 * draw.random((OBJECTS, 2)) ** 2)
        corner = (np.array([WIDTH, HEIGHT]) - side) * draw.random((OBJECTS, 2))
        labels = draw.integers(1, CLASSES + 1, OBJECTS)
        truth = np.concatenate([corner, side], axis=1).round(2)
        for box, label in zip(truth.tolist(), labels.tolist(), strict=True):
            row = {"id": len(objects) + 1, "image_id": photo["id"], "category_id": label, "bbox": box}
            objects.append({**row, "area": 0.7 * box[2] * box[3], "iscrowd": int(draw.random() < 0.02)})
        near = draw.integers(0, OBJECTS, DETECTIONS)
        boxes = (truth[near] * (1 + 0.1 * draw.standard_normal((DETECTIONS, 4)))).clip(0.01).round(2)
        found = np.where(draw.random(DETECTIONS) < 0.6, labels[near], draw.integers(1, CLASSES + 1, DETECTIONS))
        for box, label, score in zip(boxes.tolist(), found.tolist(), draw.random(DETECTIONS).tolist(), strict=True):
            results.append({"image_id": photo["id"], "category_id": label, "bbox": box, "score": round(score, 5)})
    categories = [{"id": k, "name": f"class{k}"} for k in range(1, CLASSES + 1)]
    paths = folder / "truth.json", folder / "results.json"
    whole = {"images": photos, "categories": categories, "annotations": objects}
    for path, content in zip(paths, (whole, results), strict=True):
        path.write_text(json.dumps(content), encoding="utf-8")
    return paths


def official(truth: Path, results: Path) -> tuple[list[float], dict[str, float]]:
    """The twelve numbers by pycocotools, and seconds by part."""
    clock = [time.process_time()]
    with contextlib.redirect_stdout(io.StringIO()):
        own = COCO(truth)
        found = own.loadRes(f"{results}")
        clock.append(time.process_time())
        run = COCOeval(own, found, "bbox")
        run.evaluate()
        run.accumulate()
        run.summarize()
        clock.append(time.process_time())
    return run.stats.tolist(), _parts(clock)


def ours(truth: Path, results: Path) -> tuple[list[float], dict[str, float]]:
    """The same by tag2box; what is undefined is -1, as there."""
    clock = [time.process_time()]
    own = read_coco(truth)
    found = read_detections(results, own.truth, images=own.images, categories=own.categories)
    clock.append(time.process_time())
    scores = coco_scores(own.truth, found, areas=own.areas)
    clock.append(time.process_time())
    return [-1.0 if value is None else value for value in astuple(scores)], _parts(clock)


def _parts(clock: list[float]) -> dict[str, float]:
    return {"load": clock[1] - clock[0], "evaluate": clock[2] - clock[1], "all": clock[2] - clock[0]}


def main() -> None:
    args = arguments(__doc__, "coco-evaluation", repeats=3).parse_args()
    set_threads(args.threads or 1)
    images = 20 if args.small else 5000
    ways = {"pycocotools": official, "tag2box": ours}
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as name:
        few = Path(name) / "few"
        few.mkdir()
        ours(*write_files(few, 5))
        files = write_files(Path(name), images)
        for _ in range(args.repeats):
            numbers = {}
            for way, work in ways.items():
                numbers[way], spent = work(*files)
                seconds[way].append(spent)
                print(way, spent, flush=True)
    apart = max(abs(a - b) for a, b in zip(*numbers.values(), strict=True))
    pairs = list(zip(*seconds.values(), strict=True))
    row: Row = {"images": images, "classes": CLASSES, "detections": images * DETECTIONS, "largest_difference": apart}
    for part in ("load", "evaluate", "all"):
        row[f"times_as_fast_{part}"] = spread_of([a[part] / max(b[part], 1e-7) for a, b in pairs])
        row[f"seconds_{part}"] = {way: spread_of([s[part] for s in values]) for way, values in seconds.items()}
    print(row["times_as_fast_all"], apart)
    write_json(args.out, {"machine": machine(), "rounds": args.repeats, **row})


if __name__ == "__main__":
    main()
