"""The `curl` lines of TGI's quick tour, unchanged but for the port."""

import asyncio
import json
import shlex
import shutil

import pytest

from tests.support.servers.serving import events_of, serve_on_socket

GENERATE = r"""curl 127.0.0.1:8080/generate
    -X POST
    -d '{"inputs":"What is Deep Learning?","parameters":{"max_new_tokens":20}}'
    -H 'Content-Type: application/json'"""
GENERATE_STREAM = r"""curl 127.0.0.1:8080/generate_stream
    -X POST
    -d '{"inputs":"What is Deep Learning?","parameters":{"max_new_tokens":20}}'
    -H 'Content-Type: application/json'"""
ROOT_STREAM = r"""curl 127.0.0.1:8080/
    -X POST
    -d '{"inputs":"What is Deep Learning?","parameters":{"max_new_tokens":20},"stream":true}'
    -H 'Content-Type: application/json'"""
CHAT = r"""curl localhost:8080/v1/chat/completions
    -X POST
    -d '{
  "model": "tgi",
  "messages": [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "What is deep learning?"}
  ],
  "stream": true,
  "max_tokens": 20
}'
    -H 'Content-Type: application/json'"""


async def run(line: str, port: int) -> str:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    words = [word.replace("8080", str(port)) for word in shlex.split(line)]
    process = await asyncio.create_subprocess_exec(*words, "-sS", stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


async def test_the_quick_tours_lines():
    async with serve_on_socket() as served:
        port = served.client.base_url.port
        assert port is not None
        single = json.loads(await run(GENERATE, port))
        stream = events_of(await run(GENERATE_STREAM, port))
        root = events_of(await run(ROOT_STREAM, port))
        chat = events_of(await run(CHAT, port))

    assert single == {"generated_text": " a b c d e"}
    assert [event["token"]["text"] for event in stream] == [" a", " b", " c", " d", " e", "</s>"]
    assert root[-1]["generated_text"] == "What is Deep Learning? a b c d e"
    assert chat[-1] == "[DONE]"
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chat[:-1]) == " a b c d e"
