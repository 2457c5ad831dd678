import pytest

from loadgen import sse
from loadgen.sse import EventSplitter, LineTooLongError

STREAM = b'data: {"a":1}\n\n:\n\nevent: x\ndata:{"b":2}\r\n\r\ndata: [DONE]\n\n'


def test_events_are_the_same_however_the_body_is_cut():
    for size in (1, 3, 10, len(STREAM)):
        splitter = EventSplitter()

        events = [event for at in range(0, len(STREAM), size) for event in splitter.feed(STREAM[at : at + size])]

        assert events == [b'{"a":1}', b'{"b":2}', b"[DONE]"]


def test_an_event_is_there_as_soon_as_its_line_is():
    splitter = EventSplitter()

    assert splitter.feed(b"data: 1\n") == [b"1"]


def test_a_last_line_without_line_feed_is_an_event():
    splitter = EventSplitter()

    assert splitter.feed(b"data: 1") == []
    assert splitter.finish() == [b"1"]


def test_a_line_without_end_is_refused(monkeypatch):
    monkeypatch.setattr(sse, "MAX_LINE_BYTES", 100)

    with pytest.raises(LineTooLongError):
        EventSplitter().feed(b"x" * 101)
