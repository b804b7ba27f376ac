"""Position in the queue and time left."""

from __future__ import annotations

import pytest

from tag2box.experiments.grid import queue_status


@pytest.mark.parametrize(
    ("open_", "ahead", "spent", "words"),
    [
        ([], 0, [], "a finished run"),
        (["a"], 1, [], "run 1 of 1"),
        (["x", "a", "y"], 2, [60.0], "run 2 of 3, about 2 min 0 s left"),
        (["x", "a", "y"], 1, [60.0], "run 2 of 3, about 1 min 0 s left"),  # another command has done y
        (["x", "y", "a"], 1, [600.0, 20.0], "run 3 of 3, about 20 s left"),  # the first made what all share
        (["x", "y", "z", "a", "b"], 2, [600.0, 20.0, 40.0], "run 4 of 5, about 1 min 0 s left"),
    ],
)
def test_time_left_is_estimated_from_runs_without_preparation(
    open_: list[str], ahead: int, spent: list[float], words: str
) -> None:
    assert queue_status(open_, "a", ahead, spent) == words
