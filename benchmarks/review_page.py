"""The review page with 20,000 photos: first paint, time to the next photo in a browser, memory of the server.

    python benchmarks/review_page.py --out docs/results/review-page.json

Draws 40 scenes, links them to 20,000 names, writes a label set, and reviews photos in Chromium: at the pace of a person
(a pause, in which the page fetches the photos that follow) and without pauses. Needs playwright and a Chromium.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image

from tag2box.data.scenes import Scenes
from tag2box.io import write_json
from tag2box.labels.label_set import LabelSet
from tag2box.labels.labelled import LabelBox, LabelledPhoto, LabelledPhotos
from tag2box.storage import FileStamp

SCENES = Scenes(width=640, height=480, smallest=90, largest=230)
ARGS = [
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
NEXT = """
async (key) => {
  const before = document.body.dataset.shown;
  const begin = performance.now();
  document.getElementById("stage").dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  while (document.body.dataset.shown === before && performance.now() - begin < 30000) {
    await new Promise((done) => setTimeout(done, 0));
  }
  await new Promise((done) => requestAnimationFrame(done));
  return performance.now() - begin;
}
"""
"""Milliseconds from a key to the frame with the next photo and its boxes."""
SCROLL = """
async () => {
  const rows = document.getElementById("rows");
  const times = [];
  for (let place = 0; place < 40; place += 1) {
    const begin = performance.now();
    rows.scrollTop = (rows.scrollHeight * place) / 40;
    await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
    times.push(performance.now() - begin);
  }
  return times;
}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=int, default=20_000)
    parser.add_argument("--scenes", type=int, default=40, help="different photos among them")
    parser.add_argument("--steps", type=int, default=60, help="photos that are reviewed, at each pace")
    parser.add_argument("--chromium", default=shutil.which("chromium") or "chromium")
    parser.add_argument("--out", type=Path, default=Path("docs/results/review-page.json"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        labels = make_labels(Path(folder), args.photos, args.scenes)
        made = time.perf_counter() - begin
        figures = measure(labels, args.chromium, args.steps)
    figures = {"photos": args.photos, "seconds_to_generate": round(made, 1), **figures}
    write_json(args.out, figures)
    print(args.out.read_text())


def make_labels(folder: Path, count: int, different: int) -> Path:
    """A label set of links to some scenes, with their true boxes as labels."""
    (folder / "photos").mkdir()
    drawn = []
    for number in range(min(different, count)):
        scene = SCENES.draw("train", number)
        path = folder / f"scene_{number}.jpg"
        Image.fromarray(scene.image).save(path, quality=90)
        drawn.append((path, scene.objects, FileStamp.of(path)))
    entries = []
    for number in range(count):
        path, objects, stamp = drawn[number % len(drawn)]
        name = f"photo_{number:05d}"
        os.link(path, folder / "photos" / f"{name}.jpg")
        names = [SCENES.classes[label] for label in objects.labels.tolist()]
        boxes = tuple(
            LabelBox(
                (x1, y1, x2, y2), own, 0.9, why="best of its tag", rank=1, margin=number % 7 / 10,
                alternative=(x1, y1, (x1 + x2) / 2, y2) if number % 5 == 0 else None, source="label",
            )
            for (x1, y1, x2, y2), own in zip(objects.boxes.tolist(), names, strict=True)
        )  # fmt: skip
        tags = tuple(dict.fromkeys(names))
        entries.append(
            LabelledPhoto(name, f"{name}.jpg", SCENES.width, SCENES.height, tags, boxes, (), "", stamp)
        )  # fmt: skip
    LabelSet(LabelledPhotos(folder / "photos", SCENES.classes, tuple(entries))).write(folder / "labels")
    return folder / "labels"


def measure(labels: Path, chromium: str, steps: int) -> dict[str, object]:
    """Start the server and a browser, and measure both."""
    from playwright.sync_api import sync_playwright

    begin = time.perf_counter()
    argv = [sys.executable, "-m", "tag2box", "review", str(labels), "--no-browser"]
    server = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        address = next(found[0] for line in server.stdout if (found := re.search(r"http://\S+", line)))
        started = time.perf_counter() - begin
        idle = memory(server.pid)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=ARGS)
            figures = measure_page(browser, address, steps)
            browser.close()
        return {
            "seconds_to_start": round(started, 1),
            **figures,
            "server_mb": {"at_start": idle, "at_end": memory(server.pid)},
            "browser": "chromium",
            "load_average": round(os.getloadavg()[0], 1),
            "processors": os.cpu_count(),
        }
    finally:
        server.terminate()
        server.wait()


def measure_page(browser: Any, address: str, steps: int) -> dict[str, object]:
    """Milliseconds of the page itself."""
    paints, firsts = [], []
    for _ in range(5):
        page = browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
        page.goto(address)
        page.wait_for_selector("body[data-shown]")
        paints.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
        firsts.append(page.evaluate("performance.getEntriesByName('photo-shown')[0].startTime"))
    page.wait_for_timeout(2000)
    paced = []
    for _ in range(steps):
        paced.append(page.evaluate(NEXT, "Enter"))
        page.wait_for_timeout(400)
    held = [page.evaluate(NEXT, "n") for _ in range(steps)]
    return {
        "first_paint_ms": summary(paints),
        "first_photo_ms": summary(firsts),
        "next_photo_ms": summary(paced),
        "next_photo_without_pause_ms": summary(held),
        "list_jump_ms": summary(page.evaluate(SCROLL)),
        "rows_in_page": page.evaluate("document.querySelectorAll('.photo-row').length"),
    }


def summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": round(statistics.median(ordered), 1),
        "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 1),
        "max": round(ordered[-1], 1),
    }


def memory(pid: int) -> dict[str, int]:
    """Resident memory in MB, its peak, and the part that is the process's own."""
    status = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE))
    fields = {"resident": "VmRSS", "peak": "VmHWM", "own": "RssAnon"}
    return {name: int(status[key]) // 1024 for name, key in fields.items()}


if __name__ == "__main__":
    main()
