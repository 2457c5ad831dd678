"""How long one request may take and how much its response may hold."""

from dataclasses import dataclass

CONNECT_TIMEOUT_S = 10.0
MAX_LINE_BYTES = 2**20
MAX_RESPONSE_BYTES = 64 * 2**20


class LimitPassedError(TimeoutError):
    """A limit on time has passed; its text says which."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one request; None is no limit of its own, and `total_s` bounds them all.

    `first_event_s` counts from the request's last byte to the first token event, `stall_s` from one token event to the
    next: bytes that carry no token, such as comments, are no progress.
    """

    total_s: float = 600.0
    first_event_s: float | None = None
    stall_s: float | None = None
    connect_s: float = CONNECT_TIMEOUT_S
    line_bytes: int = MAX_LINE_BYTES
    response_bytes: int = MAX_RESPONSE_BYTES
