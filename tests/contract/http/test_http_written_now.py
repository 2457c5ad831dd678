"""Tokens that the batching loop writes to a client at once: the same bytes as through the reader of the stream."""

import asyncio
import json
import re
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest

from reference_server.router.sse import WRITE_NOW
from tests.support.samples.grammars import compiler
from tests.support.servers.serving import Served, serve, serve_on_socket
from tests.support.wire.scripted_shard import EOS_TEXT, Reply

TEXTS = (" a", "é", "\U0001f600", "\u2028", ' "', "\\", "\x00", "", EOS_TEXT, " b")
WORDS = Reply(TEXTS)
NATIVE, COMPLETIONS, CHAT = "/generate_stream", "/v1/completions", "/v1/chat/completions"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
LOOKUP = {"type": "function", "function": {"name": "lookup", "parameters": CITY}}
CALL = Reply(('{"function": {"_name": "lookup', '",', ' "', "city", '":', ' "', "Oslo", '"}}'))


@dataclass(frozen=True)
class Case:
    """A request, the reply of the model server, and whether tokens are written at once."""

    path: str
    fields: dict[str, Any]
    reply: Reply = WORDS
    is_written: bool = True

    @property
    def body(self) -> dict[str, Any]:
        if self.path == NATIVE:
            return {"inputs": "hello", "parameters": {"ignore_eos_token": True, "max_new_tokens": 9} | self.fields}
        prompt = {"prompt": "hello"} if self.path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
        return {"stream": True, "ignore_eos_token": True, "max_tokens": 9} | prompt | self.fields


CASES = {
    "native": Case(NATIVE, {}),
    "native_to_its_end": Case(NATIVE, {"ignore_eos_token": False, "max_new_tokens": 20}),
    "native_details": Case(NATIVE, {"details": True, "seed": 7, "do_sample": True}),
    "native_full_text": Case(NATIVE, {"return_full_text": True}),
    "native_stop": Case(NATIVE, {"stop": [' "']}),
    "native_alternatives": Case(NATIVE, {"top_n_tokens": 2}, is_written=False),
    "native_logprob": Case(NATIVE, {}, replace(WORDS, logprob=-0.3400000035762787)),
    "native_minus_infinity": Case(NATIVE, {}, replace(WORDS, logprob=float("-inf"))),
    "native_drafts": Case(NATIVE, {}, replace(WORDS, tokens_per_step=3)),
    "native_segments": Case(NATIVE, {"max_new_tokens": 1100}),
    "native_failure": Case(NATIVE, {}, replace(WORDS, fail_after=6)),
    "native_lost": Case(NATIVE, {}, replace(WORDS, drop_after=6)),
    "completions": Case(COMPLETIONS, {}),
    "completions_stop": Case(COMPLETIONS, {"stop": ["é"]}),
    "completions_drafts": Case(COMPLETIONS, {}, replace(WORDS, tokens_per_step=4)),
    "completions_choices": Case(COMPLETIONS, {"n": 2}, is_written=False),
    "completions_failure": Case(COMPLETIONS, {}, replace(WORDS, fail_after=6)),
    "chat": Case(CHAT, {}),
    "chat_usage": Case(CHAT, {"stream_options": {"include_usage": True}}),
    "chat_drafts": Case(CHAT, {}, replace(WORDS, tokens_per_step=3)),
    "chat_segments": Case(CHAT, {"max_tokens": 1100}),
    "chat_logprobs": Case(CHAT, {"logprobs": True, "top_logprobs": 2}, is_written=False),
    "chat_alternatives_unshown": Case(CHAT, {"top_logprobs": 2}),
    "chat_choices": Case(CHAT, {"n": 2}, is_written=False),
    "chat_tools": Case(CHAT, {"tools": [LOOKUP], "ignore_eos_token": False, "max_tokens": 20}, CALL, is_written=False),
    "chat_failure": Case(CHAT, {}, replace(WORDS, fail_after=6)),
}


class Exchange:
    """One request on ASGI; `pieces` of the answer in order, of which `num_written` were written at once."""

    def __init__(self, case: Case) -> None:
        self._body: bytes | None = json.dumps(case.body).encode()
        self._path = case.path
        self.pieces: list[bytes] = []
        self.num_written = 0

    async def run(self, served: Served, *, at_once: bool) -> bytes:
        headers = [(b"host", b"router"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": self._path, "query_string": b"", "headers": headers}
        if at_once:
            scope["extensions"] = {WRITE_NOW: {"write": self._write}}
        await served.app(scope, self._receive, self._send)
        return re.sub(rb'"created":\d+', b"", b"".join(self.pieces))

    async def _receive(self) -> dict[str, Any]:
        if self._body is None:
            await asyncio.Event().wait()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def _send(self, message: Any) -> None:
        # The writer of a server may have to wait.
        await asyncio.sleep(0)
        self.pieces.append(message.get("body", b""))

    def _write(self, frame: bytes) -> bool:
        self.num_written += 1
        self.pieces.append(frame)
        return True


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_step_tokens_written_at_once_are_the_bytes_that_a_reader_sends(case: Case):
    read, written = Exchange(case), Exchange(case)
    async with serve(script=lambda _: case.reply, compile_grammar=compiler().compile) as served:
        expected = await read.run(served, at_once=False)
    async with serve(script=lambda _: case.reply, compile_grammar=compiler().compile) as served:
        found = await written.run(served, at_once=True)

    assert found == expected
    assert expected.count(b"data: ") > 2
    assert bool(written.num_written) == case.is_written


async def test_a_client_that_stops_reading_gets_every_token_in_order():
    long = Reply(("x" * 20_000,))
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 400, "ignore_eos_token": True}}
    async with (
        serve_on_socket(script=lambda _: long) as served,
        served.client.stream("POST", "/generate_stream", json=body) as response,
    ):
        while served.shard.cached_ids or not served.shard.called("decode"):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        lines = [line async for line in response.aiter_lines() if line]

    indexes = [json.loads(line.removeprefix("data: "))["index"] for line in lines]
    assert len(indexes) == 400
    assert all(after == before + 1 for before, after in pairwise(indexes))
