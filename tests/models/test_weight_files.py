from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from fake_weights import Trap, save
from tag2box.errors import UserError
from tag2box.models.weights.state_dict import digest, read_state_dict, read_weight_file


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt"])
def test_a_state_dict_survives_the_way_through_a_file(tmp_path, suffix):
    state = nn.Linear(3, 2).state_dict()
    path = save(tmp_path / f"w{suffix}", state)
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


# ---------------------------------------------------------------- any file


@pytest.mark.parametrize(
    "content",
    [
        {"a": torch.ones(2, 3)},
        {"state_dict": {"a": torch.ones(2, 3)}, "epoch": 3},
        {"model": {"state_dict": {"a": torch.ones(2, 3)}}, "note": "x"},
    ],
)
@pytest.mark.parametrize("ending", [".pkl", ".pth"])
def test_tensors_are_found_where_programs_put_them(tmp_path, content, ending):
    path = save(tmp_path / f"w{ending}", content)
    found = read_weight_file(path)
    assert list(found.tensors) == ["a"] and found.tensors["a"].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert found.sha256 == digest(path) and found.author == ""


def test_nested_names_are_joined_and_what_is_no_array_is_left_out(tmp_path):
    content = {"a": {"b": torch.ones(1), "c": "word"}, "d": [1], "e": torch.tensor(2.0), "__author__": "an author"}
    found = read_weight_file(save(tmp_path / "w.pkl", content))
    assert {name: value.tolist() for name, value in found.tensors.items()} == {"a.b": [1.0], "e": 2.0}
    assert found.author == "an author"


def test_what_torch_saved_under_another_ending_is_read(tmp_path):
    torch.save({"a": torch.ones(1)}, tmp_path / "w.ckpt")
    assert list(read_weight_file(tmp_path / "w.ckpt").tensors) == ["a"]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    state = {"features.0.weight": torch.arange(6.0).reshape(2, 3), "features.0.bias": torch.ones(2)}
    return {ending: save(folder / f"w{ending}", state).read_bytes() for ending in (".pkl", ".pth", ".safetensors")}


@settings(max_examples=60, deadline=None)
@given(
    ending=st.sampled_from([".pkl", ".pth", ".safetensors"]),
    where=st.floats(0, 0.999),
    new=st.binary(min_size=1, max_size=8),
)
def test_damage_anywhere_gives_tensors_or_one_line(sound, tmp_path_factory, ending, where, new):
    content = sound[ending]
    at = int(where * len(content))
    path = tmp_path_factory.mktemp("damaged") / f"w{ending}"
    path.write_bytes(content[:at] + new + content[at + len(new) :])
    try:
        found = read_weight_file(path)
    except UserError as error:
        assert "\n" not in str(error) and str(path) in str(error)
    else:
        assert all(isinstance(value, torch.Tensor) for value in found.tensors.values())
