"""One request from the socket's point of view: send it, read its stream, note when what came, say how it ended.

Knows bytes and clocks; what an event means is the dialect's. Times are monotonic ns of the clock it is given.
"""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field

from loadgen.connection import Clock, Connection, ConnectionPool
from loadgen.http1 import ProtocolError, ResponseParser, render_request
from loadgen.protocols.dialect import Answer, BadPayloadError, Dialect, NotThisApiError, read_timing_headers
from loadgen.sse import EventSplitter, LineTooLongError
from reports.results import RequestPhase, Status, error_type

READ_BYTES = 65_536
MAX_CAUSE_CHARACTERS = 200
MAX_RESPONSE_BYTES = 256 * 2**20


class Cut(BaseException):
    """Thrown into a running exchange to end it; the record gets `status`."""

    def __init__(self, status: Status) -> None:
        super().__init__(status)
        self.status = status


class StaleConnectionError(Exception):
    """A reused connection was closed by the peer before it answered anything."""


@dataclass(slots=True)
class Exchange:
    """Everything seen of one request on the wire; filled by `run`."""

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
        self.error_type = error_type(self.phase, cause[:MAX_CAUSE_CHARACTERS])


@dataclass(frozen=True, slots=True)
class Client:
    """Makes exchanges with one server in one dialect."""

    pool: ConnectionPool
    dialect: Dialect
    headers: Mapping[str, str]
    timeout_s: float
    clock_ns: Clock

    def run(self, body: bytes, exchange: Exchange) -> None:
        """Make one request. Never raises but for `Cut`, which is noted in the exchange and raised on."""
        deadline_ns = self.clock_ns() + round(self.timeout_s * 1e9)
        request = self._render(body)
        try:
            try:
                self._attempt(request, exchange, deadline_ns, fresh=False)
            except StaleConnectionError:
                self._attempt(request, exchange, deadline_ns, fresh=True)
        except Cut as cut:
            exchange.fail(cut.status, "cut")
            raise
        except TimeoutError:
            exchange.fail(Status.TIMEOUT, "timeout")
        except (ProtocolError, NotThisApiError, LineTooLongError) as error:
            exchange.fail(Status.PROTOCOL_ERROR, str(error))
        except BadPayloadError as error:
            exchange.fail(Status.BAD_PAYLOAD, str(error))
        except (OSError, StaleConnectionError) as error:
            _fail_broken(exchange, error)
        finally:
            exchange.end_ns = self.clock_ns()

    def _render(self, body: bytes) -> bytes:
        origin = self.pool.origin
        headers = {
            "Host": origin.host_header,
            "Content-Type": "application/json",
            "Accept": self._accepted,
            "Accept-Encoding": "identity",
            **self.headers,
        }
        return render_request("POST", origin.path(self.dialect.path), headers, body)

    @property
    def _accepted(self) -> str:
        return "text/event-stream" if self.dialect.sampling.streams else "application/json"

    def _attempt(self, request: bytes, exchange: Exchange, deadline_ns: int, *, fresh: bool) -> None:
        connection = self.pool.take(fresh=fresh)
        exchange.connect_s, exchange.is_reused = connection.connect_s, connection.is_reused
        exchange.phase = RequestPhase.HEADERS
        parser = ResponseParser()
        try:
            self._send(connection, request, exchange, deadline_ns)
            self._receive(connection, parser, exchange, deadline_ns)
        except (ConnectionError, ssl.SSLEOFError) as error:
            if connection.is_reused and exchange.bytes_received == 0:
                raise StaleConnectionError(str(error)) from error
            raise
        finally:
            if parser.may_reuse:
                self.pool.give_back(connection)
            else:
                connection.close()

    def _send(self, connection: Connection, request: bytes, exchange: Exchange, deadline_ns: int) -> None:
        connection.sock.settimeout(self._left_s(deadline_ns))
        connection.sock.sendall(request)
        exchange.sent_ns = self.clock_ns()
        exchange.bytes_sent = len(request)

    def _left_s(self, deadline_ns: int) -> float:
        left_ns = deadline_ns - self.clock_ns()
        if left_ns <= 0:
            raise TimeoutError
        return left_ns / 1e9

    def _receive(self, connection: Connection, parser: ResponseParser, exchange: Exchange, deadline_ns: int) -> None:
        splitter = EventSplitter()
        whole: list[bytes] | None = None if self.dialect.sampling.streams else []
        sock, clock_ns = connection.sock, self.clock_ns
        while not parser.is_complete:
            sock.settimeout(self._left_s(deadline_ns))
            data = sock.recv(READ_BYTES)
            now_ns = clock_ns()
            if not data:
                parser.feed_eof()
                if parser.head is None:
                    raise ConnectionResetError("closed before the response headers")
                break
            exchange.bytes_received += len(data)
            if exchange.bytes_received > MAX_RESPONSE_BYTES:
                raise ProtocolError(f"the response exceeds {MAX_RESPONSE_BYTES} bytes")
            body = parser.feed(data)
            if exchange.headers_ns is None and parser.head is not None:
                exchange.headers_ns = now_ns
                self._check_head(parser, exchange)
            if exchange.http_status == 200 and whole is not None:
                whole.append(body)
            elif exchange.http_status == 200:
                self._read_events(splitter.feed(body), now_ns, exchange)
            else:
                exchange.error_body = (exchange.error_body + body)[:2_048]
        if exchange.http_status == 200 and whole is not None:
            self._read_whole(parser, b"".join(whole), exchange)
        elif exchange.http_status == 200:
            self._read_events(splitter.finish(), clock_ns(), exchange)
        self._judge(parser, exchange)

    def _read_whole(self, parser: ResponseParser, body: bytes, exchange: Exchange) -> None:
        if parser.is_complete and parser.head is not None:
            exchange.phase = RequestPhase.STREAM
            self.dialect.read_whole(body, exchange.answer)
            read_timing_headers(parser.head.headers, exchange.answer)

    def _check_head(self, parser: ResponseParser, exchange: Exchange) -> None:
        head = parser.head
        assert head is not None
        exchange.http_status = head.status
        exchange.phase = RequestPhase.FIRST_EVENT
        if head.status < 400 and head.status != 200:
            raise ProtocolError(f"status {head.status}")
        if head.status != 200:
            return
        encoding = head.headers.get("content-encoding", "identity")
        if encoding != "identity":
            raise ProtocolError(f"the body is compressed ({encoding}) though none was accepted")
        kind = head.headers.get("content-type", "")
        if not kind.startswith(self._accepted):
            raise ProtocolError(f"content-type is {kind!r}, not {self._accepted}")

    def _read_events(self, payloads: list[bytes], now_ns: int, exchange: Exchange) -> None:
        answer = exchange.answer
        before = len(answer.event_ns)
        for payload in payloads:
            self.dialect.read(payload, now_ns, answer)
        arrived = len(answer.event_ns) - before
        if arrived:
            exchange.phase = RequestPhase.STREAM
            exchange.coalesced_events += arrived - 1

    def _judge(self, parser: ResponseParser, exchange: Exchange) -> None:
        """How a response that was read to its end, or to the peer's close, counts."""
        status, answer = exchange.http_status, exchange.answer
        assert status is not None
        if status == 429:
            exchange.fail(Status.OVERLOADED, "429")
        elif status >= 500:
            exchange.fail(Status.HTTP_5XX, str(status))
        elif status >= 400:
            exchange.fail(Status.HTTP_4XX, str(status))
        elif answer.error is not None:
            exchange.fail(Status.STREAM_ERROR, answer.error)
        elif not self.dialect.sampling.streams:
            if not answer.is_complete:
                exchange.fail(Status.TRUNCATED, "closed")
        elif not answer.event_ns:
            exchange.fail(Status.TRUNCATED, "empty stream" if parser.is_complete else "closed")
        elif not answer.is_complete:
            exchange.fail(Status.TRUNCATED, "no terminator" if parser.is_complete else "closed")


def _fail_broken(exchange: Exchange, error: Exception) -> None:
    """A connection that failed: before the headers it is a connect error, after them the stream is cut short."""
    if exchange.headers_ns is None:
        exchange.fail(Status.CONNECT_ERROR, type(error).__name__)
    elif exchange.answer.error is not None:
        exchange.fail(Status.STREAM_ERROR, exchange.answer.error)
    elif not exchange.answer.is_complete:
        exchange.fail(Status.TRUNCATED, type(error).__name__)
