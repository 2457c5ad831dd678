"""Rotary positions of the length-dependent types: each request as if it were alone."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from reference_server.errors import ArgumentError, ShardError, UnsupportedError
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.engine import Engine
from reference_server.model_server.models import rotary
from reference_server.model_server.options import RopeOverride
from reference_server.model_server.step_state import Step, StepMetadata, StepState, StepTensors
from reference_server.model_server.stepper import RunAhead
from tests.support.models.shard_driver import ShardDriver
from tests.support.models.tiny_models import generate_alone, make_tiny_model, random_prompt, save_tiny_model
from tests.support.models.tiny_shards import tiny_options, warm_up

HIDDEN = torch.zeros(1)
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}}


def installed(model: PreTrainedModel, state: StepState | None = None) -> nn.Module:
    rotary.install(model, state or StepState(), prefix_caching=False)
    module: nn.Module = model.get_submodule("model.rotary_emb")
    return module


def step_of(*rows: tuple[int, int, int]) -> Step:
    """Of rows (tokens of the request so far, first position, one past the last)."""
    known_len, first, end = np.array(rows).T
    metadata = StepMetadata(np.empty(0), np.empty((0, 0)), end - first, end, 0, known_len)
    return Step(metadata, StepTensors.of_host(metadata))


def alone(name: str, longest: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Transformers' rotation of `positions` in a forward that reaches the position before `longest`."""
    reaching = torch.cat((positions, torch.tensor([longest - 1])))[None]
    cos, sin = make_tiny_model(name).get_submodule("model.rotary_emb")(HIDDEN, reaching)
    return cos[0, :-1], sin[0, :-1]


def test_model_server_D7_dynamic_rope_follows_the_length_of_each_request() -> None:
    state = StepState()
    module = installed(make_tiny_model("llama-dynamic-rope"), state)
    # A chunk of a prompt of 60, a whole short one, and a row that decodes its 31st token. The maximum is 16.
    rows = [(60, 10, 15), (6, 0, 6), (31, 30, 31)]
    positions = [torch.arange(first, end) for _, first, end in rows]

    with state.use(step_of(*rows)):
        cos, sin = module(HIDDEN, torch.cat(positions)[None])

    expected = [alone("llama-dynamic-rope", length, each) for length, each in zip((60, 6, 31), positions, strict=True)]
    torch.testing.assert_close(cos[0], torch.cat([each[0] for each in expected]))
    torch.testing.assert_close(sin[0], torch.cat([each[1] for each in expected]))


def test_hardening_R15_longrope_chooses_the_factors_by_the_length_of_each_request() -> None:
    state = StepState()
    module = installed(make_tiny_model("phi3-longrope"), state)
    # A chunk of a prompt of 200, and a prompt that ends at the original maximum.
    rows = [(200, 100, 120), (128, 120, 128)]
    positions = [torch.arange(first, end) for _, first, end in rows]

    with state.use(step_of(*rows)):
        cos, _ = module(HIDDEN, torch.cat(positions)[None])

    expected = [alone("phi3-longrope", length, each)[0] for length, each in zip((200, 128), positions, strict=True)]
    torch.testing.assert_close(cos[0], torch.cat(expected))


@pytest.mark.parametrize(
    "run_ahead",
    [pytest.param(each, marks=() if each is RunAhead.BEFORE_READ else pytest.mark.slow) for each in RunAhead],
)
async def test_hardening_R15_a_request_past_the_original_maximum_is_as_in_transformers(
    tmp_path: Path, run_ahead: RunAhead
) -> None:
    shard = LocalShard.load(tiny_options(save_tiny_model(tmp_path, "phi3-longrope"), cpu_memory_gib=0.02))
    shard.engine.stepper.run_ahead = run_ahead
    await warm_up(shard, 256)
    driver = ShardDriver(shard)
    prompts = [random_prompt(length) for length in (20, 122, 128, 150)]

    outcomes = await driver.run(*(driver.request(row, prompt, 16) for row, prompt in enumerate(prompts)))
    shard.close()

    model = make_tiny_model("phi3-longrope")
    assert [outcome.ids for outcome in outcomes] == [generate_alone(model, prompt, 16) for prompt in prompts]


async def test_hardening_R15_prefix_caching_ends_at_the_original_maximum(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path, "phi3-longrope")
    shard = LocalShard.load(tiny_options(directory, prefix_caching=True, cpu_memory_gib=0.02))

    await warm_up(shard, max_total_tokens=128)
    with pytest.raises(ShardError, match="a request longer than 128 differ"):
        await warm_up(shard, max_total_tokens=129)
    shard.close()


def test_phimoe_has_a_scaling_for_each_side_of_the_original_maximum() -> None:
    factors = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6, "short_mscale": 1.5, "long_mscale": 3.0}
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 128, **factors}

    cos, _ = installed(make_tiny_model("phimoe", rope_parameters=rope))(HIDDEN, torch.tensor([[0, 64, 128]]))

    assert cos[0, 0, 0] == 1.5
    assert cos[0, 1, 0] == pytest.approx(1.5 * np.cos(64), abs=1e-5)
    assert cos[0, 2, 0] == pytest.approx(3.0 * np.cos(64), abs=1e-5)


def test_a_rotary_of_another_form_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="rope type 'dynamic' of CohereRotaryEmbedding is not served"):
        installed(make_tiny_model("cohere", **DYNAMIC))


def test_a_forward_that_keeps_rows_together_refuses_a_length_dependent_type() -> None:
    rotary.refuse(make_tiny_model("llama"))

    with pytest.raises(UnsupportedError, match="rope type longrope is not served for Phi3ForCausalLM"):
        rotary.refuse(make_tiny_model("phi3-longrope"))


def test_dynamic_rope_refuses_a_prefix_cache(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path, "llama-dynamic-rope")

    with pytest.raises(ArgumentError, match="`--prefix-caching true` cannot be served with dynamic rope scaling"):
        Engine.load(tiny_options(directory, prefix_caching=True), 0, 1)


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
async def test_model_server_D6_a_rope_override_is_applied(tmp_path: Path, kind: str) -> None:
    prompt = random_prompt(30)
    small = {"max_position_embeddings": 16}
    shard = LocalShard.load(tiny_options(save_tiny_model(tmp_path, "llama", **small), rope=RopeOverride(kind, 4.0)))
    await warm_up(shard)
    driver = ShardDriver(shard)

    [outcome] = await driver.run(driver.request(0, prompt))
    shard.close()

    scaled = {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0}, **small}
    assert outcome.ids == generate_alone(make_tiny_model("llama", **scaled), prompt, 10)
    assert outcome.ids != generate_alone(make_tiny_model("llama", **small), prompt, 10)


def test_an_override_scales_the_global_layers_where_layers_differ() -> None:
    config = AutoConfig.for_model("gemma3_text")
    local = dict(config.rope_parameters["sliding_attention"])

    rotary.override(config, RopeOverride("linear", 8.0))

    assert config.rope_parameters["full_attention"] == {"rope_theta": 1_000_000.0, "rope_type": "linear", "factor": 8.0}
    assert config.rope_parameters["sliding_attention"] == local


def test_an_override_without_rotary_positions_is_refused() -> None:
    with pytest.raises(ArgumentError, match="`--rope-scaling` has no effect on gpt2"):
        rotary.override(AutoConfig.for_model("gpt2"), RopeOverride("linear", 2.0))
