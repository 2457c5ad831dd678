"""Fits step costs and the batching rule of a server to client timings.

The designed loads are simulated. The fit minimizes the differences between the logarithms of simulated and measured
timings. Costs are fitted for each candidate rule, and the rule with the lowest loss is selected. Intervals are from a
jackknife over the loads, with the simulation linearized at the result. They include the noise of the runs and the error
of the law.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares
from scipy.special import stdtrit

from tuner.errors import CostModelError
from tuner.simulator.fitting.linear_law import COLUMNS, LinearLaw
from tuner.simulator.outside.client_run import ClientRun, residuals_of
from tuner.simulator.simulation import Simulation
from tuner.simulator.slot_replica import UNLIMITED_TOKENS, SlotRule

Array = npt.NDArray[np.float64]

CLIENT = "client"
# The fitted costs: time of a request between client and queue, and coefficients of the step law, in ns.
COST_NAMES = (CLIENT, "prefill", "prompts", "tokens", "squares", "decode", "rows", "kv")
STEPS_BETWEEN = (1, 2, 4, 8, 16, 32)
BUDGETS = tuple(2**power for power in range(6, 14))
# A larger residual is an outlier for the robust loss.
OUTLIER = 0.1
# Relative step of a derivative, in units of a cost's typical time.
DERIVATIVE_STEP = 0.02
SEARCH_STEPS, FINAL_STEPS = 6, 15
SEARCH_ROUNDS = 3
# A rule with more parameters must lower the loss by this fraction, any other rule by more than rounding.
CLEARLY_LOWER = 0.05
ROUNDING = 1e-5
# A rule that few servers have must lower the loss of all runs by this fraction: fits of one rule from two starts differ
# by as much.
RARE_LOWER = 0.1
FEWEST_LOADS = 6
# A load does not show the number of slots if this fraction of its users decodes at the same time.
ALL_DECODE = 0.8
SAME_SLOTS = 0.1


@dataclass(frozen=True, slots=True)
class OutsideFit:
    """The fitted costs in ns, with 95 % intervals.

    losses: of each candidate rule. errors: median and 90th percentile of the errors of held-out loads, by statistic.
    """

    rule: SlotRule
    costs: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]
    losses: Mapping[str, float]
    errors: Mapping[str, tuple[float, float]]
    loads: int

    @property
    def law(self) -> LinearLaw:
        return law_of(self.costs)


def fit_runs(runs: Sequence[ClientRun]) -> OutsideFit:
    """Fit costs and batching rule to repeated runs of designed loads. Raises CostModelError."""
    names = sorted({run.name for run in runs})
    if len(names) < FEWEST_LOADS:
        raise CostModelError(f"{len(names)} loads were measured, but at least {FEWEST_LOADS} are needed")
    search = Problem.of([next(run for run in runs if run.name == name) for name in names])
    rule = SlotRule(slots_of(runs))
    units, start = start_of(runs)
    candidates, whole = RuleSearch(search, units), Problem.of(runs)
    rule, at = candidates.best(rule, start)
    if rule.prefill_prompts is not None or not rule.mixes_prefill:
        rule, at = usual_or_clearly_better(whole, candidates, rule)
    free = _free_units(units, rule)
    _, at = whole.minimum(rule, free, at, FINAL_STEPS)
    return _with_intervals(whole, rule, free, at, candidates.losses)


def usual_or_clearly_better(whole: "Problem", candidates: "RuleSearch", rule: SlotRule) -> tuple[SlotRule, Array]:
    """The rule, or the best one with prefill in the steps of decode unless all runs show that it is worse.

    The search compares one run of each load, whose noise can prefer a rule that no server has. Most servers compute the
    prompts of several requests in the steps that decode.
    """
    usual = candidates.best_mixed
    if usual is None:
        return rule, candidates.at(rule)
    fits = {
        each: whole.minimum(each, _free_units(candidates.units, each), candidates.at(each), FINAL_STEPS)
        for each in (usual, rule)
    }
    chosen = rule if fits[rule][0] < fits[usual][0] * (1 - RARE_LOWER) - ROUNDING else usual
    return chosen, fits[chosen][1]


def slots_of(runs: Sequence[ClientRun]) -> int:
    """The number of requests that the server decodes at once; unlimited if nearly all users of the largest load decode.

    Raises CostModelError if loads with more users than slots have different numbers.
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


def law_of(costs: Mapping[str, float]) -> LinearLaw:
    return LinearLaw(tuple(costs.get(name, 0.0) for name in COLUMNS))


@dataclass(frozen=True, slots=True)
class Problem:
    """Measured runs, with their statistics, and the weight, load and kind of each statistic."""

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
            # The statistics of one kind in a run together have the weight of one statistic.
            weights += [1 / math.sqrt(names.count(name)) for name in names]
            loads += [run.name] * len(names)
            kinds += names
        return cls(tuple(runs), measured, np.asarray(weights), tuple(loads), tuple(kinds))

    @property
    def most_prompt_tokens(self) -> float:
        """Largest number of prompt tokens that can wait at the same time."""
        return max(run.users * float(run.input_tokens.max()) for run in self.runs)

    def residuals(self, rule: SlotRule, costs: Mapping[str, float]) -> Array:
        """Weighted ln(simulated / measured) of every statistic."""
        law, client_ns = law_of(costs), round(costs[CLIENT])
        found: list[float] = []
        for run, measured in zip(self.runs, self.measured, strict=True):
            load = replace(run.load, client_ns=client_ns)
            simulated = Simulation(load, [(rule, law)], max_concurrent_requests=UNLIMITED_TOKENS).run()
            found += residuals_of(measured, run.with_times_of(simulated).statistics()).values()
        return np.asarray(found) * self.weights

    def minimum(self, rule: SlotRule, units: Array, start: Array, steps: int) -> tuple[float, Array]:
        """The lowest robust loss from a start, and its costs in `units`. `steps`: limit of evaluations."""

        def residuals(scaled: Array) -> Array:
            return self.residuals(rule, _costs(scaled, units))

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
    """[values, costs]: forward differences. The steps are wide, because a simulation is not continuous."""
    base = function(at)
    columns = []
    for place in range(len(at)):
        step = DERIVATIVE_STEP * max(1.0, float(at[place]))
        moved = at.copy()
        moved[place] += step
        columns.append((function(moved) - base) / step)
    return np.stack(columns, axis=1)


