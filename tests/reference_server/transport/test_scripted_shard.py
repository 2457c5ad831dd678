"""The behaviour of the test double, on which other tests rely."""

import pytest

from reference_server.errors import ShardError
from reference_server.messages import (
    Batch,
    ChooserParameters,
    FinishReason,
    GeneratedText,
    Request,
    StoppingParameters,
)
from tests.support.wire.scripted_shard import EOS_TEXT, Reply, ScriptedShard, say


def request(stopping: StoppingParameters, number: int = 1, **values: object) -> Request:
    return Request(number, ("one two",), 10, values.pop("parameters", ChooserParameters()), stopping, **values)


async def spoken(shard: ScriptedShard, stopping: StoppingParameters, **values: object) -> GeneratedText:
    """How a lone request ends."""
    result = await shard.prefill(Batch(1, (request(stopping, **values),)))
    while result.batch is not None:
        result = await shard.decode([result.batch])
    generated = result.generations[0].generated_text
    assert generated is not None
    return generated


@pytest.mark.parametrize(
    ("stopping", "text", "reason"),
    [
        (StoppingParameters(8), "ab", FinishReason.EOS_TOKEN),
        (StoppingParameters(2), "ab", FinishReason.LENGTH),
        (StoppingParameters(3), "ab", FinishReason.LENGTH),
        (StoppingParameters(5, ignore_eos_token=True), "ababa", FinishReason.LENGTH),
        (StoppingParameters(8, min_new_tokens=4), "abab", FinishReason.EOS_TOKEN),
        (StoppingParameters(8, ("a",)), "a", FinishReason.STOP_SEQUENCE),
        (StoppingParameters(1, ("a",)), "a", FinishReason.LENGTH),
        (StoppingParameters(8, ("a",), min_new_tokens=3), "aba", FinishReason.STOP_SEQUENCE),
    ],
)
async def test_length_ends_before_eos_and_eos_before_stop_strings(stopping, text, reason):
    generated = await spoken(ScriptedShard(say("a", "b")), stopping)

    assert (generated.text, generated.finish_reason) == (text, reason)


async def test_eos_among_the_texts_ends_there():
    assert (await spoken(ScriptedShard(say("a", EOS_TEXT, "b")), StoppingParameters(8))).text == "a"


@pytest.mark.parametrize(("temperature", "seed"), [(1.0, None), (0.5, 7)])
async def test_only_sampled_generations_have_a_seed(temperature, seed):
    parameters = ChooserParameters(temperature=temperature, seed=7)

    assert (await spoken(ScriptedShard(), StoppingParameters(2), parameters=parameters)).seed == seed


async def test_prompt_and_top_tokens_are_given_when_asked_for():
    shard = ScriptedShard(say("a"))

    result = await shard.prefill(
        Batch(
            1,
            (request(StoppingParameters(5), prefill_logprobs=True, top_n_tokens=2), request(StoppingParameters(5), 2)),
        )
    )

    asked, plain = result.generations
    assert asked.prefill_tokens is not None
    assert asked.prefill_tokens.texts == ("p0", "p1")
    assert [top.texts for top in asked.top_tokens] == [("a", "a1")]
    assert (plain.prefill_tokens, plain.top_tokens) == (None, ())


async def test_several_tokens_a_step_are_cut_at_the_last():
    shard = ScriptedShard(lambda _: Reply(("a", "b", "c"), tokens_per_step=2))

    first = await shard.prefill(Batch(1, (request(StoppingParameters(3)),)))
    second = await shard.decode([first.batch])

    assert first.generations[0].tokens.texts == ("a", "b")
    assert second.generations[0].tokens.texts == ("c",)
    assert second.batch is None


async def test_dropped_request_leaves_without_a_word():
    shard = ScriptedShard(lambda asked: Reply(drop_after=1 if asked.id == 1 else None))

    first = await shard.prefill(Batch(1, (request(StoppingParameters(5)), request(StoppingParameters(5), 2))))
    second = await shard.decode([first.batch])

    assert [generation.request_id for generation in second.generations] == [2]
    assert second.batch.request_ids == (2,)


async def test_planned_failure_happens_once():
    shard = ScriptedShard()
    shard.failures["health"] = ShardError("down")

    with pytest.raises(ShardError, match="down"):
        await shard.health()
    await shard.health()

    assert shard.called("health") == [(), ()]


async def test_stopped_request_must_be_filtered_out():
    shard = ScriptedShard()
    first = await shard.prefill(Batch(1, (request(StoppingParameters(1)), request(StoppingParameters(5), 2))))

    with pytest.raises(AssertionError, match="request 1 has stopped and was not filtered"):
        await shard.decode([first.batch])
