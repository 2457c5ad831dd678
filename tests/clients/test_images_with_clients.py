"""A picture described over HTTP: real clients against launched servers with tiny random models of four families.

The other families answer over HTTP in tests/families/test_images_over_http.py.
"""

import base64
from collections.abc import Iterator
from typing import Any

import pytest

from reference_server.tokenizer import load_tokenizer
from tests.support.models.tiny_models import one_group_each
from tests.support.models.tiny_vision import (
    VOCAB_SIZE,
    SavedVisionModel,
    picture,
    save_vision_model,
)
from tests.support.servers.launched_server import Server, serve

huggingface_hub = pytest.importorskip("huggingface_hub")

pytestmark = pytest.mark.slow

PICTURE = picture(20, 45)
URL = f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}"
MESSAGES = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "w3 w4 "}, {"type": "image_url", "image_url": {"url": URL}}],
    }
]
TEXTS = [{"type": "text", "text": " w1 w2 w3 w4 w5 w6 w7 w8 w9 w10 w11 w12 w13 w14"}]
NEW_TOKENS = 5
# Tiles, rows of tiles in the text, positions of three axes, and a prompt that sees itself whole.
FAMILIES = ("llava-next", "idefics3", "qwen2-vl", "paligemma")


@pytest.fixture(scope="module", params=one_group_each(FAMILIES))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SavedVisionModel:
    return save_vision_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def server(saved: SavedVisionModel) -> Iterator[Server]:
    limits = ("--max-input-tokens", "200", "--max-total-tokens", "220", "--max-batch-prefill-tokens", "200")
    with serve("--model-id", str(saved.directory), "--dtype", "float32", *limits) as server:
        yield server


def test_openai_describes_a_picture(openai: Any, server: Server, saved: SavedVisionModel) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        request = {
            "model": "tgi", "messages": MESSAGES, "max_tokens": NEW_TOKENS, "temperature": 0.0,
            "extra_body": {"ignore_eos_token": True},
        }  # fmt: skip
        chat = client.chat.completions.create(**request)
        streamed = client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **request)
        chunks = list(streamed)

    prompt = saved.prompt_ids(("w3 w4 ", PICTURE, " "))
    generated = saved.generate(("w3 w4 ", PICTURE, " "), NEW_TOKENS)
    expected = load_tokenizer(saved.directory, VOCAB_SIZE).decode(generated, skip_special_tokens=True)
    assert chat.usage.prompt_tokens == len(prompt)
    assert chat.usage.completion_tokens == NEW_TOKENS
    # The tokenizer of the tests has no text for some ids, and no spaces around them.
    assert unspaced(chat.choices[0].message.content) == unspaced(expected)
    assert chunks[-1].usage.prompt_tokens == len(prompt)
    streamed_text = "".join(chunk.choices[0].delta.content for chunk in chunks if chunk.choices)
    assert unspaced(streamed_text) == unspaced(expected)


def unspaced(text: str) -> str:
    return "".join(text.split())


def test_huggingface_hub_describes_a_picture(server: Server, saved: SavedVisionModel) -> None:
    client = huggingface_hub.InferenceClient(server.url)
    chat = client.chat_completion(MESSAGES, max_tokens=NEW_TOKENS)
    text = client.text_generation(f"w3 w4 ![]({URL})", max_new_tokens=NEW_TOKENS, details=True)

    assert chat.usage.prompt_tokens == len(saved.prompt_ids(("w3 w4 ", PICTURE, " ")))
    expected = saved.generate(("w3 w4 ", PICTURE), NEW_TOKENS)
    found = [token.id for token in text.details.tokens]
    assert found == expected[: len(found)]


def test_a_second_request_with_the_image_reads_its_prefix_from_the_cache(
    openai: Any, server: Server, saved: SavedVisionModel
) -> None:
    url = f"data:image/png;base64,{base64.b64encode(picture(30, 31, seed=5)).decode()}"
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, *TEXTS]}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        first, second = [
            client.chat.completions.create(model="tgi", messages=messages, max_tokens=2, temperature=0.0)
            for _ in range(2)
        ]

    has_prefixes = saved.model.config.model_type != "paligemma"
    assert cached_tokens(first.usage) == 0
    # At least one token is computed.
    count = second.usage.prompt_tokens
    assert cached_tokens(second.usage) == (min(count // 16 * 16, count - 1) if has_prefixes else 0)
    assert second.choices[0].message.content == first.choices[0].message.content


def cached_tokens(usage: Any) -> int:
    details = usage.prompt_tokens_details
    return 0 if details is None else details.cached_tokens


def test_a_broken_picture_and_a_remote_one_are_refused(server: Server) -> None:
    client = huggingface_hub.InferenceClient(server.url)
    with pytest.raises(huggingface_hub.errors.ValidationError, match="invalid image: its format is none of"):
        client.text_generation("![](data:image/png;base64,AAEC)", max_new_tokens=2)
    with pytest.raises(huggingface_hub.errors.ValidationError, match="remote images are disabled"):
        client.text_generation("![](https://example.com/a.png)", max_new_tokens=2)
