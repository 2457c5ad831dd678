import random
import signal

import pytest

from loadgen.gate.pairing import Gate, SeparateRuns
from loadgen.gate.sides import LiveSide
from loadgen.interrupts import Interrupted
from loadgen.progress import SilentProgress
from reports.gate.comparison import CompareOptions
from reports.gate.decide import GateDecision
from reports.gate.side_run import SideRun

SIDES = (LiveSide("a", "old", "serve a"), LiveSide("b", "new", "serve b"))
IDENTITY = {"workload hash": "w", "model": "m"}


class DrawnRuns:
    """Measures by drawing: side B is slower by a factor, every run is off by some noise."""

    def __init__(self, slowdown=1.0, noise=0.02, invalid=(), identity_b=IDENTITY):
        self._random = random.Random(7)
        self.slowdown, self.noise, self.invalid, self.identity_b = slowdown, noise, set(invalid), identity_b
        self.measured = []

    def __call__(self, side, directory):
        self.measured.append(directory.name)
        factor = self._random.gauss(1.0, self.noise) * (self.slowdown if side.letter == "b" else 1.0)
        values = {
            **dict.fromkeys(("ttft_p50_ms", "tpot_p50_ms", "ttft_p95_ms", "tpot_p95_ms"), 20.0 * factor),
            **dict.fromkeys(("e2e_p50_ms", "e2e_p95_ms", "gap_p99_ms"), 50.0 * factor),
            **dict.fromkeys(("output_tokens_per_s", "requests_per_s"), 1000.0 / factor),
            "error_rate": 0.0,
        }
        status = "invalid" if directory.name in self.invalid else "valid"
        reasons = ("the generator was late",) if status == "invalid" else ()
        return SideRun(side.label, values, status, reasons, IDENTITY if side.letter == "a" else self.identity_b)


def separate(measure, tmp_path):
    return SeparateRuns(measure, tmp_path, SilentProgress())


def gate(tmp_path, **options):
    return Gate(tmp_path, CompareOptions(**options), SilentProgress())


def test_pairs_alternate_which_side_goes_first(tmp_path):
    runs = DrawnRuns(noise=0.0)

    gate(tmp_path, pairs=3).run(SIDES, separate(runs, tmp_path))

    assert runs.measured == ["pair01-a", "pair01-b", "pair02-b", "pair02-a", "pair03-a", "pair03-b"]


def test_a_clear_slowdown_ends_early_as_a_regression(tmp_path):
    runs = DrawnRuns(slowdown=1.2, noise=0.01)

    comparison = gate(tmp_path).run(SIDES, separate(runs, tmp_path)).comparison

    assert comparison.verdict is GateDecision.REGRESSION
    assert comparison.exit_code == 1
    assert len(runs.measured) == 8


def test_a_server_against_itself_is_never_a_regression(tmp_path):
    comparison = gate(tmp_path).run(SIDES, separate(DrawnRuns(noise=0.01), tmp_path)).comparison

    assert comparison.exit_code in (0, 3)


def test_an_invalid_run_is_repeated_once(tmp_path):
    runs = DrawnRuns(noise=0.0, invalid=["pair01-b"])

    comparison = gate(tmp_path, pairs=2).run(SIDES, separate(runs, tmp_path)).comparison

    assert runs.measured[:3] == ["pair01-a", "pair01-b", "pair01-b-again1"]
    assert comparison.exit_code == 0


def test_a_side_that_is_invalid_twice_is_not_judged(tmp_path):
    comparison = (
        gate(tmp_path).run(SIDES, separate(DrawnRuns(invalid=["pair01-b", "pair01-b-again1"]), tmp_path)).comparison
    )

    assert comparison.exit_code == 4
    assert comparison.num_pairs == 1


def test_sides_of_another_load_are_refused_at_the_first_pair(tmp_path):
    runs = DrawnRuns(identity_b={"workload hash": "other", "model": "m"})

    comparison = gate(tmp_path).run(SIDES, separate(runs, tmp_path)).comparison

    assert comparison.exit_code == 2
    assert len(runs.measured) == 2


def test_the_time_limit_ends_the_gate_with_the_pairs_so_far(tmp_path):
    runs = DrawnRuns(noise=0.2)

    comparison = (
        Gate(tmp_path, CompareOptions(), SilentProgress(), max_minutes=1e-9)
        .run(SIDES, separate(runs, tmp_path))
        .comparison
    )

    assert comparison.num_pairs == 1
    assert comparison.verdict is GateDecision.INCONCLUSIVE


@pytest.mark.parametrize(("inconclusive", "code"), [("report", 3), ("pass", 0), ("fail", 1)])
def test_the_flag_inconclusive_sets_the_exit_code_of_an_undecided_comparison(tmp_path, inconclusive, code):
    runs = DrawnRuns(noise=0.3)

    assert gate(tmp_path, pairs=2, inconclusive=inconclusive).run(SIDES, separate(runs, tmp_path)).exit_code == code


def test_an_interrupted_gate_judges_the_pairs_so_far(tmp_path):
    runs = DrawnRuns(noise=0.01)

    def measure(side, directory):
        if len(runs.measured) == 5:
            raise Interrupted(signal.SIGINT)
        return runs(side, directory)

    result = gate(tmp_path).run(SIDES, separate(measure, tmp_path))

    assert result.exit_code == 130
    assert result.comparison.num_pairs == 2
    assert result.comparison.metrics


def test_a_second_signal_ends_the_gate_at_once(tmp_path):
    def measure(side, directory):
        raise Interrupted(signal.SIGTERM, is_urgent=True)

    with pytest.raises(Interrupted):
        gate(tmp_path).run(SIDES, separate(measure, tmp_path))
