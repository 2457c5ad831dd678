"""Where the time went: in the client, on the wire, and in the server's stages; on average and request by request.

Server stages are means of the server's own histograms over the window, or of the timing headers of blocking calls.
Streams carry no such headers, so a streamed request is split by its own moments, and the server's means are set against
the time up to its first token. What the known parts leave over is shown, not hidden.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from reports import request_plots
from reports.document import MISSING, Block, Plot, Section, Table, format_number
from reports.records import Status
from reports.summary import Analysis

HEADERS = {"validation": "srv_validation_s", "queue": "srv_queue_s", "inference": "srv_inference_s"}
HISTOGRAMS = {"validation": "validation_s", "queue": "queue_s", "inference": "inference_s"}
NOTE = (
    "Means of the requests that succeeded, in ms. Network is one round trip, as long as opening a connection took. "
    "Prefill is the mean prefill call of the server, decode the rest of its inference time. Not explained is what is "
    "left of the whole."
)
FIRST_TOKEN_NOTE = (
    "Means in ms. Between is the client's TTFT less a round trip and the server's validation, queue and prefill: "
    "routing, sending, and what a mean prefill call does not say of this load's."
)
SLOWEST_NOTE = (
    "In ms, the slowest first. Waiting is from the intended start to the sending, connections included; up to the "
    "first token and streaming are the client's own times. The server tells its stages in blocking calls only."
)
MOST_SLOW = 10
MOST_BARS = 20


@dataclass(frozen=True, slots=True)
class TimeSplit:
    """Seconds of an average request; None for what nobody measured. `source` says who told the server's part."""

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
        """What the known parts do not explain."""
        parts = (self.client_wait_s, self.network_s, self.validation_s, self.queue_s, self.inference_s)
        return self.total_s - sum(part for part in parts if part is not None)


def time_split(analysis: Analysis) -> TimeSplit | None:
    """The split of a run; None where nothing succeeded or the server told nothing."""
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
    known = prefill is not None and inference is not None and prefill <= inference
    return TimeSplit(
        total_s=float(((end_ns - start_ns) / 1e9).mean()),
        client_wait_s=float(((done["t_sent_ns"] - start_ns) / 1e9).mean() - _opening_s(done)),
        network_s=_round_trip_s(analysis),
        validation_s=stages.get("validation"),
        queue_s=stages.get("queue"),
        prefill_s=prefill if known else None,
        decode_s=inference - prefill if known and inference is not None and prefill is not None else None,
        inference_s=inference,
        source=source,
    )


def _prefill_s(analysis: Analysis) -> float | None:
    """Prefill of a request where the server counts it by request, else its mean prefill call."""
    server = analysis.summary["server"]
    return _mean(server.get("prefill_s") or server.get("prefill_step_s"))


def _round_trip_s(analysis: Analysis) -> float | None:
    connects = analysis.measured.requests["connect_s"]
    opened = connects[connects > 0]
    return float(opened.median()) if len(opened) else None


def _opening_s(done: pd.DataFrame) -> float:
    """The mean time that opening connections took, which lies between dispatch and sending but is the network's."""
    return float(done["connect_s"].fillna(0.0).mean())


def _stages(done: pd.DataFrame, server: Mapping[str, Any]) -> tuple[dict[str, float | None], str]:
    """The server's stages by name: of the headers where every request has them, else of the histograms."""
    if len(done) and done["srv_inference_s"].notna().all():
        return {name: float(done[column].mean()) for name, column in HEADERS.items()}, "response headers"
    return {name: _mean(server.get(metric)) for name, metric in HISTOGRAMS.items()}, "server metrics"


def _mean(found: Mapping[str, Any] | None) -> float | None:
    return None if found is None else float(found["mean"])


