"""The step law of a measured server. It is linear in the work of a step and fitted to step traces.

prefill  c0 + c1·prompts + c2·tokens + c3·squares + c4·cached
decode   d0 + d1·rows + d2·padded rows in a graph + d3 without a graph + d4·kv (+ d5 + d6·drafted, with drafts)
adapters a0·LoRA adapters + a1·tokens that use one, in a step of any kind

A step with both phases has the sum of both laws without d0. d4 also counts the keys of a drafted token, as many as its
row has. Coefficients are not negative. The fit minimizes the relative error of the wall time, which is the time from
the start of a call to the start of the next call.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from reference_server.router.scheduling.step_work import StepWork
from tuner.errors import CostModelError
from tuner.simulator.fitting.draft_acceptance import DraftAcceptance, fit_acceptance
from tuner.simulator.fitting.traced_steps import TracedSteps, joined

FORMAT = 1
Array = npt.NDArray[np.float64]

PREFILL = ("prefill", "prompts", "tokens", "squares", "cached")
DECODE = ("decode", "rows", "padded_rows", "no_graph", "kv")
DRAFTS = ("drafts", "drafted")
ADAPTERS = ("adapters", "adapted")
COLUMNS = PREFILL + DECODE + DRAFTS + ADAPTERS
# The most important columns come first, because the later one of two dependent columns is dropped.
ORDER = ("tokens", "prefill", "decode", "rows", "kv", "squares", "prompts", "drafted", "adapted", "adapters")
# A column is linearly dependent if its residual from the others is below this fraction of its norm.
SAME = 1e-4
BOOTSTRAPS = 200
FEWEST_STEPS = 4
# The source of a model.
BY_HAND, FROM_STEPS, FROM_METRICS, FROM_CLIENTS = "by hand", "step trace", "from_metrics", "client timings"


@dataclass(frozen=True, slots=True)
class LinearLaw:
    """A `StepLaw`. `coefficients`: ns in the order of `COLUMNS`; those of drafts and adapters may be left out.

    graph_sizes: captured batch sizes, ascending.
    """

    coefficients: tuple[float, ...]
    graph_sizes: tuple[int, ...] = ()

    @property
    def kv_ns(self) -> float:
        return self.coefficients[9]

    @property
    def draft_ns(self) -> tuple[float, float]:
        """Time of drafts in a step, and of each of their tokens without its keys."""
        drafts_ns, drafted_ns = (*self.coefficients[10:], 0.0, 0.0)[:2]
        return drafts_ns, drafted_ns

    @property
    def has_adapters(self) -> bool:
        """Whether the time of adapters is known."""
        return any(self.coefficients[12:])

    def adapters_ns(self, adapters: int, tokens: int) -> float:
        """Time that adapters add to a step with `tokens` tokens that use one."""
        each_ns, token_ns = (*self.coefficients[12:], 0.0, 0.0)[:2]
        return each_ns * adapters + token_ns * tokens

    def step_ns(self, work: StepWork) -> float:
        prompts, tokens, squares, cached, rows, kv = work
        c = self.coefficients
        time_ns = 0.0
        if prompts:
            time_ns = c[0] + c[1] * prompts + c[2] * tokens + c[3] * squares + c[4] * cached
        elif rows:
            time_ns = c[5]
        if rows:
            padded = next((size for size in self.graph_sizes if size >= rows), 0)
            time_ns += c[6] * rows + (c[7] * padded if padded else c[8]) + c[9] * kv
        return time_ns


@dataclass(frozen=True, slots=True)
class StepErrors:
    """Median and 90th percentile of relative errors: of held-out steps, by phase.

    For a model from client timings: of held-out loads, by `throughput`, `ttft` and `tpot`.
    """

    median: Mapping[str, float]
    p90: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class CostModel:
    """A fitted step law. `coefficients`: ns by column. `unknown`: columns that the steps do not determine."""

    coefficients: Mapping[str, float]
    graph_sizes: tuple[int, ...] = ()
    unknown: tuple[str, ...] = ()
    num_steps: int = 0
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    errors: StepErrors | None = None
    source: str = BY_HAND
    facts: Mapping[str, Any] = field(default_factory=dict)
    acceptance: DraftAcceptance | None = None

    @property
    def in_order(self) -> tuple[float, ...]:
        """Every coefficient, in the order of `COLUMNS`."""
        return tuple(self.coefficients.get(name, 0.0) for name in COLUMNS)

    @property
    def law(self) -> "LinearLaw":
        return LinearLaw(self.in_order, self.graph_sizes)

    @property
    def is_measured(self) -> bool:
        return self.source != BY_HAND

    @property
    def is_from_metrics(self) -> bool:
        return self.source == FROM_METRICS

    @property
    def is_from_clients(self) -> bool:
        return self.source == FROM_CLIENTS

    def scaled(self, prefill: float, decode: float) -> "CostModel":
        """The model with the times of prefill and decode multiplied by these factors."""
        return self.with_factors(dict.fromkeys(PREFILL, prefill) | dict.fromkeys(DECODE + DRAFTS + ADAPTERS, decode))

    def with_factors(self, factors: Mapping[str, float]) -> "CostModel":
        """The model with the times of these columns multiplied."""
        scaled = {name: value * factors.get(name, 1.0) for name, value in self.coefficients.items()}
        return replace(self, coefficients=scaled)

    def to_json(self) -> dict[str, Any]:
        errors = None if self.errors is None else {"median": dict(self.errors.median), "p90": dict(self.errors.p90)}
        return {
            "format": FORMAT,
            "source": self.source,
            "coefficients_ns": dict(self.coefficients),
            "intervals_ns": {name: list(interval) for name, interval in self.intervals.items()},
            "unknown": list(self.unknown),
            "graph_sizes": list(self.graph_sizes),
            "steps": self.num_steps,
            "errors": errors,
            "facts": dict(self.facts),
            "acceptance": None if self.acceptance is None else self.acceptance.to_json(),
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
                None if errors is None else StepErrors(errors["median"], errors["p90"]),
                str(row.get("source", BY_HAND)),
                dict(row.get("facts", {})),
                None if row.get("acceptance") is None else DraftAcceptance.from_json(row["acceptance"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CostModelError(f"not a cost model: {error!r}") from None
        if unknown := [name for name in coefficients if name not in COLUMNS]:
            raise CostModelError(f"`coefficients_ns` has `{unknown[0]}`, but its columns are {', '.join(COLUMNS)}")
        if any(value < 0 or not math.isfinite(value) for value in coefficients.values()):
            raise CostModelError("`coefficients_ns` must be finite and not negative")
        return model


def fit(
    launches: Sequence[TracedSteps],
    *,
    graph_sizes: Sequence[int] = (),
    with_intervals: bool = True,
) -> CostModel:
    """Fit the law to launches. Raises CostModelError.

    The model is fitted to all steps, with intervals from a bootstrap over launches. Its errors are those on every fifth
    shape, of a fit to the other shapes.
    """
    steps = joined(launches)
    sizes = tuple(sorted(graph_sizes))
    if len(steps) < FEWEST_STEPS:
        raise CostModelError(f"the traces have {len(steps)} steps, but at least {FEWEST_STEPS} are needed")
    columns = _columns(steps, sizes)
    known, unknown = _independent(columns / steps.wall_ns[:, None])
    coefficients = _solve(columns, steps.wall_ns, known)
    facts = {name: launches[0].facts[name] for name in ("model_id", "engine", "version") if name in launches[0].facts}
    return CostModel(
        coefficients,
        sizes,
        tuple(COLUMNS[index] for index in unknown if _concerns(steps, COLUMNS[index])),
        len(steps),
        _intervals(launches, sizes, known) if with_intervals else {},
        _held_out_errors(steps, columns, known),
        FROM_METRICS if steps.is_from_metrics else FROM_STEPS,
        facts,
        fit_acceptance(launches),
    )


def predicted_ns(model: CostModel, steps: TracedSteps) -> Array:
    """[steps]: the times that the model gives these steps."""
    predicted: Array = _columns(steps, model.graph_sizes) @ np.asarray(model.in_order)
    return predicted


def _concerns(steps: TracedSteps, column: str) -> bool:
    """Whether the steps are of a server with what a column is about."""
    if column in DRAFTS:
        return steps.drafts is not None
    return column not in ADAPTERS or steps.adapted is not None


def rescaled(model: CostModel, load: TracedSteps) -> CostModel:
    """The model scaled by a factor for each phase, so that predicted and measured times have equal sums.

    Both phases have the same factor if rows are sums over both phases.
    """
    predicted = predicted_ns(model, load)
    is_prefill = load.work[:, 0] > 0
    phases = (is_prefill, ~is_prefill)
    if (load.calls_of_rows.min(axis=1) > 0).any():
        phases = (np.ones_like(is_prefill),) * 2
    factors = []
    for phase in phases:
        total = float(predicted[phase].sum())
        factors.append(float(load.wall_ns[phase].sum()) / total if total > 0 else 1.0)
    return model.scaled(*factors)


def _columns(steps: TracedSteps, graph_sizes: Sequence[int]) -> Array:
    """[steps, columns]: the factors of the coefficients. The factor of a constant is the number of calls."""
    prompts, tokens, squares, cached, rows, kv = steps.work.T
    prefills, decodes = steps.calls_of_rows.T
    calls, has_rows = prefills + decodes, rows > 0
    sizes = np.asarray(graph_sizes, dtype=np.float64)
    padded = np.zeros(len(steps))
    if len(sizes):
        place = np.searchsorted(sizes, rows / np.maximum(calls, 1.0))
        padded = np.where(has_rows & (place < len(sizes)), sizes[np.minimum(place, len(sizes) - 1)], 0.0)
    no_graph = has_rows & (padded == 0)
    drafted = steps.drafted
    keys = kv * (1 + drafted / np.maximum(rows, 1.0))
    parts = (
        *(prefills, prompts, tokens, squares, cached),
        *(decodes, rows, padded * calls, no_graph * calls, keys),
        *(drafted > 0, drafted),
        *steps.adapted_of_rows.T,
    )
    return np.stack([np.asarray(part, dtype=np.float64) for part in parts], axis=1)


def _independent(weighted: Array) -> tuple[list[int], list[int]]:
    """Indices of columns that can be fitted, and of columns that are zero or linearly dependent on these."""
    known: list[int] = []
    unknown: list[int] = []
    order = [COLUMNS.index(name) for name in ORDER]
    order += [index for index in range(len(COLUMNS)) if index not in order]
    for index in order:
        column = weighted[:, index]
        norm = float(np.linalg.norm(column))
        if norm == 0:
            unknown.append(index)
            continue
        rest = column
        if known:
            base = weighted[:, known]
            rest = column - base @ np.linalg.lstsq(base, column, rcond=None)[0]
        (known if float(np.linalg.norm(rest)) > SAME * norm else unknown).append(index)
    return sorted(known), sorted(unknown)


def _solve(columns: Array, wall_ns: Array, known: Sequence[int]) -> dict[str, float]:
    weighted = columns[:, list(known)] / wall_ns[:, None]
    norms = np.linalg.norm(weighted, axis=0)
    norms[norms == 0] = 1.0
    found, _ = nnls(weighted / norms, np.ones(len(wall_ns)), maxiter=1000)
    return {COLUMNS[index]: float(value) for index, value in zip(known, found / norms, strict=True)}


def _held_out_errors(steps: TracedSteps, columns: Array, known: Sequence[int]) -> StepErrors:
    shapes = {shape: number for number, shape in enumerate(dict.fromkeys(map(tuple, steps.work[:, [0, 1, 4]])))}
    is_out = np.asarray([shapes[tuple(row)] % 5 == 4 for row in steps.work[:, [0, 1, 4]]])
    if not is_out.any() or (~is_out).sum() < len(known):
        is_out = np.arange(len(steps)) % 5 == 4
    coefficients = _solve(columns[~is_out], steps.wall_ns[~is_out], known)
    predicted = columns[is_out] @ np.asarray([coefficients.get(name, 0.0) for name in COLUMNS])
    errors = np.abs(predicted / steps.wall_ns[is_out] - 1)
    is_prefill = steps.work[is_out, 0] > 0
    median, p90 = {}, {}
    for name, phase in (("prefill", is_prefill), ("decode", ~is_prefill)):
        if phase.any():
            median[name] = float(np.median(errors[phase]))
            p90[name] = float(np.quantile(errors[phase], 0.9))
    return StepErrors(median, p90)


def _intervals(
    launches: Sequence[TracedSteps], sizes: Sequence[int], known: Sequence[int]
) -> dict[str, tuple[float, float]]:
    """95 % intervals of the coefficients by bootstrap over launches, because steps of one launch are correlated."""
    if len(launches) < 3:
        return {}
    rng = np.random.default_rng(0)
    found: dict[str, list[float]] = {COLUMNS[index]: [] for index in known}
    for _ in range(BOOTSTRAPS):
        drawn = joined([launches[index] for index in rng.integers(0, len(launches), len(launches))])
        for name, value in _solve(_columns(drawn, sizes), drawn.wall_ns, known).items():
            found[name].append(value)
    return {
        name: (float(np.quantile(values, 0.025)), float(np.quantile(values, 0.975))) for name, values in found.items()
    }
