from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from review_world import scene_labels
from tag2box.cli import doctor
from tag2box.cli.doctor import Check, checks_table, diagnose, doctor_exit_code, verify_files
from tag2box.cli.label_trust import trust
from tag2box.cli.train import train
from tag2box.errors import UserError
from tag2box.labels.journal import Journal
from tag2box.labels.reviews import Action
from tag2box.models.weights import state_dict, weight_cache
from tag2box.models.weights.weight_cache import Origin
from tag2box.ops.superpixels import Superpixels
from tag2box.proposals.store import ProposalStore
from tag2box.training import checkpoint
from tag2box.training.proposal_cache import build_superpixel_cache
from tiny import tiny_photos
from tiny_world import call, one_worker, small_config, small_data, small_network

NAMES = [
    "Python", "torch", "OpenCV", "lite0 weights", "stored weights", "safetensors", "torchvision",
    "GPU", "CPUs", "precision", "OpenVINO", "memory", "disk", "working folder",
]  # fmt: skip


def by_name(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def without(monkeypatch, *missing: str, error: Exception | None = None) -> None:
    real = importlib.import_module

    def fake(name: str):
        if name in missing:
            raise error or ImportError(f"No module named {name!r}")
        return real(name)

    monkeypatch.setattr(doctor, "import_module", fake)


def test_this_machine_is_ready(tmp_path):
    checks = diagnose(tmp_path)
    assert [check.name for check in checks] == NAMES
    assert doctor_exit_code(checks) == 0
    assert all(check.detail for check in checks)
    assert all(check.ok != bool(check.remedy) for check in checks)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("checks", "code"),
    [
        ([], 0),
        ([Check("a", True, "")], 0),
        ([Check("a", True, ""), Check("b", False, "")], 1),
        ([Check("b", False, "", required=False)], 0),
    ],
)
def test_the_exit_code_is_nonzero_if_something_required_is_missing(checks, code):
    assert doctor_exit_code(checks) == code


@pytest.mark.parametrize(
    ("module", "name"),
    [("torch", "torch"), ("cv2", "OpenCV"), ("safetensors", "safetensors")],
)
def test_a_missing_package_fails_with_the_command_that_mends_it(monkeypatch, tmp_path, module, name):
    without(monkeypatch, module)
    checks = diagnose(tmp_path)
    check = by_name(checks)[name]
    assert (check.ok, doctor_exit_code(checks)) == (False, 1)
    assert "No module named" in check.detail
    assert check.remedy.startswith("pip install -c constraints.txt ")


@pytest.mark.parametrize("error", [None, RuntimeError("operator torchvision::nms\ndoes not exist")])
def test_torchvision_is_optional_even_where_it_is_broken(monkeypatch, tmp_path, error):
    without(monkeypatch, "torchvision", error=error)
    checks = diagnose(tmp_path)
    check = by_name(checks)["torchvision"]
    assert (check.ok, check.required, doctor_exit_code(checks)) == (True, False, 0)
    assert "not needed" in check.detail
    assert "\n" not in check.detail


def test_opencv_without_its_contrib_modules_is_not_enough(monkeypatch):
    monkeypatch.setattr(doctor, "_import", lambda _: (SimpleNamespace(__version__="5.0"), ""))
    check = doctor._opencv()
    assert not check.ok
    assert "without ximgproc.segmentation" in check.detail


def test_missing_weights_are_found_missing(monkeypatch):
    def absent(name: str):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor.metadata, "files", absent)
    assert doctor._lite0_weights().detail == "not installed"
    monkeypatch.setattr(doctor.metadata, "files", lambda _: [])
    assert doctor._lite0_weights().detail == "package without weights"


def test_an_old_python_is_refused(monkeypatch):
    monkeypatch.setattr(doctor.sys, "version_info", (3, 9, 1))
    check = doctor._python()
    assert (check.ok, check.detail) == (False, "3.9.1")
    assert "3.11" in check.remedy


def test_a_gpu_is_named(monkeypatch):
    cuda = SimpleNamespace(device_count=lambda: 2, get_device_name=lambda i: f"card {i}")
    monkeypatch.setattr(doctor, "_import", lambda _: (SimpleNamespace(cuda=cuda), ""))
    assert doctor._gpu().detail == "card 0, card 1"


