"""What a queue says of the time that is left."""

from __future__ import annotations

import pytest

from tag2box.studies.queue import standing


@pytest.mark.parametrize(
    ("open_", "spent", "words"),
    [
        ([], [], "a finished cell"),
        (["a"], [], "cell 1 of 1"),
        (["x", "a", "y"], [60.0], "cell 2 of 3, about 2 min 0 s left"),
        (["x", "y", "a"], [600.0, 20.0], "cell 3 of 3, about 20 s left"),  # the first made what all share
        (["x", "y", "z", "a", "b"], [600.0, 20.0, 40.0], "cell 4 of 5, about 1 min 0 s left"),
    ],
)
def test_time_left_is_told_from_cells_that_had_nothing_to_prepare(
    open_: list[str], spent: list[float], words: str
) -> None:
    assert standing(open_, "a", spent) == words
