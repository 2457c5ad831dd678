"""A fitted step law as it is stored: coefficients, intervals, errors and source."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tuner.errors import CostModelError
from tuner.simulator.fitting.draft_acceptance import DraftAcceptance
from tuner.simulator.fitting.linear_law import ADAPTERS, COLUMNS, DECODE, DRAFTS, ENDED, PREFILL, LinearLaw
from tuner.simulator.step_ranges import StepRanges

FORMAT = 1
# The source of a model.
BY_HAND, FROM_STEPS, FROM_METRICS, FROM_CLIENTS = "by hand", "step trace", "from_metrics", "client timings"


@dataclass(frozen=True, slots=True)
class StepErrors:
    """Median and 90th percentile of relative errors: of held-out steps, by phase.

    For a model from client timings: of held-out loads, by `throughput`, `ttft` and `tpot`. spread: median relative
    deviation of held-out steps from steps with equal work, by phase; no law can predict a step better. sums: median
    relative error of the sum of consecutive held-out steps, by phase. A prediction is such a sum, in which the
    differences between equal steps cancel. sizes: the largest error of the sum of all held-out steps of about one size,
    in rows or prompt tokens, by phase.
    """

    median: Mapping[str, float]
    p90: Mapping[str, float]
    spread: Mapping[str, float] = field(default_factory=dict)
    sums: Mapping[str, float] = field(default_factory=dict)
    sizes: Mapping[str, float] = field(default_factory=dict)

    def of_prediction(self, name: str) -> float:
        """The error to expect of a prediction."""
        return self.sums.get(name, self.median[name])

    def to_json(self) -> dict[str, Any]:
        return {name: dict(getattr(self, name)) for name in ("median", "p90", "spread", "sums", "sizes")}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "StepErrors":
        return cls(row["median"], row["p90"], row.get("spread", {}), row.get("sums", {}), row.get("sizes", {}))


@dataclass(frozen=True, slots=True)
class CostModel:
    """A fitted step law. `coefficients`: ns by column. `unknown`: columns that the steps do not determine.

    ranges: the measured sizes of steps; None if they are unknown.
    """

    coefficients: Mapping[str, float]
    graph_sizes: tuple[int, ...] = ()
    unknown: tuple[str, ...] = ()
    num_steps: int = 0
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    errors: StepErrors | None = None
    source: str = BY_HAND
    facts: Mapping[str, Any] = field(default_factory=dict)
    acceptance: DraftAcceptance | None = None
    ranges: StepRanges | None = None

    @property
    def in_order(self) -> tuple[float, ...]:
        """Every coefficient, in the order of `COLUMNS`."""
        return tuple(self.coefficients.get(name, 0.0) for name in COLUMNS)

    @property
    def law(self) -> "LinearLaw":
        return LinearLaw(self.in_order, self.graph_sizes, self.ranges)

    @property
    def is_measured(self) -> bool:
        return self.source != BY_HAND

    @property
    def lacks_ranges(self) -> bool:
        """Whether the model was fitted to steps whose sizes are unknown."""
        return self.ranges is None and self.source in (FROM_STEPS, FROM_METRICS)

    @property
    def is_from_metrics(self) -> bool:
        return self.source == FROM_METRICS

    @property
    def is_from_clients(self) -> bool:
        return self.source == FROM_CLIENTS

    def scaled(self, prefill: float, decode: float) -> "CostModel":
        """The model with the times of prefill and decode multiplied by these factors."""
        beyond_prefill = DECODE + DRAFTS + ADAPTERS + ENDED
        return self.with_factors(dict.fromkeys(PREFILL, prefill) | dict.fromkeys(beyond_prefill, decode))

    def with_factors(self, factors: Mapping[str, float]) -> "CostModel":
        """The model with the times of these columns multiplied."""
        scaled = {name: value * factors.get(name, 1.0) for name, value in self.coefficients.items()}
        return replace(self, coefficients=scaled)

    def with_error(self) -> "CostModel":
        """The model with times that are longer by the error to expect of a prediction."""
        if self.errors is None:
            return self
        longer = {phase: 1 + self.errors.sums.get(phase, 0.0) for phase in ("prefill", "decode")}
        return self.scaled(longer["prefill"], longer["decode"])

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "source": self.source,
            "coefficients_ns": dict(self.coefficients),
            "intervals_ns": {name: list(interval) for name, interval in self.intervals.items()},
            "unknown": list(self.unknown),
            "graph_sizes": list(self.graph_sizes),
            "steps": self.num_steps,
            "errors": None if self.errors is None else self.errors.to_json(),
            "facts": dict(self.facts),
            "acceptance": None if self.acceptance is None else self.acceptance.to_json(),
            "ranges": None if self.ranges is None else self.ranges.to_json(),
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "CostModel":
        """The inverse of `to_json`. Raises CostModelError."""
        try:
            coefficients = {str(name): float(value) for name, value in row["coefficients_ns"].items()}
            errors = row.get("errors")
            model = cls(
                coefficients,
                tuple(int(size) for size in row.get("graph_sizes", ())),
                tuple(row.get("unknown", ())),
                int(row.get("steps", 0)),
                {name: (float(lo), float(hi)) for name, (lo, hi) in row.get("intervals_ns", {}).items()},
                None if errors is None else StepErrors.from_json(errors),
                str(row.get("source", BY_HAND)),
                dict(row.get("facts", {})),
                None if row.get("acceptance") is None else DraftAcceptance.from_json(row["acceptance"]),
                None if row.get("ranges") is None else StepRanges.from_json(row["ranges"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CostModelError(f"not a cost model: {error!r}") from None
        if unknown := [name for name in coefficients if name not in COLUMNS]:
            raise CostModelError(f"`coefficients_ns` has `{unknown[0]}`, but its columns are {', '.join(COLUMNS)}")
        if any(value < 0 or not math.isfinite(value) for value in coefficients.values()):
            raise CostModelError("`coefficients_ns` must be finite and not negative")
        return model
