"""The cause of a stall, from a step trace, health probes and the times of threads."""

import json
from pathlib import Path

from benchmarks.robustness.core_times import CoreTimes
from benchmarks.robustness.stall_cause import InFlight, Stall, StallEvidence, TracedStep, cause_of, read_steps

MS = 1_000_000


def stall(start_ms: int, end_ms: int) -> Stall:
    return Stall((end_ms - start_ms) * MS, start_ms * MS, end_ms * MS, is_first=False, late_ns=0)


def step(at_ms: int, model_ms: int, wall_ms: int, tokens: int = 0) -> TracedStep:
    return TracedStep(at_ms * MS, "prefill" if tokens else "decode", tokens, 6, model_ms * MS, wall_ms * MS)


def test_a_long_step_is_named_with_its_tokens():
    evidence = StallEvidence([step(0, 20, 25), step(25, 170, 180, tokens=512), step(205, 20, 25)], [], [], [])

    cause = cause_of(stall(10, 210), evidence)

    assert cause.stages_ms == {"model steps": 185.0, "router between steps": 15.0, "no step": 0.0}
    assert cause.text == (
        "model steps: 185 of 200 ms; the longest is a prefill of 512 prompt tokens and 6 rows, 170 ms"
    )


def test_a_blocked_event_loop_is_seen_by_a_health_probe_and_the_other_requests():
    probes = [InFlight("health", 30 * MS, 220 * MS)]
    others = [InFlight("prompt of 2 MB", 20 * MS, 240 * MS), InFlight("grammar", 300 * MS, 310 * MS)]
    evidence = StallEvidence([step(0, 20, 230), step(230, 20, 25)], [], probes, others)

    cause = cause_of(stall(10, 240), evidence)

    assert cause.text == (
        "router between steps: 210 of 230 ms; its event loop was blocked: a health probe took 190 ms; "
        "in flight: prompt of 2 MB"
    )


def test_threads_that_wait_for_a_core_are_named():
    samples = [
        CoreTimes(0, {"model server": 0, "router": 0}, {"model server": 0, "router": 0}),
        CoreTimes(50 * MS, {"model server": 20 * MS, "router": 1 * MS}, {"model server": 5 * MS, "router": 0}),
        CoreTimes(250 * MS, {"model server": 60 * MS, "router": 2 * MS}, {"model server": 155 * MS, "router": 1 * MS}),
    ]
    cause = cause_of(stall(60, 240), StallEvidence([step(60, 180, 185)], samples, [], []))

    assert cause.waited_for_core_ms == {"model server": 150.0, "router": 1.0}
    assert cause.text.endswith("180 ms; threads of the model server waited 150 ms for a core")


def test_a_wait_without_a_step_is_before_the_batch():
    cause = cause_of(stall(100, 300), StallEvidence([step(0, 20, 25), step(280, 20, 25)], [], [], []))

    assert cause.stages_ms == {"model steps": 20.0, "router between steps": 0.0, "no step": 180.0}
    assert cause.text == "no step: 180 of 200 ms"


def test_steps_are_read_from_a_trace(tmp_path: Path):
    trace = tmp_path / "steps.jsonl"
    columns = ["at_ns", "kind", "tokens", "rows", "total_ns", "wall_ns"]
    trace.write_text("\n".join(map(json.dumps, [{"columns": columns}, [5, "decode", 0, 3, 7, 9]])) + "\n")

    assert read_steps(trace) == [TracedStep(5, "decode", 0, 3, 7, 9)]
