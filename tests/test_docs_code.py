"""Python code on the pages and in docstrings is run, on tiny photos and with a tiny network, or says that it is not."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch

import tag2box
from pages import BLOCK, PAGES, ROOT, name
from tag2box.labels.journal import Journal
from tag2box.labels.label_set import LabelSet
from tag2box.labels.reviews import Action
from tag2box.labels.trust import Trust
from tag2box.methods.mist import Mist
from tag2box.methods.wscl import Contrast
from tag2box.models.augment import Augment
from tag2box.models.detector import Detector, Heads
from tag2box.models.drop_block import DropBlock
from tag2box.models.lite0 import Lite0
from tag2box.models.rng import StepRng
from tag2box.proposals.selective_search import SelectiveSearch
from tag2box.recipes import RECIPES, Data
from tag2box.training.criterion import Criterion
from tag2box.training.step import Step
from tag2box.types import Batch, Proposals
from tiny import tiny_detector
from tiny_world import small_config, small_data, small_network
from worlds import random_world

NOT_RUN = re.compile(r"\*\(Not run by the tests: [^*]+\)\*\s*\Z")
GUIDES = {  # pages whose Python is run by a test of its own
    "docs/adding-a-format.md": "formats/test_format_guide.py",
    "docs/adding-a-labeler.md": "methods/test_labeler_guide.py",
    "docs/adding-a-loss-term.md": "training/test_loss_term_guide.py",
    "docs/adding-a-metric.md": "metrics/test_metric_guide.py",
    "docs/adding-a-proposal-method.md": "proposals/test_proposal_guide.py",
    "docs/backbones.md": "test_docs_recipes.py",
}


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a reader: photos, tags, a run, its labels, a student, and files of other tools."""
    folder = tmp_path_factory.mktemp("reader")
    small_data(folder)
    tags = (folder / "tags.csv").read_text(encoding="utf-8")
    (folder / "tags.csv").write_text(tags.replace("disc", "dog").replace("box", "ball"), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        small_network(patched)
        tag2box.train(small_config(folder), Path("runs/mine"))
        tag2box.label(Path("runs/mine"), Path("tags.csv"), Path("labels"))
        labels = LabelSet.open(Path("labels"))
        for seed in range(3):
            shutil.copytree("labels", f"labels-{seed}")
        tag2box.train_student(Path("labels"), Path("runs/student"), overrides=tiny_student())
        with Journal(Path("labels"), labels) as journal:
            for photo in labels.content.photos:
                journal.append(photo.id, Action("done"), based_on=0, key=photo.id, is_sampled=True)
        for out, form in (("corrected.json", "coco"), ("truth.json", "coco"), ("cvat", "cvat")):
            tag2box.export(labels, Path(out), export=form)
        tag2box.export(labels, Path("VOC2007"), export="voc", splits={"test": 1.0})
        tag2box.detect(Path("runs/mine"), [Path("photos")], Path("boxes.json"), min_score=0.0)
        tag2box.trust(Path("labels"))
        shutil.copytree("photos", "new-photos")
        shutil.copy("photos/photo0.jpg", "new-photos/a.jpg")
        shutil.copy("photos/photo0.jpg", "photo.jpg")
        yield folder


def tiny_student() -> list[str]:
    return [*importlib.import_module("tiny_student").SMALL, "plan.iterations=2"]


@pytest.fixture
def reader(desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], dict[str, Any]]:
    """Runs code in a copy of the reader's folder, which lacks what the code makes; recipes and students are tiny."""
    folder = tmp_path / "reader"
    shutil.copytree(desk, folder)
    monkeypatch.chdir(folder)
    small_network(monkeypatch)
    quick = replace(small_config(folder), data=Data())
    monkeypatch.setitem(RECIPES, "photos", lambda: quick)
    train_student = tag2box.train_student
    monkeypatch.setattr(
        tag2box,
        "train_student",
        lambda *args, overrides=(), **rest: train_student(*args, overrides=[*overrides, *tiny_student()], **rest),
    )

    def run(text: str, made: str) -> dict[str, Any]:
        for out in made.split():
            (shutil.rmtree if Path(out).is_dir() else os.remove)(out)
        names: dict[str, Any] = {"__name__": "__main__", **given(folder)}
        exec(compile(text, "code of the docs", "exec"), names)
        return names

    return run


