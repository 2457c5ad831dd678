"""What a handler works with, gathered in one value."""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from reference_server.errors import UnhealthyError
from reference_server.router.facts import ServerFacts
from reference_server.router.infer import Infer
from reference_server.router.metrics import Metrics
from reference_server.router.schemas.openai import Message
from reference_server.router.sse import Header
from reference_server.router.tools import ToolOffer


@dataclass(frozen=True, slots=True)
class Services:
    """What a request needs from the server.

    `render` makes a prompt of a conversation and the tools it offers; None where the model has no template. `clock_ns`
    is the batcher's clock; `wall_s` tells the Unix time in answers.
    """

    infer: Infer
    metrics: Metrics
    facts: ServerFacts
    render: Callable[[Sequence[Message], ToolOffer | None], Awaitable[str]] | None = None
    clock_ns: Callable[[], int] = time.perf_counter_ns
    wall_s: Callable[[], float] = time.time

    @property
    def compute_type(self) -> Header:
        return b"x-compute-type", self.facts.compute_type.encode()

    async def check_health(self) -> None:
        """Ask the model server. Raises `UnhealthyError`."""
        if not await self.infer.batcher.health():
            raise UnhealthyError

    def stream_headers(self, characters: int) -> list[Header]:
        """What every token stream's answer carries."""
        return [
            self.compute_type,
            (b"x-compute-characters", b"%d" % characters),
            (b"x-accel-buffering", b"no"),
        ]
