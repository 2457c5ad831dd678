"""Turns finished calls into `RequestRecord`s on disk, and keeps the live numbers of the progress display."""

import math
from array import array
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from loadgen.dialects.dialect import ParsedAnswer
from loadgen.http.response_reader import ClientCall
from loadgen.workloads.prompts.prompt import Prompt
from reports.run_schema import Phase, RequestRecord, Status, TokensSource

RECENT_TTFTS = 512
# Latencies that a worker sends its master per second, for display.
MAX_SENT_LATENCIES = 64
MAX_REASON_CHARACTERS = 100


@dataclass(frozen=True, slots=True)
class Times:
    """When a request was scheduled and dispatched (monotonic ns), and its wait at the in-flight limit."""

    intended_ns: int
    dispatch_ns: int
    limit_wait_s: float | None = None


def make_record(
    run_id: str,
    request_id: str,
    start_ns: int,
    phase: Phase,
    prompt: Prompt,
    times: Times,
    call: ClientCall,
    worker: int = 0,
) -> RequestRecord:
    """The record of one request; its times are ns since the run's start."""
    answer = call.answer
    first_ns = answer.event_ns[0] if answer.event_ns else None
    last_ns = answer.event_ns[-1] if answer.event_ns else None
    events = len(answer.event_ns)
    output_tokens, source = count_output(answer)

    def since_start(at_ns: int | None) -> int | None:
        return None if at_ns is None else at_ns - start_ns

    return RequestRecord(
        run_id=run_id,
        request_id=request_id,
        prompt_id=prompt.prompt_id,
        session_id=prompt.session_id,
        turn=prompt.turn,
        worker=worker,
        replica=call.replica,
        phase=phase,
        status=call.status,
        error_type=call.error_type,
        finish_reason=answer.finish_reason and answer.finish_reason[:MAX_REASON_CHARACTERS],
        adapter=prompt.adapter,
        images=prompt.num_images,
        constraint=call.constraint,
        validity=call.validity,
        http_status=call.http_status,
        t_intended_ns=since_start(times.intended_ns),
        t_dispatch_ns=since_start(times.dispatch_ns),
        t_sent_ns=since_start(call.sent_ns),
        t_headers_ns=since_start(call.headers_ns),
        t_first_ns=since_start(first_ns),
        t_first_read_ns=since_start(call.first_read_ns),
        t_first_answer_ns=since_start(answer.first_answer_ns),
        t_last_ns=since_start(last_ns),
        t_end_ns=since_start(call.end_ns),
        connect_s=call.connect_s,
        conn_reused=call.is_reused,
        limit_wait_s=times.limit_wait_s,
        planned_input_tokens=prompt.planned_input_tokens,
        planned_output_tokens=prompt.planned_output_tokens,
        requested_output_tokens=prompt.output_tokens,
        input_tokens=answer.input_tokens,
        cached_input_tokens=answer.cached_input_tokens,
        planned_cached_tokens=_planned_cached(prompt, answer),
        output_tokens=output_tokens,
        reasoning_tokens=answer.usage_reasoning_tokens,
        first_event_tokens=first_tokens(answer, output_tokens) if events else None,
        tokens_source=source,
        # The second count of a stream that has two: both are the server's and are equal unless an event was lost.
        client_output_tokens=answer.usage_output_tokens if source == TokensSource.SERVER_STREAM else None,
        srv_validation_s=answer.srv_validation_s,
        srv_queue_s=answer.srv_queue_s,
        srv_inference_s=answer.srv_inference_s,
        srv_time_per_token_s=answer.srv_time_per_token_s,
        events=events,
        coalesced_events=call.coalesced_events,
        coalesced_within_s=call.coalesced_within_ns / 1e9 if call.coalesced_events else None,
        read_late_max_s=call.read_late_ns / 1e9 if events else None,
        bytes_sent=call.bytes_sent,
        bytes_received=call.bytes_received,
        gap_ns=[later - earlier for earlier, later in zip(answer.event_ns, answer.event_ns[1:], strict=False)],
        event_tokens=answer.event_tokens if any(tokens != 1 for tokens in answer.event_tokens) else None,
    )


def _planned_cached(prompt: Prompt, answer: ParsedAnswer) -> int | None:
    """The planned cached tokens, scaled to the prompt's real length, which includes the chat template and real answers.

    The last token of a prompt is always computed.
    """
    if prompt.planned_cached_tokens is None or answer.input_tokens is None:
        return None
    scale = answer.input_tokens / (prompt.input_tokens or answer.input_tokens or 1)
    planned = max(prompt.planned_cached_tokens * scale, prompt.planned_cached_share * answer.input_tokens)
    return max(0, min(math.ceil(planned), answer.input_tokens - 1))


