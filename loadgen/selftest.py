"""This machine's client against the truth server: the error of its times, and how many events a second it bears.

The truth of a moment is when the server handed the bytes to its socket, on the clock both processes share, so a server
that was late itself is no error of the client's.
"""

import itertools
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadgen.config import BenchConfig
from loadgen.control import ControlClient
from loadgen.errors import MeasurementError
from loadgen.progress import Progress
from loadgen.runner import run
from loadgen.target import Target
from loadgen.truth_server import truth_server
from reports.records import RequestRecord, Status
from reports.results import RunResult
from reports.summary import summarize

STREAMS = (1, 16, 64, 256)
# Beyond the last level that passes, loads grow by this factor until one does not.
GROWTH = 1.5
HALVINGS = 2
MOST_STREAMS = 2_000
FIRST_S, GAP_S = 0.05, 0.02
# Lengths differ, or streams that began together would end together for ever, as they do on no real server.
LEAST_TOKENS, MOST_TOKENS = 32, 96
# "Within 1 ms plus 2 % of the truth."
ALLOWED_S, ALLOWED_SHARE = 0.001, 0.02
SHARES = (0.5, 0.99)


@dataclass(frozen=True, slots=True)
class Level:
    """What one load showed. Errors are seen minus true, in milliseconds; `lost_events` are those never counted.

    `event_lag` is from the moment an event was written to the moment it is recorded to have come.
    """

    streams: int
    requests: int
    events: int
    events_per_s: float
    cpu_us_per_event: float
    ttft_error_mean_ms: float
    ttft_error_p50_ms: float
    ttft_error_p99_ms: float
    gap_error_p50_ms: float
    gap_error_p99_ms: float
    gap_mean_ratio: float
    event_lag_min_ms: float
    event_lag_p50_ms: float
    coalesced_share: float
    lost_events: int
    server_late_p99_ms: float
    is_accurate: bool
    verdict: str


def measure_level(streams: int, seconds: float, first_s: float = FIRST_S, gap_s: float = GAP_S) -> Level:
    """One load of so many streams at once. Raises MeasurementError when nothing was measured."""
    with truth_server(first_s, gap_s) as url, tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.txt"
        one_s = first_s + MOST_TOKENS * gap_s
        count = round(streams * (4 + (seconds + 2) / (first_s + LEAST_TOKENS * gap_s)))
        prompts.write_text("\n".join(f"request {number}" for number in range(count)))
        config = BenchConfig(
            concurrency=streams,
            duration=seconds,
            warmup=1.0,
            drain=one_s + 5,
            workload="prompts",
            prompts_file=str(prompts),
            output_tokens=f"uniform:{LEAST_TOKENS},{MOST_TOKENS}",
            unhealthy_probes=0,
        )
        result = run(config, Target(url), Path(folder) / "run")
        control = ControlClient(url)
        status, body = control.get("/truth")
        control.close()
        if status != 200:
            raise MeasurementError(f"the truth server answers {status}")
        return compare(streams, result, json.loads(body), (first_s, gap_s))


def compare(streams: int, result: RunResult, truth: Sequence[dict[str, Any]], planned_s: tuple[float, float]) -> Level:
    """Seen against true, over the requests of the measurement."""
    pairs = list(paired(result, truth))
    if not pairs:
        raise MeasurementError(f"no stream of {streams} was measured; the machine is too slow for it")
    seen_ttft = [pair.ttft_s(pair.seen_ns) for pair in pairs]
    true_ttft = [pair.ttft_s(pair.true_ns) for pair in pairs]
    seen_gaps = [gap_s for pair in pairs for gap_s in gaps_s(pair.seen_ns)]
    true_gaps = [gap_s for pair in pairs for gap_s in gaps_s(pair.true_ns)]
    wanted = [
        (seen, true, share) for seen, true in ((seen_ttft, true_ttft), (seen_gaps, true_gaps)) for share in SHARES
    ]
    found = [(quantile(seen, share), quantile(true, share)) for seen, true, share in wanted]
    errors_ms = [1e3 * (seen - true) for seen, true in found]
    lags_ms = [(seen - true) / 1e6 for pair in pairs for seen, true in zip(pair.seen_ns, pair.true_ns, strict=False)]
    late_s = [late for pair in pairs for late in pair.late_s(*planned_s)]
    lost = sum(pair.lost for pair in pairs)
    return Level(
        streams=streams,
        requests=len(pairs),
        events=sum(len(pair.true_ns) for pair in pairs),
        events_per_s=sum(each.events for each in result.records) / max(row["t_s"] for row in result.timeseries),
        cpu_us_per_event=1e6 * cpu_s_per_event(result.timeseries),
        ttft_error_mean_ms=1e3 * (mean(seen_ttft) - mean(true_ttft)),
        ttft_error_p50_ms=errors_ms[0],
        ttft_error_p99_ms=errors_ms[1],
        gap_error_p50_ms=errors_ms[2],
        gap_error_p99_ms=errors_ms[3],
        gap_mean_ratio=mean(seen_gaps) / mean(true_gaps),
        event_lag_min_ms=min(lags_ms),
        event_lag_p50_ms=quantile(lags_ms, 0.5),
        coalesced_share=coalesced_share(result.records),
        lost_events=lost,
        server_late_p99_ms=1e3 * quantile(late_s, 0.99),
        is_accurate=lost == 0 and all(abs(seen - true) <= ALLOWED_S + ALLOWED_SHARE * true for seen, true in found),
        verdict=str(summarize(result)["verdict"]["status"]),
    )


