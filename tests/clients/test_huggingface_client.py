"""`huggingface_hub.InferenceClient` and its asynchronous twin against the router."""

import asyncio

import pytest

huggingface_hub = pytest.importorskip("huggingface_hub")

from tests.support.servers.serving import serve_on_socket  # noqa: E402


async def test_text_generation_and_chat_single_and_streamed():
    async with serve_on_socket() as served:
        url = str(served.client.base_url).rstrip("/")
        async with huggingface_hub.AsyncInferenceClient(url) as client:
            text = await client.text_generation("hello", max_new_tokens=2, return_full_text=False)
            detailed = await client.text_generation("hello", max_new_tokens=2, details=True, top_n_tokens=2)
            tokens = [
                part
                async for part in await client.text_generation("hello", max_new_tokens=3, stream=True, details=True)
            ]
            chat = await client.chat_completion([{"role": "user", "content": "hi"}], max_tokens=3)
            deltas = [
                part async for part in await client.chat_completion([{"role": "user", "content": "hi"}], stream=True)
            ]
            with pytest.raises(huggingface_hub.errors.ValidationError, match="`top_k` must be"):
                await client.text_generation("hello", top_k=0)

    assert text == " a b"
    assert (detailed.details.finish_reason, len(detailed.details.tokens)) == ("length", 2)
    assert [part.token.text for part in tokens] == [" a", " b", " c"]
    assert tokens[-1].details.generated_tokens == 3
    assert chat.choices[0].message.content == " a b c"
    assert "".join(delta.choices[0].delta.content for delta in deltas) == " a b c d e"


async def test_the_blocking_client_single_and_streamed():
    def use(url: str) -> tuple[str, list[str], str, str]:
        client = huggingface_hub.InferenceClient(url)
        text = client.text_generation("hello", max_new_tokens=2, return_full_text=False)
        parts = list(client.text_generation("hello", max_new_tokens=3, stream=True))
        chat = client.chat_completion([{"role": "user", "content": "hi"}], max_tokens=3)
        deltas = client.chat.completions.create(messages=[{"role": "user", "content": "hi"}], stream=True)
        streamed = "".join(delta.choices[0].delta.content for delta in deltas)
        return text, parts, chat.choices[0].message.content, streamed

    async with serve_on_socket() as served:
        text, parts, chat, streamed = await asyncio.to_thread(use, str(served.client.base_url).rstrip("/"))

    assert (text, parts, chat, streamed) == (" a b", [" a", " b", " c"], " a b c", " a b c d e")