def count_output(answer: ParsedAnswer) -> tuple[int | None, TokensSource | None]:
    """Output tokens from the best available source."""
    if answer.counts_are_exact:
        return sum(answer.event_tokens), TokensSource.SERVER_STREAM
    if answer.usage_output_tokens is not None:
        return answer.usage_output_tokens, TokensSource.SERVER_USAGE
    if answer.event_ns:
        return sum(answer.event_tokens), TokensSource.EVENTS
    return None, None


def first_tokens(answer: ParsedAnswer, output_tokens: int | None) -> int:
    """Tokens of the first event. If only the total is known and exceeds the events, its share of the characters."""
    events = len(answer.event_ns)
    if answer.counts_are_exact or not output_tokens or output_tokens <= events or not answer.characters:
        return answer.event_tokens[0]
    share = round(output_tokens * answer.first_characters / answer.characters)
    return min(max(share, 1), output_tokens - events + 1)


@dataclass(slots=True)
class LiveNumbers:
    """Counts so far, the latest TTFTs of measured requests, and all TTFTs of the last second for the time series."""

    sent: int = 0
    completed: int = 0
    failed: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    completed_measured: int = 0
    recent_ttft_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_TTFTS))
    second_ttft_s: "array[float]" = field(default_factory=lambda: array("d"))
    second_measured_ttft_s: "array[float]" = field(default_factory=lambda: array("d"))
    second_tpot_s: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, record: RequestRecord) -> None:
        """Count a complete request and its latencies. Other requests are not added."""
        self.completed += 1
        ttft_s, tpot_s = ttft_of(record), tpot_of(record)
        is_measured = record.phase == Phase.MEASURE
        self.completed_measured += is_measured
        if ttft_s is not None:
            self.second_ttft_s.append(ttft_s)
            if is_measured:
                self.recent_ttft_s.append(ttft_s)
                self.second_measured_ttft_s.append(ttft_s)
        if tpot_s is not None:
            self.second_tpot_s.append(tpot_s)

    def clear_second(self) -> None:
        del self.second_ttft_s[:]
        del self.second_measured_ttft_s[:]
        del self.second_tpot_s[:]


class RowSink(Protocol):
    """Destination of rows: a file or the master."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Raises OSError if the row cannot be stored."""

    def close(self) -> None:
        """No more rows."""


class Recorder:
    """Stores finished records. `on_record` is called with each record after it was stored."""

    def __init__(self, writer: RowSink, on_record: Callable[[RequestRecord], None] | None = None) -> None:
        self._writer = writer
        self._on_record = on_record
        self.live = LiveNumbers()

    def add(self, record: RequestRecord) -> None:
        """Raises OSError if the record cannot be stored."""
        live = self.live
        live.statuses[record.status] += 1
        live.tokens_out += record.output_tokens or 0
        live.tokens_in += record.input_tokens or 0
        if record.status == Status.OK:
            live.add(record)
        elif record.status not in (Status.CANCELLED, Status.ABANDONED):
            live.failed += 1
        self._writer.write(record.to_json())
        if self._on_record is not None:
            self._on_record(record)


def ttft_of(record: RequestRecord) -> float | None:
    """`ttft_s` of one record, for display; reports compute their own."""
    if record.t_first_ns is None or record.t_sent_ns is None:
        return None
    return (record.t_first_ns - record.t_sent_ns) / 1e9


def tpot_of(record: RequestRecord) -> float | None:
    """`tpot_s` of one record, for display; reports compute their own."""
    tokens = (record.output_tokens or 0) - (record.first_event_tokens or 0)
    if tokens <= 0 or record.t_first_ns is None or record.t_last_ns is None:
        return None
    return (record.t_last_ns - record.t_first_ns) / tokens / 1e9


def quantile(values: "deque[float] | array[float]", fraction: float) -> float | None:
    """Nearest order statistic: for display only."""
    if not values:
        return None
    return sorted(values)[min(len(values) - 1, int(fraction * len(values)))]


def live_row(live: LiveNumbers, in_flight: int) -> dict[str, Any]:
    """Counts so far and quantiles of the latest TTFTs without the warm-up, for progress messages."""
    return {
        "in_flight": in_flight,
        "sent": live.sent,
        "completed": live.completed,
        "completed_measured": live.completed_measured,
        "failed": live.failed,
        "tokens_out": live.tokens_out,
        "ttft_p50_s": quantile(live.recent_ttft_s, 0.50),
        "ttft_p95_s": quantile(live.recent_ttft_s, 0.95),
    }


def latest(live: LiveNumbers) -> dict[str, Any]:
    """Some latencies of the last second; the master computes quantiles over all workers."""
    return {
        "ttfts_s": list(live.second_measured_ttft_s[-MAX_SENT_LATENCIES:]),
        "tpots_s": list(live.second_tpot_s[-MAX_SENT_LATENCIES:]),
    }