def time_table(analyses: Sequence[Analysis]) -> pd.DataFrame:
    """A row per run that can tell: whole, parts, and what is not explained."""
    rows = []
    for analysis in analyses:
        split = time_split(analysis)
        if split is not None:
            parts = {
                "whole": split.total_s,
                "client wait": split.client_wait_s,
                "network": split.network_s,
                "validation": split.validation_s,
                "queue": split.queue_s,
                "prefill": split.prefill_s,
                "decode": split.decode_s if split.decode_s is not None else split.inference_s,
                "not explained": split.residual_s,
            }
            told = {name: None if value is None else 1e3 * value for name, value in parts.items()}
            rows.append({"run": analysis.label, **told, "told by": split.source})
    return pd.DataFrame(rows)


def first_token_table(analyses: Sequence[Analysis]) -> pd.DataFrame:
    """Client and server side by side up to the first token: a row per streamed run whose server tells its stages."""
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
        between_s = ttft_s - sum(part for part in parts.values() if part is not None)
        told = {"TTFT seen": ttft_s, **parts, "between": between_s, "TTFT, server's": _mean(server.get("ttft_s"))}
        rows.append(
            {"run": analysis.label, **{name: None if part is None else 1e3 * part for name, part in told.items()}}
        )
    return pd.DataFrame(rows).dropna(axis=1, how="all")


def slowest_table(analysis: Analysis, count: int = MOST_SLOW) -> pd.DataFrame:
    """The slowest requests that succeeded, each with its own parts."""
    population = analysis.measured.population
    done = population[population["status"] == Status.OK]
    start_ns = done["t_intended_ns"] if analysis.run.manifest.is_open_loop else done["t_dispatch_ns"]
    end_ns = done["t_last_ns"].fillna(done["t_end_ns"])
    parts = pd.DataFrame(
        {
            "started, s": start_ns / 1e9,
            "whole": end_ns - start_ns,
            "waiting": done["t_sent_ns"] - start_ns,
            "up to first token": done["t_first_ns"] - done["t_sent_ns"],
            "streaming": done["t_last_ns"] - done["t_first_ns"],
        }
    )
    parts[["whole", "waiting", "up to first token", "streaming"]] /= 1e6
    for name, column in HEADERS.items():
        parts[name] = 1e3 * done[column]
    known = parts[["waiting", "up to first token", "streaming", *HEADERS]].sum(axis=1)
    parts["not explained"] = parts["whole"] - known
    slowest = parts.nlargest(count, "whole").dropna(axis=1, how="all")
    if "streaming" in slowest:
        # A stream's own moments explain all of it.
        slowest = slowest.drop(columns="not explained")
    rows = done.loc[slowest.index]
    return pd.DataFrame(
        {
            "request": list(rows["request_id"]),
            "input tokens": [_whole(value) for value in rows["input_tokens"]],
            "output tokens": [_whole(value) for value in rows["output_tokens"]],
            **{str(name): list(values) for name, values in slowest.items()},
        }
    )


def _whole(value: float) -> int | None:
    return None if value != value else int(value)


PARTS = ("client wait", "network", "validation", "queue", "prefill", "decode", "not explained")


def stack_frame(analyses: Sequence[Analysis]) -> pd.DataFrame:
    """The parts of an average request: run, part, value_ms, whole_ms, which parts below zero make less than their sum.

    Of a run whose server tells nothing, the client's own parts.
    """
    told = {row["run"]: row for row in time_table(analyses).to_dict("records")}
    rows = []
    for analysis in analyses:
        row = told.get(analysis.label)
        parts = _own_parts(analysis) if row is None else {name: row[name] for name in PARTS}
        if row is not None and pd.isna(row["prefill"]):
            parts = {"inference" if name == "decode" else name: value for name, value in parts.items()}
        whole = sum(parts.values()) if row is None else row["whole"]
        rows += [
            {"run": analysis.label, "part": part, "value_ms": float(value), "whole_ms": float(whole)}
            for part, value in parts.items()
            if value is not None and value == value and value > 0
        ]
    return pd.DataFrame(rows, columns=["run", "part", "value_ms", "whole_ms"])


def _own_parts(analysis: Analysis) -> dict[str, float]:
    """Means of the streamed requests that succeeded, in ms."""
    found = spans_frame(analysis).mean()
    return {name: 1e3 * float(found[name]) for name in ("waiting", "up to first token", "streaming")}


