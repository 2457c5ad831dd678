"""The requests, throughput and latencies of each replica, in a run over several URLs."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from reports.metrics.measured import Array, Measured
from reports.metrics.requests.per_request import primary_latency
from reports.metrics.windows import Concurrency
from reports.run_schema import NOT_FAILED, Status

LATENCIES = (("ttft_s", 0.5), ("ttft_s", 0.95), ("tpot_s", 0.5), ("e2e_s", 0.5))


def replicas_table(measured: Measured) -> pd.DataFrame:
    """A row per replica: its requests, throughput and latencies; empty if the load had one URL."""
    urls = replica_urls(measured)
    if len(urls) < 2:
        return pd.DataFrame()
    seconds = measured.window.length_s
    tokens = _tokens_of_requests(measured)
    rows = []
    for number, url in enumerate(urls):
        is_own = np.asarray(measured.requests["replica"] == number)
        own, sent = measured.population[measured.population["replica"] == number], measured.requests[is_own]
        ended_s = sent["t_end_ns"][sent["status"] == Status.OK] / 1e9
        in_flight = Concurrency.of(np.asarray(sent["t_sent_ns"]) / 1e9, np.asarray(sent["t_end_ns"]) / 1e9)
        row = {
            "replica": url,
            "requests": len(own),
            "failed ↓": int((~own["status"].isin(NOT_FAILED)).sum()),
            "requests/s ↑": measured.window.contains(ended_s).sum() / seconds if seconds > 0 else None,
            "output tokens/s ↑": tokens[is_own].sum() / seconds if seconds > 0 else None,
            "in flight, mean": in_flight.mean(measured.window.start_s, measured.window.end_s),
        }
        for name, fraction in LATENCIES:
            known = own[primary_latency(name, measured.manifest.is_open_loop)].dropna()
            title = f"{name.removesuffix('_s').upper()} p{100 * fraction:.0f}, ms ↓"
            row[title] = 1e3 * float(np.quantile(known, fraction)) if len(known) else None
        rows.append(row)
    return pd.DataFrame(rows).dropna(axis=1, how="all")


def replica_urls(measured: Measured) -> Sequence[str]:
    """The URLs of a run; the index is the `replica` of a record."""
    target = measured.manifest.target
    return [str(target.get("url")), *map(str, target.get("replicas") or ())]


def _tokens_of_requests(measured: Measured) -> Array:
    """The output tokens of each request that arrived in the window, [requests]."""
    tokens = np.zeros(len(measured.requests))
    for batch in measured.events.batches():
        inside = measured.window.contains(batch.t_s)
        tokens += np.bincount(batch.request[inside], weights=batch.tokens[inside], minlength=len(tokens))
    return tokens