@dataclass(frozen=True, slots=True)
class Pair:
    """One stream as the client saw it and as the server wrote it; ns since the start of the run."""

    record: RequestRecord
    arrived_ns: int
    seen_ns: list[int]
    true_ns: list[int]

    def ttft_s(self, events_ns: Sequence[int]) -> float:
        assert self.record.t_sent_ns is not None, "an ok stream was sent"
        return (events_ns[0] - self.record.t_sent_ns) / 1e9

    @property
    def lost(self) -> int:
        """Events and tokens that were never counted, or counted and never written."""
        written = len(self.true_ns)
        return abs(written - (self.record.output_tokens or 0)) + abs(written - len(self.seen_ns))

    def late_s(self, first_s: float, gap_s: float) -> Iterator[float]:
        """How late the server itself was with each token."""
        for index, at_ns in enumerate(self.true_ns):
            yield (at_ns - self.arrived_ns) / 1e9 - first_s - index * gap_s


def paired(result: RunResult, truth: Sequence[dict[str, Any]]) -> Iterator[Pair]:
    """The complete streams of the measurement, each with its truth."""
    written = {row["inputs"]: row for row in truth}
    zero_ns = round(result.manifest.clock["monotonic_at_start_s"] * 1e9)
    for record in result.records:
        row = written.get(f"request {record.prompt_id.rsplit('-', 1)[1]}")
        if record.phase != "measure" or record.status != Status.OK or row is None:
            continue
        assert record.t_first_ns is not None, "an ok stream has a first event"
        seen_ns = list(itertools.accumulate(record.gap_ns, initial=record.t_first_ns))
        yield Pair(record, row["arrived_ns"] - zero_ns, seen_ns, [at_ns - zero_ns for at_ns in row["written_ns"]])


def gaps_s(events_ns: Sequence[int]) -> Iterator[float]:
    return ((later - earlier) / 1e9 for earlier, later in itertools.pairwise(events_ns))


def cpu_s_per_event(seconds: Sequence[dict[str, Any]]) -> float:
    """Processor time over events, without the seconds that hold the start and the end where others are left."""
    inner = list(itertools.pairwise(seconds[:-1])) or list(
        itertools.pairwise(({"t_s": 0.0, "tokens_out": 0}, *seconds))
    )
    cpu_s = sum(row["cpu_share"] * (row["t_s"] - before["t_s"]) for before, row in inner)
    return float(cpu_s / max(1, inner[-1][1]["tokens_out"] - inner[0][0]["tokens_out"]))


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def quantile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def coalesced_share(records: Sequence[RequestRecord]) -> float:
    """Events that shared a read with another one, of all."""
    return sum(record.coalesced_events for record in records) / max(1, sum(record.events for record in records))


def measure(streams: Sequence[int], seconds: float, progress: Progress, *, is_growing: bool = True) -> list[Level]:
    """Every load asked for; then, to find the capacity, larger ones and some between the last true one and the next."""
    levels: list[Level] = []

    def add(count: int) -> None:
        levels.append(measure_level(count, seconds))
        progress.say(render(levels[-1]))

    for count in streams:
        add(count)
    while is_growing and levels[-1].is_accurate and levels[-1].streams * GROWTH <= MOST_STREAMS:
        add(round(levels[-1].streams * GROWTH))
    for _ in range(HALVINGS if is_growing else 0):
        low = max((level.streams for level in levels if level.is_accurate), default=0)
        high = min((level.streams for level in levels if level.streams > low), default=low)
        if not low or high - low < 2:
            break
        add(round(math.sqrt(low * high)))
    return levels


def capacity_of(levels: Sequence[Level]) -> float | None:
    """The highest rate of events with true times; None where no load had them."""
    return max((level.events_per_s for level in levels if level.is_accurate), default=None)


def render(level: Level) -> str:
    word = f"{'true' if level.is_accurate else 'NOT true'}, {level.verdict}"
    ttft = f"TTFT error p50 {level.ttft_error_p50_ms:+.2f} p99 {level.ttft_error_p99_ms:+.2f} ms"
    gap = f"gap error p50 {level.gap_error_p50_ms:+.2f} p99 {level.gap_error_p99_ms:+.2f} ms"
    cost = f"{level.cpu_us_per_event:.0f} us of CPU an event"
    rate = f"{level.streams:>5} streams {level.events_per_s:>7.0f} events/s"
    return "  ".join((rate, ttft, gap, f"{level.lost_events} events lost", cost, word))
