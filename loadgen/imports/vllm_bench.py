"""Result files of `vllm bench serve --save-result --save-detailed` (vLLM 0.32): one JSON object, lists of requests."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from loadgen.errors import UsageError
from loadgen.imports.imported_run import ImportedLoad, ImportedRun, at_ns
from reports.run_schema import RequestRecord, Status, TokensSource

TOOL = "vllm bench serve"
PER_REQUEST = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "latencies")
LACKS = (
    "the server's own metrics",
    "a warm-up that is marked: every request counts",
    "causes of errors by type",
    "cached prompt tokens",
    "the generator's measurements of itself: its delays are not checked",
    "tokens of each event: ITL is the gap between events",
)


def is_vllm_bench(value: Any) -> bool:
    return isinstance(value, Mapping) and "request_throughput" in value and "num_prompts" in value


def read_vllm_bench(value: Mapping[str, Any], where: str) -> list[ImportedRun]:
    """The run of a result file. Raises UsageError for one without the times of its requests."""
    missing = [name for name in PER_REQUEST if not isinstance(value.get(name), list)]
    if missing:
        raise UsageError(
            f"{where}: it has totals only ({', '.join(missing)} missing), from which no interval, steady state or "
            "percentile can be computed; run vllm bench serve with --save-result --save-detailed"
        )
    waits = value.get("queue_times") or [0.0] * len(value["start_times"])
    errors = value.get("errors") or [""] * len(value["start_times"])
    rows = zip(*(value[name] for name in PER_REQUEST), waits, errors, strict=True)
    records = [_record(number, *row) for number, row in enumerate(rows)]
    return [
        ImportedRun(
            TOOL,
            "",
            str(value.get("model_id") or ""),
            datetime.strptime(str(value["date"]), "%Y%m%d-%H%M%S").isoformat(),
            _load(value),
            records,
            LACKS,
        )
    ]


def _load(value: Mapping[str, Any]) -> ImportedLoad:
    rate, users = value.get("request_rate"), value.get("max_concurrency")
    if rate not in (None, "inf"):
        return ImportedLoad(rate=float(rate), mode="poisson" if value.get("burstiness", 1.0) == 1.0 else "gamma")
    return ImportedLoad(concurrency=int(users)) if users else ImportedLoad(mode="burst")


def _record(
    number: int,
    input_tokens: int,
    output_tokens: int,
    ttft_s: float,
    itls_s: list[float],
    start_s: float,
    latency_s: float,
    wait_s: float,
    error: str,
) -> RequestRecord:
    """`start_s` is the send; before it a request waits `wait_s` for a place."""
    sent_ns = at_ns(start_s) or 0
    if error or not output_tokens:
        return RequestRecord(
            "imported",
            f"r{number}",
            status=Status.CONNECT_ERROR if error else Status.TRUNCATED,
            error_type="unknown/" + (error.strip().splitlines()[-1][:100] if error.strip() else "no tokens"),
            t_intended_ns=at_ns(start_s - wait_s),
            t_sent_ns=sent_ns,
            t_end_ns=at_ns(start_s + latency_s),
            input_tokens=input_tokens,
        )
    first_ns = at_ns(start_s + ttft_s) or 0
    gap_ns = [round(gap * 1e9) for gap in itls_s]
    return RequestRecord(
        "imported",
        f"r{number}",
        t_intended_ns=at_ns(start_s - wait_s),
        t_sent_ns=sent_ns,
        t_first_ns=first_ns,
        t_last_ns=first_ns + sum(gap_ns),
        t_end_ns=max(at_ns(start_s + latency_s) or 0, first_ns + sum(gap_ns)),
        limit_wait_s=wait_s,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        first_event_tokens=1,
        tokens_source=TokensSource.CLIENT_TOKENIZER,
        events=len(gap_ns) + 1,
        gap_ns=gap_ns,
    )
