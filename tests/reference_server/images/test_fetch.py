"""Fetching of images: from public addresses only, within limits."""

import asyncio
import ipaddress
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from reference_server.errors import ValidationError
from reference_server.images.fetch import ImageFetcher, is_public
from reference_server.messages import Image

OK = b"HTTP/1.1 200 OK\r\nContent-Type: image/png; x=1\r\n"


@asynccontextmanager
async def serving(answer: bytes, *, stays_open: bool = False) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server on loopback that sends these bytes; its URL and the requests it got."""
    requests: list[bytes] = []

    async def answer_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            requests.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(answer)
            await writer.drain()
            if stays_open:
                await reader.read()
        finally:
            writer.close()

    server = await asyncio.start_server(answer_one, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        yield f"http://127.0.0.1:{port}/a%20b.png?x=1", requests


def fetcher(url: str, max_bytes: int = 10, **options: object) -> ImageFetcher:
    """One that may connect to this machine."""
    port = int(url.split(":")[2].split("/")[0])
    return ImageFetcher(max_bytes, is_allowed=lambda _: True, ports=[port], **options)  # type: ignore[arg-type]


async def test_an_image_is_fetched_with_one_request() -> None:
    async with serving(OK + b"Content-Length: 3\r\n\r\nabc") as (url, requests):
        image = await fetcher(url).fetch(url)

    assert image == Image(b"abc", "image/png")
    assert requests[0].startswith(b"GET /a%20b.png?x=1 HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"Authorization" not in requests[0]


async def test_a_chunked_answer_and_one_that_ends_with_the_connection_are_read() -> None:
    for body in (b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", b"\r\nabc"):
        async with serving(OK + body) as (url, _):
            assert (await fetcher(url).fetch(url)).data == b"abc"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/\r\n\r\n", "Could not fetch image: status 302: redirects"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "Could not fetch image: status 404"),
        (OK + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc", "Could not fetch image: it is compressed"),
        (OK + b"Content-Length: 4000\r\n\r\n", "Image size 4000 bytes exceeds maximum allowed size of 10 bytes"),
        (OK + b"\r\n" + bytes(5000), "Image size 11 bytes exceeds maximum allowed size of 10 bytes"),
        (OK + b"Content-Length: 8\r\n\r\nabc", "Failed to read image data: the answer ended early"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "Could not fetch image: its answer is not HTTP"),
        (b"", "Failed to read image data: the answer ended early"),
    ],
)
async def test_reliability_T9_other_answers_are_refused(answer: bytes, message: str) -> None:
    async with serving(answer) as (url, _):
        with pytest.raises(ValidationError, match=message):
            await fetcher(url).fetch(url)


async def test_reliability_T9_a_server_that_does_not_answer_is_left_after_the_limit() -> None:
    async with serving(b"", stays_open=True) as (url, _):
        with pytest.raises(ValidationError, match=r"Could not fetch image: no answer within 0\.05 s"):
            await fetcher(url, timeout_s=0.05).fetch(url)


async def test_reliability_T9_an_address_that_is_not_public_gets_no_connection() -> None:
    async with serving(OK + b"Content-Length: 3\r\n\r\nabc") as (url, requests):
        port = int(url.split(":")[2].split("/")[0])
        guarded = ImageFetcher(10, ports=[port])
        for host in ("127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "2130706433", "0x7f.1"):
            with pytest.raises(ValidationError, match="is not public"):
                await guarded.fetch(f"http://{host}:{port}/")

    assert requests == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://host:8080/a.png", "port 8080 is not allowed"),
        ("http://user:secret@host/a.png", "its URL has a user name or a password"),
        ("https://other.example/a.png", "host other.example is not among `--image-fetch-hosts`"),
        ("ftp://host/a.png", "its URL is not valid"),
        ("http:///a.png", "its URL is not valid"),
        ("http://host/a b", "its URL is not valid"),
        ("http://host/a\r\nX: y", "its URL is not valid"),
        ("http://host:99999/", "its URL is not valid"),
    ],
)
async def test_reliability_T9_urls_are_checked_before_a_name_is_resolved(url: str, message: str) -> None:
    with pytest.raises(ValidationError, match=message) as raised:
        await ImageFetcher(10, hosts=["images.example"]).fetch(url)

    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "169.254.169.254", "0.0.0.0", "224.0.0.1", "100.64.0.1",
        "255.255.255.255", "::1", "::", "fe80::1", "fc00::1", "ff02::1", "::ffff:10.0.0.1", "2002:7f00:1::",
        "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe",
    ],
)  # fmt: skip
def test_reliability_T9_private_addresses_are_known_in_every_form(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses_are_allowed(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))
