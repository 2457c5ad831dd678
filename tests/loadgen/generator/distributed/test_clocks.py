from hypothesis import given
from hypothesis import strategies as st

from loadgen.generator.distributed.clocks import ClockOffset, Ping, clock_id, error_ns, estimate

MS = 1_000_000
DELAYS = st.integers(0, 50 * MS)


def ping(offset_ns, there_ns, back_ns, sent_ns=0):
    """An exchange with a clock that is `offset_ns` ahead, over a way of uneven lengths."""
    return Ping(sent_ns, sent_ns + there_ns + offset_ns, sent_ns + there_ns + back_ns)


def test_symmetric_pings_give_the_exact_offset():
    assert estimate([ping(7 * MS, 200, 200)]) == ClockOffset(7 * MS, 200)


def test_the_fastest_ping_decides():
    slow, fast = ping(7 * MS, 90 * MS, 2 * MS), ping(7 * MS, 3_000, 1_000)

    assert estimate([slow, fast, slow]) == ClockOffset(7 * MS + 1_000, 2_000)


@given(st.integers(-(10**15), 10**15), st.lists(st.tuples(DELAYS, DELAYS), min_size=1, max_size=20))
def test_the_true_offset_is_within_the_uncertainty_for_asymmetric_pings(offset_ns, ways):
    found = estimate([ping(offset_ns, there_ns, back_ns) for there_ns, back_ns in ways])

    assert abs(found.offset_ns - offset_ns) <= found.uncertainty_ns + 1


def test_drift_adds_to_the_error():
    assert error_ns(ClockOffset(1_000, 40), ClockOffset(1_300, 60)) == 360
    assert error_ns(ClockOffset(1_000, 40), None) == 40


def test_two_processes_of_one_boot_share_a_clock():
    assert clock_id() == clock_id()
