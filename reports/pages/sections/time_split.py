"""The time breakdown: client, network and server stages, on average and for the slowest requests.

Server stages are means of the server's own histograms over the window, or of the timing headers of blocking calls.
A stream has no such headers. A streamed request is therefore split at the times that the client observed, and its time
to first token is compared with the server's means. The unexplained rest is shown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from reports.document import MISSING
from reports.metrics.summary import Analysis
from reports.run_schema import Status
from reports.text import legible

HEADERS = {"validation": "srv_validation_s", "queue": "srv_queue_s", "inference": "srv_inference_s"}
HISTOGRAMS = {"validation": "validation_s", "queue": "queue_s", "inference": "inference_s"}
MAX_SLOW = 10
MAX_BARS = 20


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """The parts of an average request; None for an unknown part. source: where the server's parts were measured."""

    total_s: float
    client_wait_s: float
    network_s: float | None
    validation_s: float | None
    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None
    inference_s: float | None
    source: str

    @property
    def residual_s(self) -> float:
        """The total minus the known parts."""
        parts = (self.client_wait_s, self.network_s, self.validation_s, self.queue_s, self.inference_s)
        return self.total_s - sum(part for part in parts if part is not None)


def time_split(analysis: Analysis) -> TimeSplit | None:
    """The split of a run; None if no request succeeded or the server reported no times."""
    population = analysis.measured.population
    done = population[population["status"] == Status.OK]
    is_open = analysis.run.manifest.is_open_loop
    start_ns = done["t_intended_ns"] if is_open else done["t_dispatch_ns"]
    end_ns = done["t_last_ns"].fillna(done["t_end_ns"])
    stages, source = _stages(done, analysis.summary["server"])
    if not len(done) or stages.get("inference") is None:
        return None
    prefill = _prefill_s(analysis)
    inference = stages["inference"]
    decode = None if prefill is None or inference is None or prefill > inference else inference - prefill
    return TimeSplit(
        total_s=float(((end_ns - start_ns) / 1e9).mean()),
        client_wait_s=float(((done["t_sent_ns"] - start_ns) / 1e9).mean() - _mean_connect_s(done)),
        network_s=_round_trip_s(analysis),
        validation_s=stages.get("validation"),
        queue_s=stages.get("queue"),
        prefill_s=None if decode is None else prefill,
        decode_s=decode,
        inference_s=inference,
        source=source,
    )


def _prefill_s(analysis: Analysis) -> float | None:
    """The server's mean prefill time of a request, if it is reported; else of a prefill call."""
    server = analysis.summary["server"]
    return _mean(server.get("prefill_s") or server.get("prefill_step_s"))


def _round_trip_s(analysis: Analysis) -> float | None:
    connects = analysis.measured.requests["connect_s"]
    opened = connects[connects > 0]
    return float(opened.median()) if len(opened) else None


def _mean_connect_s(done: pd.DataFrame) -> float:
    """The mean time to open a connection. It is between dispatch and send, but is a part of the network time."""
    return float(done["connect_s"].fillna(0.0).mean())


def _stages(done: pd.DataFrame, server: Mapping[str, Any]) -> tuple[dict[str, float | None], str]:
    """The server's stages by name, and their source: the headers if every request has them, else the histograms."""
    if len(done) and done["srv_inference_s"].notna().all():
        return {name: float(done[column].mean()) for name, column in HEADERS.items()}, "response headers"
    return {name: _mean(server.get(metric)) for name, metric in HISTOGRAMS.items()}, "server metrics"


def _mean(found: Mapping[str, Any] | None) -> float | None:
    return None if found is None else float(found["mean"])


def time_table(analyses: Sequence[Analysis]) -> pd.DataFrame:
    """A row per run with server times: total, parts, and the unexplained rest."""
    rows = []
    for analysis in analyses:
        split = time_split(analysis)
        if split is not None:
            parts = {
                "total": split.total_s,
                "client wait": split.client_wait_s,
                "network": split.network_s,
                "validation": split.validation_s,
                "queue": split.queue_s,
                "prefill": split.prefill_s,
                "decode": split.decode_s if split.decode_s is not None else split.inference_s,
                "unexplained": split.residual_s,
            }
            parts_ms = {name: None if value is None else 1e3 * value for name, value in parts.items()}
            rows.append({"run": analysis.label, **parts_ms, "source": split.source})
    return pd.DataFrame(rows)


def first_token_table(analyses: Sequence[Analysis]) -> pd.DataFrame:
    """The client and server parts of the time to first token: a row per streamed run with server stages."""
    rows = []
    for analysis in analyses:
        ttft_s, server = analysis.summary["metrics"]["ttft_s"]["mean"], analysis.summary["server"]
        queue_s, prefill_s = _mean(server.get("queue_s")), _prefill_s(analysis)
        if ttft_s is None or queue_s is None or prefill_s is None:
            continue
        parts = {
            "network": _round_trip_s(analysis),
            "validation": _mean(server.get("validation_s")),
            "queue": queue_s,
            "prefill": prefill_s,
        }
        other_s = ttft_s - sum(part for part in parts.values() if part is not None)
        times_s = {"TTFT (client)": ttft_s, **parts, "other": other_s, "TTFT (server)": _mean(server.get("ttft_s"))}
        rows.append(
            {"run": analysis.label, **{name: None if part is None else 1e3 * part for name, part in times_s.items()}}
        )
    return pd.DataFrame(rows).dropna(axis=1, how="all")


