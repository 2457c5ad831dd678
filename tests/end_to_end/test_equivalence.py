"""Batching, chunking, the prefix cache, drafts, shards, transport and schema change no token of a hundred requests.

Some requests have a regex or a JSON schema, and some have penalties, top tokens or stop strings.

In float32, where the shape of a batch changes no close choice.
"""

import asyncio
import itertools
import json
import re
from collections.abc import Iterator

import pytest

from reference_server.configuration.common_config import Transport
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.options import EngineOptions
from reference_server.model_server.speculation.ngram import NgramRule
from tests.support.clients.mixed_load import GRAMMARS, MODEL, Answer, answers, mixed_calls, router_over
from tests.support.servers.model_servers import ModelServers, model_servers

# One model in one process: `tests/contract/test_router_and_shard.py`, which is in the short suite.
pytestmark = pytest.mark.slow

HEADS = "preset:tiny-llama-medusa"
"""Trained heads that draft for MODEL."""
CALLS = mixed_calls()
ALL = len(CALLS)
CONNECTIONS: tuple[tuple[str, Transport], ...] = (("v2", "grpc"), ("v3", "grpc"), ("v3", "link"))
"""Schemas and transports; the link has schema v3 only."""
FLAGS = ("--dtype", "float32", "--cpu-memory-gib", "0.06", "--prefix-caching", "true")


def load(*, prefix_caching: bool, prefill_chunking: bool, model: str = MODEL, **options: object) -> LocalShard:
    return LocalShard.load(
        EngineOptions(
            model,
            dtype="float32",
            cpu_memory_gib=0.05,
            compute_threads=1,
            prefix_caching=prefix_caching,
            prefill_chunking=prefill_chunking,
            **options,  # type: ignore[arg-type]
        )
    )


@pytest.fixture(scope="module")
def on_unix_sockets() -> Iterator[ModelServers]:
    """Two shards, loading while the first tests run."""
    with model_servers(MODEL, *FLAGS, num_shards=2) as started:
        yield started


@pytest.fixture(scope="module")
def on_tcp() -> Iterator[ModelServers]:
    """One shard."""
    with model_servers(MODEL, *FLAGS, tcp=True) as started:
        yield started


@pytest.fixture(scope="module")
def alone(on_unix_sockets: ModelServers) -> list[Answer]:
    """The answers to each request alone, whole prompts, nothing reused: the reference of the tests below."""

    async def ask() -> list[Answer]:
        shard = load(prefix_caching=False, prefill_chunking=False)
        async with router_over(shard) as router:
            alone = await answers(router, CALLS, at_once=1)
        shard.close()
        return alone

    return asyncio.run(ask())


def test_the_load_is_mixed(alone: list[Answer]):
    assert {answer.finish_reason for answer in alone} >= {"length", "stop_sequence"}
    assert len({answer.ids for answer in alone}) > 60
    assert sum(call.parameters.do_sample for call in CALLS) == 33
    assert sum(bool(answer.top_ids) for answer in alone) == 10
    for call, answer in zip(CALLS, alone, strict=True):
        if call.parameters.grammar is GRAMMARS[0]:
            assert re.fullmatch(r"[a-z ]{20,40}\.", answer.text) or answer.finish_reason == "length"
        elif call.parameters.grammar is GRAMMARS[1]:
            assert json.loads(answer.text)["day"] in ("today", "tomorrow")


@pytest.mark.parametrize(
    ("prefix_caching", "prefill_chunking", "at_once"),
    [
        (True, True, ALL),
        (True, False, ALL),
        (False, True, ALL),
        (False, False, ALL),
        (False, True, 1),
        (True, False, 1),
        (True, True, 1),
    ],
)
async def test_batching_chunking_and_the_prefix_cache_change_no_token(
    alone: list[Answer], prefix_caching: bool, prefill_chunking: bool, at_once: int
):
    shard = load(prefix_caching=prefix_caching, prefill_chunking=prefill_chunking)

    async with router_over(shard) as router:
        together = await answers(router, CALLS, at_once)
        hits = router.metrics.prefix_hit_tokens.value()
    shard.close()

    assert together == alone
    assert (hits > 0) == prefix_caching


