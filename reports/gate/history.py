"""The history table: one line per commit, and the commits at which a metric changed.

A series contains the points of one device class under one load. A change is the split of a series with the largest t
statistic; its p-value comes from permutations. Both parts are then split in the same way.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt

from reports.gate.comparison import DEFAULT_GATED, MIN_EFFECT
from reports.gate.side_run import FRACTIONS, SideRun, direction_of, find_refusals, log_degradation, median_of
from reports.gate.stored import OccasionVariation
from reports.metrics.requests.per_request import Direction
from reports.run_store import JsonlWriter

Array = npt.NDArray[np.float64]

HISTORY_VERSION = 1
MAX_POINTS = 60
MIN_SEGMENT = 3
MIN_FRACTION_CHANGE = 0.005
PERMUTATIONS = 1_999
MAX_P = 0.005
SEED = 20_240_301


class HistoryError(Exception):
    """A history file that is missing, damaged, or of a newer version."""


@dataclass(frozen=True, slots=True)
class CommitPoint:
    """The medians of one commit. Only points of one `series` (same device class and load) are comparable."""

    commit: str
    series: str
    device: str
    metrics: Mapping[str, float]
    runs: int
    measured_at: str
    added_at: str = ""
    schema_version: int = HISTORY_VERSION


@dataclass(frozen=True, slots=True)
class LevelChange:
    """A change of a metric: `before` is the last commit at the old level, `first` is the first at the new level.

    `size` is the relative change; for a fraction it is the difference. `points` counts the commits before and after.
    """

    metric: str
    series: str
    device: str
    before: str
    first: str
    size: float
    p: float
    is_worse: bool
    points: tuple[int, int] = field(default=(0, 0))


def point_of(runs: Sequence[SideRun], commit: str) -> CommitPoint:
    """The point of one commit: the median of each metric. Raises HistoryError for runs that cannot be compared."""
    if not runs:
        raise HistoryError("no runs were given; give at least one")
    keys = {series_of(run) for run in runs}
    if len(keys) > 1:
        raise HistoryError("the runs have different loads or devices; add one series at a time")
    refusals, _ = find_refusals([(f"run {number}", run) for number, run in enumerate(runs, 1)])
    if refusals:
        raise HistoryError("; ".join(refusal.message for refusal in refusals))
    medians = {name: median_of(run.values.get(name) for run in runs) for name in runs[0].values}
    return CommitPoint(
        commit=commit,
        series=keys.pop(),
        device=str(runs[0].device.get("device class", "unknown")),
        metrics={name: value for name, value in medians.items() if value is not None},
        runs=len(runs),
        measured_at=max(run.started_at for run in runs),
        added_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def series_of(run: SideRun) -> str:
    """A hash of the facts that points of a series share: load, model, device class and driver."""
    text = json.dumps([sorted(run.identity.items()), sorted(run.device.items())], default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def append_point(path: Path, point: CommitPoint) -> None:
    """Append a line to the table; creates the file and its directory. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with JsonlWriter(path) as table:
        table.write(asdict(point))


def load_history(path: Path) -> tuple[CommitPoint, ...]:
    """Every point, in the order of the file; none if the file does not exist. Raises HistoryError."""
    if not path.exists():
        return ()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise HistoryError(f"{path}: {error}") from error
    return tuple(_point(path, number, line) for number, line in enumerate(lines, 1) if line.strip())


