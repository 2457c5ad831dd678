"""Docstring examples of the router's HTTP modules."""

import doctest
from types import ModuleType

import pytest

from reference_server import trace_export
from reference_server.router import server_info, sse
from reference_server.router.chat import prompts, tool_calls
from reference_server.router.schemas import scalars
from reference_server.router.validation import token_listing

MODULES = [prompts, scalars, server_info, sse, tool_calls, token_listing, trace_export]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_examples_hold(module: ModuleType):
    outcome = doctest.testmod(module)

    assert (outcome.failed, outcome.attempted > 0) == (0, True)
