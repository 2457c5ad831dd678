"""Draft heads change no output: with sampling, penalties, stops, grammars, top tokens, filters and all run-ahead.

`preset:tiny-llama-medusa` against `preset:tiny-llama`; random calls on a tiny model with random heads.
tests/end_to_end/test_equivalence.py has a hundred requests over both wires, both schemas and two ranks.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from reference_server.errors import ArgumentError, StartupError, UnsupportedError
from reference_server.messages import ChooserParameters, GrammarType, StoppingParameters
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.options import EngineOptions
from reference_server.model_server.speculation.ngram import NgramRule
from reference_server.model_server.stepper import RunAhead
from tests.reference_server.model_server.test_speculation import GRAMMARS, PARAMETERS, assert_same, warm_up_in_chunks
from tests.support.models.checkpoints.saved_heads import save_medusa, save_mlp_speculator
from tests.support.models.random_calls import RandomCalls
from tests.support.models.shard_driver import Outcome, ShardDriver
from tests.support.models.tiny_models import VOCAB_SIZE, save_tiny_model
from tests.support.models.tiny_shards import tiny_options, warm_up

PROMPTS = ("Testing API", "What is Deep Learning?", "One day the small fox", "red, blue, green, red, blue, green, red,")
NUM_TOKENS = 24


def preset(name: str, **options: object) -> LocalShard:
    return LocalShard.load(
        EngineOptions(
            f"preset:{name}",
            cpu_memory_gib=0.1,
            compute_threads=1,
            speculate_adaptive=False,
            **options,  # type: ignore[arg-type]
        )
    )


@pytest.fixture(scope="module")
def plain() -> Iterator[LocalShard]:
    shard = preset("tiny-llama", dtype="float32")
    yield shard
    shard.close()


@pytest.fixture(scope="module")
def drafting() -> Iterator[LocalShard]:
    shard = preset("tiny-llama-medusa", dtype="float32")
    yield shard
    shard.close()


async def answers(shard: LocalShard, parameters: ChooserParameters, stopping: StoppingParameters) -> list[Outcome]:
    await warm_up(shard)
    driver = ShardDriver(shard)
    requests = [
        replace(
            driver.request(id_, [1] * 16, NUM_TOKENS, parameters, stopping, top_n_tokens=id_),
            chunks=(prompt,),
            truncate=16,
        )
        for id_, prompt in enumerate(PROMPTS)
    ]
    return await driver.run(*requests)


def num_accepted(outcomes: list[Outcome]) -> int:
    return sum(len(outcome.ids) - outcome.num_generations for outcome in outcomes)


SHORT = (
    *(("greedy", RunAhead.OFF), ("greedy", RunAhead.BEFORE_READ)),
    ("sampled with penalties", RunAhead.BEFORE_READ),
)


@pytest.mark.parametrize(
    ("name", "run_ahead"),
    [
        pytest.param(*each, marks=() if each in SHORT else pytest.mark.slow)
        for each in itertools.product(PARAMETERS, RunAhead)
    ],
)
async def test_heads_change_no_token(plain: LocalShard, drafting: LocalShard, name: str, run_ahead: RunAhead) -> None:
    stopping = StoppingParameters(NUM_TOKENS, ("ing",), ignore_eos_token=True, min_new_tokens=6)
    drafting.engine.stepper.run_ahead = run_ahead

    expected = await answers(plain, PARAMETERS[name], stopping)
    found = await answers(drafting, PARAMETERS[name], stopping)

    for own, other in zip(found, expected, strict=True):
        assert_same(own, other)
    assert num_accepted(found) > 5


@pytest.mark.parametrize("name", GRAMMARS)
async def test_drafts_of_heads_follow_the_grammar(plain: LocalShard, drafting: LocalShard, name: str) -> None:
    text, kind = GRAMMARS[name]
    parameters = ChooserParameters(do_sample=True, seed=4, grammar=text, grammar_type=GrammarType(kind))

    expected = await answers(plain, parameters, StoppingParameters(NUM_TOKENS))
    found = await answers(drafting, parameters, StoppingParameters(NUM_TOKENS))

    for own, other in zip(found, expected, strict=True):
        assert_same(own, other)


async def test_in_bfloat16_the_compiled_walk_gives_heads_the_input_of_the_output_head() -> None:
    shards = [preset("tiny-llama"), preset("tiny-llama-medusa")]
    parameters, stopping = ChooserParameters(), StoppingParameters(NUM_TOKENS, ignore_eos_token=True)

    expected, found = [await answers(shard, parameters, stopping) for shard in shards]

    kernels = shards[0].engine.backends["kernels"]
    if kernels == "fused,walk":
        # Only the compiled kernels give the same bits for every number of rows.
        assert [each.ids for each in found] == [each.ids for each in expected]
    assert shards[1].engine.backends["kernels"] == kernels
    # More than one token of two is accepted: half of the text and more comes from drafts.
    assert num_accepted(found) > 0.4 * NUM_TOKENS * len(PROMPTS)
    for shard in shards:
        shard.close()


async def test_steps_that_no_draft_follows_keep_no_hidden_states() -> None:
    shard = preset("tiny-llama-medusa")
    engine = shard.engine
    drafter, kept = engine.stepper.drafter, engine.state.hidden
    assert kept is not None
    parameters, stopping = ChooserParameters(), StoppingParameters(NUM_TOKENS, ignore_eos_token=True)

    engine.stepper.drafter = None
    plain = await answers(shard, parameters, stopping)
    assert not kept.is_read
    engine.stepper.drafter = drafter
    drafted = await answers(shard, parameters, stopping)
    shard.close()

    assert num_accepted(plain) == 0 < num_accepted(drafted)
    assert kept.is_read


@pytest.mark.parametrize(
    "quantize", ["eetq", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bitsandbytes-nf4", "fp8"))]
)
async def test_heads_of_a_quantized_model_change_no_token(quantize: str) -> None:
    shards = [preset(name, dtype="float32", quantize=quantize) for name in ("tiny-llama", "tiny-llama-medusa")]
    parameters, stopping = ChooserParameters(), StoppingParameters(NUM_TOKENS, ignore_eos_token=True)

    expected, found = [await answers(shard, parameters, stopping) for shard in shards]

    assert [each.ids for each in found] == [each.ids for each in expected]
    assert num_accepted(found) > 0.4 * NUM_TOKENS * len(PROMPTS)
    for shard in shards:
        shard.close()


# `tests/families/test_draft_heads.py` has the other kinds in the short suite.
@pytest.fixture(
    scope="module",
    params=["medusa-v1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("medusa-v2", "mlp-speculator"))],
)
def heads(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    base = save_tiny_model(tmp_path_factory.mktemp("llama"), "llama")
    directory = tmp_path_factory.mktemp("heads")
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": json.loads((base / "config.json").read_text())["hidden_size"]}
    if request.param == "mlp-speculator":
        return save_mlp_speculator(directory, base, **sizes)
    return save_medusa(directory, base, **sizes, version=int(request.param[-1]))


@pytest.mark.parametrize(
    "run_ahead", [RunAhead.BEFORE_READ, pytest.param(RunAhead.AFTER_REPLY, marks=pytest.mark.slow)]
)
async def test_random_calls_give_each_request_its_output_without_heads(heads: Path, run_ahead: RunAhead) -> None:
    shard = LocalShard.load(tiny_options(heads, cpu_memory_gib=0.05, speculate_adaptive=False))
    shard.engine.stepper.run_ahead = run_ahead
    await warm_up_in_chunks(shard)
    calls = RandomCalls(shard, 3)
    await calls.make(60)
    shard.engine.stepper.drafter = None
    await warm_up_in_chunks(shard)
    alone = ShardDriver(shard, num_blocks=200)

    num_ended = 0
    for id_, outcome in calls.outcomes.items():
        request = replace(calls.sent[id_], blocks=alone.request(id_, [1], len(outcome.ids) + 80).blocks, chunk_len=None)
        [expected] = await alone.run(request)
        if outcome.generated_text is None:
            assert outcome.ids == expected.ids[: len(outcome.ids)]
            continue
        num_ended += 1
        assert_same(outcome, expected)
    shard.close()

    assert num_ended > 5


async def test_the_warm_up_measures_the_time_of_the_heads(heads: Path) -> None:
    shard = LocalShard.load(tiny_options(heads))
    await warm_up(shard)
    await warm_up(shard)
    shard.close()

    drafter = shard.engine.stepper.drafter
    assert drafter is not None
    assert drafter.cost is not None
    # A product alone takes some us; without hidden states there would be nothing to compute.
    assert drafter.cost.proposing_ns(1) > 15_000


def test_heads_are_refused_by_name_in_the_padded_tier(heads: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"`--speculate 3` cannot be served with LlamaForCausalLM: the padded"):
        LocalShard.load(tiny_options(heads, tier="padded"))


def test_heads_with_a_rule_for_n_grams_are_refused_by_name(heads: Path) -> None:
    with pytest.raises(
        ArgumentError, match=r"`--ngram-rule tgi` cannot be served with the heads in .*: heads draft alone"
    ):
        LocalShard.load(tiny_options(heads, ngram_rule=NgramRule.TGI))


def test_more_drafted_tokens_than_heads_are_refused_before_the_model_is_loaded(heads: Path) -> None:
    with pytest.raises(ArgumentError, match=r"`--speculate 4` needs 4 heads, but the speculator has 3"):
        LocalShard.load(tiny_options(heads, speculate=4))


def test_heads_of_another_model_are_refused(tmp_path: Path) -> None:
    base = save_tiny_model(tmp_path / "base", "llama")
    save_medusa(tmp_path / "heads", base, vocab_size=VOCAB_SIZE, hidden_size=20)

    with pytest.raises(StartupError, match=r"does not fit its base model: weight 0\.0\.linear\.weight has shape"):
        LocalShard.load(tiny_options(tmp_path / "heads"))


def test_speculate_0_serves_the_base_model_alone(heads: Path) -> None:
    shard = LocalShard.load(tiny_options(heads, speculate=0))
    shard.close()

    assert shard.engine.stepper.drafter is None
    assert shard.engine.info.speculate == 0
    assert "drafts" not in shard.engine.backends
