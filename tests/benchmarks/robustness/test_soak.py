"""The soak of a launched server: its gates, and two minutes of it in the long suite."""

import dataclasses

import pytest

from benchmarks.robustness.soak import IdleState, missed_gates, quantile, soak

IDLE = IdleState(resident_bytes=800 << 20, descriptors=85, processes=8, gauges={"tgi_queue_size": 0.0})


def test_a_server_that_returns_to_its_base_line_misses_no_gate():
    assert missed_gates(0.29, IDLE, dataclasses.replace(IDLE, resident_bytes=863 << 20, descriptors=89)) == []


@pytest.mark.parametrize(
    ("wait_s", "changes", "gate"),
    [
        (0.31, {}, "wait of streams at p99.9: 310 ms, limit 300 ms"),
        (0.0, {"gauges": {"tgi_queue_size": 1.0}}, "gauges are not 0"),
        (0.0, {"descriptors": 90}, "descriptors: 90, before 85"),
        (0.0, {"processes": 9}, "processes: 9, before 8"),
        (0.0, {"resident_bytes": 865 << 20}, "memory: 865 MiB, before 800 MiB"),
    ],
)
def test_each_gate_names_its_value(wait_s: float, changes: dict[str, object], gate: str):
    [missed] = missed_gates(wait_s, IDLE, dataclasses.replace(IDLE, **changes))  # type: ignore[arg-type]

    assert missed.startswith(gate)


def test_a_quantile_is_the_smallest_value_that_reaches_the_share():
    assert [quantile(list(map(float, range(1, 1001))), share) for share in (0.5, 0.99, 0.999)] == [500, 990, 999]


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_two_minutes_of_misbehaving_clients_leave_nothing_behind():
    found = await soak(120.0, seed=20_260)

    # The wait is a figure of a quiet machine: the command gates it.
    failed = found["failed"]
    assert isinstance(failed, list)
    assert [gate for gate in failed if not gate.startswith("wait")] == []