def test_memory_is_read_from_the_kernel_and_short_memory_is_only_a_note(monkeypatch, tmp_path):
    meminfo = tmp_path / "meminfo"
    assert doctor._available_memory(meminfo) is None
    meminfo.write_text("MemTotal: 8 kB\n\n")
    assert doctor._available_memory(meminfo) is None
    meminfo.write_text("MemTotal: 8 kB\nMemAvailable:    3 kB\n")
    assert doctor._available_memory(meminfo) == 3072
    monkeypatch.setattr(doctor, "_available_memory", lambda _: 2**29)
    check = doctor._memory()
    assert (check.ok, check.required, check.detail) == (False, False, "0.5 GB free")
    monkeypatch.setattr(doctor, "_available_memory", lambda _: None)
    assert doctor._memory().ok


def test_a_folder_that_cannot_be_written_fails(tmp_path):
    checks = diagnose(tmp_path / "absent")
    assert doctor_exit_code(checks) == 1
    assert not by_name(checks)["working folder"].ok
    assert not by_name(checks)["disk"].ok


def test_the_table_shows_every_check_and_takes_brackets_literally():
    checks = [
        Check("a", True, "fine"),
        Check("b", False, "[red]gone[/red]", "mend it"),
        Check("c", False, "", "", False),
    ]
    console = Console(width=100, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(checks_table(checks))
    text = capture.get()
    assert [word in text for word in ("ok", "missing", "note", "[red]gone[/red]", "mend it")] == [True] * 5


def test_the_module_is_cheap_to_import():
    code = "import sys, tag2box.cli.doctor; print(sorted({'torch', 'cv2', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_stored_weights_that_changed_are_reported(tmp_path, monkeypatch):
    monkeypatch.setenv("TAG2BOX_HOME", f"{tmp_path}")
    assert doctor._stored_weights().detail == f"none, in {tmp_path / 'weights'}"
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "mine.safetensors").write_bytes(b"half a file")
    check = doctor._stored_weights()
    assert (check.ok, check.required) == (False, False)
    assert "mine.json is missing" in check.detail


