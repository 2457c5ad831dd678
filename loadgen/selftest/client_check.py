"""Measures this machine's client against the reference timing server: timing errors and the highest accurate rate.

The reference time of an event is when the server wrote it to the socket, on the clock that both processes share.
Lateness of the server itself is therefore not an error of the client. Tokens are spread over time, or
those of all streams are sent at once, as by an engine after a step.
"""

import contextlib
import itertools
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loadgen.config.bench_config import BenchConfig
from loadgen.config.bench_settings import NO_SALT
from loadgen.errors import MeasurementError
from loadgen.progress import ProgressDisplay
from loadgen.runner import measure
from loadgen.selftest.reference_timing_server import timing_server
from loadgen.selftest.starvation import Stops, starved_generator
from loadgen.target.control import ControlClient
from loadgen.target.target import Target
from reports.metrics.summary import summarize
from reports.run_schema import RequestRecord, Status
from reports.run_store import RunResult

STREAMS = (1, 16, 64, 256)
# Loads grow by this factor until one is not accurate.
GROWTH = 1.5
HALVINGS = 2
MAX_STREAMS = 2_000
FIRST_S, GAP_S = 0.05, 0.02
# Lengths differ; otherwise streams that start together would always end together.
MIN_TOKENS, MAX_TOKENS = 32, 96
# Accurate means within 1 ms plus 2 % of the reference time.
TOLERANCE_S, TOLERANCE_FRACTION = 0.001, 0.02
FRACTIONS = (0.5, 0.99)


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


@dataclass(frozen=True, slots=True)
class TimingErrors:
    """The client's times against those of the reference server, in seconds."""

    observed_s: Sequence[float]
    reference_s: Sequence[float]

    @property
    def errors_s(self) -> list[float]:
        """The error of each time; both sides have the same times in the same order."""
        return [seen - true for seen, true in zip(self.observed_s, self.reference_s, strict=True)]

    @property
    def mean_error_ms(self) -> float:
        return 1e3 * (mean(self.observed_s) - mean(self.reference_s))

    def error_ms(self, fraction: float) -> float:
        """The error of a quantile."""
        return 1e3 * (quantile(self.observed_s, fraction) - quantile(self.reference_s, fraction))

    @property
    def is_accurate(self) -> bool:
        """Whether the quantiles `FRACTIONS` are within the tolerance."""
        return all(
            abs(self.error_ms(fraction)) / 1e3
            <= TOLERANCE_S + TOLERANCE_FRACTION * quantile(self.reference_s, fraction)
            for fraction in FRACTIONS
        )


@dataclass(frozen=True, slots=True)
class ObservedStream:
    """One stream as the client observed it and as the server wrote it; ns since the start of the run."""

    record: RequestRecord
    due_ns: int
    observed_ns: list[int]
    reference_ns: list[int]

    def ttft_s(self, events_ns: Sequence[int]) -> float:
        assert self.record.t_sent_ns is not None, "an ok stream was sent"
        return (events_ns[0] - self.record.t_sent_ns) / 1e9

    @property
    def first_read_ns(self) -> int:
        """When the first event was read."""
        return self.observed_ns[0] if self.record.t_first_read_ns is None else self.record.t_first_read_ns

    @property
    def lost(self) -> int:
        """Events and tokens that were written but not counted, or counted but not written."""
        written = len(self.reference_ns)
        return abs(written - (self.record.output_tokens or 0)) + abs(written - len(self.observed_ns))

    def late_s(self, gap_s: float) -> Iterator[float]:
        """The server's own lateness with each token, in seconds."""
        for index, at_ns in enumerate(self.reference_ns):
            yield (at_ns - self.due_ns) / 1e9 - index * gap_s


def match_streams(result: RunResult, reference: Sequence[dict[str, Any]]) -> Iterator[ObservedStream]:
    """The complete streams of the measurement, each with its reference times."""
    written = {row["inputs"]: row for row in reference}
    zero_ns = round(result.manifest.clock["monotonic_at_start_s"] * 1e9)
    for record in result.records:
        row = written.get(f"request {record.prompt_id.rsplit('-', 1)[1]}")
        if record.phase != "measure" or record.status != Status.OK or row is None:
            continue
        assert record.t_first_ns is not None, "an ok stream has a first event"
        observed_ns = list(itertools.accumulate(record.gap_ns, initial=record.t_first_ns))
        yield ObservedStream(
            record, row["due_ns"] - zero_ns, observed_ns, [at_ns - zero_ns for at_ns in row["written_ns"]]
        )


def gaps_s(events_ns: Sequence[int]) -> Iterator[float]:
    return ((later - earlier) / 1e9 for earlier, later in itertools.pairwise(events_ns))


def cpu_s_per_event(seconds: Sequence[dict[str, Any]]) -> float:
    """CPU time per event, without the first and last second if there are others."""
    inner = list(itertools.pairwise(seconds[:-1])) or list(
        itertools.pairwise(({"t_s": 0.0, "tokens_out": 0}, *seconds))
    )
    cpu_s = sum(row["cpu_share"] * (row["t_s"] - before["t_s"]) for before, row in inner)
    return float(cpu_s / max(1, inner[-1][1]["tokens_out"] - inner[0][0]["tokens_out"]))


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def quantile(values: Sequence[float], fraction: float) -> float:
    """Linear interpolation between order statistics."""
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def coalesced_share(records: Sequence[RequestRecord]) -> float:
    """Fraction of events that shared a read with another one."""
    return sum(record.coalesced_events for record in records) / max(1, sum(record.events for record in records))


