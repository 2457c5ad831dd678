import json
from pathlib import Path

import pytest

from benchmarks.tuner.plans import PlanCase
from benchmarks.tuner.replans import Replan, replanned, smallest_of, stored_plans, summary_of

RESULT = Path("benchmarks/results/replans.json")


def plan(named: int, smallest: int) -> Replan:
    return Replan(0.9, 4, "two_choices", 1000.0, seed=1, named=named, claimed=0.96, smallest=smallest)


def test_a_plan_is_kept_by_the_smallest_fleet_and_by_larger_ones():
    plans = [plan(3, 4), plan(4, 4), plan(5, 4), plan(6, 4)]

    assert [each.is_kept for each in plans] == [False, True, True, True]
    assert [each.is_near for each in plans] == [True, True, True, False]


def test_the_summary_counts_the_plans():
    found = summary_of([plan(4, 4), plan(5, 4)])

    assert (found["plans"], found["kept"], found["at_most_one_above"], found["exactly_smallest"]) == (2, 2, 2, 1)


def test_the_smallest_sufficient_fleet_is_the_planned_one_without_the_replicas_above():
    case = PlanCase(0.9, 2, "two_choices", 4000.0, named=3, claimed=0.96, attainment=1.0, above=1, plan_s=3.3)

    assert smallest_of(case) == 2


@pytest.mark.slow
def test_trust_P1_a_plan_with_a_new_seed_names_a_sufficient_fleet():
    capacity, cases = stored_plans()

    found = replanned(cases[0], capacity, seed=7)

    assert (found.is_kept, found.is_near) == (True, True)


def test_trust_P1_the_stored_plans_with_a_new_seed_keep_their_promise():
    """95 % name a sufficient fleet, 90 % at most one replica above the smallest."""
    plans = [Replan(**row) for row in json.loads(RESULT.read_text())["plans"]]
    new = [each for each in plans if each.seed != 0]

    assert len(new) >= 42
    assert sum(each.is_kept for each in new) >= 0.95 * len(new)
    assert sum(each.is_near for each in new) >= 0.90 * len(new)
