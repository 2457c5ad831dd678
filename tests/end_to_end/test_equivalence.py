"""How requests are scheduled and carried changes no token: a hundred mixed ones, answered in every way there is.

In float32, where the shape of a batch moves no near-tie. What needs no process of its own runs in this one.
"""

import asyncio
from collections.abc import Iterator

import pytest

from reference_server.model_server.options import EngineOptions
from reference_server.model_server.shard import LocalShard
from tests.support.mixed_load import MODEL, Spoken, answers, mixed_calls, router_over
from tests.support.model_servers import ModelServers, model_servers

CALLS = mixed_calls()
ALL = len(CALLS)
FLAGS = ("--dtype", "float32", "--cpu-memory-gib", "0.06", "--prefix-caching", "true")


def load(*, prefix_caching: bool, prefill_chunking: bool) -> LocalShard:
    return LocalShard.load(
        EngineOptions(
            MODEL,
            dtype="float32",
            cpu_memory_gib=0.05,
            compute_threads=1,
            prefix_caching=prefix_caching,
            prefill_chunking=prefill_chunking,
        )
    )


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, ModelServers]]:
    """One shard on TCP and a group of two on unix sockets; they load while the tests in this process run."""
    with model_servers(MODEL, *FLAGS, tcp=True) as single, model_servers(MODEL, *FLAGS, num_shards=2) as pair:
        yield {"one shard on TCP": single, "two shards on unix sockets": pair}


@pytest.fixture(scope="module")
def alone(servers: dict[str, ModelServers]) -> list[Spoken]:
    """Each request alone, whole prompts, nothing reused: what every other way has to give."""

    async def ask() -> list[Spoken]:
        shard = load(prefix_caching=False, prefill_chunking=False)
        async with router_over(shard) as infer:
            spoken = await answers(infer, CALLS, at_once=1)
        shard.close()
        return spoken

    return asyncio.run(ask())


def test_the_load_is_mixed(alone: list[Spoken]):
    """Otherwise the tests below would show little."""
    assert {spoken.finish_reason for spoken in alone} >= {"length", "stop_sequence"}
    assert len({spoken.ids for spoken in alone}) > 60
    assert sum(call.parameters.do_sample for call in CALLS) == 33


@pytest.mark.parametrize(
    ("prefix_caching", "prefill_chunking", "at_once"),
    [
        (False, False, ALL),
        (False, True, ALL),
        (True, False, ALL),
        (True, True, ALL),
        (False, True, 1),
        (True, False, 1),
        (True, True, 1),
    ],
)
async def test_batching_chunking_and_the_prefix_cache_change_no_token(
    alone: list[Spoken], prefix_caching: bool, prefill_chunking: bool, at_once: int
):
    shard = load(prefix_caching=prefix_caching, prefill_chunking=prefill_chunking)

    async with router_over(shard) as infer:
        spoken = await answers(infer, CALLS, at_once)
        hits = infer.batcher._observer.prefix_hit_tokens.value()  # type: ignore[attr-defined]
    shard.close()

    assert spoken == alone
    assert (hits > 0) == prefix_caching


@pytest.mark.parametrize("version", ["v3", "v2"])
@pytest.mark.parametrize("where", ["one shard on TCP", "two shards on unix sockets"])
async def test_schema_shards_and_transport_change_no_token(
    alone: list[Spoken], servers: dict[str, ModelServers], where: str, version: str
):
    group = await servers[where].connect(version)

    async with router_over(group, version) as infer:
        spoken = await answers(infer, CALLS, ALL)
    await group.close()

    assert spoken == alone


@pytest.mark.slow
@pytest.mark.parametrize("at_once", [1, 7, ALL])
@pytest.mark.parametrize("version", ["v3", "v2"])
@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("tcp", [True, False], ids=["tcp", "unix"])
@pytest.mark.parametrize("chunking", ["true", "false"], ids=["chunked", "whole"])
@pytest.mark.parametrize("caching", ["true", "false"], ids=["prefix cache", "computed"])
async def test_every_combination(
    alone: list[Spoken], caching: str, chunking: str, tcp: bool, num_shards: int, version: str, at_once: int
):
    flags = (*FLAGS[:-1], caching, "--prefill-chunking", chunking)
    with model_servers(MODEL, *flags, num_shards=num_shards, tcp=tcp) as started:
        group = await started.connect(version)
        async with router_over(group, version) as infer:
            spoken = await answers(infer, CALLS, at_once)
        await group.close()

    assert spoken == alone
