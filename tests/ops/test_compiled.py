from __future__ import annotations

import pytest
import torch
from numba.core.caching import FunctionCache

from tag2box.ops.kernels import compiled


def test_kernels_work_without_a_writable_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FunctionCache._impl_class, "_locator_classes", [])  # no folder that numba could write to
    out = torch.zeros(1).numpy()

    def fill(target: object) -> None:
        target[0] = 3  # type: ignore[index]

    compiled(fill)(out)
    assert out[0] == 3
