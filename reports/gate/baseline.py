"""Named baselines: stored runs with their author and reason; later runs are compared with them.

A baseline file is untrusted input: its size is limited, and its content is validated. Every version of tgi-bench reads
the baselines of all earlier versions.
"""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from reports.gate.side_run import SideRun, find_refusals
from reports.gate.stored import MIN_RUNS
from reports.metrics.named_metrics import METRICS
from reports.metrics.requests.per_request import LATENCY_NAME
from reports.metrics.requests.pooled_metrics import PooledMetric
from reports.metrics.run_metrics import PER_RUN
from reports.metrics.summary import Analysis, metric_value
from reports.run_store import RunDirectoryError, replace_file
from reports.saved_run import load_run

BASELINE_VERSION = 1
MAX_BYTES = 16 * 2**20
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
SKETCHED = {"ttft": "ttft_s", "tpot": "tpot_s"}
POOLED = ("itl_s", "gap_s")
SKETCH_PERCENTILES = (0.0, 1.0, 5.0, *(float(each) for each in range(10, 100, 10)), 95.0, 99.0, 99.9, 100.0)
NOT_LOAD = (
    *("url", "server", "model_id", "model", "ready_timeout", "label"),
    *("api_key", "api_key_env", "header", "ca_file", "insecure"),
)

Text = Annotated[str, Field(max_length=4_000)]
Number = Annotated[float, Field(allow_inf_nan=False)]


class BaselineError(Exception):
    """A baseline is missing, damaged or of a newer version, or runs cannot form a baseline."""


class StoredRun(BaseModel):
    """One run of a baseline. `sketch`: TTFT, TPOT, ITL and gaps in ms at `SKETCH_PERCENTILES`."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    run_id: Text
    started_at: Text
    order: int
    label: Text
    status: Text
    reasons: tuple[Text, ...] = ()
    metrics: dict[str, Number | None]
    sketch: dict[str, tuple[Number, ...]] = {}
    counts: dict[str, int] = {}
    identity: dict[str, Any] = {}
    device: dict[str, Any] = {}

    @property
    def side_run(self) -> SideRun:
        return SideRun(self.label, self.metrics, self.status, self.reasons, self.identity, self.device, self.started_at)


class Baseline(BaseModel):
    """A baseline file. `side` describes the server, `load` the load, `machine` the machine."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_version: int = Field(ge=1)
    name: Text
    author: Annotated[str, Field(min_length=1, max_length=200)]
    reason: Annotated[str, Field(min_length=1, max_length=4_000)]
    blessed_at: Text
    tool_version: Text
    side: dict[str, Any]
    machine: dict[str, Any]
    load: dict[str, Any]
    load_hash: Text | None
    percentiles: tuple[Number, ...]
    runs: tuple[StoredRun, ...] = Field(min_length=1, max_length=1_000)

    @property
    def side_runs(self) -> tuple[SideRun, ...]:
        """Its runs for the gate, each labelled with the name of the baseline."""
        return tuple(run.model_copy(update={"label": self.name}).side_run for run in self.runs)


def bless(directories: Sequence[Path], name: str, author: str, reason: str) -> Baseline:
    """A baseline of runs, in the order of their start.

    Raises BaselineError if runs are invalid, have different settings, or are fewer than `MIN_RUNS`.
    """
    if NAME.fullmatch(name) is None:
        raise BaselineError(f"`{name}` is not a baseline name: use letters, digits, dots, dashes and underscores")
    if len(directories) < MIN_RUNS:
        raise BaselineError(f"{len(directories)} runs were given but a baseline needs {MIN_RUNS}")
    try:
        analyses = sorted(
            (Analysis.of(load_run(each)) for each in directories), key=lambda each: each.run.manifest.started_at
        )
    except RunDirectoryError as error:
        raise BaselineError(str(error)) from error
    runs = tuple(_stored(order, analysis) for order, analysis in enumerate(analyses))
    sides = [run.model_copy(update={"identity": run.identity | run.device}).side_run for run in runs]
    refusals, _ = find_refusals([(f"run {run.run_id}", side) for run, side in zip(runs, sides, strict=True)])
    if refusals:
        raise BaselineError("; ".join(refusal.message for refusal in refusals))
    first = analyses[0].run.manifest
    info = first.target.get("info") or {}
    return Baseline(
        schema_version=BASELINE_VERSION,
        name=name,
        author=author,
        reason=reason,
        blessed_at=datetime.now(UTC).isoformat(timespec="seconds"),
        tool_version=first.version,
        side={
            **first.labels,
            "model": first.model,
            "server_version": info.get("version"),
            "build": info.get("sha"),
            "docker_label": info.get("docker_label"),
            "launch_argv": first.target.get("launch_argv"),
            "config": first.target.get("config"),
        },
        machine={**first.machine, "accelerator": first.target.get("accelerator"), "driver": first.target.get("driver")},
        load={key: value for key, value in first.config.items() if key not in NOT_LOAD},
        load_hash=first.workload_hash,
        percentiles=SKETCH_PERCENTILES,
        runs=runs,
    )


