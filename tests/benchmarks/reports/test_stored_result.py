"""The command line of benchmarks with a stored result: it measures and writes JSON, or prints the table of JSON."""

import io
import json

import pytest

from benchmarks.reports import stored_result


def measured(runs: int) -> dict[str, int]:
    return {"runs": runs}


def rendered(found: stored_result.Result) -> str:
    return f"table of {found['runs']} runs"


def test_the_result_of_the_default_number_of_runs_is_written_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmark"])

    assert stored_result.run("Doc.", 7, measured, rendered) == 0
    assert json.loads(capsys.readouterr().out) == {"runs": 7}


def test_the_table_of_a_stored_result_is_printed_without_a_measurement(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmark", "--table", "--runs", "3"])
    monkeypatch.setattr("sys.stdin", io.StringIO('{"runs": 200}'))

    assert stored_result.run("Doc.", 7, measured, rendered) == 0
    assert capsys.readouterr().out == "table of 200 runs\n"
