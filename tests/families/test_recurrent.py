"""State-space models: a batch generates the ids of Transformers' generate alone, without K/V."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from reference_server.errors import UnsupportedError
from reference_server.model_server.calls.local_shard import LocalShard
from tests.support.models.lower_tiers import (
    PROMPTS,
    RECURRENT,
    Loaded,
    as_joined,
    join_and_leave,
    run_together,
    save_model,
    serve_model,
    unplaced,
)
from tests.support.models.shard_driver import ShardDriver
from tests.support.models.tiny_shards import SEEDED, tiny_options, warm_up

pytestmark = pytest.mark.xdist_group("recurrent")


@pytest.fixture(scope="module", params=RECURRENT)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    directory: Path = tmp_path_factory.mktemp("model")
    with serve_model(directory, save_model(directory, RECURRENT[request.param])) as loaded:
        yield loaded


async def test_a_recurrent_batch_equals_generate_alone(loaded: Loaded) -> None:
    await warm_up(loaded.shard)

    assert await run_together(loaded.shard) == loaded.expected


async def test_recurrent_requests_join_and_leave_midway(loaded: Loaded) -> None:
    await warm_up(loaded.shard)

    assert await join_and_leave(loaded.shard) == as_joined(loaded.expected)


async def test_a_recurrent_model_reports_its_limits(loaded: Loaded) -> None:
    info = await loaded.shard.info()
    reply = await warm_up(loaded.shard, max_prefill_tokens=40)

    assert info.requires_padding
    assert not info.support_chunking
    assert reply.max_supported_total_tokens is None
    assert (reply.max_input_tokens, reply.max_total_tokens) == (39, 40)


async def test_a_seed_is_independent_of_the_batch(loaded: Loaded) -> None:
    await warm_up(loaded.shard)
    driver = ShardDriver(loaded.shard)
    [alone] = await driver.run(unplaced(driver, 0, PROMPTS[1], parameters=SEEDED))

    mates = [unplaced(driver, id_, prompt) for id_, prompt in enumerate(PROMPTS[:3], start=2)]
    together = (await driver.run(unplaced(driver, 1, PROMPTS[1], parameters=SEEDED), *mates))[0]

    assert together.ids == alone.ids


async def test_prompt_logprobs_of_a_recurrent_model_equal_a_full_forward(loaded: Loaded) -> None:
    await warm_up(loaded.shard)
    driver = ShardDriver(loaded.shard)

    outcomes = await driver.run(
        *(unplaced(driver, id_, prompt, 2, prefill_logprobs=id_ != 2) for id_, prompt in enumerate(PROMPTS))
    )

    assert outcomes[2].prefill_tokens is None
    for prompt, outcome in zip(PROMPTS, outcomes, strict=True):
        if outcome.prefill_tokens is None:
            continue
        with torch.no_grad():
            logprobs = loaded.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        expected = [float(logprobs[place, id_]) for place, id_ in enumerate(prompt[1:])]
        assert outcome.prefill_tokens.logprobs[1:] == pytest.approx(expected, abs=1e-4)


def test_a_hybrid_of_states_and_attention_is_refused(tmp_path: Path) -> None:
    attention = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_layer_period": 2, "attn_layer_offset": 1}
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 80}
    save_model(tmp_path, {"model_type": "jamba", **sizes, **attention})

    with pytest.raises(UnsupportedError, match="JambaForCausalLM cannot be served through the padded tier"):
        LocalShard.load(tiny_options(tmp_path))
