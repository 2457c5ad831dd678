"""The choices of one streamed OpenAI answer: each a generation, their events interleaved.

Where tools are offered, a generation's text is read as a call. One that calls none of them is given up for a plain
generation, and nothing of it is shown (http-api.md sections 4.8 and 4.9).
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import NamedTuple

from reference_server.errors import RequestError
from reference_server.router.batching import Event, Finished, PrefillDone, TokenArrived
from reference_server.router.services import Services
from reference_server.router.tool_calls import CallReader
from reference_server.router.tools import NO_TOOL
from reference_server.router.validation import GenerateCall


class CallDelta(NamedTuple):
    """What one token adds to a tool call; its first has the function's name."""

    event: TokenArrived | Finished
    name: str | None
    arguments: str


class CallEnd(NamedTuple):
    """The end of a generation read as a call; `is_told` if a delta has shown its last token."""

    event: Finished
    is_complete: bool
    is_told: bool


ChoiceEvent = Event | CallDelta | CallEnd


class Choice:
    """One choice's generation, held while the block is open. Iterate it for its events.

    make_plain_call: the generation to run where tools are offered and none is called; None where none are offered.
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

    async def __aenter__(self) -> "Choice":
        """Start it. Raises `OverloadedError` and `ValidationError`."""
        self._running = await self._held.enter_async_context(self._services.infer.start(self.call))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._held.aclose()

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
        async for event in self._running:
            if isinstance(event, PrefillDone):
                continue
            arguments = "" if event.token.special else reader.add(event.token.text)
            if reader.name == NO_TOOL:
                break
            if arguments:
                yield CallDelta(event, None if is_named else reader.name, arguments)
                is_named = True
            if isinstance(event, Finished):
                yield CallEnd(event, reader.is_complete, bool(arguments))
                return
        await self._restart(make_plain_call)
        async for shown in self._running:
            yield shown

    async def _restart(self, make_call: Callable[[], Awaitable[GenerateCall]]) -> None:
        await self._held.aclose()
        self._services.metrics.request_count.add()
        self.arrived_ns = self._services.clock_ns()
        self.call = await make_call()
        await self.__aenter__()


async def interleave(
    choices: Sequence[Choice | RequestError],
) -> AsyncIterator[tuple[int, ChoiceEvent | RequestError]]:
    """One event of each live choice per turn, in order; a failure is the last event of its choice."""
    live: dict[int, AsyncIterator[ChoiceEvent]] = {}
    for index, choice in enumerate(choices):
        if isinstance(choice, RequestError):
            yield index, choice
        else:
            live[index] = aiter(choice)
    while live:
        for index, events in list(live.items()):
            try:
                event: ChoiceEvent | RequestError = await anext(events)
            except RequestError as error:
                event = error
            if isinstance(event, Finished | CallEnd | RequestError):
                del live[index]
            yield index, event