# ---------------------------------------------------------------- files


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run with proposals and caches, and weights; tests put back what they change."""
    folder = tmp_path_factory.mktemp("stored")
    with pytest.MonkeyPatch.context() as patch:
        small_network(patch)
        small_data(folder)
        train(small_config(folder), folder / "runs" / "mine")
        one_worker(patch)
        photos = tiny_photos(folder, 4).photos
        store = ProposalStore.open(folder / "runs" / "mine" / "proposals")
        build_superpixel_cache(photos, store, Superpixels(min_size=20), folder / "runs" / "mine" / "maps")
        patch.setenv("TAG2BOX_HOME", f"{folder}")
        weights = state_dict.Weights("lite0", state_dict.PREPROCESS["lite0"], {"a": torch.zeros(3)})
        weight_cache.store("mine", weights, Origin("here", "free", "0" * 64))
        yield folder


ROWS = {"checkpoint": 2, "state of a run": 3, "events of a run": 1, "proposals": 1, "superpixel cache": 1, "weights": 1}


def test_everything_in_a_folder_is_verified(stored: Path) -> None:
    checks = verify_files([stored])
    rows = Counter(check.name for check in checks)
    assert rows.pop("feature cache") >= 1 and rows == ROWS
    assert all(check.ok for check in checks) and doctor_exit_code(checks) == 0
    assert len({check.detail for check in checks}) == len(checks)


FILES = {
    "runs/mine/state.json": "state of a run",
    "runs/mine/run.json": "state of a run",
    "runs/mine/photos.json": "state of a run",
    "runs/mine/events.jsonl": "events of a run",
    "runs/mine/checkpoint-000006/model.safetensors": "checkpoint",
    f"runs/mine/checkpoint-000006/{checkpoint.OPTIMIZER}": "checkpoint",
    "runs/mine/checkpoint-000006/state.json": "checkpoint",
    "runs/mine/checkpoint-000006/manifest.json": "checkpoint",
    "runs/mine/proposals/index.json": "proposals",
    "runs/mine/proposals/boxes.npy": "proposals",
    "runs/mine/proposals/scores.npy": "proposals",
    "runs/mine/maps/*.f16": "feature cache",
    "runs/mine/maps/*.npy": "superpixel cache",
    "runs/mine/maps/*.json": "superpixel cache",
    "weights/mine.safetensors": "weights",
}


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_is_found_and_its_file_named(stored: Path, name: str) -> None:
    path = next(iter(sorted(stored.glob(name))))
    whole = path.read_bytes()
    for position in (0, len(whole) // 2, len(whole) - 2):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 4]) + whole[position + 1 :])
        try:
            bad = [check for check in verify_files([stored]) if not check.ok]
        finally:
            path.write_bytes(whole)
        assert [(check.name, check.failure) for check in bad] == [(FILES[name], "damaged")]
        assert str(path) in bad[0].detail and bad[0].remedy


def test_a_line_of_the_log_that_is_no_event_is_found(stored: Path) -> None:
    path = stored / "runs" / "mine" / "events.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"{", b";", 1))
    (bad,) = (check for check in verify_files([stored]) if not check.ok)
    path.write_bytes(whole)
    assert bad.name == "events of a run" and f"{path}:1" in bad.detail


def test_a_log_of_version_0_1_is_not_verified_and_no_damage(stored: Path) -> None:
    path = stored / "runs" / "mine" / "events.jsonl"
    whole = path.read_bytes()
    path.write_bytes(re.sub(rb', "crc32": "[0-9a-f]{8}"}', b"}", whole))
    (row,) = (check for check in verify_files([stored]) if not check.ok)
    path.write_bytes(whole)
    assert (row.name, row.required, row.detail) == ("events of a run", False, f"{path}: not verified")


def test_the_command_prints_a_row_for_each_file_and_exits_with_1_for_damage(stored: Path, monkeypatch, capsys) -> None:
    run, path = stored / "runs" / "mine", stored / "runs" / "mine" / "proposals" / "boxes.npy"
    done = call(["doctor", str(run), str(stored / "weights" / "mine.safetensors")], monkeypatch, capsys)
    assert (
        done.code == 0 and sum(line.startswith("ok") for line in done.out.splitlines()) == len(verify_files([run])) + 1
    )
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    done = call(["doctor", str(run)], monkeypatch, capsys)
    path.write_bytes(whole)
    assert done.code == 1 and sum(line.startswith("damaged") for line in done.out.splitlines()) == 1
    assert "Traceback" not in done.err


def test_a_file_of_a_checkpoint_is_verified_by_its_manifest(stored: Path) -> None:
    (check,) = verify_files([stored / "runs" / "mine" / "checkpoint-000006" / "model.safetensors"])
    assert check.ok and check.name == "checkpoint"


def test_paths_without_files_of_tag2box_are_reported(tmp_path: Path) -> None:
    (check,) = verify_files([tmp_path])
    assert not check.ok and check.required and str(tmp_path) in check.detail
    (tmp_path / ".hidden.f16").write_bytes(b"incomplete")
    (tmp_path / "theirs.safetensors").write_bytes(b"not ours")
    (tmp_path / "state.json").write_text("{}")  # without settings beside it: of another program
    (tmp_path / "index.json").write_text("{}")
    assert verify_files([tmp_path]) == [check]
    assert "its provenance theirs.json is missing" in verify_files([tmp_path / "theirs.safetensors"])[0].detail
    with pytest.raises(UserError, match="nowhere: no such file or folder; name a run"):
        verify_files([tmp_path / "nowhere"])


def test_older_files_without_digests_are_a_note(stored: Path, tmp_path: Path) -> None:
    (tmp_path / "config.toml").touch()
    (tmp_path / "state.json").write_text(json.dumps({"iteration": 3}))
    (tmp_path / "x.f16").write_bytes(b"tg2bexv1" + bytes(99))
    checks = verify_files([tmp_path])
    assert [(check.name, check.ok, check.required) for check in checks] == [
        ("state of a run", False, False),
        ("feature cache", False, False),
    ]
    assert doctor_exit_code(checks) == 0


def test_label_sets_reviews_and_trust_are_verified(tmp_path: Path) -> None:
    labels, folder = scene_labels(tmp_path, 2), tmp_path / "labels"
    with Journal(folder, labels) as journal:
        journal.append(labels.content.photos[0].id, Action("done"), based_on=0, key="1", is_sampled=True)
    trust(folder)
    found = verify_files([folder])
    assert [(check.name, check.ok) for check in found] == [("label set", True), ("reviews", True), ("trust", True)]
    text = (folder / "labels.json").read_text()
    (folder / "labels.json").write_text(text.replace('"score"', '"scare"'))
    assert {check.name for check in verify_files([folder]) if not check.ok} == {"label set", "reviews", "trust"}
    (folder / "labels.json").write_text(text)
    (folder / "trust.json").write_text((folder / "trust.json").read_text().replace("use_from", "use_form"))
    assert [check.name for check in verify_files([folder]) if not check.ok] == ["trust"]
