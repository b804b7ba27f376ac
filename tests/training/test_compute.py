from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from tag2box import run_inputs, runs
from tag2box.cli.detect import detect
from tag2box.cli.train import resume, train
from tag2box.errors import Interrupted, UserError
from tag2box.models.lite0 import Lite0
from tag2box.training import dist as compute
from tag2box.training.dist import Compute
from tiny_world import same, small_config, small_data, small_network, stopping_at, story, weights


@pytest.mark.parametrize(
    ("asked", "has_cached_maps", "memory"),
    [(None, True, "plain"), (None, False, "exact"), ("plain", False, "plain"), ("exact", True, "exact")],
)
def test_memory_is_as_set_or_by_the_rule(asked: str | None, has_cached_maps: bool, memory: str) -> None:
    assert Compute(memory=asked).memory_for(has_cached_maps=has_cached_maps) == memory  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="has what others lack")
@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"device": "cuda"}, r"compute\.device = cuda: torch sees no GPU"),
        ({"precision": "fp16"}, r"compute\.precision = fp16: needs a GPU"),
        ({"precision": "bf16"}, r"compute\.precision = bf16: this processor has no bf16"),
    ],
)
def test_what_a_machine_cannot_do_is_refused_before_anything_is_written(
    settings: dict[str, str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute, "has_bf16", lambda: False)
    small_data(tmp_path)
    config = small_config(tmp_path, *(f"compute.{key}={value}" for key, value in settings.items()))
    with pytest.raises(UserError, match=line):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="would choose the GPU")
def test_without_a_gpu_the_cpu_is_the_place() -> None:
    assert Compute().torch_device() == Compute(device="cpu").torch_device() == torch.device("cpu")