def _free_units(units: Array, rule: SlotRule) -> Array:
    """The units, with 0 for costs that the rule does not determine: with one prompt a step, the cost of a prompt."""
    is_free = [rule.prefill_prompts != 1 or name != "prompts" for name in COST_NAMES]
    return np.where(is_free, units, 0.0)


def _costs(scaled: Array, units: Array) -> dict[str, float]:
    return dict(zip(COST_NAMES, (float(each) for each in scaled * units), strict=True))


def start_of(runs: Sequence[ClientRun]) -> tuple[Array, Array]:
    """Units of the costs, in which each cost is near 1 for a typical step or prompt, and a start in these units."""
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
    """Searches for the batching rule, one part after the other. Each rule is fitted once."""

    problem: Problem
    units: Array
    _fitted: dict[SlotRule, tuple[float, Array]] = field(default_factory=dict)

    def at(self, rule: SlotRule) -> Array:
        """The fitted costs of a rule in units."""
        return self._fitted[rule][1]

    @property
    def best_mixed(self) -> SlotRule | None:
        """The best fitted rule whose steps decode and prefill several prompts, with no steps between."""
        mixed = [
            rule
            for rule in self._fitted
            if rule.mixes_prefill and rule.prefill_prompts is None and not rule.steps_between
        ]
        return min(mixed, key=lambda rule: self._fitted[rule][0], default=None)

    @property
    def losses(self) -> dict[str, float]:
        return {_describe(rule): loss for rule, (loss, _) in self._fitted.items()}

    def best(self, rule: SlotRule, start: Array) -> tuple[SlotRule, Array]:
        """The rule with the lowest loss, and its costs in units."""
        self._loss(rule, start)
        for _ in range(SEARCH_ROUNDS):
            before = rule
            first, *others = [self._with_budget(phase, start) for phase in _prefill_rules(rule)]
            rule = self._lowest(first, others, 0.0)
            rule = self._lowest(rule, [replace(rule, steps_between=steps) for steps in STEPS_BETWEEN], CLEARLY_LOWER)
            for simpler in (replace(rule, steps_between=0), replace(rule, prefill_tokens=UNLIMITED_TOKENS)):
                rule = self._lowest(rule, [simpler], -CLEARLY_LOWER)
            if rule == before:
                break
        return rule, self._fitted[rule][1]

    def _with_budget(self, rule: SlotRule, start: Array) -> SlotRule:
        """The rule with the best limit of prompt tokens of a step."""
        rule = replace(rule, prefill_tokens=UNLIMITED_TOKENS)
        self._loss(rule, start)
        budgets = [each for each in reversed(BUDGETS) if each < self.problem.most_prompt_tokens]
        return self._lowest(rule, [replace(rule, prefill_tokens=budget) for budget in budgets], CLEARLY_LOWER)

    def _lowest(self, rule: SlotRule, others: Iterable[SlotRule], margin: float) -> SlotRule:
        """The rule, or the best of `others` whose loss is lower by the fraction `margin`, higher if it is negative."""
        best = rule
        for other in others:
            at = self._fitted[best][1]
            if other != best and self._loss(other, at) < self._loss(best, at) * (1 - margin) - ROUNDING:
                best = other
        return best

    def _loss(self, rule: SlotRule, start: Array) -> float:
        if rule not in self._fitted:
            self._fitted[rule] = self.problem.minimum(rule, _free_units(self.units, rule), start, SEARCH_STEPS)
        return self._fitted[rule][0]


def _prefill_rules(rule: SlotRule) -> list[SlotRule]:
    """The rule with every combination of `mixes_prefill` and `prefill_prompts`."""
    combinations = [(mixes, prompts) for mixes in (True, False) for prompts in (None, 1)]
    return [replace(rule, mixes_prefill=mixes, prefill_prompts=prompts) for mixes, prompts in combinations]


def _describe(rule: SlotRule) -> str:
    """A short description of a rule's prefill.

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


def _with_intervals(
    problem: Problem, rule: SlotRule, units: Array, at: Array, losses: Mapping[str, float]
) -> OutsideFit:
    """Add intervals and held-out errors to a fit: a jackknife over the loads with the linearized simulation.

    Costs at their bound of 0 can become negative here, so their intervals have a width.
    """

    def function(scaled: Array) -> Array:
        return problem.residuals(rule, _costs(scaled, units))

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
    half = float(stdtrit(len(names) - 1, 0.975)) * deviation * units
    costs = _costs(at, units)
    return OutsideFit(
        rule,
        costs,
        {name: (max(0.0, costs[name] - each), costs[name] + each) for name, each in zip(COST_NAMES, half, strict=True)},
        losses,
        {
            kind: (float(np.median(values)), float(np.quantile(values, 0.9)))
            for kind in dict.fromkeys(problem.kinds)
            for values in [np.abs(held_out[[each == kind for each in problem.kinds]])]
        },
        len(names),
    )
