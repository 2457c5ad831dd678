"""Where the time of an average request went: waiting in the client, on the wire, and in the server's stages.

Server stages are means of the server's own histograms over the window, or of the timing headers of blocking calls; what
they and the client's own times leave over is shown, not hidden.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from reports.document import Section, Table
from reports.results import Status
from reports.summary import Analysis

HEADERS = {"validation": "srv_validation_s", "queue": "srv_queue_s", "inference": "srv_inference_s"}
HISTOGRAMS = {"validation": "validation_s", "queue": "queue_s", "inference": "inference_s"}
NOTE = (
    "Means of the requests that succeeded, in ms. Network is one round trip, as long as opening a connection took. "
    "Prefill is the mean prefill call of the server, decode the rest of its inference time. Not explained is what is "
    "left of the whole."
)


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
    prefill = _mean(analysis.summary["server"].get("prefill_step_s"))
    inference = stages["inference"]
    known = prefill is not None and inference is not None and prefill <= inference
    connects = analysis.measured.requests["connect_s"]
    opened = connects[connects > 0]
    return TimeSplit(
        total_s=float(((end_ns - start_ns) / 1e9).mean()),
        client_wait_s=float(((done["t_sent_ns"] - start_ns) / 1e9).mean() - _opening_s(done)),
        network_s=float(opened.median()) if len(opened) else None,
        validation_s=stages.get("validation"),
        queue_s=stages.get("queue"),
        prefill_s=prefill if known else None,
        decode_s=inference - prefill if known and inference is not None and prefill is not None else None,
        inference_s=inference,
        source=source,
    )


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


def time_section(analyses: Sequence[Analysis]) -> tuple[Section, ...]:
    """The section of a report; none where no run can tell."""
    frame = time_table(analyses)
    return (Section("Where the time went", (Table("", frame, NOTE),)),) if len(frame) else ()
