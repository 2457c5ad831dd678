"""Exports of a finished run: requests as CSV, token events as Parquet, OpenTelemetry histograms.

Reports do not read these files.
"""

import csv
import io
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from reports.metrics.checks.answer_facts import TEMPLATE_TOKENS
from reports.metrics.measured import Measured
from reports.metrics.requests.pooled_metrics import POOLED
from reports.renderers.csv import escape_formula
from reports.run_schema import Status
from reports.run_store import REQUESTS, ROWS_PER_BATCH, SCHEMA_VERSION, RunManifest, replace_file, replacing
from reports.saved_run import load_run

Array = npt.NDArray[np.float64]

CSV_FILE, EVENTS_FILE, OTEL_FILE = "requests.csv", "events.parquet", "otel.json"


def export_run(directory: Path, formats: Collection[str]) -> list[Path]:
    """Write exports (csv, events, otel) of a finished run into its directory; returns their paths."""
    return [FORMATS[name](directory) for name in FORMATS if name in formats]


def write_requests_csv(directory: Path) -> Path:
    """Write `requests.csv`: the columns of `requests.parquet`, lists separated by spaces, missing values empty."""
    target = directory / CSV_FILE
    with replacing(target) as file, _requests(directory) as table:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        writer = csv.writer(text)
        names = table.schema_arrow.names
        writer.writerow(names)
        for batch in table.iter_batches(ROWS_PER_BATCH):
            rows = batch.to_pydict()
            writer.writerows(zip(*([_cell(value) for value in rows[name]] for name in names), strict=True))
        text.detach()
    return target


def _cell(value: Any) -> Any:
    """The value of a cell: a list becomes text, and text is escaped so that it is not a formula in a spreadsheet."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return escape_formula(value) if isinstance(value, str) else value


def write_events(directory: Path) -> Path:
    """Write `events.parquet`: a row per token event: request_id, index, t_ns since the run's start, gap_ns, tokens."""
    target = directory / EVENTS_FILE
    with (
        replacing(target) as file,
        _requests(directory) as table,
        pq.ParquetWriter(file, EVENT_SCHEMA, compression="zstd") as writer,
    ):
        for batch in table.iter_batches(ROWS_PER_BATCH, columns=["request_id", "t_first_ns", "gap_ns", "event_tokens"]):
            writer.write_table(_events(batch))
    return target


EVENT_SCHEMA = pa.schema(
    [
        ("request_id", pa.string()),
        ("index", pa.int32()),
        ("t_ns", pa.int64()),
        ("gap_ns", pa.int64()),
        ("tokens", pa.int32()),
    ],
    metadata={"schema_version": str(SCHEMA_VERSION)},
)


def _events(batch: pa.RecordBatch) -> pa.Table:
    """The events of a batch of requests; the first event of a request has no gap."""
    streamed = batch.filter(pc.is_valid(batch["t_first_ns"]))
    gap_lists = streamed["gap_ns"]
    sizes = np.asarray(pc.fill_null(pc.list_value_length(gap_lists), 0), dtype=np.int64) + 1
    starts = np.cumsum(sizes) - sizes
    is_first = np.zeros(int(sizes.sum()), dtype=np.bool_)
    is_first[starts] = True
    gaps = np.zeros(len(is_first), dtype=np.int64)
    gaps[~is_first] = np.asarray(pc.list_flatten(gap_lists), dtype=np.int64)
    index = np.arange(len(gaps)) - np.repeat(starts, sizes)
    passed = np.cumsum(gaps)
    first_ns = np.asarray(streamed["t_first_ns"], dtype=np.int64)
    t_ns = np.repeat(first_ns - passed[starts], sizes) + passed
    request = np.repeat(np.arange(len(sizes)), sizes)
    return pa.table(
        [
            streamed["request_id"].take(pa.array(request)),
            pa.array(index, pa.int32()),
            pa.array(t_ns),
            pa.array(gaps, mask=is_first),
            pa.array(_tokens(streamed, sizes, starts), pa.int32()),
        ],
        schema=EVENT_SCHEMA,
    )


def _tokens(batch: pa.RecordBatch, sizes: npt.NDArray[np.int64], starts: npt.NDArray[np.int64]) -> Array:
    """The number of tokens of each event: 1 unless the record has counts."""
    tokens = np.ones(int(sizes.sum()))
    for row, counts in enumerate(batch["event_tokens"].to_pylist()):
        if counts is not None and len(counts) == sizes[row]:
            tokens[starts[row] : starts[row] + sizes[row]] = counts
    return tokens


def _requests(directory: Path) -> pq.ParquetFile:
    return pq.ParquetFile(directory / f"{REQUESTS}.parquet")


@dataclass(frozen=True, slots=True)
class OtelHistogram:
    """A histogram of OpenTelemetry's GenAI conventions (status: development). `series` returns its values."""

    name: str
    unit: str
    bounds: tuple[float, ...]
    series: Callable[[Measured], Iterator[tuple[dict[str, str], Array]]]


