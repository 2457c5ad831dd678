"""Text from outside in the terminal: it controls nothing there."""

import argparse
from collections.abc import Sequence

import pytest

from loadgen import program
from loadgen.errors import UsageError
from loadgen.program import Command, Program

HOSTILE = "red \x1b[31m, erased \x1b[2K\r, reversed \u202e, half \ud800"
SHOWN = "red ⟨1B⟩[31m, erased ⟨1B⟩[2K⟨D⟩, reversed ⟨202E⟩, half ⟨D800⟩\n"


@pytest.fixture(autouse=True)
def signal_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "raise_on_signals", lambda: None)


def program_of(is_failing: bool) -> Program:
    def run(_: argparse.Namespace, __: Sequence[str]) -> int:
        if is_failing:
            raise UsageError(HOSTILE)
        print(HOSTILE)
        return 0

    return Program("tool", "A tool.", "", {"show": Command("Shows.", lambda _: None, run)})


def test_a_terminal_receives_no_control_sequence_on_stdout(capsys: pytest.CaptureFixture[str]):
    assert program_of(is_failing=False).main(["show"]) == 0

    assert capsys.readouterr().out == SHOWN


def test_a_terminal_receives_no_control_sequence_with_an_error(capsys: pytest.CaptureFixture[str]):
    assert program_of(is_failing=True).main(["show"]) == 2

    assert capsys.readouterr().err == f"tool: {SHOWN}"
