"""The soak of a launched server: its figures and gates, and a minute of it in the long suite."""

import dataclasses
from collections import Counter

import pytest

from benchmarks.robustness.soak import left_behind, missed_waits, quantile_ms, soak, unexpected_answers
from benchmarks.robustness.soak_clients import TokenTimes, read_line
from benchmarks.robustness.soak_load import OwnWork, PhaseCounts
from benchmarks.robustness.soak_state import IdleState

MS = 1_000_000
IDLE = IdleState(resident_bytes=800 << 20, descriptors=85, processes=8, free_blocks=63, gauges={"tgi_queue_size": 0.0})


def test_a_server_that_returns_to_its_base_line_misses_no_gate():
    after = dataclasses.replace(IDLE, resident_bytes=863 << 20, descriptors=89)

    assert left_behind(IDLE, IDLE, after) == []


@pytest.mark.parametrize(
    ("changes", "gate"),
    [
        ({"gauges": {"tgi_queue_size": 1.0}}, "gauges are not 0"),
        ({"free_blocks": 62}, "free blocks: 62 of 63"),
        ({"descriptors": 90}, "descriptors: 90, before 85"),
        ({"processes": 9}, "processes: 9, before 8"),
        ({"resident_bytes": 865 << 20}, "memory: 865 MiB, before 800 MiB"),
    ],
)
def test_each_gate_names_its_value(changes: dict[str, object], gate: str):
    [missed] = left_behind(IDLE, IDLE, dataclasses.replace(IDLE, **changes))  # type: ignore[arg-type]

    assert missed.startswith(gate)


def test_blocks_that_are_lost_before_the_measured_phase_count_too():
    lost = dataclasses.replace(IDLE, free_blocks=60)

    assert left_behind(IDLE, lost, lost) == ["free blocks: 60 of 63"]


def test_a_wait_is_a_gap_minus_the_streams_own_work():
    counts = PhaseCounts(OwnWork(gap_ns=20 * MS, first_ns={8: 50 * MS}))
    counts.add_stream(TokenTimes(0, [80 * MS, 90 * MS, 200 * MS], [0, 1, 2], 210 * MS, "whole"), 8)

    assert sorted(counts.waits_ns) == [0, 30 * MS, 90 * MS]
    assert [stall.is_first for stall in sorted(counts.slowest)] == [False, True, False]


def test_a_stream_that_was_cut_waited_until_its_end():
    counts = PhaseCounts()
    counts.add_stream(TokenTimes(0, [10 * MS], [0], 5_000 * MS, "cut"), 1)

    assert max(counts.waits_ns) == 4_990 * MS
    assert unexpected_answers(counts.statuses) == ["answers: 1 times stream cut"]


@pytest.mark.parametrize(
    ("lines", "outcome"),
    [
        ([b"HTTP/1.1 200 OK", b'data:{"token":{},"generated_text":null}', b'data:{"token":{},"generated_text":"a"}'],
         "whole"),
        ([b"HTTP/1.1 200 OK", b'data:{"token":{},"generated_text":null}'], "cut"),
        ([b"HTTP/1.1 200 OK", b'data:{"error":"x","error_type":"generation"}'], "cut"),
        ([b"HTTP/1.1 429 Too Many Requests"], "429"),
        ([], "no answer"),
    ],
)  # fmt: skip
def test_a_stream_is_whole_with_its_last_token(lines: list[bytes], outcome: str):
    times = TokenTimes()
    for line in lines:
        read_line(times, line, 0, 0)

    assert times.outcome == outcome


def test_only_expected_answers_pass():
    statuses = Counter({"health 200": 9, "health 503": 2, "stream left": 3, "prompt of 2 MB 500": 1})

    assert unexpected_answers(statuses) == ["answers: 2 times health 503", "answers: 1 times prompt of 2 MB 500"]


@pytest.mark.parametrize(
    ("wait_ms", "late_ms", "kernel_times", "missed"),
    [
        (299, 0, True, []),
        (310, 0, True, ["wait of streams at p99.9: 310 ms, limit 300 ms"]),
        (0, 310, True, ["waits are not decided: the client read 310 ms late at p99.9"]),
        (0, 0, False, ["waits are not decided: the kernel records no arrival times"]),
    ],
)
def test_waits_are_gated_if_the_client_could_measure_them(
    wait_ms: int, late_ms: int, kernel_times: bool, missed: list[str]
):
    counts = PhaseCounts()
    counts.gap_waits_ns.extend([wait_ms * MS])
    counts.late_ns.extend([late_ms * MS])

    assert missed_waits(counts, kernel_times=kernel_times) == missed


def test_a_quantile_is_the_smallest_value_that_reaches_the_share():
    values = [n * MS for n in range(1, 1001)]

    assert [quantile_ms(values, share) for share in (0.5, 0.99, 0.999)] == [500, 990, 999]


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_a_minute_of_misbehaving_clients_leaves_nothing_behind():
    found = await soak(40.0, seed=20_260, warm_s=15.0, quiet_s=5.0)

    # The wait is a figure of a quiet machine: the command gates it.
    failed = found["failed"]
    assert isinstance(failed, list)
    assert [gate for gate in failed if not gate.startswith("wait")] == []
