import pytest

from loadgen.http.http1 import MAX_HEAD_BYTES, ProtocolError, ResponseParser, render_request

CHUNKED = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n7;name=x\r\n, world\r\n0\r\ntrailer: 1\r\n\r\n"
)


def test_a_chunked_body_is_the_same_in_reads_of_any_size():
    for size in (1, 2, 3, 7, 50, len(CHUNKED)):
        parser = ResponseParser()

        body = b"".join(parser.feed(CHUNKED[at : at + size]) for at in range(0, len(CHUNKED), size))

        assert body == b"hello, world"
        assert parser.is_complete
        assert parser.may_reuse


def test_a_body_with_a_length_ends_there():
    parser = ResponseParser()

    assert parser.feed(b"HTTP/1.1 404 Not Found\r\nContent-Length: 3\r\n\r\nab") == b"ab"
    assert not parser.is_complete
    assert parser.feed(b"c") == b"c"
    assert parser.is_complete
    assert parser.head is not None
    assert parser.head.status == 404


def test_a_body_without_length_ends_with_the_connection_and_cannot_be_reused():
    parser = ResponseParser()

    parser.feed(b"HTTP/1.1 200 OK\r\n\r\nabc")
    assert not parser.is_complete
    parser.feed_eof()

    assert parser.is_complete
    assert not parser.may_reuse


def test_an_interim_response_is_skipped():
    parser = ResponseParser()

    parser.feed(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    assert parser.head is not None
    assert parser.head.status == 200
    assert parser.is_complete
    assert not parser.may_reuse


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon here\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 5_000,
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * MAX_HEAD_BYTES,
    ],
)
def test_bytes_that_are_not_http_are_a_protocol_error(answer):
    with pytest.raises(ProtocolError):
        ResponseParser().feed(answer)


def test_a_request_carries_its_length():
    request = render_request("POST", "/generate", {"Host": "h:1"}, b"{}")

    assert request == b"POST /generate HTTP/1.1\r\nHost: h:1\r\nContent-Length: 2\r\n\r\n{}"
