"""``tag2box propose --snap``, from detections to a run whose report says what it uses; with a fake network."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fake_sam import use_fake_sam
from tag2box.experiments import summary
from tag2box.experiments.grid import RunResult
from tag2box.experiments.study_data import SplitStores
from tag2box.proposals import sam_boxes
from tag2box.proposals.importers.proposal_files import Imported
from tag2box.proposals.selective_search import SelectiveSearch
from tag2box.proposals.store import ProposalStore
from tag2box.reporting.records import read_run
from tag2box.reporting.report_page import name_runs
from tag2box.runs import read_config
from tiny_world import Finished, call, small_data, small_network, tree

FLAGS = ("--short-side", "0", "--min-side", "4", "--max-boxes", "30", "--workers", "1")
Run = Callable[..., Finished]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    use_fake_sam(monkeypatch)
    small_network(monkeypatch)
    small_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    return lambda *words: call(words, monkeypatch, capsys)


def train(store: str, out: str) -> tuple[str, ...]:
    short = ("plan.iterations=2", "loader.resize.scales=[48]", "inference.scales=[48]", "heads.embed_dim=6")
    flags = [word for each in short for word in ("--set", each)]
    return ("train", "tags.csv", "--photos", "photos", "--proposals", store, "--out", out, *flags)


def test_detections_are_snapped_into_a_store_that_trains(run: Run, tmp_path: Path) -> None:
    assert run("propose", "photos", "--out", "ss", *FLAGS).code == 0
    assert run(*train("ss", "first")).code == 0
    assert run("detect", "first", "photos", "--out", "boxes.json", "--proposals", "ss").code == 0
    snap = ("propose", "photos", "--out", "snapped", "--snap", "boxes.json", "--proposals", "ss", *FLAGS)
    before, done = tree(tmp_path / "ss"), run(*snap)
    assert done.code == 0 and done.out.startswith("snapped (uses SA-1B masks): 4 photos, "), done.err
    plain, added = ProposalStore.open(Path("ss")), ProposalStore.open(Path("snapped"))
    for name in plain.sizes:
        assert torch.equal(added.boxes(name)[: len(plain.boxes(name))], plain.boxes(name))
    assert sum(len(added.boxes(name)) - len(plain.boxes(name)) for name in plain.sizes) > 0
    assert tree(tmp_path / "ss") == before
    there = tree(tmp_path / "snapped")
    assert run(*snap).code == 0 and tree(tmp_path / "snapped") == there  # nothing left to do

    assert run(*train("snapped", "second")).code == 0
    settled = read_config(Path("second")).proposals
    assert settled == SelectiveSearch(min_side=4, max_boxes=30)  # for photos without snapped boxes
    assert RunResult(Path("second"), {}).uses() == "SA-1B masks" and RunResult(Path("first"), {}).uses() == ""
    rows = SimpleNamespace(results={"OICR+": {0: RunResult(Path("second"), {})}, "PCL": {0: RunResult(Path("x"), {})}})
    assert [summary._row_name(label, rows) for label in rows.results] == ["OICR+ (uses SA-1B masks)", "PCL"]
    names = [named.name for named in name_runs([read_run(Path("first")), read_run(Path("second"))])]
    assert "uses" not in names[0] and names[1].endswith("(uses SA-1B masks)")
    assert run("report", "first", "second", "--out", "report.html").code == 0
    assert "SA-1B masks" in Path("report.html").read_text()
    assert run("detect", "second", "photos", "--out", "again.json").code == 0
    assert run("detect", "second", "photos", "--out", "more.json", "--proposals", "snapped").code == 0
    assert SplitStores(Path("snapped"), Path("snapped")).method() == Imported()


def test_without_a_store_the_method_is_searched_first(run: Run) -> None:
    Path("boxes.json").write_text(json.dumps([{"image_id": "photo1", "bbox": [8, 8, 20, 20], "score": 0.5}]))
    assert run("propose", "photos", "--out", "plain", *FLAGS).code == 0
    assert run("propose", "photos", "--out", "both", "--snap", "boxes.json", *FLAGS).code == 0
    plain, both = (ProposalStore.open(Path(name)) for name in ("plain", "both"))
    grown = [len(both.boxes(name)) > len(plain.boxes(name)) for name in plain.sizes]
    assert grown == [name == "photo1" for name in plain.sizes] and both.source["proposals"] == plain.source


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--proposals", "ss"), "--proposals: only with --snap"),
        (("--snap", "none.json"), "none.json"),
        (("--snap", "other.json"), "none of its 1 images is one of the photos"),
        (("--snap", "boxes.json", "--proposals", "new"), "the store of --proposals, which stays as it is"),
        (("--snap", "boxes.json", "--proposals", "absent"), "absent"),
        (("--method", "sam"), "--short-side: no setting of sam"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(run: Run, more: tuple[str, ...], words: str) -> None:
    Path("boxes.json").write_text(json.dumps([{"image_id": "photo1", "bbox": [8, 8, 20, 20]}]))
    Path("other.json").write_text(json.dumps([{"image_id": "elsewhere", "bbox": [8, 8, 20, 20]}]))
    done = run("propose", "photos", "--out", "new", *more, *FLAGS)
    assert done.code == 2 and len(done.complaints) == 1 and words in done.complaints[0], done.err
    assert not Path("new").exists()


def test_without_weights_nothing_is_searched(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TAG2BOX_HOME", f"{tmp_path / 'home'}")
    monkeypatch.setattr(sam_boxes, "mobile_sam_network", sam_boxes.mobile_sam)
    done = run("propose", "photos", "--out", "new", "--method", "sam", "--workers", "1")
    assert done.code == 2 and "tag2box weights get mobile-sam" in done.complaints[0] and not Path("new").exists()
