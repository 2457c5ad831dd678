"""One HTTP call: send the request, read the response, record how it ended. Times are monotonic ns."""

from collections.abc import Mapping
from dataclasses import dataclass

from loadgen.dialects.dialect import BadPayloadError, Dialect, NotThisApiError, accepted_type
from loadgen.http.arrival_times import Clock
from loadgen.http.connection import ConnectionPool, NotSentError
from loadgen.http.http1 import ProtocolError, render_request
from loadgen.http.response_reader import CallLimits, CallTimeoutError, ClientCall, ResponseReader
from loadgen.http.sse import LineTooLongError
from reports.run_schema import RequestPhase, Status


class CallCancelled(BaseException):
    """Thrown into a running call to end it; `status` is recorded."""

    def __init__(self, status: Status) -> None:
        super().__init__(status)
        self.status = status


@dataclass(frozen=True, slots=True)
class Client:
    """Makes calls to one server in one dialect."""

    pool: ConnectionPool
    dialect: Dialect
    headers: Mapping[str, str]
    limits: CallLimits
    clock_ns: Clock

    def run(self, body: bytes, call: ClientCall) -> None:
        """Make one call and record it in `call`; it is sent once. Raises only CallCancelled, after recording it."""
        deadline_ns = self.clock_ns() + round(self.limits.total_s * 1e9)
        request = self._render(body)
        try:
            self._exchange(request, call, deadline_ns)
        except CallCancelled as cancelled:
            call.fail(cancelled.status, "cut")
            raise
        except TimeoutError as error:
            call.fail(Status.TIMEOUT, str(error) if isinstance(error, CallTimeoutError) else "timeout")
        except (ProtocolError, NotThisApiError, LineTooLongError) as error:
            call.fail(Status.PROTOCOL_ERROR, str(error))
        except BadPayloadError as error:
            call.fail(Status.BAD_PAYLOAD, str(error))
        except OSError as error:
            _fail_broken(call, error)
        finally:
            call.end_ns = call.end_ns or self.clock_ns()

    def _render(self, body: bytes) -> bytes:
        origin = self.pool.origin
        headers = {
            "Host": origin.host_header,
            "Content-Type": "application/json",
            "Accept": accepted_type(self.dialect),
            "Accept-Encoding": "identity",
            **self.headers,
        }
        return render_request("POST", origin.path(self.dialect.path), headers, body)

    def _exchange(self, request: bytes, call: ClientCall, deadline_ns: int) -> None:
        """Send the request and read the response. A reused connection that the peer closed is replaced before."""
        reader = ResponseReader(self.dialect, self.limits, call, deadline_ns)
        while call.sent_ns is None:
            connection = self.pool.take(min(self.limits.connect_s, reader.left_s(self.clock_ns())))
            call.connect_s, call.is_reused = connection.connect_s, connection.is_reused
            call.phase = RequestPhase.HEADERS
            try:
                connection.send(request, reader.left_s(self.clock_ns()))
                call.sent_ns = self.clock_ns()
                call.bytes_sent = len(request)
                connection.receive(reader)
            except NotSentError:
                continue
            finally:
                if reader.parser.may_reuse:
                    self.pool.give_back(connection)
                else:
                    connection.close()


def _fail_broken(call: ClientCall, error: Exception) -> None:
    """Record a broken connection: a connect error before the headers, a truncated stream after them."""
    if call.headers_ns is None:
        call.fail(Status.CONNECT_ERROR, type(error).__name__)
    elif call.answer.error is not None:
        call.fail(Status.STREAM_ERROR, call.answer.error)
    elif not call.answer.is_complete:
        call.fail(Status.TRUNCATED, type(error).__name__)
