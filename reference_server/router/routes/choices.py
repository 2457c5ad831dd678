"""The choices of one streamed OpenAI answer: each is a generation, and their events are interleaved.

With tools, a generation's text is parsed as a tool call. If it calls no tool, it is cancelled and a generation without
tools is streamed instead.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import NamedTuple

from reference_server.errors import RequestError
from reference_server.router.chat.tool_calls import CallReader
from reference_server.router.chat.tools import NO_TOOL
from reference_server.router.generation_stream import Event, Finished, PrefillDone, TokenArrived, Writer
from reference_server.router.services import Services
from reference_server.router.validation.validator import GenerateCall


class CallDelta(NamedTuple):
    """A token's part of a tool call; the first delta has the function's name."""

    event: TokenArrived | Finished
    name: str | None
    arguments: str


class CallEnd(NamedTuple):
    """The end of a generation parsed as a tool call, with the last part of the call; None if it has no name yet."""

    event: Finished
    is_complete: bool
    delta: CallDelta | None


ChoiceEvent = Event | CallDelta | CallEnd


class StreamedChoice:
    """One choice's generation: an async context manager that runs it, and an async iterable of its events.

    make_plain_call: makes the call without tools, for a generation that calls none; None if no tools are offered.
    """

    def __init__(
        self,
        services: Services,
        call: GenerateCall,
        arrived_ns: int,
        make_plain_call: Callable[[], Awaitable[GenerateCall]] | None = None,
    ) -> None:
        self.call = call
        self.arrived_ns = arrived_ns
        self._services = services
        self._make_plain_call = make_plain_call
        self._held = AsyncExitStack()

    async def __aenter__(self) -> "StreamedChoice":
        """Start it. Raises `OverloadedError` and `ValidationError`."""
        self._running = await self._held.enter_async_context(self._services.infer.start(self.call, self.arrived_ns))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._held.aclose()

    def write_with(self, writer: Writer) -> None:
        """Hand tokens to `writer` while the reader of this choice waits; tokens of a tool call are parsed instead."""
        if self._make_plain_call is None:
            self._running.write_with(writer)

    @property
    def input_len(self) -> int:
        return self._running.input_len

    def __aiter__(self) -> AsyncIterator[ChoiceEvent]:
        if self._make_plain_call is None:
            return aiter(self._running)
        return self._read_call(self._make_plain_call)

    async def _read_call(self, make_plain_call: Callable[[], Awaitable[GenerateCall]]) -> AsyncIterator[ChoiceEvent]:
        reader = CallReader()
        is_named = False
        # The part that closes the arguments waits for the finish reason, which arrives after a few tokens more.
        last: CallDelta | None = None
        async for event in self._running:
            if isinstance(event, PrefillDone):
                continue
            arguments = "" if event.token.special else reader.add(event.token.text)
            if reader.name == NO_TOOL:
                break
            delta = CallDelta(event, None if is_named else reader.name, arguments)
            is_named = reader.name is not None
            if isinstance(event, Finished):
                yield CallEnd(event, reader.is_complete, last or (delta if is_named else None))
                return
            if arguments and reader.is_closed:
                last = delta
            elif arguments:
                yield delta
        await self._restart(make_plain_call)
        async for plain_event in self._running:
            yield plain_event

    async def _restart(self, make_call: Callable[[], Awaitable[GenerateCall]]) -> None:
        await self._held.aclose()
        self._services.metrics.request_count.add()
        self.arrived_ns = self._services.clock_ns()
        self.call = await make_call()
        await self.__aenter__()


async def interleave(
    choices: Sequence[StreamedChoice | RequestError],
) -> AsyncIterator[tuple[int, ChoiceEvent | RequestError]]:
    """One event of each running choice per turn, in order; an error is the last event of its choice."""
    running: dict[int, AsyncIterator[ChoiceEvent]] = {}
    for index, choice in enumerate(choices):
        if isinstance(choice, RequestError):
            yield index, choice
        else:
            running[index] = aiter(choice)
    while running:
        for index, events in list(running.items()):
            try:
                event: ChoiceEvent | RequestError = await anext(events)
            except RequestError as error:
                event = error
            if isinstance(event, Finished | CallEnd | RequestError):
                del running[index]
            yield index, event
