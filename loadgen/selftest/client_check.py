"""Measures the errors of this machine's client against the reference timing server, under one load.

The reference time of an event is when the server wrote it to the socket, on the clock that both processes share.
Lateness of the server itself is therefore not an error of the client. Tokens are spread over time, or
those of all streams are sent at once, as by an engine after a step.
"""

import contextlib
import itertools
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loadgen.config.bench_config import BenchConfig
from loadgen.config.bench_settings import NO_SALT
from loadgen.errors import MeasurementError
from loadgen.runner import measure
from loadgen.selftest.reference_timing_server import timing_server
from loadgen.selftest.starvation import Stops, starved_generator
from loadgen.selftest.stream_times import TimingErrors, gaps_s, match_streams, mean, quantile
from loadgen.target.control import ControlClient
from loadgen.target.target import Target
from reports.metrics.summary import summarize
from reports.run_schema import RequestRecord
from reports.run_store import RunResult

FIRST_S, GAP_S = 0.05, 0.02
# Lengths differ; otherwise streams that start together would always end together.
MIN_TOKENS, MAX_TOKENS = 32, 96


@dataclass(frozen=True, slots=True)
class ClientAccuracy:
    """Accuracy of the client under one load. Errors are observed minus reference times, in milliseconds.

    `lost_events` were never counted. `event_lag` is the time from writing an event to its recorded arrival.
    `ttft_worst_error` is the 99th percentile of the absolute errors of single requests, `ttft_error_p99` the error of
    the 99th percentile. `read_ttft_error` is the error if the time of the read is taken for the arrival.
    `bounded_gaps_share` is the fraction of gaps inside one read, for which only a bound is known. With `sends_bursts`
    the server sent the tokens of all streams at once; with `is_starved` the generator had half of its time, in
    stops of up to `longest_stop_ms`. `reasons` are the findings of the run's verdict.
    """

    streams: int
    sends_bursts: bool
    is_starved: bool
    requests: int
    events: int
    events_per_s: float
    cpu_us_per_event: float
    ttft_error_mean_ms: float
    ttft_error_p50_ms: float
    ttft_error_p99_ms: float
    ttft_worst_error_ms: float
    read_ttft_error_mean_ms: float
    read_ttft_error_p99_ms: float
    gap_error_p50_ms: float
    gap_error_p99_ms: float
    gap_mean_ratio: float
    event_lag_min_ms: float
    event_lag_p50_ms: float
    coalesced_share: float
    bounded_gaps_share: float
    lost_events: int
    server_late_p99_ms: float
    is_accurate: bool
    verdict: str
    reasons: tuple[str, ...]
    longest_stop_ms: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.streams} streams{' in bursts' if self.sends_bursts else ''}"


def measure_level(
    streams: int,
    seconds: float,
    first_s: float = FIRST_S,
    gap_s: float = GAP_S,
    *,
    sends_bursts: bool = False,
    is_starved: bool = False,
) -> ClientAccuracy:
    """Measure one load of concurrent streams. Raises MeasurementError if no stream was measured."""
    with timing_server(first_s, gap_s, sends_bursts=sends_bursts) as url, tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.txt"
        one_s = first_s + MAX_TOKENS * gap_s
        count = round(streams * (4 + (seconds + 2 + one_s) / (first_s + MIN_TOKENS * gap_s)))
        prompts.write_text("\n".join(f"request {number}" for number in range(count)))
        config = BenchConfig(
            concurrency=streams,
            duration=seconds,
            warmup=1.0,
            drain=one_s + 5,
            workload="prompts",
            prompts_file=str(prompts),
            salt=NO_SALT,
            output_tokens=f"uniform:{MIN_TOKENS},{MAX_TOKENS}",
            unhealthy_probes=0,
        )
        with starved_generator() if is_starved else contextlib.nullcontext(Stops()) as stops:
            result = measure(config, Target(url), Path(folder) / "run")
        control = ControlClient(url)
        status, body = control.get("/times")
        control.close()
        if status != 200:
            raise MeasurementError(f"the reference timing server answers {status}")
        found = compare(streams, result, json.loads(body), gap_s, sends_bursts=sends_bursts, is_starved=is_starved)
        return replace(found, longest_stop_ms=1e3 * stops.longest_s)


