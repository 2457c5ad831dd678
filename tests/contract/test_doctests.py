"""The examples in docstrings hold."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for package in ("reference_server", "loadgen", "tuner", "reports", "benchmarks")
    for path in (ROOT / package).rglob("*.py")
    if ">>> " in path.read_text()
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_a_module_are_correct(name: str) -> None:
    found = doctest.testmod(importlib.import_module(name))

    assert found.failed == 0
