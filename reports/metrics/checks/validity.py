"""The verdict on a run: the checks of its client, its end, its server and its steady state."""

import math
from collections.abc import Mapping
from typing import Any

from reports.metrics.checks.abandoned import Abandoned
from reports.metrics.checks.client_checks import CHECKS
from reports.metrics.checks.findings import (
    FAILED_REQUESTS,
    NO_STEADY_STATE,
    RANK,
    Finding,
    Level,
    Verdict,
    above,
)
from reports.metrics.checks.overload import Overload
from reports.metrics.checks.restarts import START_TIME_SERIES, UNREACHABLE, restarted_s
from reports.metrics.measured import Measured
from reports.metrics.requests.prefix_cache import CachedShare
from reports.metrics.steadiness import series_between
from reports.metrics.windows import UNEVEN_MODES
from reports.run_schema import NOT_FAILED
from reports.run_store import RunResult


def judge_run(
    run: RunResult,
    measured: Measured,
    facts: Mapping[str, Any],
    overload: Overload | None = None,
    cached: CachedShare | None = None,
    abandoned: Abandoned | None = None,
) -> Verdict:
    """The verdict from all checks. facts: the result of `client_facts`."""
    findings = _completeness(run, measured)
    findings += [found for check in CHECKS if (found := check(facts)) is not None]
    findings += _failures(measured)
    findings += [Finding("overloaded", Level.VALID, overload.message)] if overload else []
    findings += abandoned.findings if abandoned else []
    findings += _imported(run)
    identity = _identity(run)
    findings += identity
    # An overloaded server, or one that restarted, has no steady state, so it is not checked.
    findings += [] if identity or (overload and overload.is_growing) else _steadiness(measured)
    findings += _prefix_cache(cached) if cached is not None else []
    findings += _accelerator(run, measured)
    findings.sort(key=lambda found: -RANK[found.level])
    return Verdict(findings[0].level if findings else Level.VALID, tuple(findings))


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


def _failures(measured: Measured) -> list[Finding]:
    """A finding at level valid: the server's failures do not spoil the measurement."""
    total = len(measured.population)
    failed = total - int(measured.population["status"].isin(NOT_FAILED).sum())
    return [Finding(FAILED_REQUESTS, Level.VALID, f"{failed:,} of {total:,} requests failed")] if failed else []


def _steadiness(measured: Measured) -> list[Finding]:
    """Changes of throughput and latencies over the window, or a note that it is too short for the check."""
    window = measured.window
    if not window.is_steady:
        return [
            Finding(NO_STEADY_STATE, Level.INVALID, "no steady state: the warm-up lasted longer than half of the run")
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
    """Only more cached tokens than planned are a finding; fewer are normal, because the cache is limited."""
    if cached.planned is None:
        return []
    if cached.measured is None:
        return [Finding("cached_tokens_unknown", Level.VALID, "cached tokens unknown")]
    level = above(cached.measured - cached.planned, 0.01, 0.10)
    message = (
        f"prompts were known to the server: {100 * cached.measured:.1f} % of prompt tokens were cached, "
        f"{100 * cached.planned:.1f} % planned; restart the server or use a new --salt"
    )
    return [Finding("prompts_known", level, message)] if level is not None else []


def _imported(run: RunResult) -> list[Finding]:
    """A finding for a run from the file of another tool; the setup section of the report lists the missing data."""
    imported = run.manifest.target.get("imported")
    return [Finding("imported", Level.VALID, f"imported from {imported['tool']}")] if imported else []


IDENTITY = ("model_id", "model_sha", "version", "sha", "docker_label")


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
    started = {(row.get("labels"), row["value"]) for row in run.server_metrics if row["name"] == START_TIME_SERIES}
    if len(started) > len({labels for labels, _ in started}):
        changed.append("start time")
    fell_s = restarted_s(run.server_metrics)
    if fell_s is not None:
        changed.append(f"its counters fell back {fell_s:.0f} s after the start, as after a restart")
    if not changed:
        return []
    return [Finding("server_identity", Level.INVALID, f"the server changed during the run: {', '.join(changed)}")]


THROTTLED = 0x08 | 0x20 | 0x40 | 0x80
"""Bits of NVML's clock event reasons: hardware slowdown, software and hardware thermal slowdown, power brake.

The power cap is not included, because it is normal for a GPU under full load.
"""


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
