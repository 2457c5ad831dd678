"""Whose request the running task works for: set once a request by app.py, read by permits, log lines and traces."""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol


class Trace(Protocol):
    """A span under which the parts of a request are told."""

    def add_part(self, name: str, start_ns: int, end_ns: int) -> None:
        """A part that is over, in Unix nanoseconds."""
        ...


@dataclass(frozen=True, slots=True)
class RequestContext:
    """`handler` is TGI's name of the route's function; `client` tells clients apart and is never shown."""

    handler: str = ""
    client: str = ""
    trace: Trace | None = None


NO_REQUEST = RequestContext()
CURRENT: ContextVar[RequestContext] = ContextVar("request", default=NO_REQUEST)
