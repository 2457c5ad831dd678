"""Fetches images that clients name by URL, from public addresses only.

The name is resolved here, every address is checked, and the connection goes to a checked address, so that a name cannot
lead to this machine's network. No redirects, no other ports, no decompression; bounded in time and bytes.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable, Collection
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

import httptools

from reference_server.errors import ValidationError
from reference_server.messages import Image

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

TIMEOUT_S = 10.0
PORTS = {"http": 80, "https": 443}
MAX_HEADER_BYTES = 65_536
_READ_BYTES = 65_536
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def is_public(address: Address) -> bool:
    """Whether an address is public; an IPv4 address embedded in an IPv6 address must be public too."""
    if isinstance(address, ipaddress.IPv6Address):
        embedded = address.ipv4_mapped or address.sixtofour or (address.teredo and address.teredo[1])
        if embedded is None and address in _NAT64:
            embedded = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if embedded:
            return is_public(embedded)
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


class ImageFetcher:
    """Fetches images of at most `max_bytes`.

    hosts: the allowed hosts; all if empty. is_allowed, ports: the addresses and ports to connect to.
    """

    def __init__(
        self,
        max_bytes: int,
        hosts: Collection[str] = (),
        is_allowed: Callable[[Address], bool] = is_public,
        ports: Collection[int] = frozenset(PORTS.values()),
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._max_bytes = max_bytes
        self._hosts = frozenset(host.lower() for host in hosts)
        self._is_allowed = is_allowed
        self._ports = frozenset(ports)
        self._timeout_s = timeout_s
        self._context = ssl.create_default_context()

    async def fetch(self, url: str) -> Image:
        """The body of the answer. Raises ValidationError with TGI's texts."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._fetch(self._target(url))
        except TimeoutError:
            raise _failed(f"no answer within {self._timeout_s:g} s") from None
        except (OSError, httptools.HttpParserError) as error:
            reason = getattr(error, "strerror", None) or "its answer is not HTTP"
            raise _failed(str(reason)) from error

    def _target(self, url: str) -> "_Target":
        try:
            parts = urlsplit(url)
            target = _Target.of(parts)
        except ValueError:
            raise _failed("its URL is not valid") from None
        if parts.username is not None or parts.password is not None:
            raise _failed("its URL has a user name or a password")
        if target.port not in self._ports:
            raise _failed(f"port {target.port} is not allowed")
        if self._hosts and target.host not in self._hosts:
            raise _failed(f"host {target.host:.100} is not among `--image-fetch-hosts`")
        return target

    async def _fetch(self, target: "_Target") -> Image:
        address = await self._resolve(target)
        context = self._context if target.is_encrypted else None
        reader, writer = await asyncio.open_connection(
            address, target.port, ssl=context, server_hostname=target.host if context else None
        )
        try:
            writer.write(target.request)
            answer = _Answer(self._max_bytes)
            while not answer.is_complete:
                data = await reader.read(_READ_BYTES)
                if not data:
                    break
                answer.feed(data)
            return answer.image()
        finally:
            writer.transport.abort()

    async def _resolve(self, target: "_Target") -> str:
        """An address of the host; one that is not allowed refuses the host."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
        addresses = [str(entry[4][0]) for entry in found]
        # A scope (`fe80::1%eth0`) is not part of an address.
        if not addresses or not all(self._is_allowed(ipaddress.ip_address(each.split("%")[0])) for each in addresses):
            raise _failed(f"the address of {target.host:.100} is not public")
        return addresses[0]


@dataclass(frozen=True, slots=True)
class _Target:
    """The server and the request of a URL."""

    host: str
    port: int
    is_encrypted: bool
    request: bytes

    @classmethod
    def of(cls, parts: SplitResult) -> "_Target":
        """Raises ValueError for a URL that cannot be requested."""
        default = PORTS.get(parts.scheme)
        if default is None or not parts.hostname:
            raise ValueError("no http URL")
        host, port = parts.hostname.encode("idna").decode(), parts.port or default
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if not path.isascii() or any(character <= " " or character == "\x7f" for character in host + path):
            raise ValueError("characters that a request may not have")
        shown = f"[{host}]" if ":" in host else host
        authority = shown if port == default else f"{shown}:{port}"
        lines = [
            f"GET {path} HTTP/1.1",
            f"Host: {authority}",
            "Accept: image/*",
            "Accept-Encoding: identity",
            "User-Agent: text-generation-router",
            "Connection: close",
        ]
        return cls(host, port, parts.scheme == "https", "\r\n".join([*lines, "", ""]).encode())


class _Answer:
    """An HTTP answer while it is read; raises ValidationError as soon as it is refused."""

    def __init__(self, max_bytes: int) -> None:
        self.is_complete = False
        self._max_bytes = max_bytes
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._header_bytes = 0
        self._has_headers = False
        self._body = bytearray()
        # The parser does not pass on exceptions of its callbacks.
        self._refusal: ValidationError | None = None

    def feed(self, data: bytes) -> None:
        if not self._has_headers:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES + _READ_BYTES:
                raise _failed("its headers are too long")
        self._parser.feed_data(data)
        if self._refusal is not None:
            raise self._refusal

    def image(self) -> Image:
        """Raises ValidationError for an answer that ends early."""
        length = self._headers.get("content-length")
        is_delimited = length is not None or "transfer-encoding" in self._headers
        if not self._has_headers or (is_delimited and not self.is_complete):
            raise ValidationError("Failed to read image data: the answer ended early")
        return Image(bytes(self._body), self._headers.get("content-type", "").partition(";")[0].strip())

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._has_headers = True
        status = self._parser.get_status_code()
        if 300 <= status < 400:
            self._refuse(_failed(f"status {status}: redirects are not followed"))
        elif status != 200:
            self._refuse(_failed(f"status {status}"))
        elif self._headers.get("content-encoding", "identity").lower() != "identity":
            self._refuse(_failed("it is compressed"))
        length = self._headers.get("content-length", "0")
        if length.isdecimal():
            self._check_size(int(length))

    def on_body(self, body: bytes) -> None:
        self._body += body
        if len(self._body) > self._max_bytes:
            self._check_size(self._max_bytes + 1)

    def on_message_complete(self) -> None:
        self.is_complete = True

    def _refuse(self, error: ValidationError) -> None:
        self._refusal = self._refusal or error

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            self._refuse(
                ValidationError(f"Image size {size} bytes exceeds maximum allowed size of {self._max_bytes} bytes")
            )


def _failed(detail: str) -> ValidationError:
    return ValidationError(f"Could not fetch image: {detail}")
