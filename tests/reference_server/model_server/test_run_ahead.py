"""Run-ahead changes no output and follows its rules: when rows are launched, which tokens are kept.

One random sequence of 160 calls runs here at one rank; the long mode has four of 500 at one rank and three at two.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from reference_server.configuration.common_config import Transport
from reference_server.errors import ShardError
from reference_server.messages import (
    Batch,
    ChooserParameters,
    GrammarType,
    Request,
    StoppingParameters,
    WarmupRequest,
)
from reference_server.model_server.batch import SequenceBatch
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.forward.inputs import RaggedInputs
from reference_server.model_server.forward.ragged import RaggedForward
from reference_server.model_server.stepper import Launched, RunAhead, StepOutput, Stepper
from reference_server.transport.shard import Shard
from tests.support.models.random_calls import RandomCalls
from tests.support.models.shard_driver import ShardDriver
from tests.support.models.tiny_models import random_prompt, save_tiny_model, text_of
from tests.support.models.tiny_shards import loaded, tiny_options, warm_up
from tests.support.servers.model_servers import model_servers

PROMPTS = [random_prompt(length) for length in (4, 20, 2, 11)]
NUM_CALLS = 500


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def plain(directory: Path) -> Iterator[LocalShard]:
    yield from loaded(directory, run_ahead=False, cpu_memory_gib=0.05)


@pytest.fixture(scope="module", params=["read-first", "launch-first"])
def ahead(directory: Path, request: pytest.FixtureRequest) -> Iterator[LocalShard]:
    """A shard that answers step n before it launches n+1, as on a CPU, and one that launches first, as on CUDA."""
    shard = loaded_ahead(directory, launches_first=request.param == "launch-first")
    yield shard
    shard.close()


def loaded_ahead(directory: Path, launches_first: bool) -> LocalShard:
    shard = LocalShard.load(tiny_options(directory, cpu_memory_gib=0.05))
    shard.engine.stepper.run_ahead = RunAhead.BEFORE_READ if launches_first else RunAhead.AFTER_REPLY
    return shard


@pytest.fixture
async def driver(ahead: LocalShard) -> ShardDriver:
    await warm_up(ahead)
    return ShardDriver(ahead)


class Forwards:
    """The rows of every forward, counted where the model is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[int] = []
        whole = RaggedForward.__call__

        def counted(forward: RaggedForward, inputs: RaggedInputs) -> torch.Tensor:
            self.rows.append(inputs.metadata.num_rows)
            return whole(forward, inputs)

        monkeypatch.setattr(RaggedForward, "__call__", counted)

    def since(self) -> list[int]:
        rows, self.rows = self.rows, []
        return rows


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> Forwards:
    return Forwards(monkeypatch)


async def warm_up_in_chunks(shard: Shard) -> None:
    request = Request(0, (text_of([1] * 16),), 16, ChooserParameters(), StoppingParameters(1))
    await shard.warmup(WarmupRequest(Batch(0, (request,)), 16))


@pytest.mark.parametrize(
    ("seed", "num_calls"),
    [(0, 100), *(pytest.param(seed, NUM_CALLS, marks=pytest.mark.slow) for seed in range(1, 5))],
)
async def test_random_calls_give_the_same_with_and_without(
    plain: LocalShard, directory: Path, seed: int, num_calls: int
) -> None:
    await warm_up_in_chunks(plain)
    expected = RandomCalls(plain, seed)
    calls = await expected.make(num_calls)

    for launches_first in (False, True):
        ahead = loaded_ahead(directory, launches_first)
        await warm_up_in_chunks(ahead)
        got = RandomCalls(ahead, seed)

        assert await got.make(num_calls) == calls
        for id_, outcome in expected.outcomes.items():
            assert got.outcomes[id_].texts == outcome.texts
            assert got.outcomes[id_].generated_text == outcome.generated_text
            assert got.outcomes[id_].logprobs == pytest.approx(outcome.logprobs, abs=1e-4)
            assert [each.ids for each in got.outcomes[id_].top_tokens] == [each.ids for each in outcome.top_tokens]
        ahead.close()


