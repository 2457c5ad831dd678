"""Facts about the load generator and its records.

`client_checks.py` has the bounds. A fact is None where it was not measured.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from reports.metrics.checks.answer_facts import answer_facts
from reports.metrics.checks.restarts import UNREACHABLE, restarted_s
from reports.metrics.measured import Measured
from reports.metrics.requests.counted import is_cut_off
from reports.run_schema import Status
from reports.run_store import RunResult

LATE_SEND_S = 0.025


def client_facts(run: RunResult, measured: Measured) -> dict[str, Any]:
    """The generator's measurements of itself and of its records, by name; None for a fact that was not measured."""
    requests, population = measured.requests, measured.population
    series = _window_series(run, measured)
    workers: list[Mapping[str, Any]] = run.client.get("workers") or []
    lag = population["schedule_lag_s"] - population["limit_wait_s"].fillna(0)
    is_offered = measured.window.contains(requests["t_intended_ns"] / 1e9)
    offered = int(is_offered.sum())
    # A request that is due at the end of the window is sent shortly after it.
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


def _server_requests(run: RunResult) -> int | None:
    """The number of requests that the server counted; None if it has no count, stopped answering, or restarted."""
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
    """Open files divided by their limit, for the worker that is nearest to its limit."""
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
