"""Measures the client at growing loads, and finds the highest with accurate times."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.errors import MeasurementError
from loadgen.progress import ProgressDisplay
from loadgen.selftest.client_check import ClientAccuracy, measure_level

STREAMS = (1, 16, 64, 256)
# Loads grow by this factor until one is not accurate.
GROWTH = 1.5
HALVINGS = 2
MAX_STREAMS = 2_000


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
        load = f"{best.events_per_s:,.0f} events/s ({best.name})"
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
        progress.show(headline(levels[-1]))

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


def headline(level: ClientAccuracy) -> str:
    """The load, its rate, and whether its times are accurate."""
    word = f"{'accurate' if level.is_accurate else 'INACCURATE'}, {_verdict(level)}"
    streams = f"{level.streams:>5} streams {'in bursts' if level.sends_bursts else 'spread   '}"
    return f"{streams}  {level.events_per_s:>7,.0f} events/s  {word}"


def render(level: ClientAccuracy) -> str:
    """The headline, then the errors in ms and the cost, in lines of 80 columns."""
    ttft = f"TTFT error mean {level.ttft_error_mean_ms:+.2f}, p99 {level.ttft_error_p99_ms:+.2f} ms"
    worst = f"99 % of requests within {level.ttft_worst_error_ms:.2f} ms"
    read = f"read times: mean {level.read_ttft_error_mean_ms:+.2f}, p99 {level.read_ttft_error_p99_ms:+.2f} ms"
    gap = f"gap error p50 {level.gap_error_p50_ms:+.2f}, p99 {level.gap_error_p99_ms:+.2f} ms"
    bounded = f"{100 * level.bounded_gaps_share:.1f} % of the gaps inside one read"
    lost = f"{level.lost_events} events lost"
    cost = f"{level.cpu_us_per_event:.0f} µs of CPU per event"
    rows = (f"{ttft}; {worst}", f"{read}; {gap}", f"{bounded}; {lost}; {cost}")
    return "\n".join((headline(level), *(f"    {row}" for row in rows)))
