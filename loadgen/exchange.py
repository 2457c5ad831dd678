"""One request from the socket's point of view: send it, read its response, say how it ended.

Times are monotonic ns of the clock it is given. What the response says is the reception's business.
"""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass

from loadgen.connection import Clock, Connection, ConnectionPool
from loadgen.http1 import ProtocolError, render_request
from loadgen.limits import LimitPassedError, RequestLimits
from loadgen.protocols.dialect import BadPayloadError, Dialect, NotThisApiError
from loadgen.reception import Exchange, Reception
from loadgen.sse import LineTooLongError
from reports.records import RequestPhase, Status


class Cut(BaseException):
    """Thrown into a running exchange to end it; the record gets `status`."""

    def __init__(self, status: Status) -> None:
        super().__init__(status)
        self.status = status


class StaleConnectionError(Exception):
    """A reused connection was closed by the peer before it answered anything."""


@dataclass(frozen=True, slots=True)
class Client:
    """Makes exchanges with one server in one dialect."""

    pool: ConnectionPool
    dialect: Dialect
    headers: Mapping[str, str]
    limits: RequestLimits
    clock_ns: Clock

    def run(self, body: bytes, exchange: Exchange) -> None:
        """Make one request. Never raises but for `Cut`, which is noted in the exchange and raised on."""
        end_by_ns = self.clock_ns() + round(self.limits.total_s * 1e9)
        request = self._render(body)
        try:
            try:
                self._attempt(request, exchange, end_by_ns, fresh=False)
            except StaleConnectionError:
                self._attempt(request, exchange, end_by_ns, fresh=True)
        except Cut as cut:
            exchange.fail(cut.status, "cut")
            raise
        except TimeoutError as error:
            exchange.fail(Status.TIMEOUT, str(error) if isinstance(error, LimitPassedError) else "timeout")
        except (ProtocolError, NotThisApiError, LineTooLongError) as error:
            exchange.fail(Status.PROTOCOL_ERROR, str(error))
        except BadPayloadError as error:
            exchange.fail(Status.BAD_PAYLOAD, str(error))
        except (OSError, StaleConnectionError) as error:
            _fail_broken(exchange, error)
        finally:
            exchange.end_ns = exchange.end_ns or self.clock_ns()

    def _render(self, body: bytes) -> bytes:
        origin = self.pool.origin
        headers = {
            "Host": origin.host_header,
            "Content-Type": "application/json",
            "Accept": self.dialect.sampling.accepted_type,
            "Accept-Encoding": "identity",
            **self.headers,
        }
        return render_request("POST", origin.path(self.dialect.path), headers, body)

    def _attempt(self, request: bytes, exchange: Exchange, end_by_ns: int, *, fresh: bool) -> None:
        reception = Reception(self.dialect, self.limits, exchange, end_by_ns)
        connection = self.pool.take(min(self.limits.connect_s, reception.left_s(self.clock_ns())), fresh=fresh)
        exchange.connect_s, exchange.is_reused = connection.connect_s, connection.is_reused
        exchange.phase = RequestPhase.HEADERS
        try:
            self._send(connection, request, exchange, reception)
            connection.receive(reception)
        except (ConnectionError, ssl.SSLEOFError) as error:
            if connection.is_reused and exchange.bytes_received == 0:
                raise StaleConnectionError(str(error)) from error
            raise
        finally:
            if reception.parser.may_reuse:
                self.pool.give_back(connection)
            else:
                connection.close()

    def _send(self, connection: Connection, request: bytes, exchange: Exchange, reception: Reception) -> None:
        connection.sock.settimeout(reception.left_s(self.clock_ns()))
        connection.sock.sendall(request)
        exchange.sent_ns = self.clock_ns()
        exchange.bytes_sent = len(request)


def _fail_broken(exchange: Exchange, error: Exception) -> None:
    """A connection that failed: before the headers it is a connect error, after them the stream is cut short."""
    if exchange.headers_ns is None:
        exchange.fail(Status.CONNECT_ERROR, type(error).__name__)
    elif exchange.answer.error is not None:
        exchange.fail(Status.STREAM_ERROR, exchange.answer.error)
    elif not exchange.answer.is_complete:
        exchange.fail(Status.TRUNCATED, type(error).__name__)
