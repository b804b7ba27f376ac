"""Labeler inputs that every labeler has to handle."""

from __future__ import annotations

from hypothesis import strategies as st

from strategies import make_labeler_input
from tag2box.types import LabelerInput

WORLDS: list[tuple[tuple[int, ...], list[list[int]]]] = [
    ((), []),  # no photo
    ((0,), [[1, 1]]),  # no proposals
    ((3,), [[0, 0]]),  # no tags
    ((0, 0), [[1], [0]]),
    ((1,), [[1]]),  # one proposal
    ((1,), [[1, 0, 1]]),  # one proposal, several classes
    ((1,), [[1, 1, 1]]),
    ((2, 0, 4), [[0, 0], [1, 0], [1, 1]]),
    ((3, 0, 2), [[1], [1], [0]]),
    ((12,), [[1]]),  # one class
    ((40,), [[1] * 30]),  # many classes
]


@st.composite
def random_inputs(draw: st.DrawFn, high: int = 9) -> LabelerInput:
    """A few images, classes and proposals, any of them none."""
    images, classes = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    sizes = tuple(draw(st.integers(0, high)) for _ in range(images))
    tags = [[draw(st.integers(0, 1)) for _ in range(classes)] for _ in range(images)]
    return make_labeler_input(sizes, tags, stages=2, seed=draw(st.integers(0, 10_000)))