@pytest.mark.parametrize(
    ("source", "is_adaptive", "run_ahead", "at_once"),
    [
        (NgramRule.SUFFIX, False, True, 2),
        (HEADS, False, True, 4),
        (NgramRule.SUFFIX, True, True, 4),
        (NgramRule.SUFFIX, False, False, 2),
        (NgramRule.TGI, False, True, 2),
        (NgramRule.SUFFIX, True, True, 1),
        (HEADS, True, True, 1),
        (HEADS, True, True, 4),
        (HEADS, False, False, 2),
        (HEADS, False, True, ALL),
    ],
)
async def test_drafts_change_no_token(
    alone: list[Answer], source: str, is_adaptive: bool, run_ahead: bool, at_once: int
):
    model, rule = (HEADS, NgramRule.SUFFIX) if source == HEADS else (MODEL, NgramRule(source))
    drafts = {"speculate": 4, "ngram_rule": rule, "speculate_adaptive": is_adaptive, "run_ahead": run_ahead}
    shard = load(prefix_caching=True, prefill_chunking=True, model=model, **drafts)

    async with router_over(shard) as router:
        together = await answers(router, CALLS, at_once)
        verified, accepted = router.metrics.draft_tokens.value(), router.metrics.accepted_tokens.value()
        skipped = router.metrics.render().decode()
    shard.close()

    assert together == alone
    # An adaptive drafter may find that nothing pays here.
    assert is_adaptive or verified > accepted > 0
    # One request at a time has no step with prompts and other rows.
    assert ('tgi_undrafted_tokens{reason="prompts"}' in skipped) == (at_once != 1)
    assert f"tgi_request_skipped_tokens_sum {accepted:.0f}" in skipped.splitlines()


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize(("model", "speculate"), [(MODEL, ("--speculate", "3")), (HEADS, ())])
async def test_drafts_change_no_token_behind_a_wire(
    alone: list[Answer], model: str, speculate: tuple[str, ...], num_shards: int
):
    flags = (*FLAGS, *speculate, "--speculate-adaptive", "false")
    with model_servers(model, *flags, num_shards=num_shards) as started:
        for version, transport in CONNECTIONS:
            group = await started.connect(version, transport)
            async with router_over(group, version) as router:
                together = await answers(router, CALLS, at_once=2)
                accepted = router.metrics.accepted_tokens.value()
            await group.close()

            assert together == alone, (version, transport)
            assert accepted > 0


@pytest.mark.parametrize(
    ("where", "version", "transport"),
    [
        ("on_unix_sockets", "v2", "grpc"),
        ("on_unix_sockets", "v3", "link"),
        ("on_unix_sockets", "v3", "grpc"),
        ("on_tcp", "v2", "grpc"),
        ("on_tcp", "v3", "grpc"),
    ],
)
async def test_schema_shards_and_transport_change_no_token(
    alone: list[Answer], request: pytest.FixtureRequest, where: str, version: str, transport: Transport
):
    group = await request.getfixturevalue(where).connect(version, transport)

    async with router_over(group, version) as router:
        together = await answers(router, CALLS, ALL)
    await group.close()

    assert together == alone


# Every pair of two options is in one row.
SERVERS = [
    ("true", "true", "tcp", 2),
    ("true", "false", "unix", 1),
    ("true", "false", "link", 2),
    ("false", "true", "unix", 2),
    ("false", "true", "link", 1),
    ("false", "false", "tcp", 1),
]


@pytest.mark.parametrize(("caching", "chunking", "wire", "num_shards"), SERVERS)
async def test_all_pairs_of_options_at_any_batch_size_change_no_token(
    alone: list[Answer], caching: str, chunking: str, wire: str, num_shards: int
):
    """The last requests of each load run alone, so batches of one are in it too."""
    flags = (*FLAGS[:-1], caching, "--prefill-chunking", chunking)
    connections = [each for each in CONNECTIONS if (each[1] == "link") == (wire == "link")]
    with model_servers(MODEL, *flags, num_shards=num_shards, tcp=wire == "tcp") as started:
        for (version, transport), at_once in itertools.product(connections, (7, ALL)):
            group = await started.connect(version, transport)
            async with router_over(group, version) as router:
                together = await answers(router, CALLS, at_once)
            await group.close()

            assert together == alone, (version, at_once)
