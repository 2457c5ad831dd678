"""Origin of a generation: set once per HTTP request, carried by its calls, used by permits, logs and traces."""

from dataclasses import dataclass
from typing import Protocol


class RequestSpan(Protocol):
    """A trace span to which the stages of a request are added."""

    def add_stage(self, name: str, start_ns: int, end_ns: int) -> None:
        """Add a stage that has ended, in Unix nanoseconds."""
        ...


@dataclass(frozen=True, slots=True)
class RequestContext:
    """`handler` is TGI's name of the route's function. `client` distinguishes clients and is never shown."""

    handler: str = ""
    client: str = ""
    span: RequestSpan | None = None


NO_CONTEXT = RequestContext()
