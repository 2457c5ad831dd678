"""Step costs and batching rules are recovered from client timings alone."""

from dataclasses import replace

import numpy as np
import pytest

from reference_server.router.scheduling.scheduler_options import SchedulerOptions
from tests.tuner.simulator.outside.synthetic_runs import COSTS, synthetic_runs
from tuner.errors import CostModelError
from tuner.simulator.outside.fit_costs import (
    Problem,
    RuleSearch,
    fit_runs,
    slots_of,
    start_of,
    usual_or_clearly_better,
)
from tuner.simulator.slot_replica import UNLIMITED_TOKENS, SlotRule

MIXED = SlotRule(UNLIMITED_TOKENS)


def test_servers_3_costs_are_recovered_from_client_timings():
    runs = synthetic_runs(SlotRule(3), users=4, tokens=256)
    units, start = start_of(runs)

    loss, found = Problem.of(runs).minimum(SlotRule(3), units, start, 15)

    assert loss < 1e-4
    assert dict(zip(COSTS, found * units, strict=True)) == pytest.approx(COSTS, rel=0.03)


@pytest.mark.slow
def test_servers_3_costs_and_rule_are_recovered_from_client_timings():
    found = fit_runs(synthetic_runs(SlotRule(3, mixes_prefill=False), users=4, tokens=256))

    assert (found.rule.slots, found.rule.mixes_prefill, found.rule.prefill_prompts) == (3, False, None)
    assert found.costs == pytest.approx(COSTS, rel=0.03)
    assert max(median for median, _ in found.errors.values()) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule",
    [
        replace(MIXED, steps_between=1),
        SlotRule(6, 256),
        SlotRule(8, prefill_prompts=1, mixes_prefill=False),
        SlotRule(5, mixes_prefill=False, steps_between=4),
    ],
)
def test_servers_3_every_batching_rule_is_identified(rule: SlotRule):
    found = fit_runs(synthetic_runs(rule, noise=0.03, repeats=3, users=16, tokens=512)).rule

    assert (found.slots, found.mixes_prefill, found.prefill_prompts) == (
        rule.slots,
        rule.mixes_prefill,
        rule.prefill_prompts,
    )
    assert found.steps_between == rule.steps_between
    if rule.prefill_tokens < UNLIMITED_TOKENS:
        assert found.prefill_tokens == rule.prefill_tokens


@pytest.mark.slow
def test_servers_3_intervals_contain_the_true_costs_under_noise():
    fits = [fit_runs(synthetic_runs(MIXED, noise=0.05, repeats=3, users=8, seed=seed)) for seed in range(4)]

    covered = [low <= COSTS[name] <= high for fit in fits for name, (low, high) in fit.intervals.items()]
    assert len(covered) == 4 * len(COSTS)
    # 32 intervals of 95 %, not independent within a fit.
    assert np.mean(covered) >= 0.85
    assert all(low < high for fit in fits for low, high in fit.intervals.values())
    for name in ("decode", "rows"):
        assert np.median([fit.costs[name] for fit in fits]) == pytest.approx(COSTS[name], rel=0.03)


@pytest.mark.slow
def test_servers_3_the_bundled_scheduler_is_predicted_as_an_unknown_server():
    options = SchedulerOptions(4096, 400_000, 0.3, 20, supports_chunking=True)

    found = fit_runs(synthetic_runs(options, noise=0.05, repeats=3, users=16, tokens=512))

    assert found.rule.mixes_prefill
    assert found.rule.slots == UNLIMITED_TOKENS
    assert max(median for median, _ in found.errors.values()) < 0.1


def test_servers_3_slots_are_the_requests_that_decode_at_once():
    runs = synthetic_runs(SlotRule(3), users=8)

    assert slots_of(runs) == 3
    assert slots_of([run for run in runs if run.users <= 2]) == UNLIMITED_TOKENS


def test_servers_3_slots_that_loads_disagree_about_are_refused():
    few, many = (synthetic_runs(SlotRule(slots), users=16) for slots in (3, 6))
    runs = [run for run in few if run.users == 16] + [run for run in many if run.users == 8]

    with pytest.raises(CostModelError, match="cannot identify the slots of the server: it decodes at once"):
        slots_of(runs)


def test_too_few_loads_are_refused():
    with pytest.raises(CostModelError, match="2 loads were measured, but at least 6 are needed"):
        fit_runs(synthetic_runs(MIXED)[:2])


@pytest.mark.parametrize("mixes", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_servers_3_all_runs_decide_whether_prefill_stalls_decode(mixes: bool):
    """The search, which sees one run of each load, found the stalling rule better."""
    runs = synthetic_runs(SlotRule(UNLIMITED_TOKENS, mixes_prefill=mixes), users=4, repeats=2)
    units, start = start_of(runs)
    mixing, stalling = SlotRule(UNLIMITED_TOKENS), SlotRule(UNLIMITED_TOKENS, mixes_prefill=False)
    search = RuleSearch(Problem.of(runs), units, {mixing: (0.2, start), stalling: (0.1, start)})

    chosen, _ = usual_or_clearly_better(search.problem, search, stalling)

    assert chosen == (mixing if mixes else stalling)
