"""Any bytes from a server, split anywhere, give the same answer or an error with a status."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.config.bench_config import BenchConfig
from loadgen.dialects.dialect import BadPayloadError, NotThisApiError, Sampling
from loadgen.dialects.registry import DIALECTS
from loadgen.http.http1 import ProtocolError
from loadgen.http.response_reader import CallLimits, CallTimeoutError, ClientCall, ResponseReader
from loadgen.http.sse import LineTooLongError
from reports.run_schema import Status

KNOWN_ERRORS = (ProtocolError, LineTooLongError, NotThisApiError, BadPayloadError, ConnectionResetError)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
# 200 examples each, as `make test` has time for.
FEW = settings(max_examples=200, derandomize=True)


def read(api, pieces, limits=CallLimits()):  # noqa: B008 - it is frozen
    """The exchange of a response that came in these pieces, and the error that ended it."""
    call = ClientCall(sent_ns=0)
    reader = ResponseReader(DIALECTS[api](Sampling()), limits, call, 10**12)
    try:
        for at_ns, piece in enumerate(pieces, start=1):
            if piece and reader.take(piece, at_ns):
                return call, None
        reader.take(b"", len(pieces) + 1)
    except KNOWN_ERRORS as error:
        return call, type(error)
    return call, None


def cut(content, places):
    bounds = [0, *sorted(place % (len(content) + 1) for place in places), len(content)]
    return [content[low:high] for low, high in itertools.pairwise(bounds)]


def chunked(pieces):
    return HEAD + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces if piece) + b"0\r\n\r\n"


EVENTS = st.lists(st.one_of(st.text(), st.just(None)), max_size=8)
PLACES = st.lists(st.integers(0, 10_000), max_size=12)


@FEW
@given(EVENTS, st.sampled_from([b"\n", b"\r\n", b"\r"]), PLACES, PLACES)
def test_reliability_4_10_91_any_stream_in_any_chunks_in_any_segments_is_the_same_answer(texts, ends, chunks, segments):
    """None is a keep-alive comment. Chunks cut lines and characters, segments cut chunks."""
    body = b""
    for text in texts:
        delta = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}
        body += (
            b":"
            if text is None
            else b"data: " + json.dumps(delta, ensure_ascii=bool(chunks)).encode("utf-8", "replace")
        )
        body += ends * 2
    body += b"data: [DONE]" + ends * 2

    call, error = read("openai-chat", cut(chunked(cut(body, chunks)), segments))

    assert error is None
    assert len(call.answer.event_ns) == sum(1 for text in texts if text)
    assert call.answer.event_ns == sorted(call.answer.event_ns)
    assert call.status == (Status.OK if any(texts) else Status.TRUNCATED)


VALID = chunked([b'data:{"token":{"id":1,"text":"a"},"generated_text":null,"details":null}\n\n'] * 3 + [b"data:{}\n\n"])


@FEW
@given(
    st.lists(st.tuples(st.integers(0, len(VALID)), st.binary(max_size=4)), max_size=6),
    PLACES,
    st.sampled_from(list(DIALECTS)),
)
def test_reliability_I11_damaged_bytes_have_a_status_or_a_known_error(changes, places, api):
    damaged = VALID
    for at, content in changes:
        damaged = damaged[:at] + content + damaged[at + len(content) :]

    call, error = read(api, cut(damaged, places), CallLimits(line_bytes=2_000, response_bytes=4_000))

    assert error or call.end_ns is not None
    assert len(call.error_type or "") < 300


@pytest.mark.parametrize(
    ("limits", "event_ns", "now_ns", "left"),
    [
        (CallLimits(), [], 0, 1_000.0),
        (CallLimits(first_event_s=5), [], 10**9, 4.0),
        (CallLimits(first_event_s=5), [10**9], 2 * 10**9, 998.0),
        (CallLimits(first_event_s=5, stall_s=3), [10**9], 2 * 10**9, 2.0),
        (CallLimits(stall_s=3), [], 0, 3.0),
        (CallLimits(first_event_s=5), [], 5 * 10**9, "first_event_timeout"),
        (CallLimits(stall_s=3), [10**9], 4 * 10**9, "stall_timeout"),
        (CallLimits(stall_s=3), [10**12 - 1], 10**12, "timeout"),
    ],
)
def test_the_nearest_limit_applies(limits, event_ns, now_ns, left):
    call = ClientCall(sent_ns=0)
    call.answer.event_ns = event_ns
    reader = ResponseReader(DIALECTS["tgi"](Sampling()), limits, call, 10**12)

    if isinstance(left, str):
        with pytest.raises(CallTimeoutError, match=f"^{left}$"):
            reader.left_s(now_ns)
    else:
        assert reader.left_s(now_ns) == left


@pytest.mark.parametrize("name", ["first_event_timeout", "stall_timeout"])
def test_a_limit_on_events_is_refused_for_blocking_answers(name):
    with pytest.raises(ValueError, match=f"`{name}` is 5.0 but `stream` is false"):
        BenchConfig(stream=False, **{name: "5s"})

    assert BenchConfig(**{name: "5s"}).request_limits != CallLimits()
