import itertools

import pytest

from loadgen.errors import TargetError
from loadgen.target.control import ControlClient
from tests.support.servers.raw_server import raw_server

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


@pytest.fixture
def ask():
    """Makes calls whose connections are closed with the test."""
    clients = []

    def get(url, timeout_s=5.0):
        clients.append(ControlClient(url))
        return clients[-1].get("/info", timeout_s)

    yield get
    for client in clients:
        client.close()


def test_an_answer_is_its_status_and_body(ask):
    with raw_server(lambda: [HEAD + b"content-length: 2\r\n\r\n", b"{}"]) as url:
        assert ask(url) == (200, b"{}")


@pytest.mark.parametrize(
    "pieces",
    [
        [b"HTTP/1.1 200 OK\r\n", *[b"a"] * 1_000],
        [HEAD + b"content-length: 1000\r\n\r\n", *[b" "] * 1_000],
        [b"HTTP/1.1 100 Continue\r\n\r\n"] * 1_000,
    ],
)
def test_reliability_T41_a_slowly_sent_stream_ends_at_the_limit(ask, pieces):
    with (
        raw_server(lambda: pieces, pause_s=0.02) as url,
        pytest.raises(TargetError, match=r"too long|timed out|timeout"),
    ):
        ask(url, timeout_s=0.2)


def test_headers_over_the_limit_are_refused(ask):
    endless = itertools.chain([b"HTTP/1.1 200 OK\r\n"], itertools.repeat(b"a: b\r\n" * 100))

    with raw_server(lambda: endless) as url, pytest.raises(TargetError):
        ask(url)


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 abc\r\n\r\n"])
def test_bytes_that_are_not_an_answer_are_a_target_error(ask, answer):
    with raw_server(lambda: [answer]) as url, pytest.raises(TargetError, match="/info"):
        ask(url)
