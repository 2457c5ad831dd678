"""Runs and reports of tests in their own process are cheap: loads are forked, figures not saved, words counted once."""

from collections.abc import Iterator

import pytest

from tests.support.forked_loads import LoadsOfTests
from tests.support.remembered_vocabularies import remembered_vocabularies
from tests.support.servers.stream_server import ServerState, stream_server
from tests.support.undrawn_figures import undrawn_figures


@pytest.fixture(scope="package", autouse=True)
def cheap_runs(load_forker: LoadsOfTests) -> Iterator[None]:
    with load_forker.in_use(), undrawn_figures(), remembered_vocabularies():
        yield


@pytest.fixture
def url(state: ServerState) -> Iterator[str]:
    """The URL of a scripted server; `state`, a fixture of the module, has its script."""
    with stream_server(state) as (url, _):
        yield url
