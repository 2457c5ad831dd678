import dataclasses

import pytest

from loadgen.errors import UsageError
from loadgen.selftest.trap_judgement import ToolReport, TrapResult, judge_deception, judge_honest, render_result
from loadgen.selftest.trap_rows import TRAPS, TrapCase, select_traps, speeds

TRAP = dataclasses.replace(TRAPS[16], findings=("request_count",))
RIGHT = ToolReport({"tpot_mean_ms": 20.3})


def test_a_number_within_two_percent_passes_under_a_valid_verdict():
    assert judge_deception(TRAP, RIGHT).passes
    assert judge_deception(TRAP, ToolReport({"tpot_mean_ms": 20.5})).reason == (
        "tpot_mean_ms 20.5 instead of 20 (+2 %)"
    )
    assert not judge_deception(TRAP, ToolReport({"tpot_mean_ms": None})).passes


@pytest.mark.parametrize(
    ("findings", "passes"),
    [(("request_count",), True), (("cpu",), False), (("request_count", "cpu"), False)],
)
def test_a_degraded_run_passes_for_the_right_reason_alone(findings, passes):
    report = ToolReport({"tpot_mean_ms": 40.0}, "degraded", findings)

    assert judge_deception(TRAP, report).passes is passes


def test_a_note_of_the_right_name_passes_and_another_does_not_matter():
    overloaded = TRAPS[13]

    assert judge_deception(overloaded, ToolReport({}, notes=("overloaded", "short"))).passes
    assert not judge_deception(overloaded, ToolReport({"ttft_mean_ms": 500.0}, notes=("short",))).passes


def test_an_honest_load_may_not_be_flagged_and_must_be_right():
    assert judge_honest(TRAP.honest, RIGHT).passes
    assert not judge_honest(TRAP.honest, dataclasses.replace(RIGHT, verdict="degraded", findings=("cpu",))).passes
    assert not judge_honest(TRAP.honest, ToolReport({"tpot_mean_ms": 18.0})).passes


def test_without_failures_none_may_be_reported():
    case = TrapCase(TRAP.honest.behaviour, TRAP.honest.load, {"failed": 0})

    assert judge_honest(case, ToolReport({"failed": 0})).passes
    assert not judge_honest(case, ToolReport({"failed": 1})).passes


def test_a_row_fails_with_either_of_its_loads():
    flagged = dataclasses.replace(RIGHT, verdict="degraded", findings=("cpu",))

    assert TrapResult(TRAP, RIGHT, [RIGHT]).passes
    assert not TrapResult(TRAP, RIGHT, [RIGHT, flagged]).passes
    assert render_result(TrapResult(TRAP, RIGHT, [flagged])) == (
        "FAIL  17 another client loads the server: tpot_mean_ms 20.3 (true 20): right; honest load: degraded: cpu"
    )


def test_traps_are_numbered_from_row_0_to_22():
    assert [trap.number for trap in select_traps(None)] == list(range(23))
    assert [trap.number for trap in select_traps([5, 3])] == [5, 3]
    with pytest.raises(UsageError, match="`traps` has 23, but the traps are 0 to 22"):
        select_traps([23])


def test_true_values_are_arithmetic():
    honest = TRAPS[6].honest

    true = speeds(honest.behaviour, honest.load)

    assert (true["ttft_mean_ms"], true["e2e_mean_ms"]) == (250.0, pytest.approx(870.0))
    assert true["output_tokens_per_s"] == pytest.approx(8 * 32 / 0.87)


def test_trust_T5_the_true_mean_of_a_stall_depends_on_the_window():
    """3 s of constant arrivals wait 1.5 s each, those of the 0.25 s before it 3 s each."""
    stall = TRAPS[4].deceptive

    assert stall.true_in(None) == {"ttft_mean_ms": pytest.approx(512.5)}
    assert stall.true_in(10.0) == {"ttft_mean_ms": pytest.approx(775.0)}
