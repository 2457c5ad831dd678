"""TLS over a socket that is read with `recvmsg`, so that decrypted data keeps the kernel's arrival time."""

import contextlib
import socket
import ssl
from dataclasses import dataclass
from typing import Any

from loadgen.errors import UsageError

HANDSHAKE_READ_BYTES = 16_384
RECORD_BYTES = 16_384


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """How a server's certificate is checked: by the system's authorities, by others (PEM text), or not at all."""

    ca_pem: str | None = None
    is_insecure: bool = False

    def context(self) -> ssl.SSLContext:
        """Raises UsageError if `ca_pem` has no certificate."""
        try:
            context = ssl.create_default_context(cadata=self.ca_pem)
        except (ssl.SSLError, ValueError) as error:
            raise UsageError(f"`ca_file` has no certificate in PEM form: {error}") from error
        if self.is_insecure:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


SYSTEM_TLS = TlsSettings()


class TlsSocket:
    """The client's side of a TLS connection, with the methods of a socket that `Connection` uses."""

    def __init__(self, transport: socket.socket, context: ssl.SSLContext, host: str) -> None:
        """Do the handshake. Raises OSError."""
        self._transport = transport
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        try:
            self._shake_hands()
        except BaseException:
            transport.close()
            raise

    def send(self, data: bytes | memoryview) -> int:
        """Send all of the data. Returns its size."""
        self._tls.write(data)
        self._transport.sendall(self._outgoing.read())
        return len(data)

    def sendall(self, data: bytes | memoryview) -> None:
        self.send(data)

    def recvmsg(self, size: int, ancillary_size: int) -> tuple[bytes, list[tuple[int, int, bytes]], int, Any]:
        """`socket.recvmsg`, with decrypted data and the ancillary data of the read that completed it.

        `size` bounds the encrypted bytes of a read.
        """
        while True:
            data, ancillary, flags, address = self._transport.recvmsg(size, ancillary_size)
            self._incoming.write(data)
            decrypted, is_closed = self._decrypt()
            if decrypted or is_closed or not data:
                return decrypted, ancillary, flags, address

    def recv(self, size: int) -> bytes:
        return self.recvmsg(size, 0)[0]

    def settimeout(self, seconds: float | None) -> None:
        self._transport.settimeout(seconds)

    def fileno(self) -> int:
        return self._transport.fileno()

    def close(self) -> None:
        self._transport.close()

    def _shake_hands(self) -> None:
        while True:
            with contextlib.suppress(ssl.SSLWantReadError):
                self._tls.do_handshake()
                self._transport.sendall(self._outgoing.read())
                return
            self._transport.sendall(self._outgoing.read())
            data = self._transport.recv(HANDSHAKE_READ_BYTES)
            if not data:
                raise ConnectionResetError("closed during the TLS handshake")
            self._incoming.write(data)

    def _decrypt(self) -> tuple[bytes, bool]:
        """The data of all complete records, and whether the peer ended the TLS connection."""
        pieces: list[bytes] = []
        with contextlib.suppress(ssl.SSLWantReadError):
            while piece := self._tls.read(RECORD_BYTES):
                pieces.append(piece)
            return b"".join(pieces), True
        return b"".join(pieces), False
