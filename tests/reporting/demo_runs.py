"""Synthetic run folders as training writes them, for the tests and for viewing the page."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import torch
from PIL import Image, ImageDraw

from tag2box.annotations import Detections, Objects, Truth
from tag2box.reporting.records import ProposalRecall, ReportInputs, RunRecord, read_run

CLASSES = ("mug", "plate", "spoon")
COLOURS = ((200, 80, 60), (90, 140, 190), (210, 190, 110))
SIZE = (400, 300)
ITERATIONS = 400


def make_truth(ids: list[str], seed: int) -> Truth:
    chance = random.Random(seed)
    objects = []
    for index in range(len(ids)):
        boxes, labels = [], []
        for _ in range(0 if index == 0 else chance.randint(1, 4)):  # the first photo is empty
            x, y = chance.randint(0, 290), chance.randint(0, 190)
            boxes.append([x, y, x + chance.randint(50, 110), y + chance.randint(50, 110)])
            labels.append(chance.randrange(len(CLASSES)))
        objects.append(Objects.of(boxes, labels))
    return Truth(CLASSES, tuple(ids), (SIZE,) * len(ids), tuple(objects))


def paint(truth: Truth, folder: Path) -> dict[str, Path]:
    folder.mkdir(parents=True)
    paths = {}
    for photo, objects in zip(truth.ids, truth.objects, strict=True):
        image = Image.new("RGB", SIZE, (120, 125, 118))
        pen = ImageDraw.Draw(image)
        for corners, label in zip(objects.boxes.tolist(), objects.labels.tolist(), strict=True):
            pen.ellipse(corners, fill=COLOURS[label])
        paths[photo] = folder / f"{photo}.jpg"
        image.save(paths[photo])
    return paths


def jitter(truth: Truth, seed: int, spread: float) -> dict[str, Detections]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for photo, objects in zip(truth.ids, truth.objects, strict=True):
        noise = torch.randn(len(objects), 4, generator=generator) * spread
        scores = torch.rand(len(objects), generator=generator)
        found[photo] = Detections(objects.boxes + noise, scores, objects.labels)
    return found


def events(name: str, truth: Truth, *, boxes: float, tau: bool, seed: int) -> list[dict[str, object]]:
    chance = random.Random(seed)
    machine = {"cpu": "2 cores", "memory": "8 GB"}
    out: list[dict[str, object]] = [
        {"event": "start", "time": 0.0, "name": name, "classes": list(truth.classes), "train_photos": len(truth)}
        | {"iterations": ITERATIONS, "seed": 0, "proposals_per_photo": 180.2, "machine": machine}
        | {"versions": {"python": "3.11", "torch": "2.13.0"}}
    ]
    for iteration in range(5, ITERATIONS + 1, 5):
        part = iteration / ITERATIONS
        wave = [math.exp(-3 * part) + 0.3 + chance.gauss(0, 0.05) for _ in range(4)]
        losses = {"mil": wave[0], "refine": 2 * wave[1], "box": 0.4 * wave[2], "contrast": wave[3] if tau else 0.0}
        losses["total"] = sum(losses.values())
        out.append({"event": "step", "time": 0.4 * iteration, "iteration": iteration, "losses": losses}
                   | ({"contrast_share": 0.01 * wave[3]} if tau else {})
                   | {"lr": 0.01, "seconds": 0.4 * iteration})  # fmt: skip
        if iteration % 10 == 0:
            counts = [1 + (boxes - 1) * part + chance.gauss(0, 0.04) for _ in range(3)]
            taus = [0.4 + 0.3 * part + chance.gauss(0, 0.01) if tau else None for _ in range(3)]
            per_class = {c: counts[-1] + 0.2 * i for i, c in enumerate(truth.classes)}
            out.append({"event": "pseudo", "time": 0.4 * iteration, "iteration": iteration}
                       | {"boxes_per_class": counts, "threshold": taus, "per_class": per_class})  # fmt: skip
        if iteration % 100 == 0:
            out.append({"event": "gallery", "time": 0.4 * iteration, "iteration": iteration}
                       | {"photos": gallery(truth, boxes, 1 - part, seed)})  # fmt: skip
    return [*out, {"event": "end", "time": 170.0, "iteration": ITERATIONS, "seconds": 168.3, "peak_memory_mb": 1812.4}]


def gallery(truth: Truth, boxes: float, blur: float, seed: int) -> list[dict[str, object]]:
    generator = torch.Generator().manual_seed(seed)
    photos = []
    for photo, objects in list(zip(truth.ids, truth.objects, strict=True))[:6]:
        kept = objects.boxes[: round(boxes)]
        shaken = kept + torch.randn(len(kept), 4, generator=generator) * 40 * blur
        labels = objects.labels[: len(kept)].tolist()
        photos.append({"id": photo, "boxes": shaken.tolist(), "labels": labels, "scores": [0.7] * len(kept)})
    return photos  # type: ignore[return-value]


def metrics(truth: Truth, level: float) -> dict[str, object]:
    per_class = {c: level + 0.08 * i for i, c in enumerate(truth.classes)}
    mean = sum(per_class.values()) / len(per_class)
    shares = {"found": level, "part": 0.5 - level / 2, "grouped": 0.2 - level / 5, "missed": 0.2 - level / 5}
    kinds = {
        "correct": mean,
        "other_class": 0.0,
        "part": 0.8 - mean,
        "too_large": 0.1,
        "surroundings": 0.1,
        "nowhere": 0.0,
    }
    trivial = {**dict.fromkeys(kinds, 0.0), "correct": 0.45, "too_large": 0.55, "pairs": 90}
    rows = ("centred box, same class scores", "whole photo, same class scores", "centred box, tags known")
    extents = {"oracle_corloc": 0.93, "above_part": 0.43, "above_enlargement": 0.6, "above_both": 0.3, "pairs": 90}
    return {
        "test": {
            "baselines": {row: {"voc07": {"mAP": 0.4 - 0.1 * i, "per_class": {}}} for i, row in enumerate(rows)},
            "verdicts": {"voc07": {"value": mean, "best_row": rows[0], "best": 0.4, "is_above": mean > 0.4}},
            "extents": extents,
            "voc07": {"mAP": mean, "per_class": per_class},
            "voc12": {"mAP": mean - 0.01, "per_class": per_class},
            "coco": {"AP": mean / 2, "AP50": mean, "AP75": None, "per_class": {"mug": 0.1}},
            "challenges": shares | {"other": 1 - sum(shares.values())},
        },
        "train": {
            "corloc": {"mean": mean + 0.2, "per_class": {c: v + 0.2 for c, v in per_class.items()}},
            "errors": kinds | {"pairs": 90, "by_class": {"mug": kinds | {"pairs": 30}}, "by_size": {}, "by_count": {}},
            "baselines": {rows[2]: {"corloc": {"mean": 0.45, "per_class": {}}, "errors": trivial}},
            "verdicts": {"corloc": {"value": mean + 0.2, "best_row": rows[2], "best": 0.45, "is_above": True}},
        },
        "truth_boxes_per_class": 2.1,
    }


def write_run(folder: Path, lines: list[dict[str, object]], figures: dict[str, object]) -> None:
    folder.mkdir(parents=True)
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "metrics.json").write_text(json.dumps(figures))
    (folder / "config.toml").write_text('[labeler]\nkind = "od"\nfg_iou = 0.5\n')


def write_demo(folder: Path) -> ReportInputs:
    """Two finished runs on painted photos, read back as a report reads them."""
    train = make_truth([f"train_{i:03d}" for i in range(40)], seed=1)
    test = make_truth([f"test_{i:03d}" for i in range(30)], seed=2)
    runs: list[RunRecord] = []
    for name, boxes, level, seed in (("OICR+", 1.05, 0.28, 3), ("OD-WSCL", 1.9, 0.4, 4)):
        home = folder / "runs" / name
        write_run(home, events(name, train, boxes=boxes, tau=name == "OD-WSCL", seed=seed), metrics(train, level))
        runs.append(read_run(home, test_detections=jitter(test, seed, 40 * (1 - level))))
    return ReportInputs(
        title="Kitchen objects from tags",
        runs=runs,
        commands=["tag2box train photos --out runs/OD-WSCL", "tag2box report runs/OICR+ runs/OD-WSCL"],
        train_photos=paint(train, folder / "train"),
        test_photos=paint(test, folder / "test"),
        train_truth=train,
        test_truth=test,
        proposal_recall={
            "train": ProposalRecall({"0.5": 0.93, "0.7": 0.71, "0.9": 0.2}, 0.78, 180.2),
            "test": ProposalRecall({"0.5": 0.91, "0.7": 0.69, "0.9": 0.18}, 0.77, 176.0),
        },
    )
