"""Results of a benchmark: every time, statistics by step and batch size, tables as text, and JSON."""

import json
import math
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from reference_server.benchmark.steps import BatchTimes

SCHEMA = 1
PACKAGES = ("tgi-bench", "torch", "transformers")
CONFIDENCE = 0.95

Measure = Callable[[BatchTimes], float]

LATENCIES: Mapping[str, Measure] = {
    "Prefill": lambda batch: batch.prefill_s * 1e3,
    "Decode (token)": lambda batch: batch.decode_s / batch.decode_steps * 1e3,
    "Decode (total)": lambda batch: batch.decode_s * 1e3,
}
"""In ms, by TGI's names of the steps. A decode step with accepted drafts generates several tokens of a request."""

THROUGHPUTS: Mapping[str, Measure] = {
    "Prefill": lambda batch: batch.size / batch.prefill_s,
    "Prefill (prompt)": lambda batch: batch.prompt_tokens / batch.prefill_s,
    "Decode": lambda batch: batch.decode_tokens / batch.decode_s,
}
"""In tokens/s: generated tokens, as in TGI, and the tokens of the prompts."""


@dataclass(frozen=True, slots=True)
class StepSummary:
    """Statistics of one step at one batch size. A percentile needs a run above it."""

    step: str
    batch_size: int
    runs: int
    average: float
    half_interval: float | None
    lowest: float
    highest: float
    p50: float
    p90: float | None
    p99: float | None

    @classmethod
    def of(cls, step: str, batch_size: int, values: Sequence[float]) -> "StepSummary":
        """half_interval: of the 95 % interval of the average, from the runs as independent values; two are needed."""
        return cls(
            step=step,
            batch_size=batch_size,
            runs=len(values),
            average=statistics.fmean(values),
            half_interval=_half_interval(values),
            lowest=min(values),
            highest=max(values),
            p50=statistics.median(values),
            p90=_percentile(values, 0.9),
            p99=_percentile(values, 0.99),
        )


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """The timed batches by their size, and the settings, model server and software that they belong to."""

    model: str
    settings: Mapping[str, Any]
    shard: Mapping[str, Any]
    batches: Mapping[int, Sequence[BatchTimes]]
    versions: Mapping[str, str] = field(default_factory=lambda: installed_versions())

    def latencies(self) -> list[StepSummary]:
        """Milliseconds, by step and batch size."""
        return list(self._summaries(LATENCIES))

    def throughputs(self) -> list[StepSummary]:
        """Tokens per second, by step and batch size."""
        return list(self._summaries(THROUGHPUTS))

    def _summaries(self, measures: Mapping[str, Measure]) -> Iterator[StepSummary]:
        for step, measure in measures.items():
            for size, batches in self.batches.items():
                yield StepSummary.of(step, size, [measure(each) for each in batches])

    def write_json(self, path: Path) -> None:
        """Every time, and the statistics."""
        content = {
            "schema": SCHEMA,
            "model": self.model,
            "settings": dict(self.settings),
            "shard": dict(self.shard),
            "versions": dict(self.versions),
            "latency_ms": [asdict(each) for each in self.latencies()],
            "tokens_per_s": [asdict(each) for each in self.throughputs()],
            "batches": [asdict(each) for batches in self.batches.values() for each in batches],
        }
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def render(self) -> str:
        """The tables of the terminal, in Markdown as TGI's."""
        settings = [(name.replace("_", " ").capitalize(), str(value)) for name, value in self.settings.items()]
        head = ("Step", "Batch", "Average", "Lowest", "Highest")
        return "\n\n".join(
            (
                table(("Parameter", "Value"), [("Model", self.model), *settings]),
                "Latency, ms ↓\n\n"
                + table(
                    (*head, "p50", "p90", "p99"),
                    [(*_cells(each), short(each.p50), short(each.p90), short(each.p99)) for each in self.latencies()],
                ),
                "Throughput, tokens/s ↑\n\n" + table(head, [_cells(each) for each in self.throughputs()]),
            )
        )


def installed_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def short(value: float | None) -> str:
    """Three significant digits; `–` for an unknown value.

    >>> [short(value) for value in (0.01234, 12.345, 1234.5, None)]
    ['0.0123', '12.3', '1234', '–']
    """
    if value is None:
        return "–"
    decimals = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:.{decimals}f}"


def average_text(summary: StepSummary) -> str:
    """The average with its interval: `12.3 ± 0.42`."""
    if summary.half_interval is None:
        return short(summary.average)
    return f"{short(summary.average)} ± {short(summary.half_interval)}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns; the first one to the left."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        return f"| {' | '.join(cells)} |"

    return "\n".join([line(head), f"|{'|'.join('-' * (width + 2) for width in widths)}|", *map(line, rows)])


def _cells(summary: StepSummary) -> tuple[str, ...]:
    return (
        summary.step,
        str(summary.batch_size),
        average_text(summary),
        short(summary.lowest),
        short(summary.highest),
    )


def _half_interval(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    # scipy takes half a second to import.
    from scipy import stats

    quantile = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def _percentile(values: Sequence[float], share: float) -> float | None:
    """By linear interpolation; None with fewer than 1 / (1 - share) values."""
    if len(values) * (1 - share) < 1 - 1e-9:
        return None
    place = share * (len(values) - 1)
    ordered, low = sorted(values), math.floor(place)
    return ordered[low] + (place - low) * (ordered[min(low + 1, len(values) - 1)] - ordered[low])
