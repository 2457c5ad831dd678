"""A wave of streamed requests over HTTP, and when each token of each came; a client that costs little.

Two dialects: TGI's `/generate_stream` with text, and OpenAI's `/v1/completions` with token ids.
"""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

Dialect = Literal["tgi", "openai"]
TIMEOUT_S = 600


class FailedRequest(Exception):
    """A request that did not give the tokens that were asked for."""


@dataclass(frozen=True, slots=True)
class Stream:
    """One request: seconds from the wave's start to its first and last token, and its tokens."""

    first_s: float
    last_s: float
    num_tokens: int

    @property
    def tpot_ms(self) -> float:
        return (self.last_s - self.first_s) / max(1, self.num_tokens - 1) * 1e3


@dataclass(frozen=True, slots=True)
class Prompt:
    """The text, the ids it has once it is cut to the wanted length, and how many tokens are to follow."""

    text: str
    ids: Sequence[int]
    new_tokens: int

    def request(self, dialect: Dialect) -> tuple[str, dict[str, Any]]:
        """Path and body."""
        if dialect == "openai":
            body = {"model": "model", "prompt": list(self.ids), "max_tokens": self.new_tokens, "temperature": 0}
            return "/v1/completions", {
                **body,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        parameters = {"max_new_tokens": self.new_tokens, "truncate": len(self.ids), "ignore_eos_token": True}
        return "/generate_stream", {"inputs": self.text, "parameters": parameters}


def run_wave(url: str, dialect: Dialect, prompts: Sequence[Prompt]) -> list[Stream]:
    """Send all prompts at once. Raises FailedRequest if one does not give all its tokens."""

    async def main() -> list[Stream]:
        started = time.perf_counter()
        async with asyncio.timeout(TIMEOUT_S):
            return list(await asyncio.gather(*(stream(url, dialect, prompt, started) for prompt in prompts)))

    return asyncio.run(main())


async def stream(url: str, dialect: Dialect, prompt: Prompt, started: float) -> Stream:
    """One request, timed from `started`. Raises FailedRequest."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 20)
    path, asked = prompt.request(dialect)
    body = json.dumps(asked).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(head.encode() + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
    first = last = 0.0
    num_tokens = 0
    try:
        status = await reader.readline()
        if b" 200 " not in status:
            raise FailedRequest(f"0 of {prompt.new_tokens} tokens came from {url}: {status!r}")
        # To the end of a chunked answer, or of the connection.
        while (line := await reader.readline()) and line != b"0\r\n":
            if not line.startswith(b"data:"):
                continue
            now = time.perf_counter() - started
            count = _tokens_of(line[5:].strip(), dialect, num_tokens)
            if count > num_tokens:
                first, last, num_tokens = first or now, now, count
    finally:
        writer.close()
    if num_tokens != prompt.new_tokens:
        raise FailedRequest(f"{num_tokens} of {prompt.new_tokens} tokens came from {url}")
    return Stream(first, last, num_tokens)


def _tokens_of(payload: bytes, dialect: Dialect, so_far: int) -> int:
    """The tokens that have come once this event has; OpenAI's last event counts them all."""
    if payload == b"[DONE]":
        return so_far
    event = json.loads(payload)
    if "error" in event:
        raise FailedRequest(str(event["error"]))
    if dialect == "tgi":
        return so_far + ("token" in event)
    usage = event.get("usage")
    if usage is not None:
        return int(usage["completion_tokens"])
    return so_far + bool(event["choices"])
