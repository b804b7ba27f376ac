"""The student: a small detector without proposals, trained on a label set."""
