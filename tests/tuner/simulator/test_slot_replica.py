"""Servers with slots, in virtual time, with a simple law: prefill 10 ms + 0.1 ms a token, decode 5 ms + 1 ms a row."""

import random

import pytest

from tuner.simulator.fitting.linear_law import LinearLaw
from tuner.simulator.simulation import PlannedRequest, Simulated, SimulatedLoad, Simulation
from tuner.simulator.slot_replica import SlotRule

TOY = LinearLaw((10e6, 0.0, 1e5, 0.0, 0.0, 5e6, 1e6, 0.0, 0.0, 0.0))
WITH_KV = LinearLaw((10e6, 0.0, 1e5, 3.0, 20.0, 5e6, 1e6, 0.0, 0.0, 1e3))


def replay(rule: SlotRule, *requests: tuple[float, int, int], law: LinearLaw = TOY, strides: bool = True) -> Simulated:
    """Simulate requests of (arrival in ms, input tokens, output tokens)."""
    planned = [PlannedRequest(inputs, outputs) for _, inputs, outputs in requests]
    load = SimulatedLoad(planned, times_ns=[round(1e6 * at_ms) for at_ms, _, _ in requests])
    return Simulation(load, [(rule, law)], with_strides=strides).run()


def times_ms(run: Simulated) -> list[tuple[float, float]]:
    """First token and end of each request."""
    return [(flight.first_ns / 1e6, flight.end_ns / 1e6) for flight in run.flights]


def test_requests_beyond_the_slots_wait_for_one():
    run = replay(SlotRule(1), (0, 100, 3), (0, 100, 3))

    assert times_ms(run) == [(20, 32), (52, 64)]
    assert run.replicas[0].waiting_fractions() == {"slots": 1.0}


def test_a_prompt_shares_its_step_with_rows_that_decode():
    run = replay(SlotRule(4), (0, 100, 10), (21, 100, 10))

    # The second prompt joins at 26 ms, in a step of 10 + 10 + 1 ms; then 2 rows decode in 7 ms a step.
    assert times_ms(run) == [(20, 47 + 7 * 7), (47, 47 + 7 * 7 + 2 * 6)]


def test_rows_wait_for_a_prompt_that_stalls_decode():
    run = replay(SlotRule(4, mixes_prefill=False), (0, 100, 10), (21, 100, 10))

    assert times_ms(run) == [(20, 46 + 8 * 7), (46, 46 + 8 * 7 + 6)]


def test_prompts_are_computed_one_a_step():
    assert times_ms(replay(SlotRule(4, prefill_prompts=1), (0, 100, 1), (0, 100, 1))) == [(20, 20), (40, 40)]


def test_a_prompt_over_the_budget_takes_several_steps():
    assert times_ms(replay(SlotRule(4, prefill_tokens=60), (0, 100, 1))) == [(16 + 14, 16 + 14)]


def test_new_requests_wait_for_the_steps_between():
    run = replay(SlotRule(4, steps_between=2), (0, 100, 30), (1, 100, 30), (21, 100, 30))

    # The second joins at 20 ms, in a step of 21 ms; then 2 rows decode twice, and the third joins.
    assert [first for first, _ in times_ms(run)] == [20, 41, 41 + 2 * 7 + 22]


@pytest.mark.parametrize("seed", range(20))
def test_strides_do_not_change_times(seed: int):
    rng = random.Random(seed)
    rule = SlotRule(rng.choice((1, 3, 8)), rng.choice((32, 2**20)), rng.choice((None, 1)), rng.random() < 0.5, seed % 4)
    requests = [(rng.uniform(0, 400), rng.randint(1, 200), rng.randint(1, 40)) for _ in range(30)]
    requests.sort()

    several, single = (times_ms(replay(rule, *requests, law=WITH_KV, strides=strides)) for strides in (True, False))

    # Each step is rounded to a ns by itself.
    assert [time for each in several for time in each] == pytest.approx(
        [time for each in single for time in each], abs=0.01
    )


def test_token_times_are_recorded_for_gaps():
    load = SimulatedLoad([PlannedRequest(100, 4)], times_ns=[0])

    run = Simulation(load, [(SlotRule(1), TOY)], with_gaps=True).run()

    assert run.flights[0].token_ns == [20_000_000, 26_000_000, 32_000_000, 38_000_000]
