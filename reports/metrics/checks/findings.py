"""The findings of a run's checks: their levels, and the verdict that follows from them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Level(StrEnum):
    """The validity of a run: the level of its worst finding."""

    VALID = "valid"
    DEGRADED = "degraded"
    INVALID = "invalid"


NO_STEADY_STATE = "steady_state"
"""The check of an invalid run whose warm-up lasted longer than half of it."""
FAILED_REQUESTS = "failed_requests"
"""The check of a finding on failed requests, which is about the server."""
RANK = {Level.VALID: 0, Level.DEGRADED: 1, Level.INVALID: 2}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: its name, its level, and a message.

    A finding of level valid is a fact about the server or the run; the measurement stays valid.
    """

    check: str
    level: Level
    message: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a run, and its findings, worst first."""

    level: Level
    findings: tuple[Finding, ...]

    def to_json(self) -> dict[str, Any]:
        """`reasons` are the findings above level valid, `findings` those at level valid."""
        rows = [{"check": each.check, "level": each.level, "message": each.message} for each in self.findings]
        return {
            "status": self.level,
            "reasons": [row for row in rows if row["level"] is not Level.VALID],
            "findings": [row for row in rows if row["level"] is Level.VALID],
        }


def finding_messages(summary: Mapping[str, Any]) -> list[str]:
    """The messages of the findings at level valid, for the first line; of an invalid run only that on failed requests.

    Empty for runs of older versions.
    """
    verdict = summary["verdict"]
    return [
        finding["message"]
        for finding in verdict.get("findings", ())
        if verdict["status"] != Level.INVALID or finding["check"] == FAILED_REQUESTS
    ]


def is_overloaded(summary: Mapping[str, Any]) -> bool:
    """Whether a valid or degraded run overloaded the server; `summary["overload"]` has the rates."""
    return summary["verdict"]["status"] != Level.INVALID and summary.get("overload") is not None


def latencies_grow(summary: Mapping[str, Any]) -> bool:
    """Whether latencies grow until the end of the run, because the server is overloaded."""
    return is_overloaded(summary) and bool(summary["overload"]["latencies_grow"])


def finding(check: str, level: Level | None, message: str) -> Finding | None:
    """The finding of a check; None without a level."""
    return None if level is None else Finding(check, level, message)


def above(value: float | None, degraded: float, invalid: float) -> Level | None:
    """The level of a value by its two bounds; None for a value up to `degraded`, and for an unknown value."""
    if value is None or math.isnan(value) or value <= degraded:
        return None
    return Level.INVALID if value > invalid else Level.DEGRADED
