from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tag2box.cli.train import train
from tag2box.errors import UserError
from tag2box.training import dist as compute
from tag2box.training.dist import Compute
from tiny_world import small_config, small_data, small_network, story, weights


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
