"""Drafts change no output: greedy and sampled, with penalties, stops, grammars, chunks, filters and run-ahead.

One random sequence of 300 calls runs here for each kind of run-ahead, twelve of 500 in the long mode; two ranks in the
long mode. tests/families has every packed family.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from reference_server.errors import UnsupportedError
from reference_server.messages import (
    Batch,
    ChooserParameters,
    GrammarType,
    Request,
    StoppingParameters,
    WarmupRequest,
)
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.drafting import Drafter
from reference_server.model_server.options import EngineOptions
from reference_server.model_server.speculation.ngram import NgramRule
from reference_server.transport.shard import Shard
from tests.support.models.known_drafts import KnownDrafts
from tests.support.models.random_calls import RandomCalls
from tests.support.models.shard_driver import Outcome, ShardDriver
from tests.support.models.tiny_models import random_prompt, save_tiny_model, text_of
from tests.support.models.tiny_shards import SEEDED, loaded, tiny_options, warm_up

LOOP = [7, 8, 9, 10] * 5
"""A prompt that n-grams continue, whatever the model says."""
SPECULATE = 4


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def plain(directory: Path) -> Iterator[LocalShard]:
    yield from loaded(directory, cpu_memory_gib=0.05)


@pytest.fixture(scope="module", params=["ahead", pytest.param("not-ahead", marks=pytest.mark.slow)])
def drafting(directory: Path, request: pytest.FixtureRequest) -> Iterator[LocalShard]:
    """Every draft is verified, so the warm-up does not measure the cost of drafts."""
    run_ahead = request.param == "ahead"
    yield from loaded(
        directory, cpu_memory_gib=0.05, speculate=SPECULATE, speculate_adaptive=False, run_ahead=run_ahead
    )


async def warm_up_in_chunks(shard: Shard) -> None:
    request = Request(0, (text_of([1] * 16),), 16, ChooserParameters(), StoppingParameters(1))
    await shard.warmup(WarmupRequest(Batch(0, (request,)), 16))


def assert_same(got: Outcome, expected: Outcome) -> None:
    assert got.ids == expected.ids
    assert got.texts == expected.texts
    assert got.generated_text == expected.generated_text
    assert got.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert [each.ids for each in got.top_tokens] == [each.ids for each in expected.top_tokens]
    assert (got.prefill_tokens is None) == (expected.prefill_tokens is None)
    if got.prefill_tokens is not None and expected.prefill_tokens is not None:
        assert got.prefill_tokens.ids == expected.prefill_tokens.ids
        # The first token has none.
        assert got.prefill_tokens.logprobs == pytest.approx(expected.prefill_tokens.logprobs, abs=1e-4, nan_ok=True)
    for own, other in zip(got.top_tokens, expected.top_tokens, strict=True):
        assert own.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize(
    ("seed", "num_calls"),
    [(0, 100), *(pytest.param(seed, 500, marks=pytest.mark.slow) for seed in range(1, 13))],
)
async def test_random_calls_give_each_request_its_output_without_drafts(
    plain: LocalShard, drafting: LocalShard, seed: int, num_calls: int
) -> None:
    # The calls differ, since requests end in fewer of them; the requests are the same.
    await warm_up_in_chunks(plain)
    known = RandomCalls(plain, seed)
    await known.make(num_calls)
    await warm_up_in_chunks(drafting)
    outputs = {id_: outcome.ids for id_, outcome in known.outcomes.items()}
    drafting.engine.stepper.drafter = Drafter(KnownDrafts(outputs), SPECULATE)

    got = RandomCalls(drafting, seed)
    await got.make(num_calls)

    await warm_up_in_chunks(plain)
    alone = ShardDriver(plain, num_blocks=200)
    num_ended = num_accepted = 0
    for id_, outcome in got.outcomes.items():
        request = replace(got.sent[id_], blocks=alone.request(id_, [1], len(outcome.ids) + 80).blocks, chunk_len=None)
        [expected] = await alone.run(request)
        num_accepted += len(outcome.ids) - outcome.num_generations
        if outcome.generated_text is None:
            assert outcome.ids == expected.ids[: len(outcome.ids)]
            continue
        num_ended += 1
        assert_same(outcome, expected)
    assert num_ended > num_calls // 10
    assert num_accepted > num_calls // 10


PARAMETERS = {
    "greedy": ChooserParameters(),
    "sampled": SEEDED,
    "penalties": ChooserParameters(repetition_penalty=1.3, frequency_penalty=0.3, presence_penalty=0.2),
    "sampled with penalties": replace(SEEDED, repetition_penalty=1.1, typical_p=0.8),
    "watermark": ChooserParameters(do_sample=True, watermark=True, seed=5),
}
# "sampled with penalties" has their parts, and the random calls have greedy requests.
LONG = ("greedy", "sampled", "penalties")


def fields(top_n: int) -> dict[str, object]:
    """Requests with top tokens also ask for the logprobs of their prompts."""
    return {"top_n_tokens": top_n, "prefill_logprobs": top_n > 0}


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=pytest.mark.slow if each in LONG else ()) for each in PARAMETERS],
)
async def test_model_server_M30_drafts_change_no_token(plain: LocalShard, drafting: LocalShard, name: str) -> None:
    stopping = StoppingParameters(24, ("w7",), ignore_eos_token=True, min_new_tokens=6)
    requests = [(LOOP, 0), (random_prompt(9), 2), (LOOP[:7], 1)]
    await warm_up(plain)
    await warm_up(drafting)
    expected = ShardDriver(plain)
    for id_, (prompt, top_n) in enumerate(requests):
        await expected.run(expected.request(id_, prompt, 24, PARAMETERS[name], stopping, **fields(top_n)))
    outputs = {id_: outcome.ids for id_, outcome in expected.outcomes.items()}
    drafting.engine.stepper.drafter = Drafter(KnownDrafts(outputs), SPECULATE)

    driver = ShardDriver(drafting)
    outcomes = await driver.run(
        *(
            driver.request(id_, prompt, 24, PARAMETERS[name], stopping, **fields(top_n))
            for id_, (prompt, top_n) in enumerate(requests)
        )
    )

    for id_, outcome in enumerate(outcomes):
        assert_same(outcome, expected.outcomes[id_])
    assert sum(len(outcome.ids) - outcome.num_generations for outcome in outcomes) > 5


# `test_ngram.py` compares the drafts of the other rule with those of TGI.
@pytest.mark.parametrize(
    "rule", [pytest.param(rule, marks=pytest.mark.slow if rule is NgramRule.TGI else ()) for rule in NgramRule]
)
async def test_model_server_M30_ngram_drafts_are_accepted_on_repetitive_text(rule: NgramRule) -> None:
    prompt = "One two three four, one two three four, one two three four, one two"
    options = EngineOptions("preset:tiny-llama", cpu_memory_gib=0.1, compute_threads=1)
    drafting = replace(options, speculate=3, ngram_rule=rule, speculate_adaptive=False)
    shards = [LocalShard.load(options), LocalShard.load(drafting)]
    num_accepted = 0
    for parameters in (ChooserParameters(), ChooserParameters(temperature=0.6, seed=11)):
        found = []
        for shard in shards:
            await warm_up(shard)
            driver = ShardDriver(shard)
            request = driver.request(0, [1] * 40, 40, parameters)
            found += await driver.run(replace(request, chunks=(prompt,), truncate=40))

        assert found[1].ids == found[0].ids
        # A product of several rows may round its sums otherwise than one of one row.
        assert found[1].logprobs == pytest.approx(found[0].logprobs, abs=1e-4)
        assert found[0].num_generations == len(found[0].ids)
        num_accepted += len(found[1].ids) - found[1].num_generations
    assert num_accepted > 3
    for shard in shards:
        shard.close()


GRAMMARS = {"regex": (r"(ab|ba){3,20}!", GrammarType.REGEX), "words": (r"[a-z ]{20,40}\.", GrammarType.REGEX)}


@pytest.mark.parametrize("name", ["regex", pytest.param("words", marks=pytest.mark.slow)])
async def test_model_server_D23_drafts_follow_the_grammar(name: str) -> None:
    text, kind = GRAMMARS[name]
    parameters = ChooserParameters(do_sample=True, seed=4, grammar=text, grammar_type=kind)
    shard = LocalShard.load(EngineOptions("preset:tiny-llama", dtype="float32", cpu_memory_gib=0.1, compute_threads=1))
    await warm_up(shard)
    driver = ShardDriver(shard)
    stopping = StoppingParameters(60)

    def request(id_: int) -> Request:
        made = driver.request(id_, [1] * 12, parameters=parameters, stopping=stopping)
        return replace(made, chunks=("ab ba ab ba ab ba",), truncate=12)

    [expected] = await driver.run(request(0))
    for id_, drafter in enumerate([Drafter(KnownDrafts({1: expected.ids}), SPECULATE)], 1):
        shard.engine.stepper.drafter = drafter
        [outcome] = await driver.run(request(id_))

        assert_same(outcome, expected)
        assert outcome.num_generations < len(outcome.ids)
    shard.close()


def test_drafts_are_refused_by_name_in_the_padded_tier(directory: Path) -> None:
    with pytest.raises(UnsupportedError, match="`--speculate 2` cannot be served with LlamaForCausalLM: the padded"):
        LocalShard.load(tiny_options(directory, tier="padded", speculate=2))
