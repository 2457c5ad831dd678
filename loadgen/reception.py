"""One response as its bytes come: its framing, its events and when they came, its limits, and how it counts.

Does no reading itself: whoever reads hands over every read with its time. `Exchange` is what the record is made of.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from loadgen.http1 import ProtocolError, ResponseHead, ResponseParser
from loadgen.limits import LimitPassedError, RequestLimits
from loadgen.protocols.dialect import Answer, Dialect, read_timing_headers
from loadgen.sse import EventSplitter
from reports.records import RequestPhase, Status, error_type

MAX_CAUSE_CHARACTERS = 200
MAX_ERROR_BODY_BYTES = 2_048
AFTER_END = "data after the end"


@dataclass(slots=True)
class Exchange:
    """Everything seen of one request on the wire."""

    answer: Answer = field(default_factory=Answer)
    status: Status = Status.OK
    error_type: str | None = None
    http_status: int | None = None
    sent_ns: int | None = None
    headers_ns: int | None = None
    end_ns: int | None = None
    connect_s: float | None = None
    is_reused: bool | None = None
    coalesced_events: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    error_body: bytes = b""
    phase: RequestPhase = RequestPhase.CONNECT

    def fail(self, status: Status, cause: str) -> None:
        self.status = status
        self.note(cause)

    def note(self, cause: str) -> None:
        """Keep what was odd about the request, and where."""
        self.error_type = error_type(self.phase, cause[:MAX_CAUSE_CHARACTERS])


class Reception:
    """Fills an exchange from one response. `end_by_ns` is when the whole request has to be over."""

    def __init__(self, dialect: Dialect, limits: RequestLimits, exchange: Exchange, end_by_ns: int) -> None:
        self.parser = ResponseParser()
        self._dialect, self._limits, self._exchange, self._end_by_ns = dialect, limits, exchange, end_by_ns
        self._answer = exchange.answer
        self._splitter = EventSplitter(limits.line_bytes)
        self._whole: list[bytes] = []
        self._take_body: Callable[[bytes, int], None] | None = None

    def take(self, data: bytes, now_ns: int) -> bool:
        """One read and its time; empty when the peer closed. Whether the response has ended.

        Raises ProtocolError, LineTooLongError, NotThisApiError, BadPayloadError, ConnectionResetError.
        """
        exchange, parser = self._exchange, self.parser
        if not data:
            parser.feed_eof()
            if parser.head is None:
                raise ConnectionResetError("closed before the response headers")
            self._end(now_ns)
            return True
        exchange.bytes_received += len(data)
        if exchange.bytes_received > self._limits.response_bytes:
            raise ProtocolError(f"the response exceeds {self._limits.response_bytes} bytes")
        body = parser.feed(data)
        if self._take_body is None:
            if parser.head is None:
                return False
            exchange.headers_ns = now_ns
            self._take_body = self._choose_body(parser.head)
        if body:
            self._take_body(body, now_ns)
        if not parser.is_complete:
            return False
        self._end(now_ns)
        return True

    def left_s(self, now_ns: int) -> float:
        """Seconds after which a limit may have passed. Raises LimitPassedError once one has."""
        due_ns, limit = min(self._limits_ahead())
        if due_ns <= now_ns:
            raise LimitPassedError(limit)
        left_s = (due_ns - now_ns) / 1e9
        # An event that comes meanwhile sets a limit that may be nearer.
        return left_s if self._limits.stall_s is None else min(left_s, self._limits.stall_s)

    def _limits_ahead(self) -> list[tuple[int, str]]:
        ahead = [(self._end_by_ns, "timeout")]
        if not self._dialect.sampling.streams or self._exchange.sent_ns is None:
            return ahead
        event_ns = self._answer.event_ns
        limit_s = self._limits.stall_s if event_ns else self._limits.first_event_s
        if limit_s is not None:
            since_ns = event_ns[-1] if event_ns else self._exchange.sent_ns
            ahead.append((since_ns + round(limit_s * 1e9), "stall_timeout" if event_ns else "first_event_timeout"))
        return ahead

    def _choose_body(self, head: ResponseHead) -> Callable[[bytes, int], None]:
        """What the bytes of the body are for."""
        self._exchange.http_status = head.status
        self._exchange.phase = RequestPhase.FIRST_EVENT
        if head.status < 400 and head.status != 200:
            raise ProtocolError(f"status {head.status}")
        if head.status != 200:
            return self._keep_error
        encoding = head.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise ProtocolError(f"the body is compressed ({encoding}) though none was accepted")
        kind = head.headers.get("content-type", "").lower()
        if not kind.startswith(self._dialect.sampling.accepted_type):
            raise ProtocolError(f"content-type is {kind!r}, not {self._dialect.sampling.accepted_type}")
        return self._read_events if self._dialect.sampling.streams else self._keep_whole

    def _read_events(self, body: bytes, now_ns: int) -> None:
        self._read_payloads(self._splitter.feed(body), now_ns)

    def _read_payloads(self, payloads: Sequence[bytes], now_ns: int) -> None:
        answer = self._answer
        before = len(answer.event_ns)
        for payload in payloads:
            if answer.is_terminated:
                self._exchange.note(AFTER_END)
                break
            self._dialect.read(payload, now_ns, answer)
        arrived = len(answer.event_ns) - before
        if arrived:
            self._exchange.phase = RequestPhase.STREAM
            self._exchange.coalesced_events += arrived - 1

    def _keep_whole(self, body: bytes, _now_ns: int) -> None:
        self._whole.append(body)

    def _keep_error(self, body: bytes, _now_ns: int) -> None:
        exchange = self._exchange
        exchange.error_body = (exchange.error_body + body)[:MAX_ERROR_BODY_BYTES]

    def _end(self, now_ns: int) -> None:
        """The response was read to its end, or to the peer's close."""
        exchange, parser = self._exchange, self.parser
        exchange.end_ns = now_ns
        assert parser.head is not None
        if exchange.http_status == 200 and self._dialect.sampling.streams:
            self._read_payloads(self._splitter.finish(), now_ns)
        elif exchange.http_status == 200 and parser.is_complete:
            exchange.phase = RequestPhase.STREAM
            self._dialect.read_whole(b"".join(self._whole), exchange.answer)
            read_timing_headers(parser.head.headers, exchange.answer)
        self._judge(parser.head.status)

    def _judge(self, status: int) -> None:
        """How it counts."""
        exchange, answer = self._exchange, self._answer
        if status == 429:
            exchange.fail(Status.OVERLOADED, "429")
        elif status >= 500:
            exchange.fail(Status.HTTP_5XX, str(status))
        elif status >= 400:
            exchange.fail(Status.HTTP_4XX, str(status))
        elif answer.error is not None:
            exchange.fail(Status.STREAM_ERROR, answer.error)
        elif self._dialect.sampling.streams and not answer.event_ns:
            exchange.fail(Status.TRUNCATED, "empty stream" if self.parser.is_complete else "closed")
        elif not answer.is_complete:
            exchange.fail(Status.TRUNCATED, "no terminator" if self.parser.is_complete else "closed")
