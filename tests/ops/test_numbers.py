from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tag2box.ops.losses import at_least_single, unit_rows


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_half_precision_becomes_single(given: torch.dtype, expected: torch.dtype) -> None:
    assert at_least_single(torch.zeros(2, dtype=given)).dtype == expected


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_rows_become_those_of_unit_length(rows: int) -> None:
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
    torch.testing.assert_close(unit_rows(x), functional.normalize(x, dim=1))


def test_a_row_of_zeros_stays_and_teaches_nothing() -> None:
    x = torch.tensor([[0.0, 0.0], [3.0, 4.0]], requires_grad=True)
    rows = unit_rows(x)
    assert rows.tolist() == [[0.0, 0.0], [pytest.approx(0.6), pytest.approx(0.8)]]
    rows.sum().backward()
    assert x.grad is not None and x.grad[0].tolist() == [0.0, 0.0]
    assert x.grad[1].abs().max() > 0
