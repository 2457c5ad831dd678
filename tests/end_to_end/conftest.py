"""One launched server for every test that only reads from it."""

from collections.abc import Iterator

import pytest

from tests.support.servers.launched_server import Server, serve

LIMITS = ("--max-input-tokens", "2300", "--max-total-tokens", "3400", "--max-batch-prefill-tokens", "2300")


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """`preset:tiny-llama` with one shard."""
    with serve("--dtype", "float32", *LIMITS, "--max-concurrent-requests", "1024") as running:
        yield running
