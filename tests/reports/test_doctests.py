"""The examples in docstrings hold."""

import doctest
import importlib
import pkgutil

import pytest

import reports

MODULES = sorted(module.name for module in pkgutil.walk_packages(reports.__path__, "reports."))


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_a_module_are_correct(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