def given(folder: Path) -> dict[str, Any]:
    """Names that code on the pages uses without making them."""
    truth, detections = random_world(0)
    torch.manual_seed(0)
    boxes = torch.tensor([[0.0, 0, 30, 30], [4, 4, 28, 30], [20, 20, 40, 40]]).repeat(2, 1)
    batch = Batch(("a", "b"), torch.eye(2, dtype=torch.bool), Proposals(boxes, (3, 3)), torch.rand(2, 3, 40, 48) * 255)
    detector = tiny_detector(2).train()
    (folder / "rows").mkdir()
    table = pyarrow.table({"scores": [[0.5, 0.2], []], "error": ["", "no photo"]})
    pyarrow.parquet.write_table(table, folder / "rows" / "part.parquet")
    return {
        "rows": folder / "rows",
        "tag2box": tag2box, "Path": Path, "replace": replace, "Data": Data, "SelectiveSearch": SelectiveSearch,
        "LabelSet": LabelSet, "Trust": Trust, "folder": folder / "labels",
        "config": replace(small_config(folder), data=Data(tags=folder / "tags.csv", photos=folder / "photos")),
        "truth": truth, "detections": detections, "others": random_world(1)[1], "boxes_of_class_maps": detections,
        "probe_scores": {photo: torch.rand(len(truth.classes)) for photo in truth.ids},
        "Detector": Detector, "Lite0": Lite0, "Heads": Heads, "Step": Step, "StepRng": StepRng, "DropBlock": DropBlock,
        "Augment": Augment, "Criterion": Criterion, "Mist": Mist, "Contrast": Contrast,
        "batch": batch, "detector": detector, "i": 0, **criterion_inputs(detector, batch), "iterations": 2,
        "optimizer": torch.optim.SGD([p for p in detector.parameters() if p.requires_grad], lr=0.1),
    }  # fmt: skip


def criterion_inputs(detector: Detector, batch: Batch) -> dict[str, Any]:
    """What a step passes to its criterion."""
    seen: dict[str, Any] = {}

    class Recorder(Criterion):
        def __call__(self, outputs: Any, meta: Any, augment_rois: Any, **rest: Any) -> Any:
            seen.update(outputs=outputs, augment_rois=augment_rois)
            raise InterruptedError

    with contextlib.suppress(InterruptedError):
        Step(detector, Recorder(), DropBlock(), Augment())(batch, StepRng(0, 0))
    return seen


MADE = {  # what code makes itself, in a reader's folder that would have it already
    "README.md": "runs/mine", "docs/commands.md": "runs/mine", "docs/labels.md": "labels",
    "docs/tracking.md": "runs/mine",
    "docs/student.md": "runs/student", "train": "runs/mine", "tracking": "runs/mine", "label": "labels",
    "merge_labels": "labels", "docs/boxes-and-tags.md": "labels-2", "train_student": "runs/student",
}  # fmt: skip


def code_of_pages() -> list[Any]:
    """Every Python block that is not marked as not run, of pages without a test of their own."""
    return [
        pytest.param(name(page), match[2], id=f"{name(page)}-{place}")
        for page in PAGES
        if name(page) not in GUIDES
        for place, match in enumerate(BLOCK.finditer(page.read_text(encoding="utf-8")))
        if match[1] == "python" and not NOT_RUN.search(match.string[: match.start()])
    ]


def examples_of_docstrings() -> list[Any]:
    return [
        pytest.param(public, dedent(text.partition("\nExample:\n")[2]), id=public)
        for public in sorted(tag2box.__all__)
        if "\nExample:\n" in (text := inspect.getdoc(getattr(tag2box, public)) or "")
    ]


@pytest.mark.parametrize(("page", "text"), code_of_pages())
def test_python_on_the_pages_runs(page: str, text: str, reader: Callable[[str, str], dict[str, Any]]) -> None:
    assert reader(text, MADE.get(page, ""))


@pytest.mark.parametrize(("public", "text"), examples_of_docstrings())
def test_examples_of_docstrings_run(public: str, text: str, reader: Callable[[str, str], dict[str, Any]]) -> None:
    assert reader(text, MADE.get(public, ""))


@pytest.mark.parametrize("page", GUIDES)
def test_a_guide_has_a_test_that_reads_its_python(page: str) -> None:
    text = (ROOT / "tests" / GUIDES[page]).read_text(encoding="utf-8")
    assert Path(page).name in text and 'blocks(GUIDE, "python")' in text


def test_few_blocks_are_not_run_and_say_why() -> None:
    texts = {name(page): page.read_text(encoding="utf-8") for page in PAGES}
    remarks = {page: text.count("*(Not run by the tests: ") for page, text in texts.items()}
    assert {page: count for page, count in remarks.items() if count} == {
        "docs/architecture.md": 1, "docs/compare.md": 1, "docs/hand-over.md": 2, "docs/hub.md": 1,
        "docs/reproduce.md": 1, "docs/scenes.md": 1,
    }  # fmt: skip