def _point(path: Path, number: int, line: str) -> CommitPoint:
    try:
        row = json.loads(line)
        version = row["schema_version"]
        metrics = {str(name): float(value) for name, value in row["metrics"].items()}
        commit, series, device, measured_at = (str(row[name]) for name in ("commit", "series", "device", "measured_at"))
        runs = int(row["runs"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise HistoryError(f"{path}:{number}: not a history line ({error!r})") from error
    if version != HISTORY_VERSION:
        raise HistoryError(
            f"{path}:{number}: has schema {version} but this version reads {HISTORY_VERSION}; update tgi-bench"
        )
    if not all(math.isfinite(value) for value in metrics.values()):
        raise HistoryError(f"{path}:{number}: a metric is not a finite number")
    return CommitPoint(commit, series, device, metrics, runs, measured_at, str(row.get("added_at", "")))


def find_changes(points: Sequence[CommitPoint], metrics: Sequence[str] = DEFAULT_GATED) -> tuple[LevelChange, ...]:
    """The changes of every series and metric, in the order of the points. Raises KeyError for an unknown metric."""
    by_series: dict[str, list[CommitPoint]] = {}
    for point in points:
        by_series.setdefault(point.series, []).append(point)
    found = []
    for series in by_series.values():
        for name in metrics:
            direction_of(name)
            known = [point for point in series if name in point.metrics][-MAX_POINTS:]
            scaled = log_degradation([point.metrics[name] for point in known], name)
            if scaled is not None:
                found += [_change(name, known, scaled, *split) for split in _splits(scaled, 0, name)]
    return tuple(found)


def _change(
    name: str, points: Sequence[CommitPoint], scaled: Array, start: int, at: int, end: int, p: float
) -> LevelChange:
    before, after = points[at - 1], points[at]
    degradation = float(scaled[at:end].mean() - scaled[start:at].mean())
    sign = -1.0 if direction_of(name) is Direction.HIGHER else 1.0
    size = sign * degradation if name in FRACTIONS else math.expm1(sign * degradation)
    return LevelChange(
        metric=name,
        series=after.series,
        device=after.device,
        before=before.commit,
        first=after.commit,
        size=size,
        p=p,
        is_worse=degradation > 0,
        points=(at - start, end - at),
    )


def _splits(values: Array, offset: int, name: str) -> Iterator[tuple[int, int, int, float]]:
    """Start, split index, end and p-value of every split, from left to right; indices count from the series' start."""
    count = len(values)
    if count < 2 * MIN_SEGMENT:
        return
    at, p = best_split(values)
    size = abs(float(values[at:].mean() - values[:at].mean()))
    min_size = MIN_FRACTION_CHANGE if name in FRACTIONS else math.log1p(MIN_EFFECT)
    if p > MAX_P or size < min_size:
        return
    yield from _splits(values[:at], offset, name)
    yield offset, offset + at, offset + count, p
    yield from _splits(values[at:], offset + at, name)


def best_split(values: Array) -> tuple[int, float]:
    """The split with the largest t statistic, and its permutation p-value."""
    observed = _t_statistics(values[np.newaxis])[0]
    at = int(np.argmax(observed)) + MIN_SEGMENT
    random = np.random.default_rng(SEED)
    shuffled = random.permuted(np.broadcast_to(values, (PERMUTATIONS, len(values))), axis=1)
    reached = int((_t_statistics(shuffled).max(axis=1) >= observed.max() - 1e-12).sum())
    return at, (1 + reached) / (1 + PERMUTATIONS)


def _t_statistics(rows: Array) -> Array:
    """|t| of every split with at least `MIN_SEGMENT` points on each side.

    rows: [orders, points]; the result: [orders, splits].
    """
    count = rows.shape[1]
    centred = rows - rows.mean(axis=1, keepdims=True)
    places = np.arange(MIN_SEGMENT, count - MIN_SEGMENT + 1)
    sums = np.cumsum(centred, axis=1)[:, places - 1]
    total = (centred**2).sum(axis=1, keepdims=True)
    between = sums**2 * (1 / places + 1 / (count - places))
    within = np.maximum(total - between, 1e-18)
    return np.asarray(np.sqrt(between / within * (count - 2)))


def occasion_variation(points: Sequence[CommitPoint], run: SideRun, metrics: Sequence[str]) -> OccasionVariation:
    """The variation of metrics between occasions, in the series of a run.

    Computed from successive differences, so a past change of level adds a single difference.
    """
    series = [point for point in points if point.series == series_of(run)][-MAX_POINTS:]
    deviations = {}
    for name in metrics:
        scaled = log_degradation([point.metrics.get(name) for point in series], name)
        if scaled is not None and len(scaled) > 1:
            deviations[name] = math.sqrt(float(np.mean(np.diff(scaled) ** 2)) / 2)
    return OccasionVariation(deviations, len(series))
