"""Latency percentiles of a part of a run's requests, with their intervals: of an adapter, of a kind of answer."""

import numpy as np
import numpy.typing as npt

from reports.metrics.early_end import latency_interval
from reports.metrics.requests.per_request import primary_latency
from reports.metrics.requests.request_series import RequestSeries
from reports.stats.estimators import is_supported

PERCENTILES = (50, 95)


def group_latencies(
    series: RequestSeries, own: npt.NDArray[np.bool_], names: tuple[str, ...]
) -> dict[str, float | dict[str, float | int | None] | None]:
    """For each latency, `NAME_p50` and `NAME_p95`, and `NAME_p50_interval` and `NAME_p95_interval`.

    own: [population]. In an open loop TTFT and E2E count from the intended start, as in the summary table. A percentile
    is None with too few requests for it. With too few independent requests, the bounds are NaN, and `needed` is their
    number for an interval.
    """
    found: dict[str, float | dict[str, float | int | None] | None] = {}
    for name in names:
        column = primary_latency(name, series.measured.manifest.is_open_loop)
        part = series.series(column, own)
        for percentile in PERCENTILES:
            key = f"{name}_p{percentile}"
            if not is_supported(percentile, len(part.values)):
                found |= {key: None, f"{key}_interval": None}
                continue
            estimate = latency_interval(part.percentile(percentile).interval, series.measured, column)
            bounds = {"lo": estimate.lo, "hi": estimate.hi, "needed": estimate.needed}
            found |= {key: estimate.value, f"{key}_interval": bounds}
    return found