@asynccontextmanager
async def two_ranks(directory: Path, run_ahead: bool, transport: Transport) -> AsyncIterator[Shard]:
    flags = ("--dtype", "float32", "--cpu-memory-gib", "0.1", "--compute-threads", "1")
    with model_servers(str(directory), *flags, "--run-ahead", str(run_ahead).lower(), num_shards=2) as servers:
        group = await servers.connect(transport=transport)
        yield group
        await group.close()


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "transport"), [(0, "grpc"), (1, "link"), (2, "link")])
async def test_random_calls_give_the_same_with_and_without_at_two_ranks(
    directory: Path, seed: int, transport: Transport
) -> None:
    async with two_ranks(directory, True, transport) as ahead, two_ranks(directory, False, transport) as plain:
        await warm_up_in_chunks(plain)
        await warm_up_in_chunks(ahead)

        expected = await RandomCalls(plain, seed).make(NUM_CALLS)
        got = await RandomCalls(ahead, seed).make(NUM_CALLS)

    assert got == expected


async def test_the_next_step_is_computed_before_its_call(driver: ShardDriver, forwards: Forwards) -> None:
    result = await driver.prefill(driver.request(0, PROMPTS[0]), driver.request(1, PROMPTS[1]))
    await driver.shard.health()
    assert forwards.since() == [2, 2]

    await driver.decode(result.batch)
    await driver.shard.health()

    assert forwards.since() == [2]


