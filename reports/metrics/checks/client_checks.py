"""Checks of the load generator and of the answers it received, each against two fixed bounds."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from reports.metrics.checks.answer_facts import answer_facts
from reports.metrics.checks.findings import Finding, Level, above, finding
from reports.metrics.checks.restarts import UNREACHABLE, restarted_s
from reports.metrics.counted import is_cut_off
from reports.metrics.measured import Measured
from reports.run_schema import Status
from reports.run_store import RunResult

LATE_SEND_S = 0.025


def client_facts(run: RunResult, measured: Measured) -> dict[str, Any]:
    """The generator's measurements of itself and of its records; None for what was not measured."""
    requests, population = measured.requests, measured.population
    series = _window_series(run, measured)
    workers: list[Mapping[str, Any]] = run.client.get("workers") or []
    lag = population["schedule_lag_s"] - population["limit_wait_s"].fillna(0)
    is_offered = measured.window.contains(requests["t_intended_ns"] / 1e9)
    offered = int(is_offered.sum())
    # A request that is due at the window's end is sent a moment after it.
    sent = int((is_offered & (requests["t_sent_ns"] / 1e9 <= measured.window.end_s + LATE_SEND_S)).sum())
    events = float(population["events"].sum())
    differences = (requests["client_output_tokens"] - requests["output_tokens"]).abs() / requests["output_tokens"]
    gaps = measured.counted_events.gaps.values
    return answer_facts(measured) | {
        "sent_over_offered": sent / offered if offered and measured.manifest.is_open_loop else None,
        "schedule_lag_p99_s": _quantile(lag, 0.99),
        "ttft_median_s": _quantile(population["ttft_s"], 0.5),
        "gap_median_s": float(np.median(gaps)) / 1e9 if len(gaps) else None,
        "loop_lag_p99_s": _worst(workers, "loop_lag_p99_s"),
        "arrival_times": run.manifest.arrival_times.get("source"),
        "full_reads": run.manifest.arrival_times.get("full"),
        "read_late_p99_s": _quantile(population["read_late_max_s"], 0.99),
        "loop_lag_max_s": _largest(_worst(workers, "loop_lag_max_s"), _max(series.get("loop_lag_max_s"))),
        "cpu_share_max": _worst_cpu(series, workers),
        "gc_pause_max_s": _worst(workers, "gc_pause_max_s"),
        "open_files_share": _open_files_share(workers),
        "local_ports": _least(workers, "local_ports"),
        "coalesced_share": float(population["coalesced_events"].sum()) / events if events else None,
        "coalesced_gaps_share": _share(population["coalesced_events"].sum(), (population["events"] - 1).clip(0).sum()),
        "read_interval_s": _read_interval_s(population),
        "coalesced_within_max_s": _max(population["coalesced_within_s"]),
        "token_mismatch_median": _quantile(differences[np.isfinite(differences)], 0.5),
        "completions": int(
            ((requests["status"] == Status.OK) & measured.window.contains(requests["t_end_ns"] / 1e9)).sum()
        ),
        "requests": int((requests["t_sent_ns"].notna() & (requests["status"] != Status.CONNECT_ERROR)).sum()),
        "succeeded": int((requests["status"] == Status.OK).sum()),
        "cut_off": int(is_cut_off(population).sum()),
        "drain_limit_s": measured.window.drain_s,
        "server_requests": _server_requests(run),
        "lost_workers": int(run.client.get("lost_workers") or 0),
        "lost": run.client.get("lost") or [],
        "client_errors": max(
            int((requests["status"] == Status.CLIENT_ERROR).sum()), len(run.client.get("client_errors") or [])
        ),
        "write_errors": int(run.client.get("write_errors") or 0),
        "capacity_events_per_s": run.client.get("capacity_events_per_s"),
        "events_per_s_per_worker": events / measured.window.length_s / max(measured.manifest.workers, 1)
        if measured.window.length_s > 0
        else None,
    }