def test_bf16_trains_to_the_result_of_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny recipe, 120 iterations: losses of the last 20 within 3 %, weights within 15 % of the way they went.

    On a CPU without bf16 instructions torch computes the same numbers slowly, so the arithmetic is tested anywhere.
    """
    monkeypatch.setattr(compute, "has_bf16", lambda: True)
    small_network(monkeypatch)
    small_data(tmp_path, 6)
    ends, losses = {}, {}
    for name, words in {
        "start": ("plan.iterations=1", "plan.optimizer.lr=1e-12"),
        "fp32": ("plan.iterations=120",),
        "bf16": ("plan.iterations=120", "compute.precision=bf16"),
    }.items():
        train(small_config(tmp_path, "plan.optimizer.kind=sgd", *words), tmp_path / name)
        ends[name] = torch.cat([value.flatten() for value in weights(tmp_path / name).values()])
        told = [e["losses"]["total"] for e in story(tmp_path / name) if e["event"] == "step"]  # type: ignore[index]
        losses[name] = sum(told[-20:]) / len(told[-20:])
    assert losses["fp32"] < 0.9 * losses["start"]  # it learns something
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.03)
    way = (ends["fp32"] - ends["start"]).norm()
    assert 0 < (ends["bf16"] - ends["fp32"]).norm() < 0.15 * way


# ---------------------------------------------------------------- the measured precision


@pytest.mark.parametrize(
    ("seconds", "precision"),
    [
        ({}, "fp32"),
        ({"trunk": (1.0, 0.5)}, "bf16"),
        ({"trunk": (1.0, 0.95)}, "fp32"),  # gains less than a tenth
        ({"trunk": (1.0, 0.2), "neck": (1.0, 1.2)}, "fp32"),  # a part is slower
        ({"trunk": (1.0, 0.5), "neck": (1.0, 1.05)}, "bf16"),  # within the noise
    ],
)
def test_bf16_is_taken_only_where_it_pays(seconds: dict[str, tuple[float, float]], precision: str) -> None:
    assert compute.choice_of(seconds).precision == precision


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TAG2BOX_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(compute, "has_bf16", lambda: True)
    return tmp_path / "home"


def test_a_choice_is_measured_once_and_read_back(home: Path) -> None:
    calls: list[str] = []

    def parts() -> compute.Parts:
        calls.append("built")
        return {"sum": lambda: torch.ones(4).sum()}

    first = compute.choose_precision("net", parts)
    assert compute.choose_precision("net", parts) == first and calls == ["built"]
    compute.choose_precision("other", parts, store=False)
    compute.choose_precision("other", parts, store=False)
    assert calls == ["built"] * 3


@pytest.mark.parametrize("content", ["", "[]", "{", '{"net | x": 3}', '{"net": {"precision": "fp8", "reason": ""}}'])
def test_a_damaged_memory_of_choices_is_measured_again(home: Path, content: str) -> None:
    home.mkdir()
    (home / "precision.json").write_text(content)
    assert compute.choose_precision("net", lambda: {"sum": lambda: torch.ones(4).sum()}).reason


def test_without_instructions_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "has_bf16", lambda: False)
    choice = compute.choose_precision("net", lambda: pytest.fail("measured"))
    assert choice == compute.PrecisionChoice("fp32", "this processor has no bf16 instructions")


def test_the_parts_of_a_backbone_run() -> None:
    parts = compute.backbone_parts(Lite0(pool_size=4))
    assert list(parts) == ["trunk", "RoI maps", "neck"]
    for part in parts.values():
        part()


def test_auto_is_settled_when_a_run_starts_and_recorded(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_network(monkeypatch)
    small_data(tmp_path)
    chosen = compute.PrecisionChoice("bf16", "set by this test")
    monkeypatch.setattr(run_inputs, "choose_precision", lambda *_: chosen)
    train(small_config(tmp_path, "compute.precision=auto", "plan.iterations=2"), tmp_path / "run")
    assert runs.read_config(tmp_path / "run").compute.precision == "bf16"


def test_an_unsettled_precision_builds_no_network() -> None:
    with pytest.raises(UserError, match=r"compute\.precision = auto: is settled when a run starts"):
        Compute(precision="auto").runtime()


@pytest.mark.parametrize(
    ("given", "usable"),
    [
        (Compute(), Compute()),
        (Compute(precision="fp16"), Compute()),
        (Compute(precision="bf16"), Compute()),
        (Compute(engine="openvino"), Compute()),
    ],
)
def test_a_trained_run_detects_where_something_is_missing_with_a_warning(
    given: Compute, usable: Compute, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute, "has_bf16", lambda: False)
    monkeypatch.setattr(compute, "has_openvino", lambda: False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert given.usable() == usable
    assert len(said) == int(given != usable)


def test_precision_and_engine_of_a_trained_run_can_change_for_detection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute, "has_bf16", lambda: True)
    small_network(monkeypatch)
    small_data(tmp_path)
    train(small_config(tmp_path, "plan.iterations=2"), tmp_path / "run")
    photo = next((tmp_path / "photos").iterdir())
    found = {
        words: detect(tmp_path / "run", [photo], overrides=words, min_score=0)[photo.stem]
        for words in [(), ("compute.precision=fp32",), ("compute.precision=bf16",)]
    }
    single, same, half = found.values()
    assert torch.equal(single.scores, same.scores) and torch.equal(single.boxes, same.boxes)
    assert not torch.equal(single.scores, half.scores)
    assert half.scores.dtype == torch.float32
    torch.testing.assert_close(half.scores.max(), single.scores.max(), rtol=0.1, atol=0.02)
    with pytest.raises(UserError, match="only inference settings of a trained run can change"):
        detect(tmp_path / "run", [photo], overrides=("compute.memory=exact",))


def test_a_run_in_bf16_is_resumed_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "has_bf16", lambda: True)
    small_network(monkeypatch)
    small_data(tmp_path)
    config = small_config(tmp_path, "plan.iterations=4", "compute.precision=bf16")
    train(config, tmp_path / "whole")
    with pytest.raises(Interrupted):
        train(config, tmp_path / "halves", progress=stopping_at(2))
    resume(tmp_path / "halves")
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "halves"))
