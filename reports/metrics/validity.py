"""Checks whether a run is a valid measurement: the generator's own metrics and the sample, against fixed bounds."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import pandas as pd

from reports.metrics.answer_facts import answer_facts
from reports.metrics.counted import is_cut_off
from reports.metrics.measured import Measured
from reports.metrics.overload import Overload
from reports.metrics.prefix_cache import CachedShare
from reports.metrics.steadiness import series_between
from reports.metrics.windows import UNEVEN_MODES
from reports.run_schema import Status
from reports.run_store import RunResult


class Level(StrEnum):
    """The validity of a run: the level of its worst finding."""

    VALID = "valid"
    DEGRADED = "degraded"
    INVALID = "invalid"


RANK = {Level.VALID: 0, Level.DEGRADED: 1, Level.INVALID: 2}


@dataclass(frozen=True, slots=True)
class Finding:
    """One check that found something: its name, its level, and a sentence for the reader.

    At level valid it states a fact about the server or the run, and leaves the measurement valid.
    """

    check: str
    level: Level
    message: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a run, and its findings, worst first."""

    level: Level
    findings: tuple[Finding, ...]

    def to_json(self) -> dict[str, Any]:
        """`reasons` are the findings above level valid, `findings` those at level valid."""
        rows = [{"check": each.check, "level": each.level, "message": each.message} for each in self.findings]
        return {
            "status": self.level,
            "reasons": [row for row in rows if row["level"] is not Level.VALID],
            "findings": [row for row in rows if row["level"] is Level.VALID],
        }


def finding_messages(summary: Mapping[str, Any]) -> list[str]:
    """The findings at level valid, for the line of the verdict; none in an invalid run and in older runs."""
    verdict = summary["verdict"]
    if verdict["status"] == Level.INVALID:
        return []
    return [finding["message"] for finding in verdict.get("findings", ())]


def is_overloaded(summary: Mapping[str, Any]) -> bool:
    """Whether a valid or degraded run found the server overloaded; `summary["overload"]` has the rates."""
    return summary["verdict"]["status"] != Level.INVALID and summary.get("overload") is not None


def latencies_grow(summary: Mapping[str, Any]) -> bool:
    """Whether latencies grow as long as the run lasts, because the server is overloaded."""
    return is_overloaded(summary) and bool(summary["overload"]["latencies_grow"])


def judge_run(
    run: RunResult,
    measured: Measured,
    facts: Mapping[str, Any],
    overload: Overload | None = None,
    cached: CachedShare | None = None,
) -> Verdict:
    """The verdict of every check; `facts` come from `client_facts`."""
    findings = _completeness(run, measured)
    findings += [found for check in CHECKS if (found := check(facts)) is not None]
    findings += [Finding("overloaded", Level.VALID, overload.message)] if overload else []
    identity = _identity(run)
    findings += identity
    # Latencies of an overloaded server grow as long as the run lasts, and a server that restarted starts anew: neither
    # has a steady state to look for.
    findings += [] if identity or (overload and overload.is_growing) else _steadiness(measured)
    findings += _prefix_cache(cached) if cached is not None else []
    findings += _accelerator(run, measured)
    findings.sort(key=lambda found: -RANK[found.level])
    return Verdict(findings[0].level if findings else Level.VALID, tuple(findings))


def client_facts(run: RunResult, measured: Measured) -> dict[str, Any]:
    """The generator's measurements of itself and of its records; None for what was not measured."""
    requests, population = measured.requests, measured.population
    series = _window_series(run, measured)
    workers: list[Mapping[str, Any]] = run.client.get("workers") or []
    lag = population["schedule_lag_s"] - population["limit_wait_s"].fillna(0)
    offered = int(measured.window.contains(requests["t_intended_ns"] / 1e9).sum())
    sent = int(measured.window.contains(requests["t_sent_ns"] / 1e9).sum())
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


# Bursts of this size at such intervals are not steps of an engine.
MIN_BURST_EVENTS, MIN_BURST_INTERVAL_S = 8, 0.25


