"""What a metric answers: plain numbers as fractions, None where there is nothing to measure, never NaN."""

from __future__ import annotations

from dataclasses import dataclass

JsonNumbers = dict[str, float | dict[str, float | None] | None]
"""A metric's numbers as JSON: names to fractions, and at most one level of classes below."""


@dataclass(frozen=True, slots=True)
class ClassScores:
    """One fraction per class; None for a class without objects."""

    classes: tuple[str, ...]
    values: tuple[float | None, ...]

    @property
    def mean(self) -> float | None:
        """Mean over the classes that have objects."""
        known = [value for value in self.values if value is not None]
        return sum(known) / len(known) if known else None

    def per_class(self) -> dict[str, float | None]:
        """Class name to value."""
        return dict(zip(self.classes, self.values, strict=True))


def share(part: int, whole: int) -> float | None:
    """``part / whole``, or None of nothing."""
    return part / whole if whole else None
