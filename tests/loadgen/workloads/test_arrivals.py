import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.workloads.arrivals import NS_PER_S, Burst, Constant, Gamma, Replay, StagedRate, schedule, schedule_hash


def test_constant_arrivals_do_not_drift():
    times = list(itertools.islice(Constant(3.0).times(seed=1), 301))

    assert times[:4] == [0, 333_333_333, 666_666_667, NS_PER_S]
    assert times[300] == 100 * NS_PER_S


def test_poisson_arrivals_have_the_rate_and_exponential_gaps():
    times = list(itertools.islice(Gamma(50.0).times(seed=7), 20_000))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5

    assert mean == pytest.approx(0.02 * NS_PER_S, rel=0.03)
    assert deviation / mean == pytest.approx(1.0, rel=0.05)


def test_burstiness_widens_the_gaps_at_the_same_rate():
    times = list(itertools.islice(Gamma(50.0, burstiness=0.25).times(seed=7), 20_000))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5

    assert mean == pytest.approx(0.02 * NS_PER_S, rel=0.06)
    assert deviation / mean == pytest.approx(2.0, rel=0.1)


@given(rate=st.floats(0.01, 10_000), burstiness=st.floats(0.1, 10), seed=st.integers(0, 2**40))
def test_equal_seeds_give_equal_arrivals_that_never_decrease(rate, burstiness, seed):
    process = Gamma(rate, burstiness)

    once = list(itertools.islice(process.times(seed), 50))
    again = list(itertools.islice(process.times(seed), 50))

    assert once == again
    assert once == sorted(once)
    assert schedule_hash(once) == schedule_hash(again)


def test_another_seed_gives_another_schedule():
    first, second = (list(itertools.islice(Gamma(1.0).times(seed), 10)) for seed in (1, 2))

    assert schedule_hash(first) != schedule_hash(second)


def test_a_trace_starts_at_zero_and_is_stretched():
    replay = Replay([5_000, 1_000, 3_000], time_scale=0.5)

    assert list(itertools.islice(replay.times(seed=0), 3)) == [0, 1_000, 2_000]


def test_a_burst_is_all_at_once():
    assert list(Burst(3).times(seed=0)) == [0, 0, 0]


def test_a_duration_counts_from_the_end_of_the_warm_up():
    assert schedule(iter(range(0, 100, 10)), warmup_ns=20, duration_ns=30).times_ns == [0, 10, 20, 30, 40]


def test_trust_D1_a_schedule_goes_on_through_the_drain_and_its_window_does_not_depend_on_it():
    short, long = (schedule(Gamma(20.0).times(3), duration_ns=NS_PER_S, drain_ns=n * NS_PER_S) for n in (1, 5))

    later = [list(each.drain_ns) for each in (short, long)]
    assert short.times_ns == long.times_ns
    assert later[0] == [at for at in later[1] if at < 2 * NS_PER_S]
    whole = list(itertools.takewhile(lambda at: at < 6 * NS_PER_S, Gamma(20.0).times(3)))
    assert long.times_ns + later[1] == whole


def test_trust_D1_stages_keep_their_last_rate_above_zero():
    times = list(itertools.islice(StagedRate(((2.0, 4.0), (2.0, 0.0))).times(0), 12))

    assert all(at <= 4 * NS_PER_S for at in times[:8])
    assert times[8:] == [4 * NS_PER_S + (number + 1) * NS_PER_S // 4 for number in range(4)]


def test_trust_D1_a_trace_whose_rows_arrive_at_once_does_not_start_again():
    assert list(Replay([7, 7]).times(0)) == [0, 0]