def compare(
    streams: int,
    result: RunResult,
    reference: Sequence[dict[str, Any]],
    gap_s: float,
    *,
    sends_bursts: bool = False,
    is_starved: bool = False,
) -> ClientAccuracy:
    """Compare observed with reference times, over the requests of the measurement."""
    pairs = list(match_streams(result, reference))
    if not pairs:
        raise MeasurementError(f"none of {streams} streams was measured; this machine is too slow")
    ttft = TimingErrors(
        [pair.ttft_s(pair.observed_ns) for pair in pairs], [pair.ttft_s(pair.reference_ns) for pair in pairs]
    )
    read_ttft = TimingErrors([pair.ttft_s([pair.first_read_ns]) for pair in pairs], ttft.reference_s)
    gaps = TimingErrors(
        [gap for pair in pairs for gap in gaps_s(pair.observed_ns)],
        [gap for pair in pairs for gap in gaps_s(pair.reference_ns)],
    )
    lags_ms = [
        (seen - true) / 1e6 for pair in pairs for seen, true in zip(pair.observed_ns, pair.reference_ns, strict=False)
    ]
    late_s = [late for pair in pairs for late in pair.late_s(gap_s)]
    lost = sum(pair.lost for pair in pairs)
    verdict = summarize(result)["verdict"]
    return ClientAccuracy(
        streams=streams,
        sends_bursts=sends_bursts,
        is_starved=is_starved,
        requests=len(pairs),
        events=sum(len(pair.reference_ns) for pair in pairs),
        events_per_s=sum(each.events for each in result.records) / max(row["t_s"] for row in result.timeseries),
        cpu_us_per_event=1e6 * cpu_s_per_event(result.timeseries),
        ttft_error_mean_ms=ttft.mean_error_ms,
        ttft_error_p50_ms=ttft.error_ms(0.5),
        ttft_error_p99_ms=ttft.error_ms(0.99),
        ttft_worst_error_ms=1e3 * quantile([abs(error) for error in ttft.errors_s], 0.99),
        read_ttft_error_mean_ms=read_ttft.mean_error_ms,
        read_ttft_error_p99_ms=read_ttft.error_ms(0.99),
        gap_error_p50_ms=gaps.error_ms(0.5),
        gap_error_p99_ms=gaps.error_ms(0.99),
        gap_mean_ratio=mean(gaps.observed_s) / mean(gaps.reference_s),
        event_lag_min_ms=min(lags_ms),
        event_lag_p50_ms=quantile(lags_ms, 0.5),
        coalesced_share=coalesced_share(result.records),
        bounded_gaps_share=sum(pair.record.coalesced_events for pair in pairs) / max(1, len(gaps.observed_s)),
        lost_events=lost,
        server_late_p99_ms=1e3 * quantile(late_s, 0.99),
        is_accurate=lost == 0 and ttft.is_accurate and gaps.is_accurate,
        verdict=str(verdict["status"]),
        reasons=tuple(str(reason["check"]) for reason in verdict["reasons"]),
    )


def cpu_s_per_event(seconds: Sequence[dict[str, Any]]) -> float:
    """CPU time per event, without the first and last second if there are others."""
    inner = list(itertools.pairwise(seconds[:-1])) or list(
        itertools.pairwise(({"t_s": 0.0, "tokens_out": 0}, *seconds))
    )
    cpu_s = sum(row["cpu_share"] * (row["t_s"] - before["t_s"]) for before, row in inner)
    return float(cpu_s / max(1, inner[-1][1]["tokens_out"] - inner[0][0]["tokens_out"]))


def coalesced_share(records: Sequence[RequestRecord]) -> float:
    """Fraction of events that shared a read with another one."""
    return sum(record.coalesced_events for record in records) / max(1, sum(record.events for record in records))
