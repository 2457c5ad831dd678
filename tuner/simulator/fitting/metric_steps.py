"""Computes steps of a server without step traces from the differences of its metrics between scrapes.

The step law is linear, so a cost model can be fitted to sums over intervals. `tgi_batch_inference_duration` has the
number of calls and their time by method. Their work is summed over the tokens that the run's requests received in the
interval. The chunks of a prompt are unknown.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from reference_server.router.scheduling.step_work import StepWork
from tuner.errors import TraceError
from tuner.simulator.fitting.traced_steps import TracedSteps, read_steps
from tuner.simulator.simulated_server import OPTION_NAMES
from tuner.trial.evaluate import STEPS_FILE

NS_PER_S = 1e9
METHODS = ("prefill", "decode")
CALLS, SECONDS = "tgi_batch_inference_duration_count", "tgi_batch_inference_duration_sum"
POOL = "tgi_batch_max_total_tokens"
METRICS_TABLE, REQUESTS_TABLE = "server_metrics.parquet", "requests.parquet"
Array = npt.NDArray[np.float64]
# Methods and features of `StepWork` of each row, by whether prefill is chunked. With chunked prefill, a call of either
# method computes both phases, so only their sum is known.
_PREFILL, _DECODE = np.array([True, False]), np.array([False, True])
_PROMPTS = np.array([True] * 4 + [False] * 3)
PHASES = {False: ((_PREFILL, _PROMPTS), (_DECODE, ~_PROMPTS)), True: ((_PREFILL | _DECODE, _PROMPTS | ~_PROMPTS),)}


def steps_of(run: Path, settings: Mapping[str, Any]) -> TracedSteps:
    """The steps of a trial's run: from its step trace, else from its metrics. Raises TraceError."""
    trace = run.parent / STEPS_FILE
    return read_steps(trace) if trace.exists() else metric_steps(run, settings)


def metric_steps(run: Path, settings: Mapping[str, Any]) -> TracedSteps:
    """Sums over the intervals of a run on a server with these settings. Raises TraceError."""
    import pandas as pd

    if not (run / METRICS_TABLE).exists() or not (run / REQUESTS_TABLE).exists():
        raise TraceError(f"{run} has no server metrics or no requests")
    table = pd.read_parquet(run / METRICS_TABLE, filters=[("name", "in", [CALLS, SECONDS, POOL])])
    if table["labels"].str.contains('replica="', regex=False).any():
        raise TraceError(f"{run} has metrics of several servers: measure a single server")
    table["method"] = table["labels"].str.extract('method="([a-z]+)"', expand=False).fillna("")
    wide = table.pivot_table(index="t_s", columns=["name", "method"], values="value", aggfunc="last").sort_index()
    if any((name, method) not in wide for name in (CALLS, SECONDS) for method in METHODS):
        raise TraceError(f"{run}: the server's metrics have no {CALLS.removesuffix('_count')} by method")
    facts = _facts(run, settings, None if (POOL, "") not in wide else wide[POOL, ""].max())
    # A series does not exist before its first count.
    counts, seconds = (
        np.diff(wide[[(name, method) for method in METHODS]].ffill().fillna(0.0).to_numpy(), axis=0)
        for name in (CALLS, SECONDS)
    )
    edges_s = wide.index.to_numpy(dtype=np.float64)
    columns = ["status", "t_sent_ns", "t_first_ns", "t_last_ns", "input_tokens", "cached_input_tokens"]
    requests = pd.read_parquet(run / REQUESTS_TABLE, columns=[*columns, "output_tokens", "gap_ns"])
    requests = requests[(requests["status"] == "ok") & requests["t_first_ns"].notna()]
    computed = _computed(requests.to_dict("records"), edges_s)
    busy_s = _busy_s(requests[["t_sent_ns", "t_last_ns"]].to_numpy(dtype=np.float64) / NS_PER_S, edges_s)
    # The time between calls counts as step time, so the time of calls is scaled to the time with requests.
    scale = max(1.0, busy_s / seconds.sum()) if seconds.sum() > 0 else 1.0
    return _rows(computed, counts, seconds * scale * NS_PER_S, facts)


