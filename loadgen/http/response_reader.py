"""Reads one response: framing, events with their times, limits, and the status that is recorded.

Does no I/O. Each socket read is passed on with its timestamp. The record of a request is made from `ClientCall`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from loadgen.dialects.dialect import Dialect, ParsedAnswer, accepted_type, read_timing_headers
from loadgen.http.error_body import message_of
from loadgen.http.http1 import ProtocolError, ResponseHead, ResponseParser
from loadgen.http.sse import MAX_LINE_BYTES
from reports.run_schema import RequestPhase, Status, error_type

MAX_CAUSE_CHARACTERS = 200
MAX_ERROR_BODY_BYTES = 2_048
AFTER_END = "data after the end"
CONNECT_TIMEOUT_S = 10.0
MAX_RESPONSE_BYTES = 64 * 2**20


class CallTimeoutError(TimeoutError):
    """A time limit has passed; the message is its name."""


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Limits of one call. `total_s` bounds the whole call; None sets no further limit.

    `first_event_s` counts from the request's last byte to the first token event, `stall_s` from one token event to the
    next. Bytes without a token, such as comments, do not count as progress.
    """

    total_s: float = 600.0
    first_event_s: float | None = None
    stall_s: float | None = None
    connect_s: float = CONNECT_TIMEOUT_S
    line_bytes: int = MAX_LINE_BYTES
    response_bytes: int = MAX_RESPONSE_BYTES


@dataclass(slots=True)
class ClientCall:
    """One HTTP call as the client observed it. Times are monotonic ns: of arrival, where the kernel records it.

    `first_read_ns` is when the first event was read, `read_late_ns` the longest time from arrival of an event to its
    read. Events that shared a read arrived within `coalesced_within_ns`. The client leaves once it has received
    `leaves_after_tokens`.
    """

    answer: ParsedAnswer = field(default_factory=ParsedAnswer)
    status: Status = Status.OK
    error_type: str | None = None
    http_status: int | None = None
    sent_ns: int | None = None
    headers_ns: int | None = None
    end_ns: int | None = None
    connect_s: float | None = None
    is_reused: bool | None = None
    coalesced_events: int = 0
    coalesced_within_ns: int = 0
    first_read_ns: int | None = None
    leaves_after_tokens: int | None = None
    constraint: str | None = None
    validity: str | None = None
    replica: int | None = None
    read_late_ns: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    error_body: bytes = b""
    phase: RequestPhase = RequestPhase.CONNECT

    def fail(self, status: Status, cause: str) -> None:
        self.status = status
        self.note(cause)

    def note(self, cause: str) -> None:
        """Record a cause and the phase in which it occurred."""
        self.error_type = error_type(self.phase, cause[:MAX_CAUSE_CHARACTERS])


