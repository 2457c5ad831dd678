"""The simulator with a simple law: prefill 10 ms + 0.1 ms per token, decode 5 ms + 1 ms per row."""

import random
from dataclasses import dataclass
from itertools import cycle, repeat

import pytest

from reference_server.router.scheduling.scheduler_options import SchedulerOptions
from reference_server.router.scheduling.step_work import StepWork
from tuner.simulator.simulation import PlannedRequest, Simulated, SimulatedLoad, Simulation

MS = 1_000_000


@dataclass(frozen=True)
class ToyLaw:
    kv_ns: float = 0.0
    ended_ns: float = 0.0

    def step_ns(self, work: StepWork) -> float:
        prefill = 10 * MS + 100_000 * work.tokens if work.prompts else 0
        decode = 5 * MS * (not work.prompts) + MS * work.rows if work.rows else 0
        return prefill + decode + self.kv_ns * work.kv + self.ended_ns * work.ended


def toy_options(*, ratio: float = 1.2, max_waiting_tokens: int = 20, pool: int = 1000) -> SchedulerOptions:
    # One block more than the pool: block 0 is never allocated.
    return SchedulerOptions(1000, pool + 1, ratio, max_waiting_tokens, block_size=1)


def replay(
    *planned: tuple[int, int, int],
    options: SchedulerOptions | None = None,
    strides: bool = True,
    kv_ns: float = 0.0,
    permits: int = 128,
    ended_ns: float = 0.0,
) -> Simulated:
    """A load of (arrival ms, input, output)."""
    load = SimulatedLoad([PlannedRequest(*ask[1:]) for ask in planned], times_ns=[ask[0] * MS for ask in planned])
    server = (options or toy_options(), ToyLaw(kv_ns, ended_ns))
    return Simulation(load, [server], max_concurrent_requests=permits, with_strides=strides).run()


def firsts_ms(run: Simulated) -> list[float]:
    return [flight.first_ns / MS for flight in run.flights]


def ends_ms(run: Simulated) -> list[float]:
    return [flight.end_ns / MS for flight in run.flights]


both = pytest.mark.parametrize("strides", [True, False], ids=["strides", "single_steps"])


@both
def test_simulation_V1_two_requests_that_arrive_together_run_together(strides: bool):
    run = replay((0, 100, 3), (0, 100, 3), strides=strides)

    assert firsts_ms(run) == [30, 30]
    assert ends_ms(run) == [44, 44]
    assert run.replicas[0].counts.decodes == 2


@pytest.mark.parametrize(("strides", "events"), [(True, 5), (False, 12)])
def test_simulation_V2_a_second_request_joins_at_the_next_turn(strides: bool, events: int):
    run = replay((0, 100, 10), (21, 100, 10), strides=strides)

    assert firsts_ms(run) == [20, 46]
    assert ends_ms(run) == [102, 108]
    assert (run.replicas[0].counts.decodes, run.replicas[0].counts.events) == (10, events)


@both
def test_only_the_step_after_an_ended_request_takes_longer(strides: bool):
    """As V2, with a longer second request: the first request ends at 102 ms, and the next step takes 3 ms longer."""
    run = replay((0, 100, 10), (21, 100, 14), (300, 100, 2), strides=strides, ended_ns=3.0 * MS)

    assert ends_ms(run) == [102, 135, 326]
    # An idle time is no step: the third request does not wait for the end of the second.
    assert firsts_ms(run)[2] == 320


@both
def test_simulation_V3_the_ratio_delays_a_request_until_max_waiting_tokens(strides: bool):
    run = replay((0, 100, 10), (21, 100, 10), options=toy_options(ratio=3.0, max_waiting_tokens=4), strides=strides)

    assert firsts_ms(run) == [20, 58]
    assert ends_ms(run) == [100, 118]
    assert run.replicas[0].counts.decodes == 12


@both
def test_simulation_V4_no_request_passes_the_first_of_the_queue(strides: bool):
    run = replay((0, 100, 5), (0, 100, 5), (0, 10, 5), options=toy_options(pool=150), strides=strides)

    assert firsts_ms(run) == [20, 65, 65]
    assert ends_ms(run) == [44, 93, 93]


def test_simulation_V5_a_third_request_gets_no_permit():
    run = replay((0, 100, 10), (0, 100, 10), (1, 100, 10), permits=2)

    assert [flight.status for flight in run.flights] == ["ok", "ok", "overloaded"]
    assert run.replicas[0].counts.prefills == 1


def test_users_without_a_permit_do_not_block_the_measurement():
    load = SimulatedLoad(repeat(PlannedRequest(100, 10)), users=4, requests=20)

    run = Simulation(load, [(toy_options(), ToyLaw())], max_concurrent_requests=2).run()

    measured = [flight.status for flight in run.flights if flight.sent_ns >= run.start_ns]
    assert {"ok", "overloaded"} == set(measured)


