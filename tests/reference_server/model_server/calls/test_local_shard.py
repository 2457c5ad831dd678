"""LocalShard on a tiny random Llama in float32: batches, chunks, filters, errors and token choice, by example."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from reference_server.errors import ShardError
from reference_server.messages import (
    Batch,
    CachedBatch,
    ChooserParameters,
    FinishReason,
    GrammarType,
    Image,
    Request,
    StoppingParameters,
    WarmupRequest,
)
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.decoding.detokenize import IncrementalDetokenizer
from reference_server.model_server.forward.inputs import RaggedInputs
from reference_server.model_server.forward.ragged import RaggedForward
from reference_server.model_server.stepper import RunAhead
from tests.support.models.shard_driver import Outcome, ShardDriver
from tests.support.models.tiny_models import generate_alone, make_tiny_model, random_prompt, save_tiny_model
from tests.support.models.tiny_shards import SEEDED, loaded, tiny_options, warm_up

PROMPTS = [random_prompt(length) for length in (4, 20, 2, 11)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


# `test_run_ahead.py` compares the order of a device with no run-ahead in the short suite.
@pytest.fixture(
    scope="module",
    params=["call by call", "ahead, read first", pytest.param("ahead, launch first", marks=pytest.mark.slow)],
)
def shard(directory: Path, request: pytest.FixtureRequest) -> Iterator[LocalShard]:
    """Every example holds with run-ahead and without, in the order of a CPU and in that of a device."""
    for shard in loaded(directory, run_ahead=request.param != "call by call"):
        if request.param.endswith("launch first"):
            shard.engine.stepper.run_ahead = RunAhead.BEFORE_READ
        yield shard


@pytest.fixture(scope="module")
def paged_by_token(directory: Path) -> Iterator[LocalShard]:
    """A shard whose page is one token, so that chunk budgets need not be multiples of 16."""
    yield from loaded(directory, attention="flashinfer")


@pytest.fixture
async def driver(shard: LocalShard) -> ShardDriver:
    await warm_up(shard)
    return ShardDriver(shard)


def summary(outcome: Outcome) -> tuple[list[int], list[str], FinishReason | None]:
    text = outcome.generated_text
    return outcome.ids, outcome.texts, None if text is None else text.finish_reason


async def test_model_server_M1_ragged_prefill_equals_generate_alone(driver: ShardDriver) -> None:
    model = make_tiny_model("llama")

    outcomes = await driver.run(*(driver.request(id_, prompt) for id_, prompt in enumerate(PROMPTS)))

    assert [outcome.ids for outcome in outcomes] == [generate_alone(model, prompt, 10) for prompt in PROMPTS]


async def test_model_server_M3_joining_and_filtering_change_nothing(driver: ShardDriver) -> None:
    lengths = [3, 10, 10]
    alone = [
        (await driver.run(driver.request(id_, PROMPTS[id_], lengths[id_], SEEDED, top_n_tokens=2)))[0]
        for id_ in range(3)
    ]

    def request(id_: int) -> Request:
        return driver.request(10 + id_, PROMPTS[id_], lengths[id_], SEEDED, top_n_tokens=2)

    first = await driver.prefill(request(0), request(1))
    first = await driver.decode(first.batch)
    second = await driver.prefill(request(2))
    merged = await driver.decode(first.batch, second.batch)
    assert merged.batch is not None
    assert driver.outcomes[10].generated_text is not None
    assert merged.batch.request_ids == (10, 11, 12)
    await driver.finish(merged)

    together = [driver.outcomes[10 + id_] for id_ in range(3)]
    assert [summary(outcome) for outcome in together] == [summary(outcome) for outcome in alone]
    for outcome, expected in zip(together, alone, strict=True):
        assert outcome.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
        assert [top.ids for top in outcome.top_tokens] == [top.ids for top in expected.top_tokens]


async def test_model_server_M4_seeded_sampling_does_not_depend_on_other_requests(driver: ShardDriver) -> None:
    alone = (await driver.run(driver.request(0, PROMPTS[1], parameters=SEEDED)))[0]
    others = [driver.request(id_, prompt) for id_, prompt in enumerate(PROMPTS[:3], start=2)]
    together = (await driver.run(driver.request(1, PROMPTS[1], parameters=SEEDED), *others))[0]
    first = await driver.prefill(driver.request(5, PROMPTS[2], 12))
    second = await driver.prefill(driver.request(6, PROMPTS[1], parameters=SEEDED))
    second = await driver.decode(second.batch)
    await driver.finish(await driver.decode(first.batch, second.batch))

    assert together.ids == alone.ids
    assert driver.outcomes[6].ids == alone.ids


async def test_model_server_M5_the_sampled_ids_depend_on_the_seed(driver: ShardDriver) -> None:
    seeds = [42, 42, 43]
    requests = [
        driver.request(id_, PROMPTS[1], parameters=ChooserParameters(do_sample=True, seed=seed))
        for id_, seed in enumerate(seeds)
    ]

    first, again, other = await driver.run_alone(requests)

    assert first.ids == again.ids
    assert first.ids != other.ids
    assert first.generated_text is not None
    assert first.generated_text.seed == 42


async def test_model_server_M6_one_new_token_ends_the_batch_at_once(driver: ShardDriver) -> None:
    result = await driver.prefill(driver.request(0, PROMPTS[0], max_new_tokens=1))

    assert result.batch is None
    [generation] = result.generations
    assert len(generation.tokens) == 1
    assert generation.generated_text is not None
    assert generation.generated_text.finish_reason is FinishReason.LENGTH
    assert generation.generated_text.seed is None


@pytest.mark.parametrize(
    ("max_new_tokens", "ignore_eos_token", "expected_len", "reason"),
    [(4, False, 4, FinishReason.LENGTH), (9, False, 4, FinishReason.EOS_TOKEN), (9, True, 9, FinishReason.LENGTH)],
    ids=["on the last token", "earlier", "ignored"],
)
async def test_model_server_M7_an_eos_token_ends_a_generation(
    tmp_path: Path, max_new_tokens: int, ignore_eos_token: bool, expected_len: int, reason: FinishReason
) -> None:
    # The fourth token that the prompt brings is made the end-of-sequence token.
    eos = generate_alone(make_tiny_model("llama"), PROMPTS[1], 4)[3]
    directory = save_tiny_model(tmp_path, "llama")
    (directory / "generation_config.json").write_text(f'{{"eos_token_id": [{eos}]}}')
    shard = LocalShard.load(tiny_options(directory))
    await warm_up(shard)
    driver = ShardDriver(shard)
    stopping = StoppingParameters(max_new_tokens, ignore_eos_token=ignore_eos_token)

    [outcome] = await driver.run(driver.request(0, PROMPTS[1], stopping=stopping))
    shard.close()

    assert len(outcome.ids) == expected_len
    assert outcome.generated_text is not None
    assert outcome.generated_text.finish_reason is reason


@pytest.mark.parametrize(
    "parameters",
    [ChooserParameters(repetition_penalty=1.3), ChooserParameters(frequency_penalty=0.7)],
    ids=["M12 repetition", "M13 frequency"],
)
async def test_model_server_M12_M13_penalties_equal_those_alone(
    driver: ShardDriver, parameters: ChooserParameters
) -> None:
    [alone] = await driver.run(driver.request(0, PROMPTS[2], parameters=parameters))
    [plain] = await driver.run(driver.request(1, PROMPTS[2]))

    together, _ = await driver.run(
        driver.request(2, PROMPTS[2], parameters=parameters), driver.request(3, PROMPTS[1], parameters=parameters)
    )

    assert together.ids == alone.ids
    assert together.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    assert plain.logprobs != alone.logprobs


async def test_model_server_M16_prompt_logprobs_equal_a_full_forward(driver: ShardDriver) -> None:
    prompt = PROMPTS[3]
    with torch.no_grad():
        logprobs = make_tiny_model("llama")(torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = [float(logprobs[position, id_]) for position, id_ in enumerate(prompt[1:])]

    asked, unasked = await driver.run(driver.request(0, prompt, prefill_logprobs=True), driver.request(1, prompt))

    assert unasked.prefill_tokens is None
    assert asked.prefill_tokens is not None
    assert asked.prefill_tokens.ids == tuple(prompt)
    assert asked.prefill_tokens.texts == tuple(f"w{id_}" for id_ in prompt)
    assert asked.prefill_tokens.is_special == ()
    assert math.isnan(asked.prefill_tokens.logprobs[0])
    assert asked.prefill_tokens.logprobs[1:] == pytest.approx(expected, abs=1e-4)


async def test_model_server_M16_prompt_logprobs_are_off_unless_the_server_allows_them(directory: Path) -> None:
    shard = LocalShard.load(tiny_options(directory, request_logprobs=False))
    await warm_up(shard)
    driver = ShardDriver(shard)

    [outcome] = await driver.run(driver.request(0, PROMPTS[3], prefill_logprobs=True))
    shard.close()

    assert outcome.prefill_tokens is None


async def test_model_server_M17_a_prompt_in_four_chunks(paged_by_token: LocalShard) -> None:
    await warm_up(paged_by_token, max_prefill_tokens=5)
    driver = ShardDriver(paged_by_token, block_size=1, num_blocks=100)
    [whole] = await driver.run(driver.request(0, PROMPTS[1], prefill_logprobs=True))

    result = await driver.prefill(driver.request(1, PROMPTS[1], chunk_len=5, prefill_logprobs=True))
    for _ in range(3):
        assert result.generations == ()
        assert result.batch is not None
        assert result.batch.current_tokens == 5
        result = await driver.decode(result.batch)
    assert len(result.generations) == 1
    await driver.finish(result)

    assert driver.outcomes[1].ids == whole.ids
    assert driver.outcomes[1].prefill_tokens is not None
    assert whole.prefill_tokens is not None
    assert driver.outcomes[1].prefill_tokens.logprobs[1:] == pytest.approx(whole.prefill_tokens.logprobs[1:], abs=1e-5)


async def test_model_server_M18_a_cached_prefix_gives_the_same_output(paged_by_token: LocalShard) -> None:
    await warm_up(paged_by_token)
    driver = ShardDriver(paged_by_token, block_size=1, num_blocks=100)
    first = driver.request(0, PROMPTS[1], prefill_logprobs=True)
    second = driver.request(1, PROMPTS[1])
    [whole] = await driver.run(first)

    shared = replace(second, cache_len=8, blocks=first.blocks[:8] + second.blocks[8:], prefill_logprobs=True)
    [reused] = await driver.run(shared)

    assert reused.ids == whole.ids
    assert reused.prefill_tokens is not None
    assert whole.prefill_tokens is not None
    # The first computed token's own logprob would need the logits of a cached one.
    assert [math.isnan(logprob) for logprob in reused.prefill_tokens.logprobs] == [True] * 9 + [False] * 11
    assert reused.prefill_tokens.logprobs[9:] == pytest.approx(whole.prefill_tokens.logprobs[9:], abs=1e-5)


async def test_model_server_M19_an_unknown_batch_is_an_error_of_the_call_only(driver: ShardDriver) -> None:
    with pytest.raises(ShardError, match=r"^Batch ID 99 not found in cache\.$"):
        await driver.shard.filter_batch(99, [1])
    with pytest.raises(ShardError, match="not found"):
        await driver.shard.decode([CachedBatch(99, (1,), 16)])
    await driver.shard.clear_cache(99)

    [outcome] = await driver.run(driver.request(0, PROMPTS[0]))

    assert len(outcome.ids) == 10


async def test_model_server_M20_a_failing_detokeniser_drops_only_its_request(
    driver: ShardDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = IncrementalDetokenizer.append
    result = await driver.prefill(driver.request(0, PROMPTS[0]), driver.request(1, PROMPTS[1]))
    victim = driver.outcomes[0].ids[0]

    def append(self: IncrementalDetokenizer, token_id: int) -> str:
        if victim in self._window:
            raise RuntimeError("broken text")
        return whole(self, token_id)

    monkeypatch.setattr(IncrementalDetokenizer, "append", append)
    result = await driver.decode(result.batch)

    assert result.batch is not None
    assert result.batch.request_ids == (1,)
    assert [generation.request_id for generation in result.generations] == [1]


async def test_model_server_M20_an_error_of_the_forward_escapes_and_loses_the_batch(
    driver: ShardDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: RaggedForward, inputs: RaggedInputs) -> torch.Tensor:
        raise RuntimeError("the device is gone")

    result = await driver.prefill(driver.request(0, PROMPTS[0]))
    await driver.shard.health()
    monkeypatch.setattr(RaggedForward, "__call__", broken)

    with pytest.raises(RuntimeError, match="the device is gone"):
        # Results computed earlier come first.
        await driver.finish(result)
    with pytest.raises(ShardError, match="not found"):
        await driver.decode(result.batch)


async def test_logits_that_are_not_finite_drop_only_their_request(driver: ShardDriver) -> None:
    [alone] = await driver.run(driver.request(0, PROMPTS[1]))
    result = await driver.prefill(driver.request(1, PROMPTS[0]), driver.request(2, PROMPTS[1]))
    poisoned = driver.sent[1].blocks[0]
    await driver.shard.health()
    for layer in driver.shard.engine.state.cache.layers:  # type: ignore[attr-defined]
        layer.buffer[poisoned] = float("nan")

    while result.batch is not None and 1 in result.batch.request_ids:
        result = await driver.decode(result.batch)
    assert result.batch is not None
    assert result.batch.request_ids == (2,)
    await driver.finish(result)
    # The next owner of the block finds nothing of it.
    next_owner = replace(driver.request(3, PROMPTS[1]), blocks=(poisoned, *driver.sent[2].blocks[1:]))
    [after] = await driver.run(next_owner)

    assert driver.outcomes[2].ids == alone.ids
    assert after.ids == alone.ids


async def test_receipts_count_reserved_tokens_and_those_of_the_next_forward(driver: ShardDriver) -> None:
    first = await driver.prefill(driver.request(0, PROMPTS[0], 13), driver.request(1, PROMPTS[1], 14))
    assert first.batch is not None
    # 4 + 13 - 1 tokens take one page of 16, 20 + 14 - 1 take three.
    assert (first.batch.max_tokens, first.batch.current_tokens) == (64, 2)

    joined = await driver.prefill(driver.request(2, [3] * 100, 5, chunk_len=62), cached=first.batch)
    assert joined.batch is not None
    assert joined.batch.id == first.batch.id
    # Seven more pages; two decodes leave 62 of the 64 tokens, and 38 are left of the prompt.
    assert (joined.batch.max_tokens, joined.batch.current_tokens) == (64 + 7 * 16, 2 + 38)

    kept = await driver.shard.filter_batch(joined.batch.id, [2, 0])
    assert kept == CachedBatch(joined.batch.id, (2, 0), 16 + 7 * 16, 39)
    assert await driver.shard.filter_batch(kept.id, [0, 2]) == kept
    with pytest.raises(ShardError, match="at least one request"):
        await driver.shard.filter_batch(kept.id, [])


async def test_a_finished_request_in_a_batch_is_not_continued(driver: ShardDriver) -> None:
    result = await driver.prefill(driver.request(0, PROMPTS[0], 2), driver.request(1, PROMPTS[1], 5))
    result = await driver.decode(result.batch)
    assert result.batch is not None
    assert result.batch.request_ids == (0, 1)

    result = await driver.decode(result.batch)
    assert [generation.request_id for generation in result.generations] == [1]
    assert result.batch is not None
    only_ended = await driver.shard.filter_batch(result.batch.id, [0])
    result = await driver.decode(only_ended)

    assert (result.generations, result.batch) == ((), None)


async def test_a_chunk_longer_than_the_prompt_is_an_error(driver: ShardDriver) -> None:
    with pytest.raises(ShardError, match="tokenize differently"):
        await driver.prefill(driver.request(0, PROMPTS[0], chunk_len=5))


async def test_truncation_keeps_the_last_tokens(driver: ShardDriver) -> None:
    [cut] = await driver.run(driver.request(0, PROMPTS[1], truncate=11))
    [short] = await driver.run(driver.request(1, PROMPTS[1][-11:]))

    assert cut.ids == short.ids


async def test_reliability_F7_a_grammar_that_cannot_be_enforced_drops_only_its_request(driver: ShardDriver) -> None:
    constrained = ChooserParameters(grammar="a+", grammar_type=GrammarType.REGEX)

    result = await driver.prefill(driver.request(0, PROMPTS[0], parameters=constrained), driver.request(1, PROMPTS[1]))

    assert result.batch is not None
    assert result.batch.request_ids == (1,)


async def test_hardening_R4_a_token_id_past_the_vocabulary_is_refused_before_the_forward(
    driver: ShardDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver.shard.engine.intake.tokenizer, "encode", lambda text, add_special_tokens: [5, 10**6])

    with pytest.raises(ShardError, match=r"has the token id 1000000, but the model's vocabulary has \d+ ids"):
        await driver.prefill(driver.request(1, [3, 4]))


async def test_hardening_R17_an_image_beside_text_is_refused(driver: ShardDriver) -> None:
    request = replace(driver.request(1, [3, 4]), chunks=("w3 w4", Image(b"", "image/png")))

    with pytest.raises(ShardError, match="request 1 has an image, and this model takes text only"):
        await driver.prefill(request)


async def test_the_image_in_a_warm_up_is_ignored(shard: LocalShard) -> None:
    request = Request(0, ("w3 w4", Image(b"", "image/png")), 64, SEEDED, StoppingParameters(1))

    reply = await shard.warmup(WarmupRequest(Batch(0, (request,)), 64))

    assert reply.max_supported_total_tokens is not None


async def test_hardening_R26_a_prefill_before_the_warm_up_is_refused(directory: Path) -> None:
    for shard in loaded(directory):
        with pytest.raises(ShardError, match="Prefill before Warmup"):
            await shard.prefill(Batch(0, (Request(0, ("w1",), 1, SEEDED, StoppingParameters(2**31)),)))


async def test_hardening_R26_numbers_that_the_cache_cannot_hold_are_refused(driver: ShardDriver) -> None:
    long = driver.request(0, [3, 4])
    long = replace(long, blocks=(), stopping=replace(long.stopping, max_new_tokens=2**32 - 1))
    outside = replace(driver.request(1, [3, 4]), blocks=(10**6,))

    with pytest.raises(ShardError, match=r"`max_new_tokens` is 4294967295, but the K/V cache holds \d+ tokens"):
        await driver.prefill(long)
    with pytest.raises(ShardError, match=r"request 1 has block 1000000, but there are \d+ blocks"):
        await driver.prefill(outside)


async def test_hardening_R26_a_warm_up_of_too_many_tokens_is_refused(shard: LocalShard) -> None:
    request = Request(0, ("w3",), 64, SEEDED, StoppingParameters(2**32 - 1))

    with pytest.raises(ShardError, match="`max_new_tokens` is 4294967295, but the K/V cache holds 134217728 tokens"):
        await shard.warmup(WarmupRequest(Batch(0, (request,)), 64))


async def test_hardening_R23_generations_follow_the_order_of_a_filter(driver: ShardDriver) -> None:
    prefilled = await driver.prefill(*(driver.request(row, PROMPTS[row % 2]) for row in range(3)))
    assert prefilled.batch is not None
    # A health check runs after the step that is launched ahead.
    await driver.shard.health()

    kept = await driver.shard.filter_batch(prefilled.batch.id, [2, 0])
    decoded = await driver.decode(kept)

    assert [generation.request_id for generation in decoded.generations] == [2, 0]


async def test_hardening_R23_the_total_time_includes_a_forward_that_ran_ahead(driver: ShardDriver) -> None:
    prefilled = await driver.prefill(driver.request(0, PROMPTS[0]))
    await driver.shard.health()
    decoded = await driver.decode(prefilled.batch)

    assert decoded.timings.total_ns >= decoded.timings.forward_ns + decoded.timings.decode_ns
