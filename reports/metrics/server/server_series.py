"""Reads the server's metrics from scraped series: differences of histograms and counters, means of gauges.

Samples are the rows of `server_metrics`: series under their Prometheus names, labels as `key="value",...`.
"""

import math
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from reports.metrics.server.server_metrics import SERVER_METRICS, STALE_WHEN_IDLE, ServerMetric
from reports.metrics.windows import Window
from reports.stats.estimators import percentile_name

Samples = Mapping[str, list[tuple[str, float, float]]]

QUANTILES = (50.0, 95.0, 99.0)
_BOUND = re.compile(r'le="([^"]+)"')


def server_summary(rows: Iterable[Mapping[str, Any]], window: Window) -> dict[str, Any]:
    """{kind, unit, series, ...} of each metric that the scraped series contain, by name.

    A histogram has mean, count and, unless it is a sum, percentiles with their buckets. A gauge has mean and max. A
    counter has its change, and a quotient of counters its mean and the change of the divisor.
    """
    samples = _by_series(rows)
    found: dict[str, Any] = {}
    for metric in SERVER_METRICS:
        for series in metric.series:
            values = _reduce(metric, samples, series, window)
            if values is not None:
                found[metric.name] = {"kind": metric.kind, "unit": metric.unit, "series": series, **values}
                break
    return found


