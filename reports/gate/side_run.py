"""One run for the gate: its metrics by name, and the facts that compared runs must share."""

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from reports.metrics.checks.findings import is_overloaded
from reports.metrics.requests.per_request import LATENCY_NAME, PER_REQUEST, Direction
from reports.metrics.run_metrics import PER_RUN
from reports.metrics.summary import metric_value
from reports.run_store import RunManifest
from reports.text import plain_text

Array = npt.NDArray[np.float64]

OVERLOADED = "overloaded"
"""Status of a run whose server was overloaded: its latencies depend on the length of the run."""
FRACTIONS = frozenset(("error_rate", "slo_attainment", "token_timeliness", "structured_validity", "little_residual"))


@dataclass(frozen=True, slots=True)
class SideRun:
    """One run: its metrics by name, its verdict, and the facts that compared runs must share.

    identity: facts that all runs of a comparison share. device: facts that runs of different occasions also share.
    directory: the run directory, if it was kept.
    contention: time that the server's threads were ready to run over the time that they ran; None if unknown.
    """

    label: str
    values: Mapping[str, float | None]
    status: str = "valid"
    reasons: tuple[str, ...] = ()
    identity: Mapping[str, Any] = field(default_factory=dict)
    device: Mapping[str, Any] = field(default_factory=dict)
    started_at: str = ""
    directory: Path | None = None
    contention: float | None = None

    @classmethod
    def of(
        cls, manifest: RunManifest, summary: Mapping[str, Any], metrics: Sequence[str], directory: Path | None = None
    ) -> "SideRun":
        """The gate's view of a stored run. Raises KeyError for an unknown metric."""
        values = {name: metric_value(summary, name, manifest.is_open_loop) for name in metrics}
        identity = {
            "workload hash": manifest.workload_hash,
            "schedule hash": manifest.schedule_hash,
            "load mode": manifest.mode,
            "objectives": manifest.objectives,
            "model": manifest.model,
            "length control": manifest.length_control,
            "cache mode": manifest.prefix_cache,
            "schema version": manifest.schema_version,
        }
        verdict, overloaded = summary["verdict"], is_overloaded(summary)
        reasons = [*verdict["findings"], *verdict["reasons"]] if overloaded else verdict["reasons"]
        return cls(
            label=manifest.title,
            values=values,
            status=OVERLOADED if overloaded else verdict["status"],
            reasons=tuple(reason["message"] for reason in reasons),
            identity=identity,
            device=device_of(manifest),
            started_at=manifest.started_at,
            directory=directory,
        )


def device_of(manifest: RunManifest) -> dict[str, Any]:
    """The device class of a run, and its driver."""
    machine, target = manifest.machine, manifest.target
    processor = f"{machine.get('cpus_usable') or machine.get('cpu_count')} × {machine.get('cpu')}"
    return {"device class": target.get("accelerator") or processor, "driver": target.get("driver")}


@dataclass(frozen=True, slots=True)
class Pair:
    """One run of each side, measured back to back; or slices of both, measured in turn on two servers."""

    a: SideRun
    b: SideRun
    slices: "tuple[Pair, ...]" = ()

    @classmethod
    def of_slices(cls, slices: "Sequence[Pair]") -> "Pair":
        """A pair whose sides are the means of their slices."""
        return cls(mean_run([each.a for each in slices]), mean_run([each.b for each in slices]), tuple(slices))

    @property
    def is_valid(self) -> bool:
        return "invalid" not in (self.a.status, self.b.status)

    @property
    def runs(self) -> "tuple[Pair, ...]":
        """The measured pairs: the slices, or this pair if it has none."""
        return self.slices or (self,)


def mean_run(slices: Sequence[SideRun]) -> SideRun:
    """The slices of one side as one run: the mean of each metric, and the worst verdict.

    The mean is geometric, but arithmetic for a fraction. It is None if a slice lacks the metric.
    """
    names = slices[0].values
    status = next(
        (status for status in ("invalid", OVERLOADED, "degraded") if any(each.status == status for each in slices)),
        "valid",
    )
    reasons = dict.fromkeys(reason for each in slices if each.status == status for reason in each.reasons)
    values = {name: _mean_of([each.values.get(name) for each in slices], name) for name in names}
    contention = _mean_of([each.contention for each in slices], "contention")
    return replace(
        slices[0], values=values, status=status, reasons=tuple(reasons), directory=None, contention=contention
    )