def _facts(run: Path, settings: Mapping[str, Any], pool: float | None) -> dict[str, Any]:
    """The facts of a step trace's head, from `/info`, the metrics and the settings. Raises TraceError."""
    manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    info = (manifest.get("target") or {}).get("info") or {}
    values = {**info, **{name: value for name, value in settings.items() if value is not None}}
    if pool is not None and "max_batch_total_tokens" not in settings:
        values["max_batch_total_tokens"] = int(pool)
    options = {name: values[name] for name in OPTION_NAMES if values.get(name) is not None}
    if "prefill_chunking" in values:
        options["supports_chunking"] = bool(values["prefill_chunking"])
    for name in ("max_batch_prefill_tokens", "max_batch_total_tokens"):
        if name not in options:
            raise TraceError(f"{run}: `{name}` is unknown: set it in [param] or [server.fixed]")
    return {
        "model_id": values.get("model_id"),
        "scheduler": options,
        "settings": {name: {"value": value} for name, value in values.items() if not isinstance(value, dict)},
    }


def _computed(requests: Sequence[Mapping[Any, Any]], edges_s: Array) -> Array:
    """[intervals, 7]: work as in `StepWork`. A prompt counts at its first token, a decode row at each later token.

    `ended` is 0: in an interval, it has about the same number as `prompts`.
    """
    found = np.zeros((max(len(edges_s) - 1, 0), len(StepWork._fields)))
    for request in requests:
        length, first_ns = float(request["input_tokens"]), float(request["t_first_ns"])
        cached = float(request["cached_input_tokens"] or 0)
        cached = 0.0 if cached != cached else cached
        place = int(np.searchsorted(edges_s, first_ns / NS_PER_S)) - 1
        if 0 <= place < len(found):
            found[place, :4] += (1, length - cached, length**2 - cached**2, cached)
        later_s = (first_ns + _later_ns(request)) / NS_PER_S
        places = np.searchsorted(edges_s, later_s) - 1
        is_in = (places >= 0) & (places < len(found))
        np.add.at(found[:, 4], places[is_in], 1)
        np.add.at(found[:, 5], places[is_in], (length + np.arange(1, len(later_s) + 1))[is_in])
    return found


def _later_ns(request: Mapping[Any, Any]) -> Array:
    """ns from the first token to each later token: as received if gaps are recorded, else evenly spaced."""
    count = max(0, int(request["output_tokens"] or 1) - 1)
    gaps = request["gap_ns"]
    if gaps is not None and len(gaps) == count:
        return np.cumsum(np.asarray(gaps, dtype=np.float64))
    span_ns = float(request["t_last_ns"]) - float(request["t_first_ns"])
    return np.linspace(0.0, span_ns, count + 1)[1:]


def _busy_s(spans_s: Array, edges_s: Array) -> float:
    """Time with a request in flight between the first and the last edge, in seconds."""
    total, reached = 0.0, float(edges_s[0]) if len(edges_s) else 0.0
    for begin, end in sorted(map(tuple, spans_s.tolist())):
        end = min(end, float(edges_s[-1]))
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _rows(computed: Array, counts: Array, wall_ns: Array, facts: Mapping[str, Any]) -> TracedSteps:
    """Sums over intervals, with a row for each phase, or one for both phases with chunked prefill.

    An interval is merged with the next one until its calls and its work have the same phases, because a step can cross
    the end of an interval.
    """
    chunks = bool(facts["scheduler"].get("supports_chunking"))
    works: list[Array] = []
    calls: list[Array] = []
    walls: list[float] = []
    work, count, wall = np.zeros(computed.shape[1]), np.zeros(2), np.zeros(2)
    for each_work, each_count, each_wall in zip(computed, counts, wall_ns, strict=True):
        work, count, wall = work + each_work, count + each_count, wall + each_wall
        if not count.any() or (count[0] > 0) != (work[0] > 0) or (count[1] > 0) != (work[4] > 0):
            continue
        for phases, features in PHASES[chunks]:
            if count[phases].any():
                works.append(np.where(features, work, 0.0))
                calls.append(np.where(phases, count, 0.0))
                walls.append(float(wall[phases].sum()))
        work, count, wall = np.zeros(computed.shape[1]), np.zeros(2), np.zeros(2)
    return TracedSteps.of(works, walls, facts, calls=calls)
