"""Every command checks the places it will write to before it works: one line, nothing begun, nothing written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tag2box.progress import TerminalProgress
from tiny import tiny_photos
from tiny_world import call, tree

COMMANDS: dict[str, tuple[str, dict[str, str]]] = {
    "data check DATA --json folder": ("folder: is a folder; expected a file", {}),
    "data stats DATA --out folder": ("folder: is a folder; expected a file", {}),
    "data stats DATA --out new.html --json file/x.json": ("file/x.json: file is no folder", {}),
    "propose DATA --out file": ("file: is a file; expected a folder", {}),
    "propose DATA --out file/store": ("file/store: file is no folder", {}),
    "proposals recall DATA store --out folder": ("folder: is a folder; expected a file", {}),
    "proposals recall DATA store --out new.html --json folder": ("folder: is a folder; expected a file", {}),
    "proposals import found.npz DATA --out file/store": ("file/store: file is no folder", {}),
    "evaluate --truth DATA --detections found.json --json folder": ("folder: is a folder; expected a file", {}),
    "report run --out folder": ("folder: is a folder; expected a file", {}),
    "detect run photos --out folder": ("folder: is a folder; expected a file", {}),
    "detect run photos --out new.json --draw file": ("file: is a file; expected a folder", {}),
    "detect run photos --out new.json --voc file": ("file: is a file; expected a folder", {}),
    "detect run photos --out file --format yolo": ("file: is a file; expected a folder", {}),
    "demo --out file": ("file/summary.json: file is no folder", {}),
    "reproduce table3a --out file": ("file/table3a.html: file is no folder", {}),
    "compare --systems oicr --out file": ("file/compare.html: file is no folder", {}),
    "weights convert found.npz": ("file/weights: file is no folder", {"TAG2BOX_HOME": "file"}),
    "weights get vgg16": ("file/weights: file is no folder", {"TAG2BOX_HOME": "file"}),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_place_that_cannot_be_written_is_refused_first(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    says, variables = COMMANDS[command]
    photos = tiny_photos(tmp_path, 1).photos
    image = {"id": 1, "file_name": photos[0].path.name, "width": photos[0].width, "height": photos[0].height}
    box = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 9, 9], "area": 81, "iscrowd": 0}
    truth = {"images": [image], "categories": [{"id": 1, "name": "cat"}], "annotations": [box]}
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    before = tree(tmp_path)

    def begun(*_: object) -> None:
        raise AssertionError("the work has begun")

    monkeypatch.setattr(TerminalProgress, "__call__", begun)
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = call(command.replace("DATA", "truth.json").split(), monkeypatch, capsys)
    assert (done.code, done.out) == (2, "")
    assert len(done.err.splitlines()) == 1 and done.err.startswith(f"tag2box: {says}")
    assert tree(tmp_path) == before and not list(tmp_path.glob(".*"))
