"""Step costs and batching of a server, fitted to client timings.

The designed loads are simulated, and the costs are those whose simulated timings are nearest to the measured ones, in
the logarithm. Each batching rule is fitted, and the nearest is kept. Intervals are a jackknife over the loads, of the
fit made linear at its result: they cover the noise of the runs and the misfit of the law.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares
from scipy.stats import t as student

from tuner.errors import CostModelError
from tuner.simulator.engine import Simulation
from tuner.simulator.fitting.step_cost import COLUMNS, LinearLaw
from tuner.simulator.outside.client_run import ClientRun, residuals_of
from tuner.simulator.slot_replica import UNLIMITED_TOKENS, SlotRule

Array = npt.NDArray[np.float64]

CLIENT = "client"
# The fitted figures: ns of a request before the queue, and coefficients of the step law.
FIGURES = (CLIENT, "prefill", "prompts", "tokens", "squares", "decode", "rows", "kv")
PAUSES = (1, 2, 4, 8, 16, 32)
BUDGETS = tuple(2**power for power in range(6, 14))
# A residual above this is an outlier of the robust loss.
OUTLIER = 0.1
# Relative step of a derivative, in units of a figure's typical time.
DERIVATIVE_STEP = 0.02
SEARCH_STEPS, FINAL_STEPS = 6, 15
SEARCH_ROUNDS = 3
# A rule with more parameters has to lower the loss by this fraction; any other rule by more than rounding.
CLEARLY_LOWER = 0.05
ROUNDING = 1e-5
FEWEST_LOADS = 6
# A server has as many slots as users if this fraction of the users decodes at once.
ALL_DECODE = 0.8
SAME_SLOTS = 0.1


@dataclass(frozen=True, slots=True)
class OutsideFit:
    """The fitted figures in ns, with 95 % intervals; `losses` by rule, and errors of loads that the fit lacked."""

    rule: SlotRule
    figures: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]
    losses: Mapping[str, float]
    errors: Mapping[str, tuple[float, float]]
    loads: int

    @property
    def law(self) -> LinearLaw:
        return law_of(self.figures)


def fit_runs(runs: Sequence[ClientRun]) -> OutsideFit:
    """Fit figures and rule to repeated runs of designed loads. Raises CostModelError."""
    names = sorted({run.name for run in runs})
    if len(names) < FEWEST_LOADS:
        raise CostModelError(f"{len(names)} loads were measured, but at least {FEWEST_LOADS} are needed")
    search = Problem.of([next(run for run in runs if run.name == name) for name in names])
    rule = SlotRule(slots_of(runs))
    units, start = start_of(runs)
    candidates = RuleSearch(search, units)
    rule, at = candidates.best(rule, start)
    whole, free = Problem.of(runs), _free(units, rule)
    _, at = whole.minimum(rule, free, at, FINAL_STEPS)
    return _judged(whole, rule, free, at, candidates.losses)


def slots_of(runs: Sequence[ClientRun]) -> int:
    """The requests that the server decodes at once; as many as any load has users: unlimited.

    Raises CostModelError if loads with more users disagree.
    """
    by_users: dict[int, int] = {}
    for run in runs:
        by_users[run.users] = max(by_users.get(run.users, 0), run.decoding_at_once)
    most = max(by_users)
    slots = max(by_users.values())
    if by_users[most] >= ALL_DECODE * most:
        return UNLIMITED_TOKENS
    others = {users: at_once for users, at_once in by_users.items() if users >= slots / ALL_DECODE}
    if any(abs(at_once - slots) > max(1.0, SAME_SLOTS * slots) for at_once in others.values()):
        seen = ", ".join(f"{at_once} with {users} users" for users, at_once in sorted(by_users.items()))
        raise CostModelError(f"cannot identify the slots of the server: it decodes at once {seen}")
    return slots


def law_of(figures: Mapping[str, float]) -> LinearLaw:
    return LinearLaw(tuple(figures.get(name, 0.0) for name in COLUMNS))


@dataclass(frozen=True, slots=True)
class Problem:
    """Measured runs with their statistics and weights: runs of one load have one measurement, the mean of repeats."""

    runs: tuple[ClientRun, ...]
    measured: tuple[Mapping[str, float], ...]
    weights: Array
    loads: tuple[str, ...]
    kinds: tuple[str, ...]

    @classmethod
    def of(cls, runs: Sequence[ClientRun]) -> "Problem":
        measured = tuple(run.statistics() for run in runs)
        weights, loads, kinds = [], [], []
        for run, statistics in zip(runs, measured, strict=True):
            names = [name.split("_")[0] for name in statistics]
            # The statistics of one kind of a run weigh as much as one.
            weights += [1 / math.sqrt(names.count(name)) for name in names]
            loads += [run.name] * len(names)
            kinds += names
        return cls(tuple(runs), measured, np.asarray(weights), tuple(loads), tuple(kinds))

    @property
    def most_prompt_tokens(self) -> float:
        """The most prompt tokens that can wait at once."""
        return max(run.users * float(run.input_tokens.max()) for run in self.runs)

    def residuals(self, rule: SlotRule, figures: Mapping[str, float]) -> Array:
        """Weighted ln(simulated / measured) of every statistic."""
        law, client_ns = law_of(figures), round(figures[CLIENT])
        found: list[float] = []
        for run, measured in zip(self.runs, self.measured, strict=True):
            load = replace(run.load, client_ns=client_ns)
            simulated = Simulation(load, [(rule, law)], max_concurrent_requests=UNLIMITED_TOKENS).run()
            found += residuals_of(measured, run.answered_by(simulated).statistics()).values()
        return np.asarray(found) * self.weights

    def minimum(self, rule: SlotRule, units: Array, start: Array, steps: int) -> tuple[float, Array]:
        """The lowest robust loss from a start, and its figures in units."""

        def residuals(scaled: Array) -> Array:
            return self.residuals(rule, _figures(scaled, units))

        found = least_squares(
            residuals,
            np.maximum(start, 1e-6),
            jac=lambda scaled: derivative(residuals, scaled),
            bounds=(0.0, np.inf),
            loss="soft_l1",
            f_scale=OUTLIER,
            max_nfev=steps,
        )
        return float(found.cost), np.asarray(found.x)


def derivative(function: Callable[[Array], Array], at: Array) -> Array:
    """[values, figures]: forward differences, wide enough to smooth the jumps of a simulation."""
    base = function(at)
    columns = []
    for place in range(len(at)):
        step = DERIVATIVE_STEP * max(1.0, float(at[place]))
        moved = at.copy()
        moved[place] += step
        columns.append((function(moved) - base) / step)
    return np.stack(columns, axis=1)


def _free(units: Array, rule: SlotRule) -> Array:
    """Units of the figures that a rule determines: with one prompt a step, its costs are those of the step."""
    is_free = [rule.prefill_prompts != 1 or name != "prompts" for name in FIGURES]
    return np.where(is_free, units, 0.0)


def _figures(scaled: Array, units: Array) -> dict[str, float]:
    return dict(zip(FIGURES, (float(each) for each in scaled * units), strict=True))


def start_of(runs: Sequence[ClientRun]) -> tuple[Array, Array]:
    """Units of the figures, such that each takes the time of a typical step or prompt, and a start in units."""
    lone = [run for run in runs if run.users == 1] or list(runs)
    is_in = np.concatenate([run.is_answered for run in lone])
    inputs = np.concatenate([run.input_tokens for run in lone])[is_in]
    gaps = np.concatenate([run.output_tokens for run in lone])[is_in] - 1
    ttft = np.concatenate([run.first_ns - run.sent_ns for run in lone])[is_in]
    decode = np.concatenate([run.last_ns - run.first_ns for run in lone])[is_in]
    ttft_ns = float(np.median(ttft))
    tpot_ns = float(np.median(decode[gaps > 0] / gaps[gaps > 0]))
    length = float(inputs.mean())
    slope = float(np.polyfit(inputs, ttft, 1)[0]) if len(set(inputs)) > 1 else 0.0
    rows = float(max(run.users for run in runs))
    units = np.asarray(
        [ttft_ns, ttft_ns, ttft_ns, ttft_ns / length, ttft_ns / length**2, tpot_ns, tpot_ns / rows, tpot_ns / length]
    )
    fixed = max(0.1, float(ttft.min()) / ttft_ns) / 3
    start = np.asarray([fixed, fixed, fixed, max(slope * length / ttft_ns, 0.05), 0.02, 0.8, 1.0, 0.02])
    return units, start


@dataclass(slots=True)
class RuleSearch:
    """Searches the batching rule one part after the other; each rule is fitted once."""

    problem: Problem
    units: Array
    _fitted: dict[SlotRule, tuple[float, Array]] = field(default_factory=dict)

    @property
    def losses(self) -> dict[str, float]:
        return {_describe(rule): loss for rule, (loss, _) in self._fitted.items()}

    def best(self, rule: SlotRule, start: Array) -> tuple[SlotRule, Array]:
        """The rule with the lowest loss, and its figures in units."""
        self._loss(rule, start)
        for _ in range(SEARCH_ROUNDS):
            before = rule
            first, *others = [self._with_budget(phase, start) for phase in _phases(rule)]
            rule = self._lowest(first, others, 0.0)
            rule = self._lowest(rule, [replace(rule, steps_between=steps) for steps in PAUSES], CLEARLY_LOWER)
            for simpler in (replace(rule, steps_between=0), replace(rule, prefill_tokens=UNLIMITED_TOKENS)):
                rule = self._lowest(rule, [simpler], -CLEARLY_LOWER)
            if rule == before:
                break
        return rule, self._fitted[rule][1]

    def _with_budget(self, rule: SlotRule, start: Array) -> SlotRule:
        """The rule with the best number of prompt tokens of a step."""
        rule = replace(rule, prefill_tokens=UNLIMITED_TOKENS)
        self._loss(rule, start)
        budgets = [each for each in reversed(BUDGETS) if each < self.problem.most_prompt_tokens]
        return self._lowest(rule, [replace(rule, prefill_tokens=budget) for budget in budgets], CLEARLY_LOWER)

    def _lowest(self, rule: SlotRule, others: Iterable[SlotRule], margin: float) -> SlotRule:
        """The rule, or another whose loss is lower by a fraction; a negative one allows a higher loss."""
        best = rule
        for other in others:
            at = self._fitted[best][1]
            if other != best and self._loss(other, at) < self._loss(best, at) * (1 - margin) - ROUNDING:
                best = other
        return best

    def _loss(self, rule: SlotRule, start: Array) -> float:
        if rule not in self._fitted:
            self._fitted[rule] = self.problem.minimum(rule, _free(self.units, rule), start, SEARCH_STEPS)
        return self._fitted[rule][0]


def _phases(rule: SlotRule) -> list[SlotRule]:
    """The rule with every way to prefill."""
    ways = [(mixes, prompts) for mixes in (True, False) for prompts in (None, 1)]
    return [replace(rule, mixes_prefill=mixes, prefill_prompts=prompts) for mixes, prompts in ways]


def _describe(rule: SlotRule) -> str:
    """A short name of a rule's way to prefill.

    >>> _describe(SlotRule(8, 512, 1, mixes_prefill=False))
    'prefill stalls decode, one prompt a step, 512 tokens'
    """
    parts = ["prefill shares steps with decode" if rule.mixes_prefill else "prefill stalls decode"]
    parts.append("one prompt a step" if rule.prefill_prompts == 1 else "several prompts a step")
    if rule.prefill_tokens != UNLIMITED_TOKENS:
        parts.append(f"{rule.prefill_tokens} tokens")
    if rule.steps_between:
        parts.append(f"{rule.steps_between} steps between")
    return ", ".join(parts)


def _judged(problem: Problem, rule: SlotRule, units: Array, at: Array, losses: Mapping[str, float]) -> OutsideFit:
    """The fit with intervals and held-out errors: every load left out once, with the simulation made linear.

    A figure at its bound of 0 moves beyond it, so that its interval has a width.
    """

    def function(scaled: Array) -> Array:
        return problem.residuals(rule, _figures(scaled, units))

    residuals, slopes = function(at), derivative(function, at)
    # Weights of the robust loss at the result.
    robust = (1 + (residuals / OUTLIER) ** 2) ** -0.25
    names = sorted(set(problem.loads))
    moves, held_out = [], np.zeros(len(residuals))
    for name in names:
        is_out = np.asarray([load == name for load in problem.loads])
        kept = slopes[~is_out] * robust[~is_out, None]
        move = -np.linalg.lstsq(kept, residuals[~is_out] * robust[~is_out], rcond=1e-6)[0]
        moves.append(move)
        held_out[is_out] = (residuals[is_out] + slopes[is_out] @ move) / problem.weights[is_out]
    moved = np.asarray(moves)
    deviation = np.sqrt((len(names) - 1) / len(names) * ((moved - moved.mean(axis=0)) ** 2).sum(axis=0))
    half = float(student.ppf(0.975, len(names) - 1)) * deviation * units
    figures = _figures(at, units)
    return OutsideFit(
        rule,
        figures,
        {
            name: (max(0.0, figures[name] - each), figures[name] + each)
            for name, each in zip(FIGURES, half, strict=True)
        },
        losses,
        {
            kind: (float(np.median(values)), float(np.quantile(values, 0.9)))
            for kind in dict.fromkeys(problem.kinds)
            for values in [np.abs(held_out[[each == kind for each in problem.kinds]])]
        },
        len(names),
    )
