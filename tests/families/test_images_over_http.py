"""Images behind HTTP, router and socket, with both schemas: requests get the ids of generate alone."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from reference_server.images.placeholder import VisionConfig, placeholder_of
from reference_server.images.reader import ImageReader, worker_pool
from reference_server.json_files import read_json
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.router.validation.token_limits import ConfiguredLimits
from reference_server.tokenizer import load_tokenizer
from tests.support.models.router_client import router_client
from tests.support.models.tiny_models import one_group_each
from tests.support.models.tiny_shards import tiny_options
from tests.support.models.tiny_vision import (
    VISION_MODELS,
    VOCAB_SIZE,
    SavedVisionModel,
    picture,
    save_vision_model,
)
from tests.support.wire.wire_shard import served, socket_urls

NEW_TOKENS = 6
MAX_INPUT_TOKENS = 160
PROMPTS: tuple[tuple[str | bytes, ...], ...] = (
    ("w3 w4", picture(20, 45), "w9 w1"),
    ("w7 w8 w9",),
    (picture(60, 18, seed=1), "w5", picture(9, 9, seed=2), "w6"),
    ("w3 w4", picture(20, 45), "w2 w2 w8"),
)


# Chunks and prefixes, and neither.
SHORT = ("llava-next", "paligemma")


@pytest.fixture(scope="module", params=one_group_each(VISION_MODELS, slow=set(VISION_MODELS).difference(SHORT)))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SavedVisionModel:
    return save_vision_model(tmp_path_factory.mktemp(request.param), request.param)


@asynccontextmanager
async def http_client(saved: SavedVisionModel, version: str, prefill_tokens: int) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a router that is connected to the shard through a socket."""
    shard = LocalShard.load(tiny_options(saved.directory, prefix_caching=version == "v3"))
    if not shard.engine.info.support_chunking:
        prefill_tokens = max(prefill_tokens, MAX_INPUT_TOKENS)
    limits = ConfiguredLimits(prefill_tokens, max_input_tokens=MAX_INPUT_TOKENS, max_total_tokens=MAX_INPUT_TOKENS + 20)
    placeholder = placeholder_of(VisionConfig.read(lambda name: _read(saved, name)))
    assert placeholder is not None
    tokenizer = (saved.directory, VOCAB_SIZE)
    (token_id,) = load_tokenizer(*tokenizer).encode(placeholder.token, add_special_tokens=False)
    reader = ImageReader(placeholder, token_id, worker_pool(1), fetcher=None)
    await reader.start()
    async with (
        served([shard], socket_urls(saved.directory), version) as group,
        router_client(group, tokenizer, version, limits, reader) as client,
    ):
        yield client
    await reader.close()
    shard.close()


def _read(saved: SavedVisionModel, name: str) -> dict[str, Any]:
    path = saved.directory / name
    return read_json(path) if path.is_file() else {}


def markdown(parts: tuple[str | bytes, ...]) -> str:
    return "".join(
        part if isinstance(part, str) else f"![](data:image/png;base64,{base64.b64encode(part).decode()})"
        for part in parts
    )


async def generate(client: httpx.AsyncClient, parts: tuple[str | bytes, ...]) -> Any:
    parameters = {
        "max_new_tokens": NEW_TOKENS, "details": True, "decoder_input_details": False, "ignore_eos_token": True
    }  # fmt: skip
    answer = await client.post("/generate", json={"inputs": markdown(parts), "parameters": parameters})
    assert answer.status_code == 200, answer.text
    return answer.json()["details"]


@pytest.mark.parametrize(("version", "prefill_tokens"), [("v3", 32), pytest.param("v2", 400, marks=pytest.mark.slow)])
async def test_images_over_http_equal_generate_alone(
    saved: SavedVisionModel, version: str, prefill_tokens: int
) -> None:
    async with http_client(saved, version, prefill_tokens) as client:
        answers = await asyncio.gather(*(generate(client, parts) for parts in PROMPTS))

    found = [[token["id"] for token in details["tokens"]] for details in answers]
    assert found == [saved.generate(parts, NEW_TOKENS) for parts in PROMPTS]


async def test_reliability_T14_equal_tokens_share_blocks_only_with_equal_images(saved: SavedVisionModel) -> None:
    other = ("w3 w4", picture(20, 45, seed=7), "w9 w1")
    async with http_client(saved, "v3", 400) as client:
        first, again, another = [await generate(client, parts) for parts in (PROMPTS[0], PROMPTS[0], other)]

    has_prefixes = saved.model.config.model_type != "paligemma"
    num_tokens = len(saved.prompt_ids(PROMPTS[0])) if has_prefixes else 0
    assert first.get("cached_input_tokens", 0) == 0
    assert again.get("cached_input_tokens", 0) == num_tokens // 16 * 16
    assert [token["id"] for token in again["tokens"]] == [token["id"] for token in first["tokens"]]
    # The text before the image fills no block.
    assert another.get("cached_input_tokens", 0) == 0
    assert [token["id"] for token in another["tokens"]] == saved.generate(other, NEW_TOKENS)
