"""Hundreds of requests, a third of them cancelled by their clients: nothing is left behind."""

import asyncio
import gc
import os
import re
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

from reference_server.router.generation_stream import GenerationStream
from reference_server.router.scheduling.queue import Entry
from tests.support.clients import chaotic_clients
from tests.support.servers.launched_server import Server, serve
from tests.support.servers.serving import Served, endless, serve_on_socket

GAUGES = {"tgi_queue_size 0", "tgi_batch_current_size 0", "tgi_batch_current_max_tokens 0"}


def open_descriptors(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def live_objects() -> Counter[str]:
    """Number of live objects of each kind that a request creates."""
    gc.collect()
    kinds = (Entry, GenerationStream, asyncio.Task)
    # `isinstance` reads `__class__`, which has effects on some objects.
    return Counter(kind.__name__ for each in gc.get_objects() if issubclass(kind := type(each), kinds))


async def quiesce(served: Served) -> None:
    async with asyncio.timeout(30):
        while served.services.infer.permits.free < 128 or served.shard.cached_ids:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await served.client.get("/health")
        await asyncio.sleep(0.1)
    served.shard.calls.clear()


@pytest.mark.parametrize("count", [300, pytest.param(1000, marks=pytest.mark.slow)])
async def test_requests_with_leaving_clients_leave_nothing_behind(count: int):
    async with serve_on_socket(script=endless) as served:
        port = served.client.base_url.port
        assert port is not None
        await chaotic_clients.run(port, count // 5, 64, seed=1)
        await quiesce(served)
        before = live_objects(), open_descriptors(os.getpid()), resident_bytes(os.getpid())

        outcomes = await chaotic_clients.run(port, count, 64, seed=2)
        await quiesce(served)

        after = live_objects(), open_descriptors(os.getpid()), resident_bytes(os.getpid())
        metrics = (await served.client.get("/metrics")).text
        allocator = served.scheduler.queue.admission.allocator  # type: ignore[attr-defined]
        assert (await served.generate(max_new_tokens=3)).status_code == 200

    assert 0.25 * count < outcomes.num_left < 0.42 * count
    assert Counter(outcomes.statuses) == {200: count - outcomes.num_left}
    assert outcomes.num_cut_short == 0
    assert set(metrics.splitlines()) >= GAUGES
    assert len(allocator.free_blocks) == allocator.capacity
    assert after[:2] == before[:2]
    assert after[2] < before[2] * 1.05 + 4e6
    assert 'tgi_request_failure{err="dropped"}' in metrics


def metrics_of(server: Server) -> list[str]:
    with urllib.request.urlopen(server.url + "/metrics", timeout=10) as response:
        return response.read().decode().splitlines()


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_reliability_C1_the_same_on_a_real_model_and_real_processes():
    with serve("--dtype", "float32", "--max-input-tokens", "512", "--max-total-tokens", "1024") as server:
        pids = sorted(server.children())
        await chaotic_clients.run(server.port, 300, 64, seed=3)
        await until_idle(server)
        before = [(open_descriptors(pid), resident_bytes(pid)) for pid in pids]

        outcomes = await chaotic_clients.run(server.port, 600, 64, seed=4)
        await until_idle(server)

        after = [(open_descriptors(pid), resident_bytes(pid)) for pid in pids]
        assert server.token_ids("Testing API", 5)

    assert Counter(outcomes.statuses) == {200: 600 - outcomes.num_left}
    assert outcomes.num_cut_short == 0
    for (descriptors, size), (descriptors_before, size_before) in zip(after, before, strict=True):
        assert abs(descriptors - descriptors_before) <= 4
        assert size < size_before * 1.05 + 4e6


async def until_idle(server: Server) -> None:
    async with asyncio.timeout(60):
        while not set(await asyncio.to_thread(metrics_of, server)) >= GAUGES:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    assert not [line for line in metrics_of(server) if re.match(r"tgi_request_failure.*(generation|incomplete)", line)]
