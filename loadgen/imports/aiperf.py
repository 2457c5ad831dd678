"""Records of aiperf 0.13 (`profile_export.jsonl`): one JSON object a request, metadata and metrics with their units."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from loadgen.errors import UsageError
from loadgen.imports.imported_run import ImportedLoad, ImportedRun, iso_time
from reports.run_schema import Phase, RequestRecord, Status, TokensSource

TOOL = "aiperf"
UNITS_NS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "s": 1e9, "sec": 1e9}
LACKS = (
    "the load: it is the one of this command's flags",
    "the server's own metrics",
    "the model",
    "the generator's measurements of itself: its delays are not checked",
)
WITHOUT_GAPS = "times of single chunks: no gaps and no ITL, and a request's tokens count at its first token in rates"


def is_aiperf(value: Any) -> bool:
    metadata = value.get("metadata") if isinstance(value, Mapping) else None
    return isinstance(metadata, Mapping) and "request_start_ns" in metadata


def is_aiperf_total(value: Any) -> bool:
    return isinstance(value, Mapping) and "aiperf_version" in value


def refuse_total(where: str) -> UsageError:
    return UsageError(
        f"{where}: it has totals only, from which no interval, steady state or percentile can be computed; give "
        "profile_export.jsonl of the same run"
    )


def read_aiperf(rows: Sequence[Mapping[str, Any]], where: str, load: ImportedLoad | None) -> list[ImportedRun]:
    """The run of a records file. Raises UsageError without a load: the file does not state it."""
    if load is None:
        raise UsageError(f"{where}: records of aiperf do not state their load; give --concurrency or --rate")
    records = [_record(row, f"{where}:{number}") for number, row in enumerate(rows, start=1)]
    measured = [record for record in records if record.phase == Phase.MEASURE]
    if not measured:
        raise UsageError(f"{where}: it has no request of the profiling phase")
    lacks = LACKS if any(record.gap_ns for record in records) else (*LACKS, WITHOUT_GAPS)
    first_ns = min(row["metadata"]["request_start_ns"] for row in rows)
    return [
        ImportedRun(
            TOOL,
            "",
            "",
            iso_time(first_ns / 1e9),
            load,
            records,
            lacks,
            min(record.t_sent_ns or 0 for record in measured),
        )
    ]


def _record(row: Mapping[str, Any], where: str) -> RequestRecord:
    metadata, metrics = row["metadata"], row.get("metrics") or {}
    sent_ns, end_ns = int(metadata["request_start_ns"]), int(metadata["request_end_ns"])
    ttft_ns = _ns(metrics.get("time_to_first_token"), where)
    latency_ns = _ns(metrics.get("request_latency"), where)
    gaps = metrics.get("inter_chunk_latency") or {}
    gap_ns = [_scaled(gap, gaps, where) for gap in gaps.get("value") or ()] if ttft_ns is not None else []
    first_ns = None if ttft_ns is None else sent_ns + ttft_ns
    last_ns = None if latency_ns is None or first_ns is None else max(sent_ns + latency_ns, first_ns)
    if first_ns is not None and gap_ns:
        last_ns = first_ns + sum(gap_ns)
    status = Status.OK
    if metadata.get("was_cancelled"):
        status = Status.CANCELLED
    elif row.get("error") is not None:
        status = Status.HTTP_5XX
    return RequestRecord(
        "imported",
        str(metadata.get("x_request_id") or where.rpartition(":")[2]),
        phase=Phase.WARMUP if metadata.get("benchmark_phase") == "warmup" else Phase.MEASURE,
        status=status,
        error_type=None if status is Status.OK else f"unknown/{json.dumps(row.get('error'))[:100]}",
        t_intended_ns=int(metadata.get("credit_issued_ns") or sent_ns),
        t_sent_ns=sent_ns,
        t_first_ns=first_ns,
        t_last_ns=last_ns,
        t_end_ns=max(end_ns, last_ns or end_ns),
        # aiperf's own lengths are those of the text, which its tokenizer may split in another way than the server did.
        input_tokens=_count(metrics.get("usage_prompt_tokens") or metrics.get("input_sequence_length")),
        cached_input_tokens=_count(metrics.get("usage_prompt_cache_read_tokens")),
        output_tokens=_count(metrics.get("usage_completion_tokens") or metrics.get("output_sequence_length")),
        first_event_tokens=None if first_ns is None else 1,
        tokens_source=_tokens_source(metrics),
        events=0 if first_ns is None else len(gap_ns) + 1,
        gap_ns=gap_ns,
    )


def _tokens_source(metrics: Mapping[str, Any]) -> TokensSource | None:
    if "usage_completion_tokens" in metrics:
        return TokensSource.SERVER_USAGE
    return TokensSource.CLIENT_TOKENIZER if "output_sequence_length" in metrics else None


def _ns(metric: Mapping[str, Any] | None, where: str) -> int | None:
    return None if metric is None else _scaled(metric["value"], metric, where)


def _scaled(value: float, metric: Mapping[str, Any], where: str) -> int:
    """A time of a metric in ns. Raises UsageError for an unknown unit."""
    unit = str(metric.get("unit"))
    if unit not in UNITS_NS:
        raise UsageError(f"{where}: a time has the unit {unit!r}, not one of {', '.join(UNITS_NS)}")
    return round(value * UNITS_NS[unit])


def _count(metric: Mapping[str, Any] | None) -> int | None:
    return None if metric is None else int(metric["value"])