async def test_a_device_gets_the_next_step_before_the_ids_of_this_step_are_read(
    driver: ShardDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    launch, read = Stepper.launch, Stepper.read

    def noted_launch(self: Stepper, batch: SequenceBatch, *rest: Any) -> Launched:
        events.append("launch")
        return launch(self, batch, *rest)

    def noted_read(self: Stepper, batch: SequenceBatch, steps: Sequence[Launched]) -> StepOutput:
        events.append("read")
        return read(self, batch, steps)

    monkeypatch.setattr(Stepper, "launch", noted_launch)
    monkeypatch.setattr(Stepper, "read", noted_read)
    result = await driver.prefill(driver.request(0, PROMPTS[0]))
    await driver.decode(result.batch)
    await driver.shard.health()

    launches_first = driver.shard.engine.stepper.run_ahead is RunAhead.BEFORE_READ  # type: ignore[attr-defined]
    first, then = ("launch", "read") if launches_first else ("read", "launch")
    assert events == ["launch", first, then, first, then]


async def test_without_run_ahead_nothing_is_computed_ahead(plain: LocalShard, monkeypatch: pytest.MonkeyPatch) -> None:
    await warm_up(plain)
    driver, forwards = ShardDriver(plain), Forwards(monkeypatch)

    await driver.prefill(driver.request(0, PROMPTS[0]))
    await plain.health()

    assert forwards.since() == [1]


async def test_a_join_forwards_only_rows_without_a_pending_token(driver: ShardDriver, forwards: Forwards) -> None:
    first = await driver.prefill(driver.request(0, PROMPTS[0]), driver.request(1, PROMPTS[1]))
    await driver.shard.health()
    forwards.since()

    joined = await driver.prefill(driver.request(2, PROMPTS[2]), cached=first.batch)
    assert [generation.request_id for generation in joined.generations] == [0, 1, 2]
    await driver.shard.health()

    # The prompt alone, then all three ahead.
    assert forwards.since() == [1, 3]


async def test_merged_batches_keep_their_pending_tokens(driver: ShardDriver, forwards: Forwards) -> None:
    first = await driver.prefill(driver.request(0, PROMPTS[0]))
    second = await driver.prefill(driver.request(1, PROMPTS[1]))
    await driver.shard.health()
    forwards.since()

    merged = await driver.decode(first.batch, second.batch)
    assert [generation.request_id for generation in merged.generations] == [0, 1]
    await driver.shard.health()

    assert forwards.since() == [2]


async def test_a_row_at_its_length_limit_is_never_launched(driver: ShardDriver, forwards: Forwards) -> None:
    result = await driver.prefill(driver.request(0, PROMPTS[0], 2), driver.request(1, PROMPTS[1], 4))
    await driver.shard.health()
    assert forwards.since() == [2, 2]

    result = await driver.decode(result.batch)
    await driver.shard.health()
    # Request 0 has had its second token, which is its last.
    assert forwards.since() == [1]
    await driver.finish(result)
    await driver.shard.health()

    assert forwards.since() == [1]


async def test_a_filter_drops_only_the_tokens_of_the_rows_it_removes(driver: ShardDriver, forwards: Forwards) -> None:
    [alone] = await driver.run(driver.request(9, PROMPTS[1]))
    result = await driver.prefill(driver.request(0, PROMPTS[0]), driver.request(1, PROMPTS[1]))
    await driver.shard.health()
    forwards.since()
    assert result.batch is not None

    kept = await driver.shard.filter_batch(result.batch.id, [1])
    result = await driver.decode(kept)
    assert [generation.request_id for generation in result.generations] == [1]
    await driver.finish(result)

    assert driver.outcomes[1].ids == alone.ids
    assert forwards.rows == [1] * 8


async def test_unfinished_prompts_do_not_run_ahead(driver: ShardDriver, forwards: Forwards) -> None:
    await driver.prefill(driver.request(0, PROMPTS[0]), driver.request(1, PROMPTS[1], chunk_len=5))
    await driver.shard.health()

    assert forwards.since() == [2]


def test_a_grammar_does_not_run_ahead(ahead: LocalShard) -> None:
    driver, constrained = ShardDriver(ahead), ChooserParameters(grammar="a+", grammar_type=GrammarType.REGEX)
    requests = (driver.request(0, PROMPTS[0]), driver.request(1, PROMPTS[1], parameters=constrained))
    batch = ahead.engine.intake.make_batch(Batch(1, requests))
    for sequence in batch.sequences:
        sequence.cache_len, sequence.input_len = sequence.prompt_len, 1
        sequence.ids.append(3)

    assert ahead.engine.stepper.launch_ahead(batch).pending == ()
    assert ahead.engine.stepper.launch_ahead(batch.filter([0])).pending != ()


async def test_an_error_ahead_is_raised_by_the_call_that_would_have_returned_the_token(
    driver: ShardDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = await driver.prefill(driver.request(5, PROMPTS[2]))
    result = await driver.prefill(driver.request(0, PROMPTS[0]))
    assert result.batch is not None
    await driver.shard.health()
    whole = RaggedForward.__call__

    def broken(self: RaggedForward, inputs: RaggedInputs) -> torch.Tensor:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(RaggedForward, "__call__", broken)
    await driver.decode(result.batch)
    await driver.shard.health()
    monkeypatch.setattr(RaggedForward, "__call__", whole)
    await driver.decode(other.batch)

    with pytest.raises(RuntimeError, match="the device is gone"):
        await driver.decode(result.batch)
    with pytest.raises(ShardError, match="not found"):
        await driver.decode(result.batch)


async def test_blocks_of_a_removed_row_are_clean_after_its_pending_step_failed(driver: ShardDriver) -> None:
    [alone] = await driver.run(driver.request(0, PROMPTS[1]))
    result = await driver.prefill(driver.request(1, PROMPTS[0]), driver.request(2, PROMPTS[1]))
    assert result.batch is not None
    await driver.shard.health()
    poisoned = driver.sent[1].blocks[0]
    for layer in driver.shard.engine.state.cache.layers:  # type: ignore[attr-defined]
        layer.buffer[poisoned] = float("nan")
    # The poison shows in the step that is launched after this call.
    result = await driver.decode(result.batch)
    assert result.batch is not None
    await driver.shard.filter_batch(result.batch.id, [2])

    next_owner = replace(driver.request(3, PROMPTS[1]), blocks=(poisoned, *driver.request(4, PROMPTS[1]).blocks[1:]))
    [after] = await driver.run(next_owner)

    assert after.ids == alone.ids
