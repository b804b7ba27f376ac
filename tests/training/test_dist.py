from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from tag2box.training.dist import SINGLE_PROCESS, DistContext, init_distributed, is_torchrun
from together import together


@given(st.integers(0, 40), st.integers(1, 9))
def test_shares_are_runs_that_cover_everything_once_and_evenly(count: int, size: int) -> None:
    shares = [DistContext(rank, size).shard(count) for rank in range(size)]
    assert [i for share in shares for i in share] == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_alone_nothing_is_exchanged() -> None:
    rows = torch.randn(3, 2, requires_grad=True)
    assert torch.equal(SINGLE_PROCESS.all_gather(rows), rows) and not SINGLE_PROCESS.all_gather(rows).requires_grad
    assert SINGLE_PROCESS.all_gather_object("x") == ["x"]
    assert SINGLE_PROCESS.is_main and not SINGLE_PROCESS.any(False)
    SINGLE_PROCESS.barrier()
    with SINGLE_PROCESS.main_process_first():
        pass


def test_rows_are_gathered_in_order_if_a_rank_has_none() -> None:
    def work(dist: DistContext) -> torch.Tensor:
        count = (0, 3, 0, 1)[dist.rank]
        width = 2 if count else 0  # the width does not matter on ranks without rows
        return dist.all_gather(torch.full((count, width), float(dist.rank)))

    for gathered in together(4, work):
        assert gathered.tolist() == [[1, 1], [1, 1], [1, 1], [3, 3]]


def test_no_rank_has_rows() -> None:
    assert [tuple(x.shape) for x in together(2, lambda dist: dist.all_gather(torch.zeros(0, 5)))] == [(0, 5)] * 2


def test_gradients_are_summed_and_missing_ones_are_zero_or_stay_missing() -> None:
    def work(dist: DistContext) -> list[float | None]:
        parameters = [nn.Parameter(torch.zeros(1)) for _ in range(3)]
        parameters.append(nn.Parameter(torch.zeros(1), requires_grad=False))
        parameters[0].grad = torch.tensor([1.0 + dist.rank])
        if dist.rank == 1:
            parameters[1].grad = torch.tensor([5.0])
        dist.all_reduce_gradients(parameters)
        return [None if p.grad is None else p.grad.item() for p in parameters]

    assert together(3, work) == [[6.0, 5.0, None, None]] * 3


def test_the_leader_goes_first_and_one_yes_is_a_yes(tmp_path: Path) -> None:
    def work(dist: DistContext) -> tuple[bool, bool]:
        with dist.main_process_first():
            found = (tmp_path / "made").exists()
            (tmp_path / "made").touch()
        return found, dist.any(dist.rank == 2)

    assert together(3, work) == [(False, True), (True, True), (True, True)]


def test_without_torchrun_a_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not is_torchrun()
    with init_distributed() as dist:
        assert dist == SINGLE_PROCESS
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with init_distributed() as dist:
        assert dist == SINGLE_PROCESS
