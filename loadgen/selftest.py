"""This machine's client against the truth server: the error of its times, and how many events a second it bears.

The truth of a moment is when the server handed the bytes to its socket, on the clock both processes share, so a server
that was late itself is no error of the client's.
"""

import itertools
import json
import math
import tempfile
from collections.abc import Sequence
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
from reports.results import RequestRecord, RunResult, Status

STREAMS = (1, 16, 64, 256)
# Beyond the last level that passes, loads grow by this factor until one does not.
GROWTH = 1.5
HALVINGS = 2
MOST_STREAMS = 2_000
FIRST_S, GAP_S, TOKENS = 0.05, 0.02, 64
# "Within 1 ms plus 2 % of the truth."
ALLOWED_S, ALLOWED_SHARE = 0.001, 0.02


@dataclass(frozen=True, slots=True)
class Level:
    """What one load showed. Errors are seen minus true, in milliseconds; `lost_events` are those never counted."""

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
    coalesced_share: float
    lost_events: int
    server_late_p99_ms: float
    is_accurate: bool


def measure_level(streams: int, seconds: float, first_s: float = FIRST_S, gap_s: float = GAP_S) -> Level:
    """One load of so many streams at once. Raises MeasurementError when nothing was measured."""
    with truth_server(first_s, gap_s) as url, tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.txt"
        one_s = first_s + TOKENS * gap_s
        count = max(4 * streams, round(streams * (seconds + 2) / one_s * 2))
        prompts.write_text("\n".join(f"request {number}" for number in range(count)))
        config = BenchConfig(
            concurrency=streams,
            duration=seconds,
            warmup=1.0,
            drain=one_s + 5,
            workload="prompts",
            prompts_file=str(prompts),
            output_tokens=str(TOKENS),
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
    written = {row["inputs"]: row for row in truth}
    zero_ns = round(result.manifest.clock["monotonic_at_start_s"] * 1e9)
    seen_ttft: list[float] = []
    true_ttft: list[float] = []
    seen_gaps: list[float] = []
    true_gaps: list[float] = []
    late_s: list[float] = []
    lost = measured = events = 0
    for record in result.records:
        row = written.get(f"request {record.prompt_id.rsplit('-', 1)[1]}")
        if record.phase != "measure" or record.status != Status.OK or row is None:
            continue
        measured += 1
        true_ns = [at_ns - zero_ns for at_ns in row["written_ns"]]
        events += len(true_ns)
        lost += abs(len(true_ns) - (record.output_tokens or 0)) + abs(len(true_ns) - record.events)
        assert record.t_first_ns is not None, "an ok stream has a first event"
        assert record.t_sent_ns is not None, "an ok stream was sent"
        seen_ttft.append((record.t_first_ns - record.t_sent_ns) / 1e9)
        true_ttft.append((true_ns[0] - record.t_sent_ns) / 1e9)
        seen_gaps += [gap / 1e9 for gap in record.gap_ns]
        true_gaps += [(later - earlier) / 1e9 for earlier, later in itertools.pairwise(true_ns)]
        due_ns = row["arrived_ns"] - zero_ns + round(planned_s[0] * 1e9)
        late_s += [(at_ns - due_ns) / 1e9 - index * planned_s[1] for index, at_ns in enumerate(true_ns)]
    if not measured:
        raise MeasurementError(f"no stream of {streams} was measured; the machine is too slow for it")
    pairs = [(seen_ttft, true_ttft, share) for share in (0.5, 0.99)] + [
        (seen_gaps, true_gaps, share) for share in (0.5, 0.99)
    ]
    found = [(quantile(seen, share), quantile(true, share)) for seen, true, share in pairs]
    errors_ms = [1e3 * (seen - true) for seen, true in found]
    elapsed_s = max(row["t_s"] for row in result.timeseries)
    rate = sum(each.events for each in result.records) / elapsed_s
    return Level(
        streams=streams,
        requests=measured,
        events=events,
        events_per_s=rate,
        cpu_us_per_event=1e6 * cpu_s_per_event(result.timeseries),
        ttft_error_mean_ms=1e3 * (mean(seen_ttft) - mean(true_ttft)),
        ttft_error_p50_ms=errors_ms[0],
        ttft_error_p99_ms=errors_ms[1],
        gap_error_p50_ms=errors_ms[2],
        gap_error_p99_ms=errors_ms[3],
        gap_mean_ratio=mean(seen_gaps) / mean(true_gaps),
        coalesced_share=coalesced_share(result.records),
        lost_events=lost,
        server_late_p99_ms=1e3 * quantile(late_s, 0.99),
        is_accurate=lost == 0 and all(abs(seen - true) <= ALLOWED_S + ALLOWED_SHARE * true for seen, true in found),
    )


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
    word = "true" if level.is_accurate else "NOT true"
    ttft = f"TTFT error p50 {level.ttft_error_p50_ms:+.2f} p99 {level.ttft_error_p99_ms:+.2f} ms"
    gap = f"gap error p50 {level.gap_error_p50_ms:+.2f} p99 {level.gap_error_p99_ms:+.2f} ms"
    cost = f"{level.cpu_us_per_event:.0f} us of CPU an event"
    rate = f"{level.streams:>5} streams {level.events_per_s:>7.0f} events/s"
    return "  ".join((rate, ttft, gap, f"{level.lost_events} events lost", cost, word))