def spans_frame(analysis: Analysis) -> pd.DataFrame:
    """Seconds of each streamed request that succeeded: start_s, waiting, up to first token, streaming."""
    population = analysis.measured.population
    done = population[(population["status"] == Status.OK) & population["t_first_ns"].notna()]
    start_ns = done["t_intended_ns"] if analysis.run.manifest.is_open_loop else done["t_dispatch_ns"]
    moments = (start_ns, done["t_sent_ns"], done["t_first_ns"], done["t_last_ns"])
    spans = {
        name: (later - earlier) / 1e9
        for name, (earlier, later) in zip(("waiting", "up to first token", "streaming"), pairwise(moments), strict=True)
    }
    return pd.DataFrame({"start_s": start_ns / 1e9, **spans}, index=done.index).dropna()


def gantt_frame(analysis: Analysis, count: int = MOST_BARS) -> pd.DataFrame:
    """The slowest streamed requests in order of their start: row, name, part, start_s, seconds."""
    spans = spans_frame(analysis)
    names = ["waiting", "up to first token", "streaming"]
    slowest = spans.loc[spans[names].sum(axis=1).nlargest(count).index].sort_values("start_s")
    population = analysis.measured.population
    rows = []
    lengths = population.loc[slowest.index, ["input_tokens", "output_tokens"]].to_numpy(dtype=np.float64)
    for row, (span, own) in enumerate(zip(slowest.to_dict("records"), lengths, strict=True)):
        tokens = " → ".join(MISSING if length != length else f"{length:,.0f}" for length in own)
        at_s = float(span["start_s"])
        for part in names:
            seconds = float(span[part])
            rows.append({"row": row, "name": f"{tokens} tokens", "part": part, "start_s": at_s, "seconds": seconds})
            at_s += seconds
    return pd.DataFrame(rows, columns=["row", "name", "part", "start_s", "seconds"])


def _stack(analyses: Sequence[Analysis]) -> list[Block]:
    frame = stack_frame(analyses)
    if not len(frame):
        return []
    words = frame["part"] + " " + frame["value_ms"].map(format_number) + " ms"
    told = "; ".join(f"{run}: {', '.join(rows)}" for run, rows in words.groupby(frame["run"], sort=False))
    return [
        Plot(
            "time_stack",
            "Where an average request's time went",
            "Means of the requests that succeeded; numbers are the whole. A part below zero is in the table alone.",
            f"Stacked bars. {told}.",
            lambda size: request_plots.time_stack(frame, size),
            is_full_width=True,
            height=min(1.0, 0.34 + 0.12 * len(analyses)),
        )
    ]


def _gantt(analysis: Analysis) -> list[Block]:
    frame = gantt_frame(analysis)
    if not len(frame):
        return []
    count = frame["row"].nunique()
    longest = frame.groupby("row")["seconds"].sum().max()
    return [
        Plot(
            "slowest",
            "The slowest requests on the run's clock",
            f"{count} requests in order of their start, named by input → output tokens.",
            f"Gantt chart of the {count} slowest requests; the longest took {format_number(longest)} s.",
            lambda size: request_plots.gantt(frame, size),
            is_full_width=True,
        )
    ]


def time_section(analyses: Sequence[Analysis]) -> tuple[Section, ...]:
    """The section of a report; of single runs only means, where they can tell, and one run's slowest requests."""
    blocks: list[Block] = _stack(analyses)
    if len(frame := time_table(analyses)):
        blocks.append(Table("An average request", frame, NOTE))
    first = first_token_table(analyses)
    if len(first):
        blocks.append(Table("Up to the first token", first, FIRST_TOKEN_NOTE))
    if len(analyses) == 1 and len(slowest := slowest_table(analyses[0])):
        blocks += [*_gantt(analyses[0]), Table("The slowest requests", slowest, SLOWEST_NOTE)]
    return (Section("Where the time went", tuple(blocks)),) if blocks else ()
