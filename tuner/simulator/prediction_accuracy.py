"""Grades of the accuracy of predictions, with limits for each metric."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Grade(StrEnum):
    GOOD = "good"
    USABLE = "usable"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Graded:
    """A grade, the spread of ln(measured / predicted) by metric, and the reason for a grade below good."""

    grade: Grade
    spread: Mapping[str, float]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class MetricAccuracy:
    """Accuracy of predictions of a metric, all as deviations of ln(metric).

    part: prior of each part of a residual. noise: one measurement. good, usable: limits of the grades.
    """

    part: float
    noise: float
    good: float
    usable: float


THROUGHPUT = MetricAccuracy(part=0.10, noise=0.05, good=0.05, usable=0.15)
TAIL = MetricAccuracy(part=0.20, noise=0.10, good=0.10, usable=0.30)


def accuracy_of(metric: str) -> MetricAccuracy:
    """The accuracy for a metric. Rates and times per token are predicted better than waiting times.

    >>> accuracy_of("ttft_p95_ms").noise, accuracy_of("tpot_mean_ms").noise
    (0.1, 0.05)
    """
    return TAIL if metric.startswith(("ttft", "e2e", "goodput")) or "_p9" in metric else THROUGHPUT
