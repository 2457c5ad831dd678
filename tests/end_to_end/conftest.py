"""One launched server for every test that only reads from it, and a lock of devices for each process of tests."""

from collections.abc import Iterator

import pytest

from tests.support.servers.launched_server import Server, serve

LIMITS = ("--max-input-tokens", "2300", "--max-total-tokens", "3400", "--max-batch-prefill-tokens", "2300")


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """`preset:tiny-llama` with one shard."""
    with serve("--dtype", "float32", *LIMITS, "--max-concurrent-requests", "1024") as running:
        yield running


@pytest.fixture(scope="session", autouse=True)
def _own_device_locks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A study does not wait until the studies of the other processes of tests have ended."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))
        yield
