"""The examples in docstrings of the router's HTTP side."""

import doctest
from types import ModuleType

import pytest

from reference_server.router import chat, offsets, sse, startup, tool_calls, tracing
from reference_server.router.schemas import scalars

MODULES = [chat, offsets, scalars, sse, startup, tool_calls, tracing]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_examples_hold(module: ModuleType):
    outcome = doctest.testmod(module)

    assert (outcome.failed, outcome.attempted > 0) == (0, True)
