"""The GPU benchmark: time limits, servers that do not start, missing results."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.engine import on_gpu


def test_a_hanging_command_is_killed(capfd: pytest.CaptureFixture[str]) -> None:
    code = on_gpu.run([sys.executable, "-c", "import time; time.sleep(60)"], limit_s=0.2)

    assert code == on_gpu.TIMED_OUT
    assert "killed after 0 s: " in capfd.readouterr().err


def test_processors_are_halved_if_there_are_enough() -> None:
    assert on_gpu.halves([0, 2, 4, 6, 8]) == ([0, 2], [4, 6, 8])
    assert on_gpu.halves([3]) == ([3], [3])


def test_the_engine_rate_is_measured_with_run_ahead(tmp_path: Path) -> None:
    def result(value: float, **settings: object) -> dict[str, object]:
        return {"preset": "p", "level": "E", "batch": 8, "value": value, "settings": settings}

    (path := tmp_path / "a.json").write_text(
        json.dumps({"results": [result(9.0, run_ahead=False), result(4.0, run_ahead=True)]})
    )

    assert on_gpu.engine_rate(path, "p", 8.0) == 2000.0
    assert on_gpu.engine_rate(path, "p", 64.0) is None
    assert on_gpu.engine_rate(tmp_path / "none.json", "p", 8.0) is None


@pytest.mark.slow
def test_a_server_that_does_not_start_is_an_error_in_the_result() -> None:
    server = [sys.executable, "-c", "raise SystemExit('no such device')"]

    series = on_gpu.closed_loops(server, [], "1,2", 8, 2, "1s", "1s")

    assert series["exit_code"] != 0
    assert "no such device" in series["error"]


@pytest.mark.slow
def test_level_h_runs_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert on_gpu.through_http(quick=True, measured=tmp_path / "engine.json") == 0

    stored = json.loads((tmp_path / "engine-http.json").read_text())
    points = stored["servers"]["tgi-bench"]["points"]
    assert [point["load"] for point in points] == [1.0, 4.0]
    assert all(point["metrics"]["output_tokens_per_s"] > 0 for point in points)
    assert "H tgi-bench tiny-llama, 4 streams" in capsys.readouterr().out
