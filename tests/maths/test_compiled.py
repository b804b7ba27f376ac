from __future__ import annotations

import numba
import pytest
import torch

from tag2box.maths.compiled import compiled


def test_kernels_work_where_nothing_can_be_kept_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    real = numba.njit

    def njit(*, nogil: bool, cache: bool = False) -> object:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return real(nogil=nogil)

    monkeypatch.setattr(numba, "njit", njit)
    out = torch.zeros(1).numpy()

    def fill(target: object) -> None:
        target[0] = 3  # type: ignore[index]

    compiled(fill)(out)
    assert out[0] == 3
