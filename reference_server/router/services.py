"""The collaborators of the route handlers."""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from reference_server.errors import DrainingError, UnhealthyError
from reference_server.router.chat.tools import ToolOffer
from reference_server.router.generation_stream import Finished
from reference_server.router.infer import Infer
from reference_server.router.schemas.openai import ChatMessage
from reference_server.router.served_adapters import Adapters
from reference_server.router.server_info import ServerInfo
from reference_server.router.sse import Header
from reference_server.router.telemetry.metrics import Metrics
from reference_server.router.telemetry.times import RequestTimes
from reference_server.router.validation.validator import GenerateCall


@dataclass(slots=True)
class Drain:
    """Whether the router stops: it finishes its requests, and `/ready` is 503."""

    has_begun: bool = False


@dataclass(frozen=True, slots=True)
class Services:
    """Collaborators and properties that handlers use.

    `render` turns a conversation and its tools into a prompt; None if the model has no chat template. `clock_ns` is the
    batcher's clock; `wall_s` is Unix time.
    """

    infer: Infer
    metrics: Metrics
    info: ServerInfo
    render: Callable[[Sequence[ChatMessage], ToolOffer | None], Awaitable[str]] | None = None
    clock_ns: Callable[[], int] = time.perf_counter_ns
    wall_s: Callable[[], float] = time.time
    drain: Drain = field(default_factory=Drain)

    @property
    def compute_type(self) -> Header:
        return b"x-compute-type", self.info.compute_type.encode()

    async def check_health(self) -> None:
        """Probe the model server. Raises `UnhealthyError`."""
        if not await self.infer.batcher.health():
            raise UnhealthyError

    async def check_ready(self) -> None:
        """Check that new requests are accepted. Raises `DrainingError` and `UnhealthyError`."""
        if self.drain.has_begun:
            raise DrainingError
        await self.check_health()

    @property
    def adapters(self) -> Adapters:
        return self.infer.adapters

    def observe_success(self, call: GenerateCall, arrived_ns: int, end: Finished) -> RequestTimes:
        """Count and log a generation that ends now; returns its times."""
        times = RequestTimes.of(arrived_ns, end, self.clock_ns())
        times.observe(self.metrics, call.context, call.parameters, end.generated_text.seed)
        return times

    def stream_headers(self, characters: int) -> list[Header]:
        """Headers of every token stream."""
        return [
            self.compute_type,
            (b"x-compute-characters", b"%d" % characters),
            (b"x-accel-buffering", b"no"),
        ]
