"""The trained model at temperature 1 under every schema of the suite: what ends by itself parses and is valid."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

import jsonschema_rs
import pytest

from reference_server.grammars.compile import compile_grammar
from reference_server.messages import ChooserParameters, FinishReason, Grammar, GrammarType, Request, StoppingParameters
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.options import EngineOptions
from tests.support.models.shard_driver import Outcome, ShardDriver
from tests.support.models.tiny_shards import warm_up
from tests.support.samples.grammar_samples import finite_json
from tests.support.samples.schema_suite import SERVED

MAX_NEW_TOKENS = 64
#: Of `make test-long`.
MANY_NEW_TOKENS = 400


@pytest.fixture(scope="module")
def shard() -> Iterator[LocalShard]:
    options = EngineOptions("preset:tiny-llama", dtype="float32", cpu_memory_gib=0.6, compute_threads=1)
    shard = LocalShard.load(options)
    # Processor time has what the host of a virtual machine takes; here one step in 20,000 took 133 ms instead of 0.5.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("reference_server.model_server.decoding.grammar.MAX_STEP_NS", 10**10)
        yield shard
    shard.close()


@pytest.fixture
async def driver(shard: LocalShard) -> ShardDriver:
    await warm_up(shard)
    return ShardDriver(shard, num_blocks=len(SERVED) * 27)


def request(driver: ShardDriver, id_: int, grammar: Grammar, seed: int, max_new_tokens: int) -> Request:
    parameters = ChooserParameters(do_sample=True, seed=seed, grammar=grammar.text, grammar_type=grammar.type)
    stopping = StoppingParameters(max_new_tokens)
    asked = driver.request(id_, [1] * 12, parameters=parameters, stopping=stopping)
    return replace(asked, chunks=("Give me that as JSON.",), truncate=12)


def schema(name: str) -> Grammar:
    return compile_grammar("schema", json.dumps(SERVED[name]))


async def generate_under_the_suite(
    driver: ShardDriver, names: Iterable[str], seed: int, max_new_tokens: int
) -> dict[str, Outcome]:
    requests = {name: request(driver, id_, schema(name), seed + id_, max_new_tokens) for id_, name in enumerate(names)}
    return dict(zip(requests, await driver.run(*requests.values()), strict=True))


def check(outcomes: dict[str, Outcome]) -> int:
    """How many ended by themselves; every one of them is valid."""
    ended = 0
    for name, outcome in outcomes.items():
        assert outcome.generated_text is not None, name
        if outcome.generated_text.finish_reason is FinishReason.EOS_TOKEN:
            value = finite_json(outcome.generated_text.text)
            jsonschema_rs.Draft202012Validator(SERVED[name], validate_formats=True).validate(value)
            ended += 1
    return ended


async def test_every_output_that_ends_by_itself_is_valid(driver: ShardDriver):
    outcomes = await generate_under_the_suite(driver, [*SERVED][::3], 0, MAX_NEW_TOKENS)

    assert check(outcomes) >= len(outcomes) / 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 5_000, 1000))
async def test_every_output_that_ends_by_itself_is_valid_at_length(driver: ShardDriver, seed: int):
    outcomes = await generate_under_the_suite(driver, SERVED, seed, MANY_NEW_TOKENS)

    assert check(outcomes) >= 0.7 * len(SERVED)


async def test_a_continued_answer_matches_its_grammar_to_its_end(driver: ShardDriver):
    regex = r'\{"words":"([a-zäöü]{1,9} ){60}","é":\[(true, |false, ){9}null\]\}'
    text, segments, reason = "", 0, FinishReason.LENGTH
    while reason is FinishReason.LENGTH:
        asked = request(driver, 500 + segments, Grammar(regex), 7, 11)
        parameters = replace(asked.parameters, grammar_prefix_chars=len(text))
        (outcome,) = await driver.run(
            replace(asked, chunks=("Give me that as JSON." + text,), truncate=12, parameters=parameters)
        )
        assert outcome.generated_text is not None
        # A character that a segment ended in the middle of is begun anew.
        text, reason = (text + outcome.generated_text.text).rstrip("\ufffd"), outcome.generated_text.finish_reason
        segments += 1

    assert segments > 5
    assert re.fullmatch(regex, text)
    assert json.loads(text)["é"][-1] is None


async def test_reliability_4_5_63_bad_and_good_grammars_and_plain_requests_are_each_as_if_alone(driver: ShardDriver):
    free = Grammar("", GrammarType.NONE)
    grammars = [free, Grammar("("), schema("tgi_guidance"), Grammar("((a{200}){200}){200}b"), Grammar(r"\d{4}"), free]

    def asked(first_id: int) -> list[Request]:
        return [request(driver, first_id + id_, grammar, id_, 40) for id_, grammar in enumerate(grammars)]

    alone = [(await driver.run(each))[0] if grammars[id_].text != "(" else None for id_, each in enumerate(asked(0))]
    together = await driver.run(*asked(10))

    assert [outcome.ids for outcome in together] == [outcome.ids if outcome else [] for outcome in alone]
    assert together[4].generated_text is not None
    assert together[4].generated_text.text.isdecimal()
    assert together[1].generated_text is None


async def test_grpc_6_1_a_schema_from_another_router_is_checked_here(driver: ShardDriver):
    unchecked = Grammar(json.dumps({"properties": {"a": {"not": {}}}}), GrammarType.JSON)
    grammars = [schema("range"), unchecked, Grammar("", GrammarType.NONE)]

    served, refused, free = await driver.run(
        *(request(driver, id_, grammar, id_, 24) for id_, grammar in enumerate(grammars))
    )

    assert served.generated_text is not None
    assert json.loads(served.generated_text.text)["v"] in range(1, 6)
    assert refused.generated_text is None
    assert free.generated_text is not None
