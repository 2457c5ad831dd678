"""Judges what a tool reported about a trap: right within 2 % under a valid verdict, or flagged for the right reason."""

from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.selftest.trap_rows import Trap, TrapCase

TOLERANCE = 0.02
VALID = "valid"


@dataclass(frozen=True, slots=True)
class ToolReport:
    """The report of a tool on one run: numbers by quantity, its verdict, and the findings that lowered it.

    `notes` are findings that leave the verdict valid. A tool without a verdict reports valid runs. `problem`: the tool
    gave no result. `window_s` is the length of the window that the numbers are of, if the tool chose it.
    """

    values: dict[str, float | None]
    verdict: str = VALID
    findings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    problem: str | None = None
    window_s: float | None = None


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether a case passes, and why."""

    passes: bool
    reason: str


def judge_deception(trap: Trap, report: ToolReport) -> Judgement:
    """Whether a tool reported the true numbers of a deceptive load, or flagged the run for the right reason."""
    if report.problem is not None:
        return Judgement(False, report.problem)
    named = set(report.findings) | set(report.notes)
    others = set(report.findings) - set(trap.findings)
    if others:
        return Judgement(False, f"{report.verdict} for another reason: {', '.join(sorted(others))}")
    if named & set(trap.findings):
        return Judgement(True, f"{report.verdict}: {', '.join(sorted(named & set(trap.findings)))}")
    return _right(trap.deceptive, report)


def judge_honest(case: TrapCase, report: ToolReport) -> Judgement:
    """Whether an honest run is valid and right."""
    if report.problem is not None:
        return Judgement(False, report.problem)
    if report.verdict != VALID:
        return Judgement(False, f"{report.verdict}: {', '.join(report.findings)}")
    return _right(case, report)


def _right(case: TrapCase, report: ToolReport) -> Judgement:
    """Whether every quantity is within the tolerance."""
    wrong = []
    for name, true in case.true_in(report.window_s).items():
        value = report.values.get(name)
        if true is None:
            wrong.append(f"{name} {shown(value)}, but no single value is true")
        elif value is None:
            wrong.append(f"{name} is not reported")
        elif abs(value - true) > TOLERANCE * abs(true):
            change = f" ({100 * (value / true - 1):+.0f} %)" if true else ""
            wrong.append(f"{name} {shown(value)} instead of {shown(true)}{change}")
    return Judgement(not wrong, "; ".join(wrong) or "right")


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


@dataclass(frozen=True, slots=True)
class TrapResult:
    """The reports of one tool on one trap: of the deceptive load, and of the honest one."""

    trap: Trap
    deceptive: ToolReport
    honest: Sequence[ToolReport]

    @property
    def true(self) -> dict[str, float | None]:
        return self.trap.deceptive.true_in(self.deceptive.window_s)

    @property
    def deception(self) -> Judgement:
        return judge_deception(self.trap, self.deceptive)

    @property
    def honesty(self) -> Judgement:
        judged = [judge_honest(self.trap.honest, report) for report in self.honest]
        return next((each for each in judged if not each.passes), Judgement(True, "right"))

    @property
    def passes(self) -> bool:
        return self.deception.passes and self.honesty.passes

    def to_json(self) -> dict[str, object]:
        return {
            "trap": self.trap.number,
            "name": self.trap.name,
            "passes": self.passes,
            "true": self.true,
            "values": {name: self.deceptive.values.get(name) for name in self.trap.deceptive.true},
            "verdict": self.deceptive.verdict,
            "findings": [*self.deceptive.findings, *self.deceptive.notes],
            "deception": self.deception.reason,
            "honest_load": self.honesty.reason,
        }


def render_result(result: TrapResult) -> str:
    """One line: the verdict on the row, the trap, the quantity as reported and as it is, the reasons."""
    word = "pass" if result.passes else "FAIL"
    numbers = ", ".join(
        f"{name} {shown(result.deceptive.values.get(name))} (true {'none' if true is None else shown(true)})"
        for name, true in result.true.items()
    )
    honesty = "" if result.honesty.passes else f"; honest load: {result.honesty.reason}"
    return f"{word}  {result.trap.number:>2} {result.trap.name}: {numbers}: {result.deception.reason}{honesty}"
