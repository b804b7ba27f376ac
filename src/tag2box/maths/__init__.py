"""Equations as pure functions: tensors in, tensors out; the docstrings carry the equation numbers."""
