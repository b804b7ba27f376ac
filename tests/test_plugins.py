"""A package from outside tag2box adds one part of every kind: train, interrupt, resume, detect, evaluate, report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

PARTS = "tag2box_example.parts"
SETTINGS = (
    f"criterion.labeler.kind={PARTS}:Halved", "criterion.labeler.factor=0.4",
    f"criterion.mil.kind={PARTS}:Sharpened", "criterion.mil.sharpness=3.0",
    f'criterion.extra=[{{kind="{PARTS}:LogitNorm", weight=0.02}}]',
    f"backbone.kind={PARTS}:Patches", "backbone.channels=6",
    f"proposals.kind={PARTS}:Grid", "proposals.min_side=4", "proposals.short_side=64",
    "loader.batch_size=2", "loader.resize.scales=[64]", "loader.workers=0", "inference.scales=[64]",
    "plan.iterations=120", "plan.checkpoint_every=5", "plan.log_every=5",
)  # fmt: skip


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the package was installed into by pip, without network."""
    folder = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source") / "package"
    subprocess.run(["cp", "-r", Path(__file__).parent / "plugin_package", source], check=True)
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    subprocess.run([*pip, "--target", folder, source], check=True, timeout=300)
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six small photos in the package's own dataset format, and their boxes as COCO."""
    folder = tmp_path_factory.mktemp("photos")
    images, boxes = [], []
    for i in range(6):
        pixels = np.full((64, 80, 3), 200, np.uint8)
        x = 8 + 8 * i
        pixels[16:48, x : x + 24] = (255, 0, 0) if i % 2 else (0, 0, 255)
        Image.fromarray(pixels).save(folder / f"p{i}.png")
        (folder / f"p{i}.tags").write_text("red" if i % 2 else "blue")
        images.append({"id": i + 1, "file_name": f"p{i}.png", "width": 80, "height": 64})
        box = {"id": i + 1, "image_id": i + 1, "category_id": i % 2 + 1, "bbox": [x, 16, 24, 32]}
        boxes.append({**box, "area": 768, "iscrowd": 0})
    categories = [{"id": 1, "name": "blue"}, {"id": 2, "name": "red"}]
    truth = {"images": images, "annotations": boxes, "categories": categories}
    (folder / "truth.json").write_text(json.dumps(truth))
    return folder


def command(installed: Path, *arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "tag2box", *map(str, arguments)]


def run(installed: Path, *arguments: str | Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        command(installed, *arguments), env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_run_of_outside_parts_is_interrupted_resumed_and_used(installed: Path, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    given = [word for setting in SETTINGS for word in ("--set", setting)]
    child = subprocess.Popen(
        command(installed, "train", photos, "--data-format", f"{PARTS}:Sidecar", "--out", out, *given),
        env={**os.environ, "PYTHONPATH": str(installed)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not (out / "state.json").exists() and child.poll() is None:
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=120)
    assert "--resume" in errors, errors
    stopped = json.loads((out / "state.json").read_text())["iteration"]
    run(installed, "train", "--out", out, "--resume")
    assert stopped < json.loads((out / "state.json").read_text())["iteration"] == 120

    settings = (out / "config.toml").read_text()
    for name in ("Halved", "Sharpened", "LogitNorm", "Patches", "Grid", "Sidecar"):
        assert f"{PARTS}:{name}" in settings, name
    steps = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert all("LogitNorm" in step["losses"] for step in steps if step["event"] == "step")

    boxes, lines = tmp_path / "boxes.json", tmp_path / "lines.txt"
    run(installed, "detect", out, photos, "--out", boxes, "--min-score", "0")
    run(installed, "detect", out, photos, "--out", lines, "--format", f"{PARTS}:Lines", "--min-score", "0")
    assert any(line.split()[1] in {"red", "blue"} for line in lines.read_text().splitlines())
    truth = photos / "truth.json"
    table = run(installed, "evaluate", "--truth", truth, "--detections", boxes, "--metrics", f"voc12,{PARTS}:answered")
    assert "answered" in table and "100.0" in table
    run(installed, "report", out, "--out", tmp_path / "report.html")
    assert "Loss LogitNorm over training" in (tmp_path / "report.html").read_text()


def test_without_the_package_the_run_names_what_is_missing(installed: Path, photos: Path, tmp_path: Path) -> None:
    command_line = [sys.executable, "-m", "tag2box", "train", photos, "--out", tmp_path / "run"]
    done = subprocess.run(
        [*map(str, command_line), "--set", f"criterion.labeler.kind={PARTS}:Halved"],
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"{PARTS}:Halved" in done.stderr and "PYTHONPATH" in done.stderr
