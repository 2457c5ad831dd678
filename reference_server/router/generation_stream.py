"""The events of one queued request, in order: the batching loop adds tokens, a route reads them."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from reference_server.errors import RequestError
from reference_server.messages import GeneratedText, Generation, Tokens
from reference_server.router.scheduling.queue import Entry


class GeneratedToken(NamedTuple):
    """One token as clients see it."""

    id: int
    text: str
    logprob: float
    special: bool


class PrefillDone(NamedTuple):
    """The prompt's tokens, if the request has `decoder_input_details`."""

    tokens: Tokens


class TokenArrived(NamedTuple):
    """A token that is not the last."""

    token: GeneratedToken
    top_tokens: tuple[GeneratedToken, ...]


class Finished(NamedTuple):
    """The last token, and how the segment ended. Times are from the Batcher's clock."""

    token: GeneratedToken
    top_tokens: tuple[GeneratedToken, ...]
    generated_text: GeneratedText
    queued_ns: int
    started_ns: int
    cached_input_tokens: int


Event = PrefillDone | TokenArrived | Finished

Writer = Callable[[Generation], bool]
"""Writes the tokens of a step to the client at once, all or none."""


class GenerationStream:
    """An async iterator over one request's events. It ends after `Finished`, or raises.

    Raises `GenerationError` if the batch failed and `IncompleteGenerationError` if the batching loop ended. `close`
    cancels the request and frees its blocks, at any time. One reader. `on_last` is called with the last event when it
    arrives, however late the reader takes it, and `on_tokens` with the number of tokens of each step and the time.
    `writer`, if set, takes the tokens of a step in place of a reader that waits for them; it returns False for those
    that the reader must take.
    """

    __slots__ = ("_close", "_events", "_is_over", "_waiter", "on_last", "on_tokens", "writer")

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._events: deque[Event | RequestError] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_over = False
        self.on_last: Callable[[Event | RequestError], None] | None = None
        self.on_tokens: Callable[[int, int], None] | None = None
        self.writer: Writer | None = None

    def __aiter__(self) -> "GenerationStream":
        return self

    async def __anext__(self) -> Event:
        while not self._events:
            if self._is_over:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        event = self._events.popleft()
        if isinstance(event, RequestError):
            raise event
        return event

    def close(self) -> None:
        """Stop reading; cancels the request if it has not ended."""
        if not self._is_over:
            self._is_over = True
            self._close()
        self._events.clear()
        self._wake()

    def write(self, generation: Generation) -> bool:
        """Hand a step that is not the last to the writer; False if its events must be pushed. For the Batcher.

        A reader that waits has handled every earlier event, so the order is kept.
        """
        writer, waiter = self.writer, self._waiter
        if writer is None or waiter is None or waiter.done() or generation.prefill_tokens is not None:
            return False
        try:
            return writer(generation)
        except Exception:
            # The reader meets the same error, in its own task.
            return False

    def push(self, events: Iterable[Event | RequestError], *, is_last: bool) -> None:
        """Append events and wake the reader once. For the Batcher."""
        self._events.extend(events)
        self._is_over = is_last
        if is_last and self.on_last is not None:
            self.on_last(self._events[-1])
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def events_of(entry: Entry, generation: Generation) -> list[Event]:
    """One step's output of one request, as events."""
    events: list[Event] = []
    if generation.prefill_tokens is not None:
        events.append(PrefillDone(generation.prefill_tokens))
    tokens, top_tokens = generation.tokens, generation.top_tokens
    for i, token in enumerate(map(GeneratedToken, tokens.ids, tokens.texts, tokens.logprobs, tokens.is_special)):
        events.append(TokenArrived(token, _tokens(top_tokens[i]) if i < len(top_tokens) else ()))
    if generation.generated_text is not None:
        last = events[-1]
        assert isinstance(last, TokenArrived), f"request {entry.id} ended without a token"
        events[-1] = Finished(
            *last, generation.generated_text, entry.queued_ns, entry.started_ns, entry.cached_input_tokens
        )
    return events


def _tokens(tokens: Tokens) -> tuple[GeneratedToken, ...]:
    return tuple(map(GeneratedToken, tokens.ids, tokens.texts, tokens.logprobs, tokens.is_special))
