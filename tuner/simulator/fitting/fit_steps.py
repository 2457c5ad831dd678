"""Fits the step law of a server to its step traces, with intervals and the errors on held-out shapes."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from tuner.errors import CostModelError
from tuner.simulator.fitting.cost_model import FROM_METRICS, FROM_STEPS, CostModel, StepErrors
from tuner.simulator.fitting.draft_acceptance import fit_acceptance
from tuner.simulator.fitting.equal_steps import spread_of_equal_steps
from tuner.simulator.fitting.linear_law import ADAPTERS, COLUMNS, DRAFTS
from tuner.simulator.fitting.traced_steps import TracedSteps, joined
from tuner.simulator.step_ranges import StepRanges

Array = npt.NDArray[np.float64]
# The most important columns come first, because the later one of two dependent columns is dropped.
ORDER = ("tokens", "prefill", "decode", "rows", "kv", "squares", "prompts", "drafted", "adapted", "adapters", "ended")
# A column is linearly dependent if its residual from the others is below this fraction of its norm.
SAME = 1e-4
BOOTSTRAPS = 200
FEWEST_STEPS = 4
# Number of folds in which steps are held out.
FOLDS = 5
# Ranges of the number of keys in each factor of two. Steps with numbers in one range have the same shape.
KEY_RANGES = 2
# Consecutive steps whose sum is compared with its prediction: about as many as a response has.
SUMMED = 64
# Rounds of reweighting.
ROUNDS = 8
# Steps with a smaller relative error have the weight of this one.
SMALL = 0.02
# Errors are divided by the predicted time, clipped to within this factor of the measured time.
FAR = 20.0


def fit(
    launches: Sequence[TracedSteps],
    *,
    graph_sizes: Sequence[int] = (),
    with_intervals: bool = True,
) -> CostModel:
    """Fit the law to launches. Raises CostModelError.

    The model is fitted to all steps, with intervals from a bootstrap over launches. Its errors are cross-validated: the
    steps of each fold are predicted by a fit to the other folds.
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
        StepRanges.of(steps.work, steps.calls_of_rows.sum(axis=1)),
    )


def predicted_ns(model: CostModel, steps: TracedSteps) -> Array:
    """[steps]: the times that the model gives these steps."""
    predicted: Array = _columns(steps, model.graph_sizes) @ np.asarray(model.in_order)
    return predicted


def _concerns(steps: TracedSteps, column: str) -> bool:
    """Whether the server of the steps has the feature of a column: drafts, or adapters."""
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
    prompts, tokens, squares, cached, rows, kv, ended = steps.work.T
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
        ended,
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
    """The coefficients with the smallest sum of absolute errors relative to the predicted times.

    They give the median time of a step, which a few slow steps of a busy machine do not change. Found by reweighted
    least squares.
    """
    chosen = columns[:, list(known)]
    weights = 1 / wall_ns
    for _ in range(ROUNDS):
        found = _least_squares(chosen * weights[:, None], wall_ns * weights)
        scale = np.clip(chosen @ found, wall_ns / FAR, wall_ns * FAR)
        errors = np.abs(chosen @ found - wall_ns) / scale
        weights = 1 / (scale * np.sqrt(np.maximum(errors, SMALL)))
    return {COLUMNS[index]: float(value) for index, value in zip(known, found, strict=True)}


def _least_squares(weighted: Array, target: Array) -> Array:
    norms = np.linalg.norm(weighted, axis=0)
    norms[norms == 0] = 1.0
    found, _ = nnls(weighted / norms, target, maxiter=1000)
    return np.asarray(found / norms, dtype=np.float64)


def _held_out_errors(steps: TracedSteps, columns: Array, known: Sequence[int]) -> StepErrors:
    """The error of every step, predicted from the other folds; steps of one shape are in one fold."""
    predicted, scaled = np.zeros(len(steps)), np.zeros(len(steps))
    is_prefill = steps.work[:, 0] > 0
    folds = _folds(steps)
    for fold in range(FOLDS):
        is_out = folds == fold
        if is_out.any() and not is_out.all():
            coefficients = _solve(columns[~is_out], steps.wall_ns[~is_out], known)
            times_ns = columns @ np.asarray([coefficients.get(name, 0.0) for name in COLUMNS])
            predicted[is_out] = times_ns[is_out]
            for phase in (is_prefill, ~is_prefill):
                # Predicted and measured times have equal sums, as after `rescaled`.
                total = times_ns[phase & ~is_out].sum()
                factor = steps.wall_ns[phase & ~is_out].sum() / total if total else 1.0
                scaled[phase & is_out] = factor * times_ns[phase & is_out]
    errors = np.abs(predicted / steps.wall_ns - 1)
    median, p90, spread, sums, sizes = {}, {}, {}, {}, {}
    for name, phase in (("prefill", is_prefill), ("decode", ~is_prefill)):
        if phase.any():
            median[name] = float(np.median(errors[phase]))
            p90[name] = float(np.quantile(errors[phase], 0.9))
            spread[name] = spread_of_equal_steps(steps.work[phase], steps.wall_ns[phase], predicted[phase])
            if phase.sum() >= SUMMED:
                sums[name] = _error_of_sums(steps.wall_ns[phase], scaled[phase])
                in_size = steps.work[phase, 1 if name == "prefill" else 4]
                sizes[name] = _error_of_sizes(in_size, steps.wall_ns[phase], scaled[phase])
    return StepErrors(median, p90, spread, sums, sizes)


def _error_of_sums(wall_ns: Array, predicted_ns: Array) -> float:
    """Median relative error of the sums of SUMMED consecutive steps."""
    firsts = np.arange(0, len(wall_ns) - SUMMED + 1, SUMMED)
    measured, expected = (np.add.reduceat(times[: firsts[-1] + SUMMED], firsts) for times in (wall_ns, predicted_ns))
    return float(np.median(np.abs(expected / measured - 1)))


def _error_of_sizes(sizes: Array, wall_ns: Array, predicted_ns: Array) -> float:
    """The largest relative error of a sum of all steps of about one size, if they are at least SUMMED."""
    powers = np.ceil(np.log2(np.maximum(sizes, 1.0)))
    groups = [powers == power for power in np.unique(powers) if (powers == power).sum() >= SUMMED]
    return max((abs(float(predicted_ns[each].sum() / wall_ns[each].sum()) - 1) for each in groups), default=0.0)


def _folds(steps: TracedSteps) -> npt.NDArray[np.int64]:
    """[steps]: a fold for each shape: prompts, tokens, rows, and range of keys."""
    keys = np.floor(KEY_RANGES * np.log2(steps.work[:, 5] + 1))
    rows = list(map(tuple, np.column_stack([steps.work[:, [0, 1, 4]], keys])))
    shapes = {shape: number for number, shape in enumerate(dict.fromkeys(rows))}
    if len(shapes) < FOLDS:
        return np.arange(len(steps)) % FOLDS
    return np.asarray([shapes[row] for row in rows]) % FOLDS


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