# Gaps inside one read, as a share of all; and the lateness of a read, as a share of the time between two reads.
MAX_MERGED_GAPS, MAX_READ_LATENESS = 0.01, 0.5
# Bursts of this size at such intervals are not steps of an engine.
MIN_BURST_EVENTS, MIN_BURST_INTERVAL_S = 8, 0.25


def _sent_rate(facts: Mapping[str, Any]) -> Finding | None:
    fraction = facts["sent_over_offered"]
    level = above(None if fraction is None else round(1 - fraction, 9), 0.01, 0.05)
    return finding("sent_rate", level, f"only {100 * (fraction or 0):.1f} % of the offered requests were sent on time")


def _schedule_lag(facts: Mapping[str, Any]) -> Finding | None:
    """The bound is 5 ms or 5 % of the median TTFT, whichever is larger; a smaller lag distorts no latency."""
    lag, ttft = facts["schedule_lag_p99_s"], facts["ttft_median_s"] or 0.0
    level = above(lag, max(0.005, 0.05 * ttft), max(0.025, 0.20 * ttft))
    return finding("schedule_lag", level, f"the generator sent requests up to {(lag or 0) * 1e3:.1f} ms late (p99)")


def _full_reads(facts: Mapping[str, Any]) -> Finding | None:
    """Arrival times do not show a server that waits for a full receive buffer.

    Linux 6.18 stops a sender at 110 KB unread, so that a full buffer always gives such a read. The receiver's TCP_INFO
    does not show it: `tcpi_rcv_wnd` stays at 65,536.
    """
    count = facts.get("full_reads") or 0
    return finding(
        "receive_buffer",
        Level.VALID if count else None,
        f"{count:,} reads returned 64 KiB: so much data waited unread that the server may have been held back; give "
        "the generator more processor time or `--workers`",
    )


def _starved(facts: Mapping[str, Any]) -> Finding | None:
    """The kernel merges segments that wait unread, which leaves them one arrival time.

    Events that the server merged are read at once; a read is late if it takes half of the time between two of a stream.
    """
    late, interval = facts.get("read_late_p99_s"), facts.get("read_interval_s")
    merged = facts.get("coalesced_gaps_share") or 0.0
    is_late = late is not None and interval is not None and late > MAX_READ_LATENESS * interval
    return finding(
        "starved",
        Level.DEGRADED if is_late and merged > MAX_MERGED_GAPS else None,
        f"the generator was starved: {100 * merged:.1f} % of the gaps lie inside one read and have no time of their "
        f"own, because reads came up to {(late or 0) * 1e3:.0f} ms late (p99); TTFT and gaps are bounds; give the "
        "generator more processor time or `--workers`",
    )


def _loop_lag(facts: Mapping[str, Any]) -> Finding | None:
    """A late read does not change arrival times of the kernel; `schedule_lag` is for late requests."""
    if facts.get("arrival_times") == "kernel":
        return None
    lag, gap = facts["loop_lag_p99_s"], facts["gap_median_s"]
    fraction = lag / gap if lag is not None and gap else None
    return finding(
        "loop_lag",
        above(fraction, 0.25, 1.0),
        f"the generator's event loop lagged {(lag or 0) * 1e3:.1f} ms (p99), {100 * (fraction or 0):.0f} % of the "
        "median gap; reserve CPU cores for the generator",
    )


def _cpu(facts: Mapping[str, Any]) -> Finding | None:
    fraction = facts["cpu_share_max"]
    return finding(
        "cpu", above(fraction, 0.7, 0.9), f"a generator process used {100 * (fraction or 0):.0f} % of its CPU core"
    )


def _tokens(facts: Mapping[str, Any]) -> Finding | None:
    fraction = facts["token_mismatch_median"]
    level = above(fraction, 0.02, 0.10)
    return finding(
        "token_count", level, f"server and client token counts differ by {100 * (fraction or 0):.1f} % (median)"
    )


