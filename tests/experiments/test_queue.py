"""What a queue says of the time that is left."""

from __future__ import annotations

import pytest

from tag2box.experiments.run_queue import standing


@pytest.mark.parametrize(
    ("open_", "ahead", "spent", "words"),
    [
        ([], 0, [], "a finished cell"),
        (["a"], 1, [], "cell 1 of 1"),
        (["x", "a", "y"], 2, [60.0], "cell 2 of 3, about 2 min 0 s left"),
        (["x", "a", "y"], 1, [60.0], "cell 2 of 3, about 1 min 0 s left"),  # another command has done y
        (["x", "y", "a"], 1, [600.0, 20.0], "cell 3 of 3, about 20 s left"),  # the first made what all share
        (["x", "y", "z", "a", "b"], 2, [600.0, 20.0, 40.0], "cell 4 of 5, about 1 min 0 s left"),
    ],
)
def test_time_left_is_told_from_cells_that_had_nothing_to_prepare(
    open_: list[str], ahead: int, spent: list[float], words: str
) -> None:
    assert standing(open_, "a", ahead, spent) == words
