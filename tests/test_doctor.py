from __future__ import annotations

import importlib
import subprocess
import sys
from importlib import metadata
from types import SimpleNamespace

import pytest
from rich.console import Console

from tag2box.cli import doctor
from tag2box.cli.doctor import Check, checks_table, diagnose, doctor_exit_code

NAMES = [
    "Python", "torch", "OpenCV", "lite0 weights", "stored weights", "safetensors", "faster-coco-eval", "torchvision",
    "GPU", "CPUs", "memory", "disk", "working folder",
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
    [("torch", "torch"), ("cv2", "OpenCV"), ("safetensors", "safetensors"), ("faster_coco_eval", "faster-coco-eval")],
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