def slowest_table(analysis: Analysis, count: int = MAX_SLOW) -> pd.DataFrame:
    """The slowest requests that succeeded, each with its parts."""
    population = analysis.measured.population
    done = population[population["status"] == Status.OK]
    start_ns = done["t_intended_ns"] if analysis.run.manifest.is_open_loop else done["t_dispatch_ns"]
    end_ns = done["t_last_ns"].fillna(done["t_end_ns"])
    parts = pd.DataFrame(
        {
            "started, s": start_ns / 1e9,
            "total": end_ns - start_ns,
            "waiting": done["t_sent_ns"] - start_ns,
            "to first token": done["t_first_ns"] - done["t_sent_ns"],
            "streaming": done["t_last_ns"] - done["t_first_ns"],
        }
    )
    parts[["total", "waiting", "to first token", "streaming"]] /= 1e6
    for name, column in HEADERS.items():
        parts[name] = 1e3 * done[column]
    known = parts[["waiting", "to first token", "streaming", *HEADERS]].sum(axis=1)
    parts["unexplained"] = parts["total"] - known
    slowest = parts.nlargest(count, "total").dropna(axis=1, how="all")
    if "streaming" in slowest:
        # The parts of a stream add up to its total.
        slowest = slowest.drop(columns="unexplained")
    rows = done.loc[slowest.index]
    return pd.DataFrame(
        {
            "request": [legible(number) for number in _numbers(analysis, rows["request_id"])],
            "input tokens": [_whole(value) for value in rows["input_tokens"]],
            "output tokens": [_whole(value) for value in rows["output_tokens"]],
            **{str(name): list(values) for name, values in slowest.items()},
        }
    )


def _numbers(analysis: Analysis, ids: "pd.Series[str]") -> "pd.Series[str]":
    """The ids of requests without that of the run."""
    return ids.str.removeprefix(f"{analysis.run.manifest.run_id}-")


def _whole(value: float) -> int | None:
    return None if value != value else int(value)


PARTS = ("client wait", "network", "validation", "queue", "prefill", "decode", "unexplained")


def stack_frame(analyses: Sequence[Analysis]) -> pd.DataFrame:
    """The parts of an average request: run, part, value_ms, total_ms. Parts below zero are left out.

    Without server times, the parts are those that the client measured.
    """
    by_run = {row["run"]: row for row in time_table(analyses).to_dict("records")}
    rows = []
    for analysis in analyses:
        row = by_run.get(analysis.label)
        parts = _own_parts(analysis) if row is None else {name: row[name] for name in PARTS}
        if row is not None and pd.isna(row["prefill"]):
            parts = {"inference" if name == "decode" else name: value for name, value in parts.items()}
        total = sum(parts.values()) if row is None else row["total"]
        rows += [
            {"run": analysis.label, "part": part, "value_ms": float(value), "total_ms": float(total)}
            for part, value in parts.items()
            if value is not None and value == value and value > 0
        ]
    return pd.DataFrame(rows, columns=["run", "part", "value_ms", "total_ms"])


def _own_parts(analysis: Analysis) -> dict[str, float]:
    """The parts that the client measured: means over the successful streamed requests, in ms."""
    found = spans_frame(analysis).mean()
    return {name: 1e3 * float(found[name]) for name in ("waiting", "to first token", "streaming")}


def spans_frame(analysis: Analysis) -> pd.DataFrame:
    """A row per successful streamed request, in seconds: start_s, waiting, to first token, streaming."""
    population = analysis.measured.population
    done = population[(population["status"] == Status.OK) & population["t_first_ns"].notna()]
    start_ns = done["t_intended_ns"] if analysis.run.manifest.is_open_loop else done["t_dispatch_ns"]
    moments = (start_ns, done["t_sent_ns"], done["t_first_ns"], done["t_last_ns"])
    spans = {
        name: (later - earlier) / 1e9
        for name, (earlier, later) in zip(("waiting", "to first token", "streaming"), pairwise(moments), strict=True)
    }
    return pd.DataFrame({"start_s": start_ns / 1e9, **spans}, index=done.index).dropna()


def gantt_frame(analysis: Analysis, count: int = MAX_BARS) -> pd.DataFrame:
    """The slowest streamed requests in the order of their start: row, name, part, start_s, seconds."""
    spans = spans_frame(analysis)
    names = ["waiting", "to first token", "streaming"]
    slowest = spans.loc[spans[names].sum(axis=1).nlargest(count).index].sort_values("start_s")
    population = analysis.measured.population
    rows = []
    lengths = population.loc[slowest.index, ["input_tokens", "output_tokens"]].to_numpy(dtype=np.float64)
    numbers = _numbers(analysis, population.loc[slowest.index, "request_id"])
    for row, (span, own, number) in enumerate(zip(slowest.to_dict("records"), lengths, numbers, strict=True)):
        tokens = " → ".join(MISSING if length != length else f"{length:,.0f}" for length in own)
        name = f"{legible(number)}: {tokens} tokens"
        at_s = float(span["start_s"])
        for part in names:
            seconds = float(span[part])
            rows.append({"row": row, "name": name, "part": part, "start_s": at_s, "seconds": seconds})
            at_s += seconds
    return pd.DataFrame(rows, columns=["row", "name", "part", "start_s", "seconds"])