@dataclass(frozen=True, slots=True)
class SelfTest:
    """The measured loads, and why larger ones were not measured: None if the search ended by itself."""

    levels: Sequence[ClientAccuracy]
    failure: str | None = None

    @property
    def capacity(self) -> float | None:
        """The highest event rate with accurate times, below the first load without; None if no load was accurate."""
        best = self._largest_accurate()
        return None if best is None else best.events_per_s

    def conclusion(self) -> str:
        """Up to which load the client is accurate, how accurate it is there, and what ended the search."""
        best, wrong = self._largest_accurate(), self._smallest_inaccurate()
        ends = [] if wrong is None else [f"{wrong.name} are not accurate ({_verdict(wrong)})"]
        ends += [] if self.failure is None else [self.failure]
        if best is None:
            return f"no load was timed accurately: {'; '.join(ends) or 'none was measured'}"
        error = f"TTFT error mean {best.ttft_error_mean_ms:+.2f} p99 {best.ttft_error_p99_ms:+.2f} ms"
        starved = ", with half of the processor time" if best.is_starved else ""
        starved += f" in turns of up to {best.longest_stop_ms:.0f} ms" if best.is_starved else ""
        read = f"of read times {best.read_ttft_error_mean_ms:+.2f} and {best.read_ttft_error_p99_ms:+.2f}"
        load = f"{best.events_per_s:.0f} events/s ({best.name})"
        end = "; ".join(ends) or "no larger load was measured"
        return f"accurate up to {load}{starved}: {error} ({read}); {end}"

    def _largest_accurate(self) -> ClientAccuracy | None:
        wrong = self._smallest_inaccurate()
        fewer = [level for level in self.levels if wrong is None or level.streams < wrong.streams]
        return max(fewer, key=lambda level: level.events_per_s, default=None)

    def _smallest_inaccurate(self) -> ClientAccuracy | None:
        wrong = [level for level in self.levels if not level.is_accurate]
        return min(wrong, key=lambda level: level.streams, default=None)


def _verdict(level: ClientAccuracy) -> str:
    """`degraded: starved`; of a starved load with the longest stop."""
    stopped = f", stopped for up to {level.longest_stop_ms:.0f} ms" if level.is_starved else ""
    return f"{': '.join((level.verdict, *filter(None, [', '.join(level.reasons)])))}{stopped}"


def measure_loads(
    streams: Sequence[int],
    seconds: float,
    progress: ProgressDisplay,
    *,
    is_growing: bool = True,
    is_starved: bool = False,
) -> SelfTest:
    """Measure the given loads with tokens spread over time and in bursts.

    To find the capacity, then measure larger ones in bursts, then some between accurate and inaccurate. A load that
    cannot be measured ends the search.
    """
    levels: list[ClientAccuracy] = []

    def add(count: int, *, sends_bursts: bool = True) -> None:
        try:
            levels.append(measure_level(count, seconds, sends_bursts=sends_bursts, is_starved=is_starved))
        except (MeasurementError, OSError) as error:
            raise _NotMeasuredError(f"{count} streams could not be measured: {error}") from error
        progress.show(render(levels[-1]))

    try:
        for count in streams:
            add(count, sends_bursts=False)
            add(count)
        while is_growing and levels[-1].is_accurate and levels[-1].streams * GROWTH <= MAX_STREAMS:
            add(round(levels[-1].streams * GROWTH))
        for _ in range(HALVINGS if is_growing else 0):
            low = max((level.streams for level in levels if level.is_accurate), default=0)
            high = min((level.streams for level in levels if level.streams > low), default=low)
            if not low or high - low < 2:
                break
            add(round(math.sqrt(low * high)))
    except _NotMeasuredError as error:
        return SelfTest(levels, str(error))
    return SelfTest(levels)


class _NotMeasuredError(Exception):
    """A load that could not be measured."""


def render(level: ClientAccuracy) -> str:
    word = f"{'accurate' if level.is_accurate else 'INACCURATE'}, {_verdict(level)}"
    ttft = f"TTFT error mean {level.ttft_error_mean_ms:+.2f} p99 {level.ttft_error_p99_ms:+.2f} ms"
    worst = f"99 % of requests within {level.ttft_worst_error_ms:.2f}"
    read = f"{worst}  (of read times {level.read_ttft_error_mean_ms:+.2f}, {level.read_ttft_error_p99_ms:+.2f})"
    bounded = f"{level.bounded_gaps_share:.1%} of the gaps inside one read"
    gap = f"gap error p50 {level.gap_error_p50_ms:+.2f} p99 {level.gap_error_p99_ms:+.2f} ms"
    cost = f"{level.cpu_us_per_event:.0f} us of CPU per event"
    streams = f"{level.streams:>5} streams {'in bursts' if level.sends_bursts else 'spread   '}"
    rate = f"{level.events_per_s:>7.0f} events/s"
    lost = f"{level.lost_events} events lost"
    return "  ".join((streams, rate, f"{ttft} {read}", gap, bounded, lost, cost, word))
