from __future__ import annotations

import os

import pytest
import torch

from tag2box.parallel import PASSIVE_WAITING, set_threads, wait_passively


def test_threads_wait_passively_unless_the_user_has_set_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PASSIVE_WAITING:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    wait_passively()
    assert {name: os.environ[name] for name in PASSIVE_WAITING} == {**PASSIVE_WAITING, "GOMP_SPINCOUNT": "7"}
    for name in PASSIVE_WAITING:
        monkeypatch.delenv(name)


def test_torch_and_opencv_get_the_same_number_of_threads() -> None:
    import cv2

    before = torch.get_num_threads(), cv2.getNumThreads()
    try:
        set_threads(1)
        assert (torch.get_num_threads(), cv2.getNumThreads()) == (1, 1)
    finally:
        torch.set_num_threads(before[0])
        cv2.setNumThreads(before[1])