def _finding(check: str, level: Level | None, message: str) -> Finding | None:
    return None if level is None else Finding(check, level, message)


def _above(value: float | None, degraded: float, invalid: float) -> Level | None:
    if value is None or math.isnan(value) or value <= degraded:
        return None
    return Level.INVALID if value > invalid else Level.DEGRADED


def _sent_rate(facts: Mapping[str, Any]) -> Finding | None:
    fraction = facts["sent_over_offered"]
    level = _above(None if fraction is None else round(1 - fraction, 9), 0.01, 0.05)
    return _finding("sent_rate", level, f"only {100 * (fraction or 0):.1f} % of the offered requests were sent on time")


def _schedule_lag(facts: Mapping[str, Any]) -> Finding | None:
    """The bound is 5 ms or 5 % of the median TTFT, whichever is larger; a smaller lag distorts no latency."""
    lag, ttft = facts["schedule_lag_p99_s"], facts["ttft_median_s"] or 0.0
    level = _above(lag, max(0.005, 0.05 * ttft), max(0.025, 0.20 * ttft))
    return _finding("schedule_lag", level, f"the generator sent requests up to {(lag or 0) * 1e3:.1f} ms late (p99)")


def _full_reads(facts: Mapping[str, Any]) -> Finding | None:
    """Arrival times do not show a server that waits for a full receive buffer."""
    count = facts.get("full_reads") or 0
    return _finding(
        "receive_buffer",
        Level.VALID if count else None,
        f"{count:,} reads returned 64 KiB: so much data waited unread that the server may have been held back; give "
        "the generator more processor time or `--workers`",
    )


def _loop_lag(facts: Mapping[str, Any]) -> Finding | None:
    """A late read does not change arrival times of the kernel; `schedule_lag` is for late requests."""
    if facts.get("arrival_times") == "kernel":
        return None
    lag, gap = facts["loop_lag_p99_s"], facts["gap_median_s"]
    fraction = lag / gap if lag is not None and gap else None
    return _finding(
        "loop_lag",
        _above(fraction, 0.25, 1.0),
        f"the generator's event loop lagged {(lag or 0) * 1e3:.1f} ms (p99), {100 * (fraction or 0):.0f} % of the "
        "median gap; reserve CPU cores for the generator",
    )


def _cpu(facts: Mapping[str, Any]) -> Finding | None:
    fraction = facts["cpu_share_max"]
    return _finding(
        "cpu", _above(fraction, 0.7, 0.9), f"a generator process used {100 * (fraction or 0):.0f} % of its CPU core"
    )


def _tokens(facts: Mapping[str, Any]) -> Finding | None:
    fraction = facts["token_mismatch_median"]
    level = _above(fraction, 0.02, 0.10)
    return _finding(
        "token_count", level, f"server and client token counts differ by {100 * (fraction or 0):.1f} % (median)"
    )


def _usage(facts: Mapping[str, Any]) -> Finding | None:
    """The server's count of an answer is below its events or above the limit of the request."""
    fraction = facts["usage_mismatch_median"]
    return _finding(
        "token_count",
        _above(fraction, 0.02, 0.10),
        f"usage reports impossible token counts: {100 * (fraction or 0):.1f} % (median) below the streamed events or "
        "above the requested limit",
    )


def _finish_reasons(facts: Mapping[str, Any]) -> Finding | None:
    missing, answers = facts["unfinished_answers"], facts["answers"]
    return _finding(
        "finish_reason",
        _above(missing / answers if answers else None, 0.0, 0.05),
        f"{missing} of {answers} answers ended without a finish reason: they may be cut off, but count as complete",
    )


