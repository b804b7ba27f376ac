from __future__ import annotations

import pickle
import zipfile

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from fake_weights import Trap, save
from tag2box.errors import UserError
from tag2box.models.weights.state_dict import read_state_dict, read_weight_file
from tag2box.storage import file_digest


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
    assert found.sha256 == file_digest(path) and found.author == ""


def test_nested_names_are_joined_and_what_is_no_array_is_left_out(tmp_path):
    content = {"a": {"b": torch.ones(1), "c": "word"}, "d": [1], "e": torch.tensor(2.0), "__author__": "an author"}
    found = read_weight_file(save(tmp_path / "w.pkl", content))
    assert {name: value.tolist() for name, value in found.tensors.items()} == {"a.b": [1.0], "e": 2.0}
    assert found.author == "an author"


def test_what_torch_saved_under_another_ending_is_read(tmp_path):
    torch.save({"a": torch.ones(1)}, tmp_path / "w.ckpt")
    assert list(read_weight_file(tmp_path / "w.ckpt").tensors) == ["a"]


def within_itself(key):
    content = {"features.0.weight": torch.ones(1)}
    content[key] = content  # type: ignore[assignment]
    return content


def shared(width, depth):
    """Few dictionaries, but width ** depth ways through them."""
    content = {}
    for _ in range(depth):
        content = dict.fromkeys(map(str, range(width)), content)
    return content


STRANGE = [
    (lambda: {}, "holds no named tensors"),
    (lambda: within_itself("model"), "contain themselves"),
    (lambda: within_itself("x"), "contain themselves"),
    (lambda: shared(1, 40), "nest more than 16 deep, or"),
    (lambda: shared(40, 12), "hold over 100000 entries, or"),
    (lambda: {1 << 20_000: torch.ones(1)}, "a tensor is named a int"),
    (lambda: {("a", "b"): torch.ones(1)}, "a tensor is named a tuple"),
    (lambda: {"a\x1b[2Jb": torch.ones(1)}, r"a tensor is named a\x1b[2Jb"),
    (lambda: {"a\nb": torch.ones(1)}, "a tensor is named a b"),
    (lambda: {"": torch.ones(1)}, "a tensor is named a str"),
    (lambda: {"a" * 10_000: torch.ones(1)}, "a tensor is named aaa"),
]


@pytest.mark.parametrize("ending", [".pkl", ".pth"])
@pytest.mark.parametrize(("build", "words"), STRANGE, ids=range(len(STRANGE)))
def test_strange_dictionaries_are_refused_in_one_line(tmp_path, build, words, ending):
    path = tmp_path / f"w{ending}"
    if ending == ".pkl":
        path.write_bytes(pickle.dumps(arrays(build(), {}), protocol=4))
    else:
        torch.save(build(), path)
    with pytest.raises(UserError) as raised:
        read_weight_file(path)
    line = str(raised.value)
    assert line.startswith(f"{path}: ") and line.isprintable()
    assert words in line or "more than tensors and plain values" in line  # torch itself reads no huge numbers


def arrays(value, known):
    """The same with arrays instead of tensors; dictionaries that are shared stay shared."""
    if isinstance(value, torch.Tensor):
        return value.numpy()
    if id(value) not in known:
        known[id(value)] = copy = {}
        copy.update({key: arrays(item, known) for key, item in value.items()})
    return known[id(value)]


@pytest.mark.parametrize("author", [None, b"x", [[[]]], 1 << 20_000], ids=range(4))
def test_an_author_that_is_no_text_is_left_out(tmp_path, author):
    (tmp_path / "w.pkl").write_bytes(pickle.dumps({"a": torch.ones(1).numpy(), "__author__": author}))
    assert read_weight_file(tmp_path / "w.pkl").author == ""


def expanding(path, torch_file):
    """The archive of torch.save, compressed: torch itself reads that."""
    with zipfile.ZipFile(torch_file) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.infolist():
            new.writestr(member.filename, old.read(member))


def test_an_archive_that_expands_is_refused_before_it_is_read(tmp_path):
    torch.save({"a": torch.zeros(1_000_000)}, tmp_path / "plain.pth")
    expanding(tmp_path / "w.pth", tmp_path / "plain.pth")
    assert (tmp_path / "w.pth").stat().st_size < 10_000
    torch.load(tmp_path / "w.pth", weights_only=True)
    for read in (read_weight_file, read_state_dict):
        with pytest.raises(UserError, match=r"w\.pth: an archive that expands"):
            read(tmp_path / "w.pth")


@pytest.mark.parametrize("name", ["w.safetensors", "w.pth", "w.pkl"])
def test_a_file_far_larger_than_any_weights_is_not_read(tmp_path, name):
    with (tmp_path / name).open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UserError, match=f"{name}: larger than 8 GB"):
        read_weight_file(tmp_path / name)


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
