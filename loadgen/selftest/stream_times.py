"""The times of a stream as the client recorded them, compared with those of the reference timing server."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from reports.run_schema import RequestRecord, Status
from reports.run_store import RunResult

# Accurate means within 1 ms plus 2 % of the reference time.
TOLERANCE_S, TOLERANCE_FRACTION = 0.001, 0.02
FRACTIONS = (0.5, 0.99)


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


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def quantile(values: Sequence[float], fraction: float) -> float:
    """Linear interpolation between order statistics."""
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