def _bursts(facts: Mapping[str, Any]) -> Finding | None:
    """An engine may send some tokens at once; many at long intervals were held back on the way."""
    events, interval_s = facts["burst_events"], facts["burst_interval_s"]
    is_held = events is not None and events >= MIN_BURST_EVENTS and interval_s >= MIN_BURST_INTERVAL_S
    return _finding(
        "bursts",
        Level.DEGRADED if is_held else None,
        f"tokens arrive in bursts of {events or 0:.0f} every {interval_s or 0:.2f} s: a proxy or a buffer holds them "
        "back, and TTFT and gaps are its own; measure the server without it",
    )


def _prompt_lengths(facts: Mapping[str, Any]) -> Finding | None:
    excess, planned = facts["input_tokens_excess"], facts["planned_input_tokens"]
    fraction = abs(excess) / planned if excess is not None and planned else None
    return _finding(
        "prompt_length",
        _above(fraction, 0.05, math.inf),
        f"prompts have {abs(excess or 0):.0f} tokens {'more' if (excess or 0) > 0 else 'fewer'} than the planned "
        f"{planned or 0:.0f} (median, without a chat template); pass the model's tokenizer.json as --tokenizer",
    )


def _answer_lengths(facts: Mapping[str, Any]) -> Finding | None:
    shortfall = facts["length_shortfall_median"]
    return _finding(
        "answer_length",
        _above(shortfall, 0.02, math.inf),
        f"answers are {100 * (shortfall or 0):.0f} % shorter than requested (median), although their length is forced",
    )


def _completions(facts: Mapping[str, Any]) -> Finding | None:
    """A window with few completions is valid: its intervals are withheld."""
    level = None if facts["completions"] else Level.INVALID
    return _finding("completions", level, "no request completed in the window; run longer")


def _cut_off(facts: Mapping[str, Any]) -> Finding | None:
    """Valid: what such a request bounds from below is marked."""
    count, limit_s = facts.get("cut_off") or 0, facts.get("drain_limit_s")
    limit = "" if limit_s is None else f" of {limit_s:g} s"
    noun = "request was" if count == 1 else "requests were"
    message = f"{count} {noun} cut off at the drain limit{limit} and may have taken longer (≥); raise --drain"
    return _finding("drain", Level.VALID if count else None, message)


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
    return _finding("loop_gap", _above(gap, 1.0, 5.0), f"the generator's event loop was blocked for {gap or 0:.1f} s")


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
    return _finding(
        "capacity", level, f"{rate or 0:.0f} events/s per worker, more than 70 % of the capacity in the self-test"
    )


