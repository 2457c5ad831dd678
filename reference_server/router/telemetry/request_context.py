"""Origin of a generation: set once per HTTP request, carried by its calls, used by permits, logs and traces."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Times of one generation in nanoseconds of the batcher's clock.

    started_ns: when its first batch was formed; None if it was cancelled or failed.
    """

    arrived_ns: int
    queued_ns: int
    started_ns: int | None
    first_token_ns: int | None
    finished_ns: int


class GenerationSpan(Protocol):
    """The part of a trace that belongs to one generation. `traceparent` is sent to the shards with its requests."""

    @property
    def traceparent(self) -> str: ...

    def end(self, times: StageTimes) -> None:
        """Add the stages of the generation, which ends now."""
        ...


class RequestSpan(Protocol):
    """The trace span of a request."""

    def generation(self) -> GenerationSpan | None:
        """The spans of one more generation; None if the trace is not recorded."""
        ...


@dataclass(frozen=True, slots=True)
class RequestContext:
    """`handler` is TGI's name of the route's function. `client` distinguishes clients and is never shown."""

    handler: str = ""
    client: str = ""
    span: RequestSpan | None = None


NO_CONTEXT = RequestContext()
