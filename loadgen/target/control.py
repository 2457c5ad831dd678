"""Blocking calls to a server outside the load: information, health, token counts, metrics."""

import contextlib
import functools
import http.client
import io
import json
import socket
import time
from collections.abc import Mapping
from typing import Any

from loadgen.errors import TargetError
from loadgen.http.connection import Origin
from loadgen.target.access import NO_ACCESS, Access
from loadgen.target.server_kind import TokenizeRoute

TIMEOUT_S = 30.0
MAX_BODY_BYTES = 64 * 2**20


class ControlClient:
    """Calls over one reused connection. Not thread-safe."""

    def __init__(self, url: str, access: Access = NO_ACCESS) -> None:
        self.url = url
        self.origin = Origin.parse(url)
        self.headers = dict(access.headers)
        self._tls = access.tls
        self._connection: http.client.HTTPConnection | None = None

    def get(self, route: str, timeout_s: float = TIMEOUT_S) -> tuple[int, bytes]:
        """Status and body. Raises TargetError if the server does not answer."""
        return self._request("GET", route, None, timeout_s)

    def get_json(self, route: str) -> Any | None:
        """The JSON of a route; None if the status is not 200 or the body is not JSON."""
        status, body = self.get(route)
        if status != 200:
            return None
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(body)
        return None

    def post(self, route: str, body: bytes, timeout_s: float = TIMEOUT_S) -> tuple[int, bytes]:
        """Status and body. Raises TargetError if the server does not answer."""
        return self._request("POST", route, body, timeout_s)

    def count_tokens(self, text: str, route: TokenizeRoute) -> int:
        """Token count of a text by the server, including special tokens. Raises TargetError."""
        status, body = self.post(route.path, route.body(text))
        if status != 200:
            raise TargetError(f"{self.url}{route.path}: status {status}", status)
        try:
            count = route.count(json.loads(body))
        except (ValueError, RecursionError) as error:
            raise TargetError(f"{self.url}{route.path}: not JSON ({error})") from error
        if count is None:
            raise TargetError(f"{self.url}{route.path}: neither a count nor a list of tokens")
        return count

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _request(self, method: str, route: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        headers = {**self.headers, "Content-Type": "application/json"} if body is not None else self.headers
        is_reused = self._connection is not None
        try:
            return self._call(method, route, body, headers, timeout_s)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if is_reused and isinstance(error, ConnectionError | http.client.RemoteDisconnected):
                return self._request(method, route, body, timeout_s)
            raise TargetError(f"{self.url}{route}: {_reason(error)}") from error

    def _call(
        self, method: str, route: str, body: bytes | None, headers: Mapping[str, str], timeout_s: float
    ) -> tuple[int, bytes]:
        if self._connection is None:
            self._connection = self._connect(timeout_s)
        connection = self._connection
        if connection.sock is not None:
            connection.sock.settimeout(timeout_s)
        deadline_s = time.monotonic() + timeout_s
        connection.response_class = functools.partial(_open_response, deadline_s)  # type: ignore[assignment]
        connection.request(method, self.origin.path(route), body, dict(headers))
        response = connection.getresponse()
        content = response.read(MAX_BODY_BYTES)
        if response.will_close or not response.isclosed():
            self.close()
        return response.status, content

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        if self.origin.scheme == "https":
            context = self._tls.context()
            return http.client.HTTPSConnection(self.origin.host, self.origin.port, timeout=timeout_s, context=context)
        return http.client.HTTPConnection(self.origin.host, self.origin.port, timeout=timeout_s)


def _open_response(deadline_s: float, sock: socket.socket, *args: Any, **kwargs: Any) -> http.client.HTTPResponse:
    """A response with a deadline for reading all of it, even if a server sends slowly but steadily."""
    return http.client.HTTPResponse(_DeadlineSocket(sock, deadline_s), *args, **kwargs)  # type: ignore[arg-type]


class _DeadlineSocket(io.RawIOBase):
    """A socket with a read deadline, in the form http.client requires. Does not close the socket."""

    def __init__(self, sock: socket.socket, deadline_s: float) -> None:
        self._sock, self._deadline_s = sock, deadline_s
        # http.client closes a connection that will not be reused before its body is read: this file keeps it open.
        self._held = sock.makefile("rb", buffering=0)

    def close(self) -> None:
        self._held.close()
        super().close()

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("timeout while reading the response")
        self._sock.settimeout(left_s)
        return self._sock.recv_into(buffer)


def _reason(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused; is the server running?"
    return str(error) or type(error).__name__
