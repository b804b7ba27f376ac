"""The notebook is executed from photos to exported labels; the Dockerfile names files that exist."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from tag2box.data.scenes import Scenes

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "examples" / "photos_to_labels.ipynb"


def code_cells() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_is_stored_without_outputs_and_explains_each_step() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    kinds = [cell["cell_type"] for cell in notebook["cells"]]
    assert notebook["nbformat"] == 4 and kinds.count("code") >= 6
    assert all(
        not cell["outputs"] and cell["execution_count"] is None for cell in notebook["cells"] if "outputs" in cell
    )
    assert all(kinds[place - 1] == "markdown" for place, kind in enumerate(kinds) if kind == "code")
    assert len({cell["id"] for cell in notebook["cells"]}) == len(kinds)
    for cell in code_cells():
        ast.parse(cell)


@pytest.mark.slow
def test_every_cell_of_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: None) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "__main__"}
    for cell in code_cells():
        exec(compile(cell, "notebook cell", "exec"), names)  # as Jupyter does, one namespace for all
    scenes = names["scenes"]
    assert isinstance(scenes, Scenes)
    files = sorted((tmp_path / "notebook" / "yolo").rglob("*.txt"))
    boxes = [line.split() for file in files if file.stem.startswith("train_") for line in file.read_text().splitlines()]
    assert len(boxes) >= scenes.train  # every photo has a tag, and every tag a box
    assert all(len(box) == 5 and all(0 <= float(value) <= 1 for value in box[1:]) for box in boxes)
    assert (tmp_path / "notebook" / "detected.jpg").stat().st_size


# ---------------------------------------------------------------- Dockerfile


def test_the_dockerfile_copies_what_exists_and_is_not_ignored() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [name for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE) for name in line.split()[:-1]]
    assert copied and all((ROOT / name).exists() for name in copied)
    assert all(any(Path(name).match(pattern) for pattern in kept) for name in copied)


def test_the_dockerfile_installs_verified_files_and_runs_as_a_user() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    words = [line.split()[0] for line in text.splitlines() if line and not line.startswith(("#", " "))]
    assert words[0] == "FROM" and words[-2:] == ["ENTRYPOINT", "CMD"]
    assert set(words) <= {"FROM", "ENV", "ARG", "WORKDIR", "COPY", "RUN", "USER", "ENTRYPOINT", "CMD"}
    calls = re.findall(r"pip install ([^&;|]*)", text)
    assert calls and all(
        "--require-hashes" in call or call.startswith("--no-deps --no-build-isolation .") for call in calls
    )
    assert text.index("USER user") < text.index("ENTRYPOINT")