def _mean_of(values: Sequence[float | None], name: str) -> float | None:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    if name in FRACTIONS or min(known) <= 0:
        return float(np.mean(known))
    return float(np.exp(np.mean(np.log(known))))


@dataclass(frozen=True, slots=True)
class GateRefusal:
    """The reason why runs were not compared. `is_usage`: the runs have different settings; a new run does not help."""

    message: str
    is_usage: bool = False

    @classmethod
    def of(cls, message: str, *, is_usage: bool = False) -> "GateRefusal":
        """A refusal; text of servers and runs in the message becomes plain text."""
        return cls(plain_text(message), is_usage)


def setting_of(run: SideRun) -> str:
    """Model, load mode and device in one line: `preset:tiny-llama · closed load · 2 × AMD EPYC 9B14`."""
    mode = run.identity.get("load mode")
    parts = (run.identity.get("model"), f"{mode} load" if mode else None, run.device.get("device class"))
    return plain_text(" · ".join(str(part) for part in parts if part))


def direction_of(metric: str) -> Direction:
    """The better direction of a metric, by its name in limits. Raises KeyError for an unknown metric."""
    known = {each.name: each.direction for each in PER_RUN} | {each.name: each.direction for each in PER_REQUEST}
    if metric in known:
        return known[metric]
    match = LATENCY_NAME.fullmatch(metric)
    if match is None:
        raise KeyError(metric)
    return Direction.LOWER


def find_refusals(
    runs: Sequence[tuple[str, SideRun]], allow: Collection[str] = ()
) -> tuple[tuple[GateRefusal, ...], tuple[str, ...]]:
    """Reasons not to compare these runs, and notes about them.

    runs: each with its place in the comparison. allow: names of facts; a difference in one of them becomes a note.
    """
    refusals = [
        GateRefusal.of(f"{where} ({run.label}) is invalid: {'; '.join(run.reasons) or 'no reason recorded'}")
        for where, run in runs
        if run.status == "invalid"
    ]
    refusals += [
        GateRefusal.of(f"{where} ({run.label}) cannot be compared: {'; '.join(run.reasons)}; choose a lower rate")
        for where, run in runs
        if run.status == OVERLOADED
    ]
    notes = [
        plain_text(f"{where} ({run.label}) is degraded: {'; '.join(run.reasons)}")
        for where, run in runs
        if run.status == "degraded"
    ]
    expected = runs[0][1].identity if runs else {}
    for name, value in expected.items():
        odd = next(((where, run) for where, run in runs if run.identity.get(name) != value), None)
        if odd is None:
            continue
        where, run = odd
        text = plain_text(f"{name} differs: {value} in {runs[0][0]}; {run.identity.get(name)} in {where}")
        if name in allow:
            notes.append(f"{text} (allowed)")
        else:
            refusals.append(GateRefusal(f"the runs cannot be compared: {text}", is_usage=True))
    return tuple(refusals), tuple(notes)


def log_degradation(values: Sequence[float | None], name: str) -> Array | None:
    """Values on the scale of d: logarithms, or a fraction as it is; the sign makes a higher value worse.

    None if a value is missing, or has no logarithm. Raises KeyError for an unknown metric.
    """
    known = [value for value in values if value is not None]
    if len(known) < len(values) or (name not in FRACTIONS and any(value <= 0 for value in known)):
        return None
    sign = -1.0 if direction_of(name) is Direction.HIGHER else 1.0
    return sign * (np.array(known) if name in FRACTIONS else np.log(known))


def median_of(values: Iterable[float | None]) -> float | None:
    """The median of the known values; None without any."""
    known = [value for value in values if value is not None]
    return float(statistics.median(known)) if known else None
