import pytest

from loadgen.http.sse import EventSplitter, LineTooLongError

STREAM = b'data: {"a":1}\n\n:\n\nevent: x\ndata:{"b":2}\r\n\r\ndata: [DONE]\n\n'


def test_events_are_the_same_in_reads_of_any_size():
    for size in (1, 3, 10, len(STREAM)):
        splitter = EventSplitter()

        events = [event for at in range(0, len(STREAM), size) for event in splitter.feed(STREAM[at : at + size])]

        assert events == [b'{"a":1}', b'{"b":2}', b"[DONE]"]


def test_an_event_is_returned_as_soon_as_its_line_is_complete():
    splitter = EventSplitter()

    assert splitter.feed(b"data: {}\n") == [b"{}"]
    assert splitter.feed(b"data: [DONE]\r") == [b"[DONE]"]


@pytest.mark.parametrize("ends", [b"\n", b"\r\n", b"\r"])
def test_reliability_4_10_91_events_are_the_same_at_every_cut_with_every_line_end(ends):
    """Inside UTF-8, inside `data:`, inside a line end; an event of several lines; the last one without its end."""
    stream = STREAM + 'data: {"c":"gr\u00fc\u00df \U0001f600"}\n\ndata: {"d":\ndata: 4}\n\ndata:{"e":5}'.encode()
    stream = stream.replace(b"\r\n", b"\n").replace(b"\n", ends)
    expected = [
        b'{"a":1}',
        b'{"b":2}',
        b"[DONE]",
        '{"c":"gr\u00fc\u00df \U0001f600"}'.encode(),
        b'{"d":\n4}',
        b'{"e":5}',
    ]

    cuts = [[stream[:at], stream[at:]] for at in range(len(stream) + 1)]
    for pieces in (*cuts, [bytes([byte]) for byte in stream]):
        splitter = EventSplitter()
        assert [event for piece in pieces for event in splitter.feed(piece)] + list(splitter.finish()) == expected


def test_a_last_line_without_line_feed_is_an_event():
    splitter = EventSplitter()

    assert splitter.feed(b"data: 1") == []
    assert splitter.finish() == [b"1"]
    assert splitter.finish() == []


@pytest.mark.parametrize("body", [b"x" * 101, b"data:" + b"x" * 101 + b"\n", b"data:xxxxxxxxx\n" * 12])
def test_a_line_or_an_event_without_end_is_refused(body):
    with pytest.raises(LineTooLongError):
        EventSplitter(max_line_bytes=100).feed(body)
