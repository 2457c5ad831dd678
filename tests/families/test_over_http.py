"""Models of every tier behind HTTP, router and socket, with both schemas: requests get the ids of generate alone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import PreTrainedModel

from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.router.validation.token_limits import ConfiguredLimits
from tests.support.models.lower_tiers import ENCODER_DECODER, PADDED, RECURRENT, generate_alone, save_model
from tests.support.models.router_client import router_client
from tests.support.models.tiny_configs import CONFIGS
from tests.support.models.tiny_models import VOCAB_SIZE, make_tiny_model, random_prompt, save_tiny_model, text_of
from tests.support.models.tiny_shards import tiny_options
from tests.support.wire.wire_shard import served, socket_urls

LOWER_TIERS = {"gpt-neo": PADDED["gpt-neo"], "t5": ENCODER_DECODER["t5"], "mamba": RECURRENT["mamba"]}
PROMPTS = [random_prompt(length, seed=5) for length in (4, 20, 2, 11, 40, 7, 16, 3)]
NEW_TOKENS = (10, 6, 12, 8, 5, 9, 1, 7)
# One long prompt and a few short ones in a prefill; or prefill in chunks, which padded models and v2 do not support.
PREFILL_TOKENS, CHUNK_TOKENS = 100, 16
MAX_INPUT_TOKENS, MAX_TOTAL_TOKENS = 40, 60

CASES = [
    *(("gpt-neo", "v2"), ("t5", "v3"), ("mamba", "v2"), ("llama", "v3")),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (("mistral-window", "v3"), ("gpt2", "v2"))),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (("gpt-neo", "v3"), ("t5", "v2"), ("mamba", "v3"))),
    *(pytest.param(name, "v3", marks=pytest.mark.slow) for name in ("qwen2", "gpt-neox", "bloom")),
]


@pytest.mark.parametrize(("name", "version"), CASES)
async def test_requests_over_http_equal_generate_alone(tmp_path: Path, name: str, version: str) -> None:
    model = save(tmp_path, name)
    expected = [generate_alone(model, prompt, count) for prompt, count in zip(PROMPTS, NEW_TOKENS, strict=True)]

    async with http_client(
        tmp_path, version, CHUNK_TOKENS if version == "v3" and name in CONFIGS else PREFILL_TOKENS
    ) as client:

        async def generate(prompt: list[int], new_tokens: int, delay: int) -> list[int]:
            for _ in range(delay):
                # Shorter than a step, so that each request joins a running batch.
                await asyncio.sleep(0.002)
            parameters = {"max_new_tokens": new_tokens, "ignore_eos_token": True, "details": True}
            answer = await post(client, text_of(prompt), **parameters)
            return [token["id"] for token in answer["details"]["tokens"]]

        work = zip(PROMPTS, NEW_TOKENS, range(len(PROMPTS)), strict=True)
        answers = await asyncio.gather(*(generate(*each) for each in work))

    assert answers == expected


def save(directory: Path, name: str) -> PreTrainedModel:
    if name in LOWER_TIERS:
        return save_model(directory, LOWER_TIERS[name])
    save_tiny_model(directory, name)
    return make_tiny_model(name)


@pytest.mark.parametrize("name", LOWER_TIERS)
async def test_prompt_details_over_http(tmp_path: Path, name: str) -> None:
    model = save_model(tmp_path, LOWER_TIERS[name])

    async with http_client(tmp_path, "v3", PREFILL_TOKENS) as client:
        answer = await post(
            client, text_of(PROMPTS[0]), max_new_tokens=3, details=True, decoder_input_details=True, top_n_tokens=2
        )

    details = answer["details"]
    start = [1] if model.config.is_encoder_decoder else PROMPTS[0]
    assert [token["id"] for token in details["prefill"]] == start
    assert details["prefill"][0]["logprob"] is None
    assert all(token["logprob"] < 0 for token in details["prefill"][1:])
    assert details["finish_reason"] == "length"
    assert [len(top) for top in details["top_tokens"]] == [2, 2, 2]


async def post(client: httpx.AsyncClient, inputs: str, **parameters: Any) -> Any:
    answer = await client.post("/generate", json={"inputs": inputs, "parameters": parameters})
    assert answer.status_code == 200, answer.text
    return answer.json()


@asynccontextmanager
async def http_client(directory: Path, version: str, prefill_tokens: int) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a router that is connected to the shard through a socket."""
    shard = LocalShard.load(tiny_options(directory))
    limits = ConfiguredLimits(prefill_tokens, max_input_tokens=MAX_INPUT_TOKENS, max_total_tokens=MAX_TOTAL_TOKENS)
    async with (
        served([shard], socket_urls(directory), version) as group,
        router_client(group, (directory, VOCAB_SIZE), version, limits) as client,
    ):
        yield client
    shard.close()
