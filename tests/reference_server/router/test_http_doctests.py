"""The examples in docstrings of the router's HTTP side."""

import doctest
from types import ModuleType

import pytest

from reference_server.router import chat, sse, startup
from reference_server.router.routes import generate
from reference_server.router.schemas import scalars


@pytest.mark.parametrize("module", [chat, sse, startup, generate, scalars], ids=lambda module: module.__name__)
def test_examples_hold(module: ModuleType):
    outcome = doctest.testmod(module)

    assert (outcome.failed, outcome.attempted > 0) == (0, True)
