"""Encoder-decoder models: unequal decoder lengths, parameters and ends. test_lower_tiers.py has the generated ids."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from reference_server.errors import ShardError
from reference_server.messages import ChooserParameters, FinishReason, StoppingParameters
from reference_server.model_server.calls.local_shard import LocalShard
from tests.support.models.lower_tiers import (
    ENCODER_DECODER,
    PROMPTS,
    as_joined,
    generate_alone,
    join_and_leave,
    save_model,
    unplaced,
)
from tests.support.models.shard_driver import ShardDriver
from tests.support.models.tiny_shards import SEEDED, tiny_options, warm_up

pytestmark = pytest.mark.xdist_group("encoder-decoder")


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalShard]:
    directory = tmp_path_factory.mktemp("t5")
    save_model(directory, ENCODER_DECODER["t5"])
    shard = LocalShard.load(tiny_options(directory))
    yield shard
    shard.close()


@pytest.fixture
async def driver(t5: LocalShard) -> ShardDriver:
    await warm_up(t5)
    return ShardDriver(t5)


# `test_lower_tiers.py` has one of them in the short suite.
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
async def test_five_random_models_at_other_decoder_lengths(tmp_path: Path, seed: int) -> None:
    model = save_model(tmp_path, ENCODER_DECODER["t5"], seed=seed)
    shard = LocalShard.load(tiny_options(tmp_path))
    await warm_up(shard)
    joined = await join_and_leave(shard)
    shard.close()

    assert joined == as_joined([generate_alone(model, prompt) for prompt in PROMPTS])


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(("t5", "bfloat16"), ("led, by no record", "float32")),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("t5", "float32"), ("bart", "float32"))),
        *(pytest.param(name, "bfloat16", marks=pytest.mark.slow) for name in ("bart", "led, by no record")),
    ],
)
def test_only_a_decoder_with_one_position_for_all_rows_runs_one_length_at_a_time(
    tmp_path: Path, name: str, dtype: str
) -> None:
    save_model(tmp_path, ENCODER_DECODER[name])

    shard = LocalShard.load(tiny_options(tmp_path, dtype=dtype))
    shard.close()

    assert shard.engine.model.forward.equal_lengths is name.startswith("led")  # type: ignore[attr-defined]


async def test_prompt_details_are_the_start_token_alone(driver: ShardDriver) -> None:
    [outcome] = await driver.run(unplaced(driver, 0, PROMPTS[1], 3, prefill_logprobs=True))

    assert outcome.prefill_tokens is not None
    assert outcome.prefill_tokens.ids == (1,)
    assert outcome.prefill_tokens.texts == ("w1",)
    [logprob] = outcome.prefill_tokens.logprobs
    assert math.isnan(logprob)


async def test_each_prompt_is_truncated_to_its_own_last_tokens(driver: ShardDriver) -> None:
    [short] = await driver.run(unplaced(driver, 0, PROMPTS[1][-7:]))
    cut, whole = await driver.run(unplaced(driver, 1, PROMPTS[1], truncate=7), unplaced(driver, 2, PROMPTS[1]))
    [alone] = await driver.run(unplaced(driver, 3, PROMPTS[1]))

    assert cut.ids == short.ids
    assert whole.ids == alone.ids


async def test_seeds_and_penalties_are_independent_of_the_batch(driver: ShardDriver) -> None:
    kinds = [SEEDED, ChooserParameters(repetition_penalty=1.3), ChooserParameters(frequency_penalty=0.7), SEEDED]
    alone = [
        (await driver.run(unplaced(driver, id_, prompt, parameters=kind)))[0].ids
        for id_, (prompt, kind) in enumerate(zip(PROMPTS, kinds, strict=True))
    ]

    together = await driver.run(
        *(
            unplaced(driver, 10 + id_, prompt, parameters=kind)
            for id_, (prompt, kind) in enumerate(zip(PROMPTS, kinds, strict=True))
        )
    )

    assert [outcome.ids for outcome in together] == alone


async def test_a_penalty_counts_generated_tokens_but_not_the_prompt(driver: ShardDriver) -> None:
    [plain] = await driver.run(unplaced(driver, 0, PROMPTS[1], 1))
    prompt_holding_it = [plain.ids[0], *PROMPTS[1]]
    [free] = await driver.run(unplaced(driver, 1, prompt_holding_it, 1))

    [penalized] = await driver.run(
        unplaced(driver, 2, prompt_holding_it, 1, parameters=ChooserParameters(repetition_penalty=1.5))
    )

    assert penalized.ids == free.ids
    # The penalty applies to the start token, which changes the normalisation a little.
    assert penalized.logprobs == pytest.approx(free.logprobs, abs=0.01)


async def test_a_stop_string_and_the_length_end_a_generation(driver: ShardDriver) -> None:
    [whole] = await driver.run(unplaced(driver, 0, PROMPTS[1]))
    third = whole.texts[2]
    request = unplaced(driver, 1, PROMPTS[1])
    stopping = StoppingParameters(10, stop_sequences=(third,), ignore_eos_token=True)

    [stopped] = await driver.run(replace(request, stopping=stopping))

    assert stopped.generated_text is not None
    assert stopped.generated_text.finish_reason is FinishReason.STOP_SEQUENCE
    assert stopped.ids == whole.ids[: len(stopped.ids)]
    assert stopped.texts[-1] == third
    assert stopped.generated_text.text == "".join(stopped.texts)
    assert whole.generated_text is not None
    assert whole.generated_text.finish_reason is FinishReason.LENGTH


async def test_an_eos_of_the_decoder_ends_a_generation(tmp_path: Path) -> None:
    model = save_model(tmp_path, ENCODER_DECODER["t5"])
    eos = generate_alone(model, PROMPTS[1], 4)[3]
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{eos}], "decoder_start_token_id": 1}}')
    shard = LocalShard.load(tiny_options(tmp_path))
    await warm_up(shard)
    driver = ShardDriver(shard)

    [outcome] = await driver.run(unplaced(driver, 0, PROMPTS[1], stopping=StoppingParameters(9)))
    shard.close()

    assert outcome.generated_text is not None
    assert outcome.generated_text.finish_reason is FinishReason.EOS_TOKEN
    assert outcome.ids[-1] == eos


async def test_a_prompt_that_does_not_fit_fails_alone(t5: LocalShard) -> None:
    await warm_up(t5)
    driver = ShardDriver(t5)
    running = await driver.prefill(unplaced(driver, 0, PROMPTS[0]))
    # More tokens than the tiny cache of this shard has.
    huge = replace(unplaced(driver, 1, PROMPTS[1]), stopping=StoppingParameters(1_000_000))

    with pytest.raises(ShardError, match="--max-batch-total-tokens"):
        await driver.prefill(huge)
    await driver.finish(running)

    assert len(driver.outcomes[0].ids) == 10
