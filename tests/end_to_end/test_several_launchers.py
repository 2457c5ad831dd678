"""More than one launcher on a machine: side by side without a clash, and as the nodes of one model."""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from tests.support.servers.launched_server import serve
from tests.support.servers.ports import free_port

LIMITS = ("--dtype", "float32", "--max-total-tokens", "128", "--max-batch-prefill-tokens", "64")
PROMPT = "The quick brown fox"

pytestmark = pytest.mark.slow


def test_two_launchers_of_two_shards_side_by_side() -> None:
    with serve(*LIMITS, "--num-shard", "2") as first, serve(*LIMITS, "--num-shard", "2") as second:
        groups = [[child for child in server.children().values() if "RANK" in child] for server in (first, second)]

        meetings = [{shard["RENDEZVOUS_FILE"] for shard in group} for group in groups]
        assert [len(group) for group in groups] == [2, 2]
        assert [len(meeting) for meeting in meetings] == [1, 1]
        assert meetings[0] != meetings[1]
        assert first.token_ids(PROMPT) == second.token_ids(PROMPT)


def test_two_nodes_share_one_model() -> None:
    shard_addr = f"127.0.0.1:{free_port()},127.0.0.1:{free_port()}"
    nodes = ("--num-nodes", "2", "--num-shard", "1", "--shard-addr", shard_addr)
    flags = (*LIMITS, *nodes, "--master-addr", "127.0.0.1", "--master-port", str(free_port()))

    with serve(*LIMITS) as alone, second_node(*flags) as second, serve(*flags, "--node-rank", "0") as first:
        assert first.token_ids(PROMPT) == alone.token_ids(PROMPT)
        # One shard a node, and the router on the first.
        assert sum("RANK" in child for child in first.children().values()) == 1

    # Without the first node the second has nothing to do.
    assert second.wait(timeout=60) == 1


@contextlib.contextmanager
def second_node(*flags: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "reference_server.launcher.cli", "--model-id", "preset:tiny-llama", *flags]
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen([*command, "--node-rank", "1"], stdout=output, stderr=subprocess.STDOUT)
        try:
            yield process
        except BaseException:
            process.kill()
            raise