def _usage(facts: Mapping[str, Any]) -> Finding | None:
    """The server's count of an answer is below its events or above the limit of the request."""
    fraction = facts["usage_mismatch_median"]
    return finding(
        "token_count",
        above(fraction, 0.02, 0.10),
        f"usage reports impossible token counts: {100 * (fraction or 0):.1f} % (median) below the streamed events or "
        "above the requested limit",
    )


def _finish_reasons(facts: Mapping[str, Any]) -> Finding | None:
    missing, answers = facts["unfinished_answers"], facts["answers"]
    return finding(
        "finish_reason",
        above(missing / answers if answers else None, 0.0, 0.05),
        f"{missing} of {answers} answers ended without a finish reason: they may be cut off, but count as complete",
    )


def _bursts(facts: Mapping[str, Any]) -> Finding | None:
    """An engine may send some tokens at once; many at long intervals were held back on the way."""
    events, interval_s = facts["burst_events"], facts["burst_interval_s"]
    is_held = events is not None and events >= MIN_BURST_EVENTS and interval_s >= MIN_BURST_INTERVAL_S
    return finding(
        "bursts",
        Level.DEGRADED if is_held else None,
        f"tokens arrive in bursts of {events or 0:.0f} every {interval_s or 0:.2f} s: a proxy or a buffer holds them "
        "back, and TTFT and gaps are its own; measure the server without it",
    )


def _prompt_lengths(facts: Mapping[str, Any]) -> Finding | None:
    excess, planned = facts["input_tokens_excess"], facts["planned_input_tokens"]
    fraction = abs(excess) / planned if excess is not None and planned else None
    return finding(
        "prompt_length",
        above(fraction, 0.05, math.inf),
        f"prompts have {abs(excess or 0):.0f} tokens {'more' if (excess or 0) > 0 else 'fewer'} than the planned "
        f"{planned or 0:.0f} (median, without a chat template); pass the model's tokenizer.json as --tokenizer",
    )


def _answer_lengths(facts: Mapping[str, Any]) -> Finding | None:
    share = facts["other_length_share"]
    return finding(
        "answer_length",
        above(share, 0.0, math.inf),
        f"{100 * (share or 0):.2g} % of the answers do not have the forced length: the server ends answers by itself "
        "or lacks room for them; compare prompt and answer lengths with its context length",
    )


def _completions(facts: Mapping[str, Any]) -> Finding | None:
    """A window with few completions is valid: its intervals are withheld."""
    level = None if facts["completions"] else Level.INVALID
    return finding("completions", level, "no request completed in the window; run longer")


def _cut_off(facts: Mapping[str, Any]) -> Finding | None:
    """Valid: what such a request bounds from below is marked."""
    count, limit_s = facts.get("cut_off") or 0, facts.get("drain_limit_s")
    limit = "" if limit_s is None else f" of {limit_s:g} s"
    noun = "request was" if count == 1 else "requests were"
    message = f"{count} {noun} cut off at the drain limit{limit} and may have taken longer (≥); raise --drain"
    return finding("drain", Level.VALID if count else None, message)


def _request_counts(facts: Mapping[str, Any]) -> Finding | None:
    """The server's count lies between our successes and all that we sent, whether it counts failures or not."""
    sent, succeeded, theirs = facts["requests"], facts["succeeded"], facts["server_requests"]
    if theirs is None or succeeded <= theirs <= sent:
        return None
    ours = sent if theirs > sent else succeeded
    level = Level.INVALID if abs(ours - theirs) > 0.01 * max(ours, theirs) else Level.DEGRADED
    cause = "; another client used it" if theirs > sent else ""
    return Finding("request_count", level, f"the client counted {ours} requests and the server {theirs}{cause}")


def _loop_gap(facts: Mapping[str, Any]) -> Finding | None:
    gap = facts["loop_lag_max_s"]
    return finding("loop_gap", above(gap, 1.0, 5.0), f"the generator's event loop was blocked for {gap or 0:.1f} s")


