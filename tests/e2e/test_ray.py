"""``--on ray`` as a user types it: mistakes in a line, a node killed half way, and the files of the local run."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pages import ROOT, load
from tag2box.parallel import ray_data
from tiny import tiny_photos
from tiny_world import COMMAND, Finished, World, call, environment

FLAGS = ["--short-side", "160", "--min-side", "4", "--max-boxes", "30"]
PHOTOS = 32

Type = Callable[..., Finished]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_photos(tmp_path, PHOTOS)
    return tmp_path / "photos"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Type:
    def type_(*argv: object) -> Finished:
        return call([f"{word}" for word in argv], monkeypatch, capsys)

    return type_


def _content(path: Path) -> dict[str, bytes]:
    return {f"{file.relative_to(path)}": file.read_bytes() for file in path.rglob("*") if file.is_file()}


# ---------------------------------------------------------------- mistakes


NOWHERE = "expected HOST:PORT, as `ray start --head` prints it"
MISTAKES: dict[str, tuple[list[str], dict[str, str], str]] = {
    "an empty address": (["--on", "ray", "--address", ""], {}, NOWHERE),
    "an address without ray": (["--address", "head:6379"], {}, "--address head:6379: belongs to --on ray; add it"),
    "no port": (["--on", "ray", "--address", "head"], {}, f"--address head: {NOWHERE}"),
    "a port beyond all": (["--on", "ray", "--address", "head:65536"], {}, f"--address head:65536: {NOWHERE}"),
    "a web address": (["--on", "ray", "--address", "http://head:8265"], {}, f"--address http://head:8265: {NOWHERE}"),
    "one of the environment": (["--on", "ray"], {"RAY_ADDRESS": "ray://a:1"}, f"RAY_ADDRESS ray://a:1: {NOWHERE}"),
    "no server there": (["--on", "ray", "--address", "127.0.0.1:1"], {}, "127.0.0.1:1: no answer (Connection refused)"),
    "a host that is none": (["--on", "ray", "--address", "no-such-host.invalid:6379"], {}, ":6379: no answer ("),
}  # fmt: skip


@pytest.mark.parametrize(("more", "env", "says"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_line_soon_and_nothing_is_written(
    folder: Path, tmp_path: Path, run: Type, monkeypatch: pytest.MonkeyPatch,
    more: list[str], env: dict[str, str], says: str,
) -> None:  # fmt: skip
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())  # also if Ray is not installed
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    done = run("propose", folder, "--out", tmp_path / "s", *more)
    assert done.code == 2 and len(done.complaints) == 1 and says in done.complaints[0]
    assert not (tmp_path / "s").exists() and ray_data._CONNECT_TIMEOUT <= 10


@pytest.mark.parametrize("command", [["propose", "photos", "--out", "s"], ["detect", "run", "photos"]])
def test_without_ray_the_error_names_the_install_command(
    tmp_path: Path, run: Type, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = run(*command, "--on", "ray")
    assert done.code == 2
    assert done.complaints == [
        "tag2box: --on ray: Ray is not installed; pip install 'tag2box[ray]' here and on every node"
    ]


def test_a_server_that_does_not_answer_is_reported(
    folder: Path, tmp_path: Path, run: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr("tag2box.parallel.ray_data._CONNECT_TIMEOUT", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        done = run("propose", folder, "--out", tmp_path / "s", "--on", "ray", "--address", f"127.0.0.1:{port}")
    assert done.code == 2 and len(done.complaints) == 1
    assert f"--address 127.0.0.1:{port}: no answer (timed out)" in done.complaints[0]


# ---------------------------------------------------------------- two nodes


def _type(*argv: object) -> subprocess.Popen[str]:
    env = {**environment(), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    words = [*COMMAND, *map(str, argv)]
    return subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _ended(running: subprocess.Popen[str]) -> Finished:
    out, err = running.communicate(timeout=400)
    return Finished(running.returncode, out, err)


def test_a_node_killed_half_way_changes_nothing(folder: Path, tmp_path: Path, world: World, run: Type) -> None:
    """Proposals while a node dies, then detections on the node that is left: the bytes of the local run."""
    pytest.importorskip("ray")
    kill = load(ROOT / "benchmarks" / "ray_kill.py")
    trained, seen = world.trained("ray"), world.test / "photos"
    with kill.two_nodes() as nodes:
        on = ["--on", "ray", "--address", nodes.address]
        running = _type("propose", folder, "--out", tmp_path / "there", *FLAGS, *on)
        while kill.photos_done(tmp_path / "there") < 1 and running.poll() is None:
            time.sleep(0.005)
        assert running.poll() is None and kill.photos_done(tmp_path / "there") < PHOTOS and nodes.workers()
        assert nodes.kill() > 1
        done = _ended(running)
        assert done.code == 0
        assert [line for line in done.complaints if not line.startswith("warning: photos enlarged")] == []
        found = _ended(_type("detect", trained, seen, "--out", tmp_path / "there.json", "--min-score", "0", *on))
        assert found.code == 0 and found.complaints == []
    assert run("propose", folder, "--out", tmp_path / "here", *FLAGS, "--workers", "1").code == 0
    assert _content(tmp_path / "there") == _content(tmp_path / "here")
    assert run("detect", trained, seen, "--out", tmp_path / "here.json", "--min-score", "0").code == 0
    assert (tmp_path / "there.json").read_bytes() == (tmp_path / "here.json").read_bytes()
    assert len((tmp_path / "here.json").read_bytes()) > 1000