class ResponseReader:
    """Fills a `ClientCall` from one response. `deadline_ns` is that of the whole call."""

    def __init__(self, dialect: Dialect, limits: CallLimits, call: ClientCall, deadline_ns: int) -> None:
        self.parser = ResponseParser()
        self._dialect, self._limits, self._exchange, self._deadline_ns = dialect, limits, call, deadline_ns
        self._answer = call.answer
        self._splitter = dialect.framing.splitter(limits.line_bytes)
        self._body_parts: list[bytes] = []
        self._read_body: Callable[[bytes, int, int], None] | None = None
        # The last read: when its data arrived, and when it was read.
        self._arrived_ns = self._read_ns = 0

    def take(self, data: bytes, at_ns: int, late_ns: int = 0) -> bool:
        """Process one read that arrived at `at_ns` and was read `late_ns` later; empty data: the peer closed.

        Returns whether the response has ended.

        Raises ProtocolError, LineTooLongError, NotThisApiError, BadPayloadError, ConnectionResetError.
        """
        call, parser = self._exchange, self.parser
        if not data:
            parser.feed_eof()
            if parser.head is None:
                raise ConnectionResetError("closed before the response headers")
            self._end(max(at_ns, self._arrived_ns))
            return True
        read_ns = at_ns + late_ns
        # A read without a timestamp has a time after its arrival, and maybe after the arrival of the next read's data.
        if at_ns < self._arrived_ns:
            at_ns = self._arrived_ns
        self._arrived_ns = at_ns
        call.bytes_received += len(data)
        if call.bytes_received > self._limits.response_bytes:
            raise ProtocolError(f"the response exceeds {self._limits.response_bytes} bytes")
        body = parser.feed(data)
        if self._read_body is None:
            if parser.head is None:
                return False
            # A response can arrive before the clock is read after the request's last byte.
            call.headers_ns = self._arrived_ns = at_ns = max(at_ns, call.sent_ns or 0)
            self._read_body = self._choose_body(parser.head)
        if body:
            self._read_body(body, at_ns, read_ns)
        self._read_ns = read_ns
        if not parser.is_complete:
            return self._leaves(at_ns)
        self._end(at_ns)
        return True

    def _leaves(self, at_ns: int) -> bool:
        """End the call if its client leaves now. An answer that is complete is not abandoned."""
        call, answer = self._exchange, self._answer
        tokens = call.leaves_after_tokens
        if tokens is None or answer.is_complete or answer.error is not None or sum(answer.event_tokens) < tokens:
            return False
        call.end_ns = at_ns
        call.fail(Status.ABANDONED, f"left after {tokens} tokens")
        return True

    def left_s(self, now_ns: int) -> float:
        """Seconds until the next limit. Raises CallTimeoutError once one has passed."""
        due_ns, limit = min(self._next_limits())
        if due_ns <= now_ns:
            raise CallTimeoutError(limit)
        left_s = (due_ns - now_ns) / 1e9
        # An event that arrives meanwhile starts a stall limit that may be nearer.
        return left_s if self._limits.stall_s is None else min(left_s, self._limits.stall_s)

    def _next_limits(self) -> list[tuple[int, str]]:
        limits = [(self._deadline_ns, "timeout")]
        if not self._dialect.sampling.streams or self._exchange.sent_ns is None:
            return limits
        event_ns = self._answer.event_ns
        limit_s = self._limits.stall_s if event_ns else self._limits.first_event_s
        if limit_s is not None:
            since_ns = event_ns[-1] if event_ns else self._exchange.sent_ns
            limits.append((since_ns + round(limit_s * 1e9), "stall_timeout" if event_ns else "first_event_timeout"))
        return limits

    def _choose_body(self, head: ResponseHead) -> Callable[[bytes, int, int], None]:
        """The function that processes body bytes. Raises ProtocolError."""
        self._exchange.http_status = head.status
        self._exchange.phase = RequestPhase.FIRST_EVENT
        if head.status < 400 and head.status != 200:
            raise ProtocolError(f"status {head.status}")
        if head.status != 200:
            return self._append_error
        encoding = head.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise ProtocolError(f"content-encoding is {encoding!r}, but only identity was accepted")
        kind = head.headers.get("content-type", "").lower()
        accepted = accepted_type(self._dialect)
        if not kind.startswith(accepted):
            raise ProtocolError(f"content-type is {kind!r}, but {accepted} was expected")
        return self._read_events if self._dialect.sampling.streams else self._append_body

    def _read_events(self, body: bytes, at_ns: int, read_ns: int) -> None:
        """Process the events that body bytes complete; no bytes: the end of the body."""
        answer, call = self._answer, self._exchange
        payloads = self._splitter.feed(body) if body else self._splitter.finish()
        before = len(answer.event_ns)
        for payload in payloads:
            if answer.is_terminated:
                call.note(AFTER_END)
                break
            self._dialect.read(payload, at_ns, answer)
        arrived = len(answer.event_ns) - before
        if not arrived:
            return
        if read_ns - at_ns > call.read_late_ns:
            call.read_late_ns = read_ns - at_ns
        if not before:
            call.phase = RequestPhase.STREAM
            call.first_read_ns = read_ns
        if arrived > 1:
            call.coalesced_events += arrived - 1
            call.coalesced_within_ns = max(call.coalesced_within_ns, at_ns - max(self._read_ns, call.sent_ns or 0))

    def _append_body(self, body: bytes, _at_ns: int, _read_ns: int) -> None:
        self._body_parts.append(body)

    def _append_error(self, body: bytes, _at_ns: int, _read_ns: int) -> None:
        call = self._exchange
        call.error_body = (call.error_body + body)[:MAX_ERROR_BODY_BYTES]

    def _end(self, at_ns: int) -> None:
        """Process the end of the response, or the peer's close."""
        call, parser = self._exchange, self.parser
        call.end_ns = at_ns
        assert parser.head is not None
        if call.http_status == 200 and self._dialect.sampling.streams:
            self._read_events(b"", at_ns, at_ns)
        elif call.http_status == 200 and parser.is_complete:
            call.phase = RequestPhase.STREAM
            self._dialect.read_whole(b"".join(self._body_parts), call.answer)
            read_timing_headers(parser.head.headers, call.answer)
        self._judge(parser.head.status)

    def _judge(self, status: int) -> None:
        """Set the status of a response that ended."""
        call, answer = self._exchange, self._answer
        if status == 429:
            call.fail(Status.OVERLOADED, self._refusal(status))
        elif status >= 500:
            call.fail(Status.HTTP_5XX, self._refusal(status))
        elif status >= 400:
            call.fail(Status.HTTP_4XX, self._refusal(status))
        elif answer.error is not None:
            call.fail(Status.STREAM_ERROR, answer.error)
        elif self._dialect.sampling.streams and not answer.event_ns:
            call.fail(Status.TRUNCATED, "empty stream" if self.parser.is_complete else "closed")
        elif not answer.is_complete:
            call.fail(Status.TRUNCATED, "no terminator" if self.parser.is_complete else "closed")

    def _refusal(self, status: int) -> str:
        """The status with the server's message. A message about an API key may contain it, so it is left out."""
        message = "" if status in (401, 403) else message_of(self._exchange.error_body)
        return f"{status}: {message}" if message else str(status)
