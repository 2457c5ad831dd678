"""The `openai` package against the router."""

import asyncio

import pytest

from tests.support.servers.serving import serve_on_socket


async def test_chat_and_completions_single_and_streamed(openai):
    async with serve_on_socket() as served:
        client = openai.AsyncOpenAI(base_url=str(served.client.base_url.join("/v1")), api_key="-", max_retries=0)
        messages = [{"role": "user", "content": "hi"}]
        chat = await client.chat.completions.create(model="tgi", messages=messages, logprobs=True, top_logprobs=2)
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="tgi", messages=messages, stream=True, stream_options={"include_usage": True}
            )
        ]
        completion = await client.completions.create(model="tgi", prompt=["p", "q"], max_tokens=2, stop=" z")
        parts = [part async for part in await client.completions.create(model="tgi", prompt="p", stream=True)]
        forced = await client.chat.completions.create(
            model="tgi", messages=messages, max_tokens=9, extra_body={"ignore_eos_token": True}
        )
        models = [model.id async for model in client.models.list()]
        with pytest.raises(openai.UnprocessableEntityError) as refused:
            await client.chat.completions.create(model="tgi", messages=messages, top_p=2.0)
        await client.close()

    assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == (" a b c d e", "stop")
    assert chat.choices[0].logprobs.content[0].top_logprobs[1].token == " a1"
    assert "".join(chunk.choices[0].delta.content for chunk in chunks if chunk.choices) == " a b c d e"
    assert chunks[-1].usage.completion_tokens == 6
    assert [choice.text for choice in completion.choices] == [" a b", " a b"]
    assert "".join(part.choices[0].text for part in parts) == " a b c d e"
    assert forced.usage.completion_tokens == 9
    assert models == ["m"]
    assert refused.value.response.json()["error_type"] == "validation"


async def test_the_blocking_client_single_and_streamed(openai):
    def use(url: str) -> tuple[str | None, str, str, str]:
        messages = [{"role": "user", "content": "hi"}]
        with openai.OpenAI(base_url=url, api_key="-", max_retries=0) as client:
            chat = client.chat.completions.create(model="tgi", messages=messages)
            chunks = client.chat.completions.create(model="tgi", messages=messages, stream=True)
            streamed = "".join(chunk.choices[0].delta.content for chunk in chunks)
            completion = client.completions.create(model="tgi", prompt="p", max_tokens=2)
            parts = client.completions.create(model="tgi", prompt="p", stream=True)
            return (
                chat.choices[0].message.content,
                streamed,
                completion.choices[0].text,
                "".join(part.choices[0].text for part in parts),
            )

    async with serve_on_socket() as served:
        texts = await asyncio.to_thread(use, str(served.client.base_url.join("/v1")))

    assert texts == (" a b c d e", " a b c d e", " a b", " a b c d e")