@pytest.mark.parametrize(("warmup_ns", "first_in"), [(0, 0), (1, 8)])
def test_without_a_warm_up_the_first_request_of_each_user_is_measured(warmup_ns, first_in):
    """Like `tgi-bench run --requests 20`: the window has 20 requests, the last one included."""
    planned = (PlannedRequest(100, tokens) for tokens in cycle((10, 15, 21, 28, 36)))
    load = SimulatedLoad(planned, users=4, requests=20, warmup_ns=warmup_ns)

    run = Simulation(load, [(toy_options(), ToyLaw())], max_concurrent_requests=8).run()

    inside = [flight.id for flight in run.flights if run.start_ns <= flight.sent_ns < run.end_ns]
    assert (inside[0], len(inside)) == (first_in, 20)


@pytest.mark.parametrize(("strides", "events"), [(True, 2), (False, 1001)])
def test_simulation_V6_a_stride_is_an_arithmetic_series(strides: bool, events: int):
    run = replay((0, 100, 1001), options=toy_options(pool=2000), strides=strides, kv_ns=1000.0)

    assert ends_ms(run) == [6620.5]
    assert run.replicas[0].counts.events == events


def random_case(seed: int) -> tuple[SchedulerOptions, SimulatedLoad]:
    rng = random.Random(seed)
    chunks = rng.random() < 0.4
    options = SchedulerOptions(
        max_batch_prefill_tokens=rng.choice([300, 600, 1200]),
        max_batch_total_tokens=rng.choice([1500, 3000, 9000]),
        waiting_served_ratio=rng.choice([0.0, 0.3, 1.2, 3.0]),
        max_waiting_tokens=rng.choice([0, 1, 5, 20]),
        max_batch_size=rng.choice([None, None, 2, 8]),
        supports_chunking=chunks,
        requires_padding=not chunks and rng.random() < 0.3,
        use_prefix_caching=rng.random() < 0.3,
        block_size=rng.choice([1, 16]),
    )
    planned = [PlannedRequest(rng.randint(1, 290), rng.randint(1, 60), rng.choice([None, 60])) for _ in range(60)]
    if rng.random() < 0.5:
        return options, SimulatedLoad(planned, users=rng.randint(1, 20), think_ns=rng.choice([0, 7 * MS]))
    at, times = 0, []
    for _ in planned:
        at += round(rng.expovariate(1 / (40 * MS)))
        times.append(at)
    return options, SimulatedLoad(planned, times_ns=times)


def moments(options: SchedulerOptions, load: SimulatedLoad, *, strides: bool) -> tuple[list[tuple[str, int, int]], int]:
    run = Simulation(load, [(options, ToyLaw(137.3))], max_concurrent_requests=12, with_strides=strides).run()
    counts = run.replicas[0].counts
    flights = sorted(run.flights, key=lambda flight: flight.id)
    return [(each.status, each.first_ns, each.end_ns) for each in flights], counts.decodes + counts.prefills


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 200), marks=pytest.mark.slow)])
def test_simulation_V7_strides_do_not_change_times(seeds: range):
    for seed in seeds:
        options, load = random_case(seed)

        quick, steps = moments(options, load, strides=True)
        slow, single_steps = moments(options, load, strides=False)

        assert steps == single_steps, seed
        for ours, theirs in zip(quick, slow, strict=True):
            assert ours[0] == theirs[0], seed
            assert ours[1:] == pytest.approx(theirs[1:], abs=steps), seed


def test_token_times_are_recorded_for_gaps():
    load = SimulatedLoad([PlannedRequest(100, 10), PlannedRequest(100, 10)], times_ns=[0, 21 * MS])

    run = Simulation(load, [(toy_options(), ToyLaw())], with_gaps=True).run()

    first, second = run.flights
    assert [at / MS for at in first.token_ns] == [20, 26, 53, 60, 67, 74, 81, 88, 95, 102]
    assert [at / MS for at in second.token_ns][-3:] == [95, 102, 108]
    assert len(second.token_ns) == 10


def test_a_long_answer_runs_in_segments():
    run = replay((0, 10, 2000), options=SchedulerOptions(4096, 4096, block_size=16))

    flight = run.flights[0]
    assert (flight.generated, run.replicas[0].counts.prefills) == (2000, 2)


def test_a_cached_prefix_is_not_computed_again():
    ids = tuple(range(200))
    options = SchedulerOptions(1000, 4000, block_size=16, use_prefix_caching=True)
    load = SimulatedLoad(
        [PlannedRequest(200, 5, None, ids), PlannedRequest(200, 5, None, ids)], times_ns=[0, 1000 * MS]
    )

    run = Simulation(load, [(options, ToyLaw())]).run()

    assert [flight.cached_tokens for flight in run.flights] == [0, 192]
