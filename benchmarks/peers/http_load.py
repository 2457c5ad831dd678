"""A light client for a wave of streamed requests over HTTP, with the times of tokens.

It supports TGI's `/generate_stream` with text, and OpenAI's `/v1/completions` with token ids.
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
    """A request failed or returned fewer tokens than requested."""


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """One request: seconds from the start of the wave to its first and last token, and the number of tokens."""

    first_s: float
    last_s: float
    num_tokens: int

    @property
    def tpot_ms(self) -> float:
        return (self.last_s - self.first_s) / max(1, self.num_tokens - 1) * 1e3


@dataclass(frozen=True, slots=True)
class WavePrompt:
    """A text, its ids after truncation, and the number of new tokens."""

    text: str
    ids: Sequence[int]
    new_tokens: int

    def request(self, dialect: Dialect) -> tuple[str, dict[str, Any]]:
        """Path and body of the HTTP request."""
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


def run_wave(url: str, dialect: Dialect, prompts: Sequence[WavePrompt]) -> list[StreamTimes]:
    """Send all prompts at once. Raises FailedRequest if a request does not return all tokens."""

    async def main() -> list[StreamTimes]:
        started = time.perf_counter()
        async with asyncio.timeout(TIMEOUT_S):
            return list(await asyncio.gather(*(stream(url, dialect, prompt, started) for prompt in prompts)))

    return asyncio.run(main())


async def stream(url: str, dialect: Dialect, prompt: WavePrompt, started: float) -> StreamTimes:
    """Send one request; times count from `started`, in seconds of `perf_counter`. Raises FailedRequest."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 20)
    path, content = prompt.request(dialect)
    body = json.dumps(content).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    writer.write(head.encode() + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
    first = last = 0.0
    num_tokens = 0
    try:
        status = await reader.readline()
        if b" 200 " not in status:
            raise FailedRequest(f"{url} returned 0 of {prompt.new_tokens} tokens: {status!r}")
        # The response ends with its last chunk, or with the connection.
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
        raise FailedRequest(f"{url} returned {num_tokens} of {prompt.new_tokens} tokens")
    return StreamTimes(first, last, num_tokens)


def _tokens_of(payload: bytes, dialect: Dialect, so_far: int) -> int:
    """The number of tokens after this event. OpenAI's last event has the total."""
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