def _stored(order: int, analysis: Analysis) -> StoredRun:
    manifest, summary = analysis.run.manifest, analysis.summary
    names = metric_names(summary)
    side = SideRun.of(manifest, summary, names)
    return StoredRun(
        run_id=manifest.run_id,
        started_at=manifest.started_at,
        order=order,
        label=side.label,
        status=side.status,
        reasons=side.reasons,
        metrics=dict(side.values),
        sketch=_sketch(analysis),
        counts=summary["counts"],
        identity=dict(side.identity),
        device=dict(side.device),
    )


def metric_names(summary: dict[str, Any]) -> tuple[str, ...]:
    """The names of all metrics of a summary, as in limits."""
    latencies = []
    for column, found in summary["metrics"].items():
        if not column.endswith("_s") or column.endswith("_co_s"):
            continue
        for stat in (*found["percentiles"], "mean", "min", "max"):
            name = f"{column.removesuffix('_s')}_{stat}_ms"
            if LATENCY_NAME.fullmatch(name) and _has(summary, name):
                latencies.append(name)
    return (*(metric.name for metric in PER_RUN), *latencies)


def _has(summary: dict[str, Any], name: str) -> bool:
    try:
        metric_value(summary, name, is_open_loop=False)
    except KeyError:
        return False
    return True


def _sketch(analysis: Analysis) -> dict[str, tuple[float, ...]]:
    measured = analysis.measured
    found = {name: np.asarray(measured.population[column], dtype=np.float64) for name, column in SKETCHED.items()}
    found |= {
        metric.name.removesuffix("_s"): np.asarray(metric.function(measured)[0], dtype=np.float64)
        for metric in METRICS
        if isinstance(metric, PooledMetric) and metric.name in POOLED
    }
    sketch = {}
    for name, values in found.items():
        known = values[np.isfinite(values)]
        if len(known):
            sketch[name] = tuple(float(each) for each in 1e3 * np.percentile(known, SKETCH_PERCENTILES))
    return sketch


def write_baseline(directory: Path, baseline: Baseline, *, replaces: bool = False) -> Path:
    """Store a baseline. Raises BaselineError if one of that name exists and `replaces` is false."""
    path = free_path(directory, baseline.name, replaces=replaces)
    directory.mkdir(parents=True, exist_ok=True)
    replace_file(path, baseline.model_dump_json(indent=2).encode() + b"\n")
    return path


def free_path(directory: Path, name: str, *, replaces: bool = False) -> Path:
    """The file of a new baseline. Raises BaselineError as `write_baseline` does."""
    path = directory / f"{name}.json"
    if path.exists() and not replaces:
        raise BaselineError(f"{path} exists; a baseline is replaced only on request")
    return path


def load_baseline(directory: Path, name: str) -> Baseline:
    """A baseline by its name. Raises BaselineError."""
    if NAME.fullmatch(name) is None:
        raise BaselineError(f"`{name}` is not a baseline name: use letters, digits, dots, dashes and underscores")
    path = directory / f"{name}.json"
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BaselineError(f"{path} is larger than the limit of {MAX_BYTES // 2**20} MiB")
        content = path.read_bytes()
    except OSError as error:
        raise BaselineError(f"{path}: {error.strerror}") from error
    try:
        baseline = Baseline.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise BaselineError(f"{path} is not a baseline: {where}: {first['msg']}") from error
    if baseline.schema_version > BASELINE_VERSION:
        raise BaselineError(
            f"{path} has schema {baseline.schema_version} but this version reads up to {BASELINE_VERSION}; "
            "update tgi-bench"
        )
    return baseline


def list_baselines(directory: Path) -> tuple[Baseline, ...]:
    """All baselines of a directory, sorted by name. Raises BaselineError if one is damaged."""
    return tuple(load_baseline(directory, path.stem) for path in sorted(directory.glob("*.json")))