def _generator(facts: Mapping[str, Any]) -> Finding | None:
    counts = {"lost workers": "lost_workers", "client errors": "client_errors", "records not written": "write_errors"}
    broken = [f"{facts[name]} {title}" for title, name in counts.items() if facts[name]]
    broken += [
        f"worker {lost['worker']} with {100 * lost['share']:.0f} % of the load ({lost['because']})"
        for lost in facts.get("lost") or ()
    ]
    return Finding("generator", Level.INVALID, "the generator failed: " + ", ".join(broken)) if broken else None


def _capacity(facts: Mapping[str, Any]) -> Finding | None:
    rate, capacity = facts["events_per_s_per_worker"], facts["capacity_events_per_s"]
    level = Level.DEGRADED if rate and capacity and rate > 0.7 * capacity else None
    return finding(
        "capacity", level, f"{rate or 0:.0f} events/s per worker, more than 70 % of the capacity in the self-test"
    )


CHECKS: tuple[Callable[[Mapping[str, Any]], Finding | None], ...] = (
    _generator,
    _completions,
    _cut_off,
    _sent_rate,
    _schedule_lag,
    _full_reads,
    _starved,
    _loop_lag,
    _loop_gap,
    _cpu,
    _tokens,
    _usage,
    _finish_reasons,
    _bursts,
    _prompt_lengths,
    _answer_lengths,
    _request_counts,
    _capacity,
)


def _server_requests(run: RunResult) -> int | None:
    """The requests that the server counted during the run, if it reports a count and did not end or restart."""
    counted = run.client.get("server_requests")
    is_whole = run.manifest.stop_reason not in UNREACHABLE and restarted_s(run.server_metrics) is None
    return int(counted) if counted is not None and is_whole else None


def _window_series(run: RunResult, measured: Measured) -> pd.DataFrame:
    series = pd.DataFrame(run.timeseries)
    return series[measured.window.contains(series["t_s"])] if "t_s" in series else series


def _worst_cpu(series: pd.DataFrame, workers: list[Mapping[str, Any]]) -> float | None:
    """The mean CPU use of the busiest worker over the window, as a fraction of a core."""
    if "cpu_share" in series and series["cpu_share"].notna().any():
        return float(series.groupby(series["worker"].fillna(0))["cpu_share"].mean().max())
    return _worst(workers, "cpu_share")


def _read_interval_s(population: pd.DataFrame) -> float | None:
    """Mean time between two reads of a stream."""
    streamed_s = (population["t_last_ns"] - population["t_first_ns"]).clip(0).sum() / 1e9
    return _share(streamed_s, (population["events"] - 1 - population["coalesced_events"]).clip(0).sum())


def _open_files_share(workers: list[Mapping[str, Any]]) -> float | None:
    """Open files divided by the limit, of the worker nearest to its limit."""
    fractions = [
        float(worker["open_files"]) / float(worker["max_open_files"])
        for worker in workers
        if worker.get("open_files") is not None and (worker.get("max_open_files") or 0) > 0
    ]
    return max(fractions, default=None)


def _share(part: float, whole: float) -> float | None:
    return float(part) / float(whole) if whole else None


def _least(workers: list[Mapping[str, Any]], name: str) -> int | None:
    return min((int(worker[name]) for worker in workers if worker.get(name) is not None), default=None)


def _worst(workers: list[Mapping[str, Any]], name: str) -> float | None:
    values = [float(worker[name]) for worker in workers if worker.get(name) is not None]
    return max(values, default=None)


def _largest(*values: float | None) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _max(values: "pd.Series[float] | None") -> float | None:
    return float(values.max()) if values is not None and values.notna().any() else None


def _quantile(values: "pd.Series[float]", fraction: float) -> float | None:
    known = values.dropna()
    return float(np.quantile(known, fraction)) if len(known) else None
