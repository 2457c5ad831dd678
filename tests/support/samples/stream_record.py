"""The record of one streamed answer, with a small set of times."""

from reports.run_schema import RequestRecord

S = 1_000_000_000
MS = 1_000_000


def stream_record(start_s: float, first_s: float, gap_s: float, tokens: int, **more: object) -> RequestRecord:
    """A successful stream: due at `start_s`, sent 10 ms later, first token at `first_s`."""
    gaps = [round(gap_s * S)] * (tokens - 1)
    first = round(first_s * S)
    record = RequestRecord(
        run_id="r",
        request_id=f"q{start_s}",
        t_intended_ns=round(start_s * S),
        t_dispatch_ns=round(start_s * S) + 4 * MS,
        t_sent_ns=round(start_s * S) + 10 * MS,
        t_headers_ns=round(start_s * S) + 15 * MS,
        t_first_ns=first,
        t_first_answer_ns=first,
        t_last_ns=first + sum(gaps),
        t_end_ns=first + sum(gaps),
        gap_ns=gaps,
        events=tokens,
        input_tokens=100,
        output_tokens=tokens,
        requested_output_tokens=tokens,
        first_event_tokens=1,
        tokens_source="server_stream",
    )
    for name, value in more.items():
        setattr(record, name, value)
    return record
