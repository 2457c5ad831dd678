import dataclasses

import pytest

from loadgen.clocks import ClockOffset
from loadgen.crew import Crew, Stage
from loadgen.messages import PROTOCOL, Hello

MASTER = Hello(PROTOCOL, "1.0", "2.47.0", "here", 1, "boot-1", "secret")
END = {
    "stop_reason": "duration",
    "warmup_ended_s": 1.0,
    "window_end_s": 11.0,
    "drain_s": 0.2,
    "clipped": {"requests": 1, "input_tokens": 5, "output_tokens": 0},
    "client_errors": [],
}


def worker(**changes):
    return dataclasses.replace(MASTER, **{"pid": 2} | changes)


@pytest.fixture
def crew():
    return Crew(2, MASTER)


@pytest.fixture
def members(crew):
    admitted = [crew.admit(f"c{number}", worker()) for number in range(2)]
    for member in admitted:
        member.stage = Stage.READY
    crew.has_begun = True
    return admitted


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol": PROTOCOL + 1}, f"the master speaks protocol {PROTOCOL} and this worker {PROTOCOL + 1}"),
        ({"version": "0.9"}, "the master is tgi-bench 1.0 and this worker 0.9"),
        ({"locust": "2.20.1"}, "the master has locust 2.47.0 and this worker 2.20.1"),
        ({"key": "guess"}, "the key is wrong: TGI_BENCH_JOIN_KEY"),
    ],
)
def test_a_worker_that_does_not_match_is_refused_by_name(crew, changes, reason):
    assert reason in crew.refusal(worker(**changes), url_is_loopback=False)


def test_what_is_no_hello_is_refused(crew):
    assert Hello.from_json({"type": "hello"}) is None
    assert crew.refusal(None, url_is_loopback=False) == "that is no hello of tgi-bench"


def test_another_patch_version_of_locust_may_join(crew):
    assert crew.refusal(worker(locust="2.47.3"), url_is_loopback=False) is None


def test_a_worker_elsewhere_cannot_reach_a_server_on_the_masters_loopback(crew):
    assert "give the master a --url others can reach" in crew.refusal(worker(host="there"), url_is_loopback=True)
    assert crew.refusal(worker(), url_is_loopback=True) is None


def test_who_comes_too_late_is_refused(crew, members):
    assert crew.refusal(worker(), url_is_loopback=False) == "the load has its 2 workers already"


def test_a_lost_worker_marks_the_run_and_the_others_go_on(crew, members):
    crew.note_progress(members[1], {"phase": "measure", "in_flight": 3, "completed": 7})

    crew.lose(members[1], "its heartbeats stopped")

    assert not crew.is_over
    assert crew.live(2.0)["in_flight"] == 0
    assert crew.live(2.0)["completed"] == 7
    crew.note_done(members[0], END, {"cpu_share": 0.1})
    assert crew.is_over
    assert crew.end()["lost"] == [{"worker": 1, "share": 0.5, "because": "its heartbeats stopped"}]
    assert crew.end()["stop_reason"] == "duration"
    assert [member.describe(2)["is_lost"] for member in crew.members] == [False, True]


def test_a_worker_may_be_lost_before_its_first_word(crew, members):
    crew.lose(members[1], "killed")

    assert crew.live(0.5)["in_flight"] == 0


def test_a_run_that_lost_every_worker_says_so(crew, members):
    for member in members:
        crew.lose(member, "killed")

    assert crew.end()["stop_reason"] == "worker_lost"
    assert crew.end()["window_end_s"] is None


def test_the_warm_up_is_over_when_the_last_worker_that_is_left_is_warm(crew, members):
    members[0].warm_ns = 5
    assert not crew.is_warm

    members[1].warm_ns = 9
    assert (crew.is_warm, crew.warm_ns) == (True, 9)

    crew.lose(members[1], "killed")
    assert (crew.is_warm, crew.warm_ns) == (True, 5)


@pytest.mark.parametrize(
    ("reason", "stops_all"), [("requests", None), ("duration", None), ("server_unreachable", "server_unreachable")]
)
def test_a_worker_whose_share_is_done_stops_no_other(crew, members, reason, stops_all):
    crew.note_stopping(reason)

    assert crew.stop_reason == stops_all


def test_errors_of_all_workers_count_against_the_limit():
    crew = Crew(2, MASTER, max_errors=5)
    members = [crew.admit(f"c{number}", worker()) for number in range(2)]

    crew.note_progress(members[0], {"phase": "measure", "errors": 2})
    assert crew.stop_reason is None
    crew.note_progress(members[1], {"phase": "measure", "errors": 3})

    assert crew.stop_reason == "error_count"


def test_the_live_view_sums_counts_and_pools_latencies(crew, members):
    shared = {"phase": "measure", "waiting": 0, "failed": 1, "statuses": {"ok": 4}}
    crew.note_progress(
        members[0], shared | {"in_flight": 2, "tokens_out": 40, "ttfts_s": [0.1, 0.2], "tpots_s": [0.01]}
    )
    crew.note_progress(members[1], shared | {"in_flight": 3, "tokens_out": 60, "ttfts_s": [0.3], "tpots_s": []})

    live = crew.live(4.0)

    assert (live["in_flight"], live["tokens_out"], live["failed"], live["statuses"]) == (5, 100, 2, {"ok": 8})
    assert (live["ttft_p50_s"], live["ttft_p95_s"], live["tpot_p50_s"]) == (0.2, 0.3, 0.01)


def test_a_clock_of_the_same_boot_needs_no_offset_and_another_one_gets_the_measured(crew):
    same, other = (crew.admit(name, worker(clock=clock)) for name, clock in (("a", "boot-1"), ("b", "boot-2")))
    for member in (same, other):
        member.measured, member.measured_later = ClockOffset(5_000, 30), ClockOffset(5_100, 20)

    assert (same.offset_ns, same.clock_error_ns) == (0, 0)
    assert (other.offset_ns, other.clock_error_ns) == (5_000, 130)
    assert crew.end()["clock_error_s"] == pytest.approx(130e-9)


def test_ends_add_up(crew, members):
    for member, window_end_s in zip(members, (11.0, 10.5), strict=True):
        crew.note_done(member, END | {"window_end_s": window_end_s}, {})

    end = crew.end()

    assert end["window_end_s"] == 11.0
    assert end["clipped"] == {"requests": 2, "input_tokens": 10, "output_tokens": 0}
    assert end["lost"] == []


def test_a_worker_that_was_interrupted_by_itself_is_a_lost_one(crew, members):
    crew.note_done(members[0], END | {"stop_reason": "interrupted"}, {})

    assert crew.end()["lost"][0]["because"] == "its process was interrupted"