CHECKS: tuple[Callable[[Mapping[str, Any]], Finding | None], ...] = (
    _generator,
    _completions,
    _cut_off,
    _sent_rate,
    _schedule_lag,
    _full_reads,
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


def _completeness(run: RunResult, measured: Measured) -> list[Finding]:
    """A finding for a run that was killed, with the time of its last row and the planned time."""
    if run.has_ended:
        return []
    requests = measured.requests
    rows = [*requests["t_sent_ns"].dropna() / 1e9, *requests["t_end_ns"].dropna() / 1e9]
    rows += [float(row["t_s"]) for row in run.timeseries]
    duration_s = run.manifest.config.get("duration")
    planned = f" of {run.manifest.warmup_s + duration_s:.0f}" if isinstance(duration_s, int | float) else ""
    message = f"incomplete: stopped after {max(rows, default=0.0):.0f}{planned} s"
    return [Finding("incomplete", Level.INVALID, message)]


def _steadiness(measured: Measured) -> list[Finding]:
    """Changes of throughput and latencies over the window; a note where it is too short for the check."""
    window = measured.window
    if not window.is_steady:
        return [
            Finding("steady_state", Level.INVALID, "no steady state: the warm-up lasted longer than half of the run")
        ]
    if measured.manifest.mode in UNEVEN_MODES or window.length_s <= 0:
        return []
    series = series_between(
        window.start_s,
        window.end_s,
        measured.requests,
        measured.events,
        is_open_loop=measured.manifest.is_open_loop,
    )
    if not series.is_checkable:
        message = f"steady state not checked, needs about {math.ceil(series.needed_s)} s"
        return [Finding("steady_state_unchecked", Level.VALID, message)]
    changes = [
        f"{name} {'rose' if change > 0 else 'fell'} by {abs(change):.0%}".replace("%", " %")
        for name, change in series.changes().items()
    ]
    message = f"{', '.join(changes)} during the window; run longer or raise --warmup"
    return [Finding("not_stationary", Level.DEGRADED, message)] if changes else []


def _prefix_cache(cached: CachedShare) -> list[Finding]:
    """Fewer cached tokens than planned are no defect: the cache is limited."""
    if cached.planned is None:
        return []
    if cached.measured is None:
        return [Finding("cached_tokens_unknown", Level.VALID, "cached tokens unknown")]
    level = _above(cached.measured - cached.planned, 0.01, 0.10)
    message = (
        f"prompts were known to the server: {100 * cached.measured:.1f} % of prompt tokens were cached, "
        f"{100 * cached.planned:.1f} % planned; restart the server or use a new --salt"
    )
    return [Finding("prompts_known", level, message)] if level is not None else []


IDENTITY = ("model_id", "model_sha", "version", "sha", "docker_label")
START_TIME_SERIES = "process_start_time_seconds"
COUNTER_SUFFIXES = ("_total", "_count", "_success")


def restarted_s(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """When a counter of the server fell, as it does after a restart; None if none did."""
    latest: dict[tuple[str, str], float] = {}
    for row in rows:
        if not row["name"].endswith(COUNTER_SUFFIXES) or row["value"] is None:
            continue
        key = (row["name"], row.get("labels") or "")
        if row["value"] < latest.get(key, 0.0):
            return float(row["t_s"])
        latest[key] = row["value"]
    return None


UNREACHABLE = ("server_unreachable", "server_unhealthy")


def _identity(run: RunResult) -> list[Finding]:
    """Findings for a server that was gone, restarted or replaced."""
    if run.manifest.stop_reason in UNREACHABLE:
        end_s = run.manifest.window_end_s or 0.0
        message = f"the load ended after {end_s:.0f} s because the server no longer answered"
        return [Finding("server_identity", Level.INVALID, message)]
    before, after = run.manifest.target.get("info"), run.manifest.target.get("info_end")
    if before and after == {}:
        return [Finding("server_identity", Level.INVALID, "the server did not answer at the end of the run")]
    changed = [name for name in IDENTITY if before and after and before.get(name) != after.get(name)]
    started = {row["value"] for row in run.server_metrics if row["name"] == START_TIME_SERIES}
    if len(started) > 1:
        changed.append("start time")
    fell_s = restarted_s(run.server_metrics)
    if fell_s is not None:
        changed.append(f"its counters fell back {fell_s:.0f} s after the start, as after a restart")
    if not changed:
        return []
    return [Finding("server_identity", Level.INVALID, f"the server changed during the run: {', '.join(changed)}")]


# Bits of NVML's clock event reasons: hardware slowdown, software and hardware thermal slowdown, power brake. The power
# cap is not among them: it is normal for a GPU under full load.
THROTTLED = 0x08 | 0x20 | 0x40 | 0x80


def _accelerator(run: RunResult, measured: Measured) -> list[Finding]:
    """Findings for a GPU that another process used or that was throttled in the window."""
    rows = [row for row in run.server_metrics if measured.window.start_s <= row["t_s"] <= measured.window.end_s]
    most = max((row["value"] for row in rows if row["name"] == "accelerator_processes"), default=0)
    reasons = [int(row["value"]) for row in rows if row["name"] == "accelerator_throttle_reasons"]
    slowed = sum(bool(each & THROTTLED) for each in reasons)
    found = []
    if most > 1:
        message = f"the accelerator was shared: {most:.0f} processes used one device"
        found.append(Finding("accelerator_shared", Level.INVALID, message))
    if slowed:
        message = f"the accelerator was throttled in {slowed} of {len(reasons)} samples"
        found.append(Finding("accelerator_throttled", Level.INVALID, message))
    return found


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