def gauge_series(rows: Iterable[Mapping[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Times and values of a gauge; empty if it was not scraped."""
    metric = next(each for each in SERVER_METRICS if each.name == name)
    samples = _by_series(rows)
    for series in metric.series:
        points = _gauge_points(metric, samples, series)
        if points:
            return sorted(points), [points[t_s] for t_s in sorted(points)]
    return [], []


def ratio_series(rows: Iterable[Mapping[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Times and values of a quotient of counters, for each pair of scrapes between which the divisor grew."""
    metric = next(each for each in SERVER_METRICS if each.name == name)
    samples = _by_series(rows)
    for series in metric.series:
        part, whole = (_counted(samples, each) for each in series.split(" / "))
        times = sorted(part.keys() & whole.keys())
        spans = [(a, b) for a, b in pairwise(times) if whole[b] > whole[a]]
        if spans:
            return [b for _, b in spans], [(part[b] - part[a]) / (whole[b] - whole[a]) for a, b in spans]
    return [], []


def counter_changes(rows: Iterable[Mapping[str, Any]], name: str, label: str, window: Window) -> dict[str, float]:
    """The growth of a counter over the window by the value of one label; "" for series without this label.

    A server may send a series only once it has counted something: at earlier scrapes its value is 0.
    """
    samples = _by_series(rows)
    found = samples.get(name) or samples.get(_other_name(name), [])
    server = re.match(r"[a-z0-9]+[:_]", name)
    times = {t_s for other, own in samples.items() if server and other.startswith(server[0]) for _, t_s, _ in own}
    pattern = re.compile(rf'(?:^|,){re.escape(label)}="([^"]*)"')
    points: dict[str, dict[float, float]] = {}
    for labels, t_s, value in found:
        match = pattern.search(labels) if label else None
        own = points.setdefault(match[1] if match else "", {})
        own[t_s] = own.get(t_s, 0.0) + value
    changes = {
        key: _difference(dict.fromkeys((t_s for t_s in times if t_s < min(own)), 0.0) | own, window)
        for key, own in points.items()
    }
    return {key: change for key, change in changes.items() if change is not None}


def _by_series(rows: Iterable[Mapping[str, Any]]) -> Samples:
    samples: dict[str, list[tuple[str, float, float]]] = {}
    for row in rows:
        if row.get("value") is not None:
            samples.setdefault(row["name"], []).append((row.get("labels") or "", row["t_s"], row["value"]))
    return samples


def _summed(samples: Samples, series: str) -> dict[float, float]:
    """The value at each scrape, summed over label sets: all, or those with the label in `series`."""
    match = re.fullmatch(r"([^{]+)(?:\{(.*)\})?", series)
    assert match is not None, series
    label = match[2] or ""
    points: dict[float, float] = {}
    for labels, t_s, value in samples.get(match[1], ()):
        if label in labels:
            points[t_s] = points.get(t_s, 0.0) + value
    return points


def _reduce(metric: ServerMetric, samples: Samples, series: str, window: Window) -> dict[str, Any] | None:
    match metric.kind:
        case "histogram":
            return _histogram(samples, series, window)
        case "counter":
            return _counter(samples, series, window)
        case _:
            return _gauge(_gauge_points(metric, samples, series), metric.scale, window)


def _histogram(samples: Samples, series: str, window: Window) -> dict[str, Any] | None:
    parts = [_mean_and_count(samples, part, window) for part in series.split(" + ")]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    found = {"mean": sum(mean for mean, _ in known), "count": known[0][1]}
    return found | ({"percentiles": _bucket_percentiles(samples, series, window)} if len(parts) == 1 else {})


def _mean_and_count(samples: Samples, series: str, window: Window) -> tuple[float, float] | None:
    total = _difference(_summed(samples, _with_suffix(series, "_sum")), window)
    count = _difference(_summed(samples, _with_suffix(series, "_count")), window)
    return None if total is None or not count else (total / count, count)


def _with_suffix(series: str, suffix: str) -> str:
    """`a{b="c"}` and `_sum` give `a_sum{b="c"}`."""
    name, brace, labels = series.partition("{")
    return f"{name}{suffix}{brace}{labels}"


def _bucket_percentiles(samples: Samples, series: str, window: Window) -> dict[str, dict[str, float | None]]:
    """Percentiles of the values in the window, linear inside a bucket, with the bounds of the bucket.

    A percentile in the last bucket, without an upper bound, has no value.
    """
    counts = _bucket_counts(samples, series, window)
    if not counts or counts[-1][1] <= 0:
        return {}
    bounds, below = np.array([bound for bound, _ in counts]), np.array([count for _, count in counts])
    found: dict[str, dict[str, float | None]] = {}
    for percentile in QUANTILES:
        wanted = percentile / 100 * below[-1]
        index = int(np.searchsorted(below, wanted))
        lo, before = (float(bounds[index - 1]), float(below[index - 1])) if index else (0.0, 0.0)
        hi = float(bounds[index]) if math.isfinite(bounds[index]) else None
        inside = float(below[index]) - before
        value = None if hi is None else lo + (hi - lo) * (wanted - before) / inside
        found[percentile_name(percentile)] = {"value": value, "lo": lo, "hi": hi}
    return found


def _bucket_counts(samples: Samples, series: str, window: Window) -> list[tuple[float, float]]:
    """The upper bound of each bucket, ascending, and the number of values of the window up to it."""
    name, _, label = _with_suffix(series, "_bucket").rstrip("}").partition("{")
    points: dict[float, dict[float, float]] = {}
    for labels, t_s, value in samples.get(name, ()):
        if label in labels and (match := _BOUND.search(labels)) is not None:
            bucket = points.setdefault(float(match[1]), {})
            bucket[t_s] = bucket.get(t_s, 0.0) + value
    grown = {bound: _difference(bucket, window) for bound, bucket in points.items()}
    return sorted((bound, count) for bound, count in grown.items() if count is not None)


def _counter(samples: Samples, series: str, window: Window) -> dict[str, Any] | None:
    changes = [_difference(_counted(samples, part), window) for part in series.split(" / ")]
    if any(change is None for change in changes):
        return None
    if len(changes) == 1:
        return {"change": changes[0]}
    part, whole = changes
    return {"mean": (part or 0.0) / whole, "change": whole} if whole else None


def _counted(samples: Samples, series: str) -> dict[float, float]:
    """A counter, or a sum of counters, at each scrape that has all of them."""
    parts = [_summed(samples, part) or _summed(samples, _other_name(part)) for part in series.split(" + ")]
    times = set.intersection(*(set(part) for part in parts))
    return {t_s: sum(part[t_s] for part in parts) for t_s in times}


def _other_name(counter: str) -> str:
    """The other spelling of a counter's name: with or without the suffix `_total`."""
    return counter.removesuffix("_total") if counter.endswith("_total") else f"{counter}_total"


def _gauge_points(metric: ServerMetric, samples: Samples, series: str) -> dict[float, float]:
    """A gauge at each scrape, without the stale values of an idle server."""
    is_mean = metric.kind == "average" and " / " not in series
    points = _averaged(samples, series) if is_mean else _levels(samples, series)
    counters = next((names for prefix, names in STALE_WHEN_IDLE.items() if series.startswith(prefix)), ())
    counted = next((found for name in counters if (found := _counted(samples, name))), {})
    idle = {b for a, b in pairwise(sorted(counted)) if counted[b] == counted[a]}
    return {t_s: value for t_s, value in points.items() if t_s not in idle}


def _gauge(points: Mapping[float, float], scale: float, window: Window) -> dict[str, Any] | None:
    inside = [scale * value for t_s, value in points.items() if window.start_s <= t_s <= window.end_s]
    return {"mean": float(np.mean(inside)), "max": max(inside)} if inside else None


def _averaged(samples: Samples, series: str) -> dict[float, float]:
    """The mean over label sets at each scrape."""
    values: dict[float, list[float]] = {}
    for _, t_s, value in samples.get(series, ()):
        values.setdefault(t_s, []).append(value)
    return {t_s: sum(each) / len(each) for t_s, each in values.items()}


def _levels(samples: Samples, series: str) -> dict[float, float]:
    """A gauge at each scrape, or the quotient of two."""
    part, _, whole = series.partition(" / ")
    points = _summed(samples, part)
    if not whole:
        return points
    wholes = _summed(samples, whole)
    return {t_s: value / wholes[t_s] for t_s, value in points.items() if wholes.get(t_s)}


def _difference(points: Mapping[float, float], window: Window) -> float | None:
    """Growth over the window: from the last scrape up to its start to the first scrape from its end on."""
    times = sorted(points)
    if len(times) < 2:
        return None
    first = max((t_s for t_s in times if t_s <= window.start_s), default=times[0])
    last = min((t_s for t_s in times if t_s >= window.end_s), default=times[-1])
    return points[last] - points[first] if last > first else None
