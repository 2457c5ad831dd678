"""Drafts in the simulator, with laws and acceptances whose results are arithmetic."""

import itertools
from dataclasses import replace

import pytest

from reference_server.router.scheduling.scheduler_options import SchedulerOptions
from tuner.errors import NotSimulatedError
from tuner.simulator.drafting import Drafting, SpeculatingLaw, uniform
from tuner.simulator.fitting.cost_model import CostModel
from tuner.simulator.fitting.draft_acceptance import DraftAcceptance
from tuner.simulator.fitting.linear_law import LinearLaw
from tuner.simulator.predict import law_of
from tuner.simulator.simulated_server import SimulatedServer
from tuner.simulator.simulation import PlannedRequest, Simulated, SimulatedLoad, Simulation

MS = 1_000_000
# Prefill 10 ms + 0.1 ms per token; decode 5 ms + 1 ms per row, + 2 ms with drafts + 0.5 ms per drafted token.
TOY = LinearLaw((10e6, 0.0, 1e5, 0.0, 0.0, 5e6, 1e6, 0.0, 0.0, 0.0, 2e6, 5e5))
ALWAYS = DraftAcceptance(1.0, 1.0, 1.0)
NEVER = DraftAcceptance(1.0, 0.0, 0.0)


def options(speculate: int) -> SchedulerOptions:
    return SchedulerOptions(1000, 200_001, 1.2, 20, block_size=1, speculate=speculate)


def replay(
    law: SpeculatingLaw, *planned: tuple[int, int, int], strides: bool = True, with_gaps: bool = False
) -> Simulated:
    """A load of (arrival ms, input, output)."""
    load = SimulatedLoad([PlannedRequest(*ask[1:]) for ask in planned], times_ns=[ask[0] * MS for ask in planned])
    server = (options(law.speculate), law)
    return Simulation(load, [server], with_strides=strides, with_gaps=with_gaps).run()


def test_drafts_that_are_always_accepted_give_three_tokens_a_step():
    run = replay(SpeculatingLaw(TOY, 2, ALWAYS, is_adaptive=False), (0, 100, 10), with_gaps=True)

    # Prefill 20 ms, then three steps of 5 + 1 + 2 + 2 * 0.5 ms for the other nine tokens.
    assert run.flights[0].first_ns == 20 * MS
    assert run.flights[0].token_ns == [each * MS for each in (20, 29, 29, 29, 38, 38, 38, 47, 47, 47)]
    assert run.flights[0].end_ns == 47 * MS
    assert (run.replicas[0].counts.drafted, run.replicas[0].counts.accepted) == (6, 6)


def test_drafts_that_are_never_accepted_cost_time_and_give_no_token():
    run = replay(SpeculatingLaw(TOY, 2, NEVER, is_adaptive=False), (0, 100, 4))

    # A draft is never longer than the tokens that remain after the one of the step: two, one, none.
    assert run.flights[0].end_ns == (20 + 9 + 8.5 + 6) * MS
    assert run.replicas[0].counts.accepted == 0


def test_an_adaptive_server_stops_drafts_that_are_never_accepted():
    plain = replay(SpeculatingLaw(TOY, 4, DraftAcceptance(0.0, 0.0, 0.0)), (0, 100, 500))
    run = replay(SpeculatingLaw(TOY, 4, NEVER), (0, 100, 500))

    assert run.replicas[0].counts.drafted < 10
    assert run.flights[0].end_ns < 1.02 * plain.flights[0].end_ns


def test_an_adaptive_server_drafts_where_a_row_is_cheap_and_not_where_it_is_dear():
    """A step of 5 ms and 1 ms a row has room for drafts of one row, and none at 64 rows."""
    law = SpeculatingLaw(LinearLaw((*TOY.coefficients[:10], 0.0, 1e6)), 4, DraftAcceptance(1.0, 0.9, 0.88))

    alone = replay(law, (0, 10, 200))
    together = replay(law, *[(0, 10, 200)] * 64)

    assert alone.replicas[0].counts.accepted > 100
    assert not Drafting(law).may_draft(64)
    assert together.replicas[0].counts.drafted < 0.05 * 64 * 200


# Decode 4 ms + 0.25 ms per row, and 0.4 ms per drafted token. With four drafted tokens of which on average 2.36 are
# accepted, one user's step has 3.36 tokens in 5.85 ms instead of one in 4.25 ms: 2.44 times as many. With 32 users it
# has 107.6 tokens in 63.2 ms instead of 32 in 12 ms: 0.64 times as many.
ONE_USER = LinearLaw((10e6, 0.0, 1e5, 0.0, 0.0, 4e6, 0.25e6, 0.0, 0.0, 0.0, 0.0, 4e5))
USEFUL = DraftAcceptance(1.0, 0.8, 0.8)


def decode_ns(law: SpeculatingLaw, users: int, requests: int = 4) -> float:
    """The time of the decode steps: closed loop, each user one request after the other, all of 200 tokens."""
    load = SimulatedLoad([PlannedRequest(10, 200)] * (users * requests), users=users, requests=users * requests)
    return Simulation(load, [(options(law.speculate), law)]).run().replicas[0].counts.decode_ns


