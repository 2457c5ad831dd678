"""The examples in docstrings of the router's HTTP side."""

import doctest
from types import ModuleType

import pytest

from reference_server.router import chat, offsets, sse, startup, tracing
from reference_server.router.schemas import scalars


@pytest.mark.parametrize("module", [chat, offsets, scalars, sse, startup, tracing], ids=lambda module: module.__name__)
def test_examples_hold(module: ModuleType):
    outcome = doctest.testmod(module)

    assert (outcome.failed, outcome.attempted > 0) == (0, True)