CLIENT_BOUNDS = tuple(0.01 * 2**power for power in range(14))
FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08),
    *(0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
PER_TOKEN_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
TOKEN_BOUNDS = tuple(4.0**power for power in range(14))
CUMULATIVE = 2
"""OTLP's AGGREGATION_TEMPORALITY_CUMULATIVE."""


def write_otel(directory: Path) -> Path:
    """Write `otel.json`: histograms of the requests in the window, as one OTLP/JSON metrics request."""
    measured = Measured.of(load_run(directory))
    manifest = measured.manifest
    metrics = [_otel_metric(histogram, measured) for histogram in OTEL_HISTOGRAMS]
    resource = {"attributes": _attributes({"service.name": "tgi-bench", "tgi_bench.run_id": manifest.run_id})}
    scope = {"scope": {"name": "tgi-bench", "version": manifest.version}}
    scoped = scope | {"metrics": [metric for metric in metrics if metric["histogram"]["dataPoints"]]}
    content = {"resourceMetrics": [{"resource": resource, "scopeMetrics": [scoped]}]}
    target = directory / OTEL_FILE
    replace_file(target, json.dumps(content, indent=1, allow_nan=False).encode() + b"\n")
    return target


def _otel_metric(histogram: OtelHistogram, measured: Measured) -> dict[str, Any]:
    common = _common_attributes(measured.manifest)
    zero_s = measured.manifest.clock.get("wall_at_start_s", 0.0)
    edges = [str(round((zero_s + at_s) * 1e9)) for at_s in (measured.window.start_s, measured.window.end_s)]
    points = [
        {"attributes": _attributes(common | own), "startTimeUnixNano": edges[0], "timeUnixNano": edges[1]}
        | _buckets(values, histogram.bounds)
        for own, values in histogram.series(measured)
        if len(values)
    ]
    data = {"aggregationTemporality": CUMULATIVE, "dataPoints": points}
    return {"name": histogram.name, "unit": histogram.unit, "histogram": data}


def _buckets(values: Array, bounds: tuple[float, ...]) -> dict[str, Any]:
    """Counts per bucket; a value equal to a bound belongs to the bucket below it."""
    counts = np.bincount(np.searchsorted(bounds, values, side="left"), minlength=len(bounds) + 1)
    return {
        "count": str(len(values)),
        "sum": float(values.sum()),
        "min": float(values.min()),
        "max": float(values.max()),
        "explicitBounds": list(bounds),
        "bucketCounts": [str(count) for count in counts],
    }


def _common_attributes(manifest: RunManifest) -> dict[str, Any]:
    address = urlsplit(str(manifest.target.get("url") or ""))
    info: Mapping[str, Any] = manifest.target.get("info") or {}
    is_chat = manifest.target.get("api") in TEMPLATE_TOKENS
    return {
        "gen_ai.operation.name": "chat" if is_chat else "text_completion",
        "gen_ai.provider.name": str(manifest.target.get("api") or "unknown"),
        "gen_ai.request.model": str(manifest.target.get("model") or info.get("model_id") or "unknown"),
        "server.address": address.hostname or "",
        "server.port": address.port or (443 if address.scheme == "https" else 80),
    }


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {"key": key, "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}}
        for key, value in values.items()
    ]


Series = Iterator[tuple[dict[str, str], Array]]


def _durations(measured: Measured) -> Series:
    """The duration of every request, by status."""
    for status, rows in measured.population.groupby("status", sort=True):
        own = {} if status == Status.OK else {"error.type": str(status)}
        yield own, _known((rows["t_last_ns"].fillna(rows["t_end_ns"]) - rows["t_sent_ns"]) / 1e9)


def _column(name: str) -> Callable[[Measured], Series]:
    def series(measured: Measured) -> Series:
        yield {}, _known(measured.population[name])

    return series


def _server_durations(measured: Measured) -> Series:
    population = measured.population
    yield {}, _known(population["srv_validation_s"] + population["srv_queue_s"] + population["srv_inference_s"])


def _gaps(measured: Measured) -> Series:
    yield {}, POOLED[0].function(measured)[0]


def _token_counts(measured: Measured) -> Series:
    for kind in ("input", "output"):
        yield {"gen_ai.token.type": kind}, _known(measured.population[f"{kind}_tokens"])


def _known(column: "pd.Series[float]") -> Array:
    return np.asarray(column.dropna(), dtype=np.float64)


OTEL_HISTOGRAMS = (
    OtelHistogram("gen_ai.client.operation.duration", "s", CLIENT_BOUNDS, _durations),
    OtelHistogram("gen_ai.client.operation.time_to_first_chunk", "s", CLIENT_BOUNDS, _column("ttft_s")),
    OtelHistogram("gen_ai.client.operation.time_per_output_chunk", "s", CLIENT_BOUNDS, _gaps),
    OtelHistogram("gen_ai.client.token.usage", "{token}", TOKEN_BOUNDS, _token_counts),
    OtelHistogram("gen_ai.server.time_to_first_token", "s", FIRST_TOKEN_BOUNDS, _column("ttft_s")),
    OtelHistogram("gen_ai.server.time_per_output_token", "s", PER_TOKEN_BOUNDS, _column("tpot_s")),
    OtelHistogram("gen_ai.server.request.duration", "s", CLIENT_BOUNDS, _server_durations),
)

FORMATS: dict[str, Callable[[Path], Path]] = {"csv": write_requests_csv, "events": write_events, "otel": write_otel}