@pytest.mark.parametrize("is_timed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_adaptive_drafts_follow_the_load_at_which_drafts_stop_to_pay(is_timed: bool):
    plain, fixed, adaptive = (
        {users: decode_ns(law, users) for users in (1, 32)}
        for law in (
            SpeculatingLaw(ONE_USER, 4, DraftAcceptance(0.0, 0.0, 0.0), is_adaptive=False),
            SpeculatingLaw(ONE_USER, 4, USEFUL, is_adaptive=False),
            SpeculatingLaw(ONE_USER, 4, USEFUL, is_timed=is_timed),
        )
    )

    assert plain[1] / fixed[1] == pytest.approx(2.44, rel=0.05)
    assert plain[32] / fixed[32] == pytest.approx(0.64, rel=0.05)
    assert adaptive[1] < 1.05 * fixed[1]
    assert adaptive[32] < 1.01 * plain[32]


def test_a_server_with_a_clock_drafts_where_the_measured_time_shows_a_gain_that_its_costs_do_not():
    """One drafted token makes a step 1.28 times as fast: less than a server without a clock demands."""
    law = LinearLaw((*ONE_USER.coefficients[:11], 2.2e6))
    acceptance = DraftAcceptance(1.0, 0.95, 0.95)

    untimed, timed = (decode_ns(SpeculatingLaw(law, 1, acceptance, is_timed=each), 1) for each in (False, True))

    # 4.25 ms a token; 1.95 tokens in 6.45 ms.
    assert untimed == pytest.approx(4 * 199 * 4.25e6, rel=0.001)
    assert untimed / timed == pytest.approx(1.28, rel=0.05)


def test_a_server_with_a_clock_stops_drafts_that_lose_time():
    law = LinearLaw((*ONE_USER.coefficients[:11], 2.2e6))
    plain, timed = (
        decode_ns(SpeculatingLaw(law, 4, acceptance, is_timed=True), 1, requests=20)
        for acceptance in (DraftAcceptance(0.0, 0.0, 0.0), DraftAcceptance(1.0, 0.3, 0.3))
    )

    assert timed < 1.03 * plain


def test_only_one_rank_on_a_cpu_measures_its_steps():
    cost = CostModel({"decode": 1e6}, acceptance=ALWAYS)

    def is_timed(device: str | None, **settings: object) -> bool:
        law = law_of(replace(server(speculate=2, **settings), device=device), cost)
        assert isinstance(law, SpeculatingLaw)
        return law.is_timed

    assert is_timed("cpu")
    assert is_timed("cpu", num_shard=1)
    assert not is_timed("cpu", run_ahead=False)
    assert not is_timed("cpu", speculate_adaptive=False)
    assert not is_timed("cuda")
    assert not is_timed(None)


@pytest.mark.parametrize("acceptance", [ALWAYS, DraftAcceptance(0.7, 0.6, 0.7)])
@pytest.mark.parametrize("is_adaptive", [True, False])
def test_strides_and_single_steps_agree(acceptance: DraftAcceptance, is_adaptive: bool):
    law = SpeculatingLaw(TOY, 3, acceptance, is_adaptive)
    load = [(7 * number, 20 + number, 5 + 3 * (number % 40)) for number in range(120)]

    ends = [[flight.end_ns for flight in replay(law, *load, strides=each).flights] for each in (True, False)]

    assert ends[0] == pytest.approx(ends[1], abs=1000)


def test_accepted_tokens_follow_the_given_acceptance():
    drafting = Drafting(SpeculatingLaw(TOY, 3, DraftAcceptance(0.5, 0.6, 0.5), is_adaptive=False))
    rows = [drafting.row(key, 100, 50) for key in range(20_000)]

    lengths = [drafting.propose([row])[0] for row in rows]
    counts = [drafting.accepted(row, 3) for row in rows]

    assert sum(length == 3 for length in lengths) / 20_000 == pytest.approx(0.5, abs=0.02)
    for place, share in enumerate((0.6, 0.3, 0.15)):
        assert sum(count > place for count in counts) / 20_000 == pytest.approx(share, abs=0.02)


def test_draws_are_even_and_independent_of_their_neighbours():
    draws = [uniform(key, position) for key in range(100) for position in range(100)]

    assert sum(draws) / len(draws) == pytest.approx(0.5, abs=0.01)
    pairs = sum(a < 0.5 and b < 0.5 for a, b in itertools.pairwise(draws))
    assert pairs / len(draws) == pytest.approx(0.25, abs=0.02)


def server(**settings: object) -> SimulatedServer:
    return SimulatedServer({"max_batch_prefill_tokens": 1000, "max_batch_total_tokens": 9000}, {}).with_settings(
        settings
    )


def test_a_server_with_drafts_needs_their_acceptance():
    cost = CostModel({"decode": 1e6, "rows": 1e5})

    with pytest.raises(NotSimulatedError, match="`speculate` is 4, but the costs have no `acceptance`"):
        law_of(server(speculate=4), cost)
    assert law_of(server(speculate=0), cost) == cost.law


def test_a_server_whose_drafts_are_not_adaptive_is_simulated_so():
    cost = CostModel({"decode": 1e6}, acceptance=ALWAYS)

    adaptive, every = (law_of(server(speculate=2, speculate_adaptive=value), cost) for value in (None, False))

    assert isinstance(adaptive, SpeculatingLaw)
    assert isinstance(every, SpeculatingLaw)
    assert (adaptive.is_adaptive, every.is_adaptive) == (True, False)
