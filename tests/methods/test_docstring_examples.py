"""The examples in the docstrings of ops, methods and metrics run as they are written."""

import doctest
import importlib
import pkgutil

import pytest

import tag2box.methods
import tag2box.metrics
import tag2box.ops
from tag2box import extend

MODULES = [
    f"{package.__name__}.{module.name}"
    for package in (tag2box.ops, tag2box.methods, tag2box.metrics)
    for module in pkgutil.iter_modules(package.__path__)
]
PAPER_CLASSES = [*extend.LABELERS.values(), *extend.MIL_HEADS.values()] + [
    f"tag2box.methods.{name}"
    for name in ("wscl:Sampling", "wscl:Contrast", "wsddn:Spatial", "casd:Attention", "wsrpn:Rescore")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_are_true(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("path", PAPER_CLASSES)
def test_classes_of_a_paper_have_its_reference_and_an_example(path: str) -> None:
    text = extend.load_part(path).__doc__
    assert "https://" in text and "Example:" in text
