"""Reports of guidellm 0.8 (`benchmarks.json`, schema 2): a benchmark for each strategy, with its requests by status."""

from collections.abc import Iterator, Mapping
from typing import Any

from loadgen.errors import UsageError
from loadgen.imports.imported_run import ImportedLoad, ImportedRun, at_ns, iso_time
from reports.run_schema import RequestRecord, Status, TokensSource

TOOL = "guidellm"
STATUSES = {"successful": Status.OK, "errored": Status.HTTP_5XX, "incomplete": Status.CANCELLED}
LACKS = (
    "times of single tokens: no gaps and no ITL, and a request's tokens count at its first token in rates",
    "the server's own metrics",
    "phases of errors",
    "the generator's measurements of itself: its delays are not checked",
)


def is_guidellm(value: Any) -> bool:
    metadata = value.get("metadata") if isinstance(value, Mapping) else None
    return isinstance(metadata, Mapping) and "guidellm_version" in metadata and "benchmarks" in value


def read_guidellm(value: Mapping[str, Any], where: str) -> list[ImportedRun]:
    """A run for each benchmark of a report. Raises UsageError for one that keeps a sample of its requests only."""
    return [_run(value, each, f"{where}: benchmark {number}") for number, each in enumerate(value["benchmarks"], 1)]


def _run(report: Mapping[str, Any], benchmark: Mapping[str, Any], where: str) -> ImportedRun:
    metrics = benchmark["scheduler_metrics"]
    records = list(_records(benchmark["requests"]))
    made = metrics["requests_made"]
    total = sum(int(made[name] or 0) for name in STATUSES)
    if len(records) < total:
        raise UsageError(
            f"{where} keeps {len(records)} of {total} requests, a sample from which no rate can be computed; run "
            "guidellm without a sample size"
        )
    return ImportedRun(
        TOOL,
        str(report["metadata"]["guidellm_version"]),
        str((benchmark["config"].get("backend") or {}).get("model") or ""),
        iso_time(metrics["request_start_time"]),
        _load(benchmark["config"]["strategy"], where),
        records,
        LACKS,
        at_ns(metrics["measure_start_time"]),
        at_ns(metrics["measure_end_time"]),
    )


def _load(strategy: Mapping[str, Any], where: str) -> ImportedLoad:
    kind = strategy["type_"]
    if kind == "concurrent":
        return ImportedLoad(concurrency=int(strategy["streams"]))
    if kind == "synchronous":
        return ImportedLoad(concurrency=1)
    if kind in ("constant", "poisson"):
        return ImportedLoad(rate=float(strategy["rate"]), mode=kind)
    if kind == "throughput":
        users = strategy.get("max_concurrency")
        return ImportedLoad(concurrency=int(users)) if users else ImportedLoad(mode="burst")
    raise UsageError(f"{where}: strategy {kind!r} has no load that this version can describe")


def _records(requests: Mapping[str, Any]) -> Iterator[RequestRecord]:
    for group, status in STATUSES.items():
        for row in requests.get(group) or ():
            times = row["info"]["timings"]
            if times.get("request_start") is not None:
                yield _record(row, times, status)


def _record(row: Mapping[str, Any], times: Mapping[str, Any], status: Status) -> RequestRecord:
    end_s = times.get("request_end") or times.get("resolve_end")
    error = row["info"].get("error")
    return RequestRecord(
        "imported",
        str(row["request_id"]),
        status=status,
        error_type=None if status is Status.OK else f"unknown/{str(error or status)[:100]}",
        t_intended_ns=at_ns(times.get("targeted_start") or times["request_start"]),
        t_sent_ns=at_ns(times["request_start"]),
        t_first_ns=at_ns(times.get("first_token_iteration")),
        t_last_ns=at_ns(times.get("last_token_iteration")),
        t_end_ns=at_ns(end_s),
        input_tokens=row.get("prompt_tokens"),
        cached_input_tokens=row.get("cached_tokens"),
        output_tokens=row.get("output_tokens"),
        first_event_tokens=1 if times.get("first_token_iteration") is not None else None,
        tokens_source=TokensSource.SERVER_USAGE if row.get("output_tokens") is not None else None,
        events=int(times.get("token_iterations") or 0),
    )
