"""Small blocking calls to a server beside the load: its information, health, token counts, metrics."""

import contextlib
import functools
import http.client
import io
import json
import socket
import ssl
import time
from collections.abc import Mapping
from typing import Any

from loadgen.connection import Origin
from loadgen.errors import TargetError

TIMEOUT_S = 30.0
MAX_BODY_BYTES = 64 * 2**20


class ControlClient:
    """One kept connection. Not for several threads at once."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        self.url = url
        self.origin = Origin.parse(url)
        self._headers = dict(headers or {})
        self._connection: http.client.HTTPConnection | None = None

    def get(self, route: str, timeout_s: float = TIMEOUT_S) -> tuple[int, bytes]:
        """Status and body. Raises TargetError when there is no answer."""
        return self._request("GET", route, None, timeout_s)

    def get_json(self, route: str) -> Any | None:
        """The JSON a route gives, None when it has none."""
        status, body = self.get(route)
        if status != 200:
            return None
        with contextlib.suppress(ValueError):
            return json.loads(body)
        return None

    def post(self, route: str, body: bytes, timeout_s: float = TIMEOUT_S) -> tuple[int, bytes]:
        """Status and body. Raises TargetError when there is no answer."""
        return self._request("POST", route, body, timeout_s)

    def count_tokens(self, text: str) -> int:
        """Tokens of a text by the server's `/tokenize`, special ones included. Raises TargetError."""
        status, body = self.post("/tokenize", json.dumps({"inputs": text}).encode())
        if status != 200:
            raise TargetError(f"{self.url}/tokenize: status {status}", status)
        try:
            tokens = json.loads(body)
        except ValueError as error:
            raise TargetError(f"{self.url}/tokenize: not JSON ({error})") from error
        if not isinstance(tokens, list):
            raise TargetError(f"{self.url}/tokenize: not a list of tokens")
        return len(tokens)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _request(self, method: str, route: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        headers = {**self._headers, "Content-Type": "application/json"} if body is not None else self._headers
        is_kept = self._connection is not None
        try:
            return self._exchange(method, route, body, headers, timeout_s)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if is_kept and isinstance(error, ConnectionError | http.client.RemoteDisconnected):
                return self._request(method, route, body, timeout_s)
            raise TargetError(f"{self.url}{route}: {_reason(error)}") from error

    def _exchange(
        self, method: str, route: str, body: bytes | None, headers: Mapping[str, str], timeout_s: float
    ) -> tuple[int, bytes]:
        if self._connection is None:
            self._connection = self._connect(timeout_s)
        connection = self._connection
        if connection.sock is not None:
            connection.sock.settimeout(timeout_s)
        until_s = time.monotonic() + timeout_s
        connection.response_class = functools.partial(_open_response, until_s)  # type: ignore[assignment]
        connection.request(method, self.origin.path(route), body, dict(headers))
        response = connection.getresponse()
        content = response.read(MAX_BODY_BYTES)
        if response.will_close or not response.isclosed():
            self.close()
        return response.status, content

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        if self.origin.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(self.origin.host, self.origin.port, timeout=timeout_s, context=context)
        return http.client.HTTPConnection(self.origin.host, self.origin.port, timeout=timeout_s)


def _open_response(until_s: float, sock: socket.socket, *args: Any, **kwargs: Any) -> http.client.HTTPResponse:
    """A response that has to be read by a time, however steadily a server drips."""
    return http.client.HTTPResponse(_Deadlined(sock, until_s), *args, **kwargs)  # type: ignore[arg-type]


class _Deadlined(io.RawIOBase):
    """The bytes of a socket until a time. What http.client takes for a socket; it does not close the real one."""

    def __init__(self, sock: socket.socket, until_s: float) -> None:
        self._sock, self._until_s = sock, until_s

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the answer takes too long")
        self._sock.settimeout(left_s)
        return self._sock.recv_into(buffer)


def _reason(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "connection refused; is the server running there?"
    return str(error) or type(error).__name__
