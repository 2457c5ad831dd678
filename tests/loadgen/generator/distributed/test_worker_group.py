import dataclasses

import pytest

from loadgen.generator.distributed.clocks import ClockOffset
from loadgen.generator.distributed.worker_group import Stage, WorkerGroup
from loadgen.generator.worker_messages import PROTOCOL, Hello

MASTER = Hello(PROTOCOL, "1.0", "2.47.0", "here", 1, "boot-1")
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
def group():
    return WorkerGroup(2, MASTER)


@pytest.fixture
def members(group):
    admitted = [group.admit(f"c{number}", worker()) for number in range(2)]
    for member in admitted:
        member.stage = Stage.READY
    group.has_begun = True
    return admitted


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol": PROTOCOL + 1}, f"the master has protocol {PROTOCOL} and this worker {PROTOCOL + 1}"),
        ({"version": "0.9"}, "the master is tgi-bench 1.0 and this worker 0.9"),
        ({"locust": "2.20.1"}, "the master has locust 2.47.0 and this worker 2.20.1"),
        ({"index": 2}, "part 2 of the load is not free"),
    ],
)
def test_a_worker_that_does_not_match_is_refused_by_name(group, changes, reason):
    assert reason in group.refusal(worker(**changes), url_is_loopback=False)


def test_an_unrecognised_handshake_is_refused(group):
    assert Hello.from_json({"type": "hello"}) is None
    assert group.refusal(None, url_is_loopback=False) == "unrecognised handshake"


@pytest.mark.parametrize(
    "change",
    [
        {"protocol": "4"}, {"protocol": True}, {"pid": -1}, {"pid": 2**40}, {"host": ""}, {"host": "h" * 300},
        {"host": "\x1b[2J"}, {"host": ["here"]}, {"version": None}, {"clock": 5}, {"index": "../../x"}, {"index": -1},
        {"index": 1.5}, {"index": 10**6},
    ],
)  # fmt: skip
def test_hardening_S3_the_fields_of_a_hello_are_typed_and_bounded(change):
    assert Hello.from_json(dataclasses.asdict(MASTER)) == MASTER
    assert Hello.from_json(dataclasses.asdict(MASTER) | change) is None


def test_hardening_S3_two_workers_cannot_make_one_part(group):
    group.admit("c0", worker(index=1))

    assert group.refusal(worker(index=1), url_is_loopback=False) == "part 1 of the load is not free"


def test_another_patch_version_of_locust_may_join(group):
    assert group.refusal(worker(locust="2.47.3"), url_is_loopback=False) is None


def test_a_worker_elsewhere_cannot_reach_a_server_on_the_masters_loopback(group):
    assert "use a --url that other machines can reach" in group.refusal(worker(host="there"), url_is_loopback=True)
    assert group.refusal(worker(), url_is_loopback=True) is None


def test_a_late_worker_is_refused(group, members):
    assert group.refusal(worker(), url_is_loopback=False) == "the load already has its 2 workers"


def test_a_lost_worker_marks_the_run_and_the_others_go_on(group, members):
    group.note_progress(members[1], {"phase": "measure", "in_flight": 3, "completed": 7})

    group.lose(members[1], "its heartbeats stopped")

    assert not group.is_over
    assert group.live(2.0)["in_flight"] == 0
    assert group.live(2.0)["completed"] == 7
    group.note_done(members[0], END, {"cpu_share": 0.1})
    assert group.is_over
    assert group.end()["lost"] == [{"worker": 1, "share": 0.5, "because": "its heartbeats stopped"}]
    assert group.end()["stop_reason"] == "duration"
    assert [member.describe(2)["is_lost"] for member in group.members] == [False, True]


def test_a_worker_may_be_lost_before_its_first_message(group, members):
    group.lose(members[1], "killed")

    assert group.live(0.5)["in_flight"] == 0


def test_a_run_without_workers_ends_as_worker_lost(group, members):
    for member in members:
        group.lose(member, "killed")

    assert group.end()["stop_reason"] == "worker_lost"
    assert group.end()["window_end_s"] is None


def test_the_warm_up_is_over_when_all_remaining_workers_are_warm(group, members):
    members[0].warm_ns = 5
    assert not group.is_warm

    members[1].warm_ns = 9
    assert (group.is_warm, group.warm_ns) == (True, 9)

    group.lose(members[1], "killed")
    assert (group.is_warm, group.warm_ns) == (True, 5)


def test_a_worker_that_stops_sending_stops_all_unless_it_was_interrupted_alone(group, members):
    group.note_stopping("interrupted")
    assert not group.is_stopped

    group.note_stopping("server_unreachable")

    assert (group.is_stopped, group.stop_reason) == (True, "server_unreachable")


def test_errors_of_all_workers_count_against_the_limit():
    group = WorkerGroup(2, MASTER, max_errors=5)
    members = [group.admit(f"c{number}", worker()) for number in range(2)]

    group.note_progress(members[0], {"phase": "measure", "errors": 2})
    assert group.stop_reason is None
    group.note_progress(members[1], {"phase": "measure", "errors": 3})

    assert group.stop_reason == "error_count"


def test_the_live_view_sums_counts_and_pools_latencies(group, members):
    shared = {"phase": "measure", "waiting": 0, "failed": 1, "statuses": {"ok": 4}}
    group.note_progress(
        members[0], shared | {"in_flight": 2, "tokens_out": 40, "ttfts_s": [0.1, 0.2], "tpots_s": [0.01]}
    )
    group.note_progress(members[1], shared | {"in_flight": 3, "tokens_out": 60, "ttfts_s": [0.3], "tpots_s": []})

    live = group.live(4.0)

    assert (live["in_flight"], live["tokens_out"], live["failed"], live["statuses"]) == (5, 100, 2, {"ok": 8})
    assert (live["ttft_p50_s"], live["ttft_p95_s"], live["tpot_p50_s"]) == (0.2, 0.3, 0.01)


def test_a_clock_of_the_same_boot_has_offset_0_and_another_the_measured_offset(group):
    same, other = (group.admit(name, worker(clock=clock)) for name, clock in (("a", "boot-1"), ("b", "boot-2")))
    for member in (same, other):
        member.measured, member.measured_later = ClockOffset(5_000, 30), ClockOffset(5_100, 20)

    assert (same.offset_ns, same.clock_error_ns) == (0, 0)
    assert (other.offset_ns, other.clock_error_ns) == (5_000, 130)
    assert group.end()["clock_error_s"] == pytest.approx(130e-9)


def test_ends_add_up(group, members):
    for member, window_end_s in zip(members, (11.0, 10.5), strict=True):
        group.note_done(member, END | {"window_end_s": window_end_s}, {})

    end = group.end()

    assert end["window_end_s"] == 11.0
    assert end["clipped"] == {"requests": 2, "input_tokens": 10, "output_tokens": 0}
    assert end["lost"] == []


def test_a_worker_that_was_interrupted_alone_is_lost(group, members):
    group.note_done(members[0], END | {"stop_reason": "interrupted"}, {})

    assert group.end()["lost"][0]["because"] == "its process was interrupted"
