"""The measure command: every part on a CPU with small shapes and without the server's packages."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from reference_server.model_server.attention import conformance, select
from reference_server.model_server.forward import prepare
from reference_server.model_server.forward.cuda_graph import GraphedForward
from reference_server.model_server.measure import correctness
from reference_server.model_server.measure.__main__ import main
from reference_server.model_server.measure.levels import measure_engine, measure_steps
from reference_server.model_server.measure.record import Measurement, MeasurePlan, Record, deadline
from reference_server.model_server.measure.rig import Floors, Rig
from reference_server.model_server.measure.table import goals_of, render
from tests.support.models.devices.graph_recorder import Recorder
from tests.support.models.devices.table_attention import TABLES

# Packages of server and client that the command does not need: blocked.
ABSENT = (
    "pydantic", "fastapi", "uvicorn", "uvloop", "orjson", "grpc", "locust",
    "gevent", "pandas", "pyarrow", "optuna", "bitsandbytes", "torchao", "llguidance", "outlines_core", "opentelemetry",
)  # fmt: skip
BARE = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({ABSENT!r}))
runpy.run_module("reference_server.model_server.measure", run_name="__main__")
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BARE, "--quick", "--presets", "tiny-llama", *arguments],
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=170,
        text=True,
    )


@pytest.mark.slow
def test_steps_and_engine_are_measured_on_a_bare_machine(tmp_path: Path) -> None:
    out = tmp_path / "result.json"

    done = run("--parts", "ceilings,steps,engine", "--out", str(out))

    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert (found["schema"], found["device"]["type"], found["valid"]) == (1, "cpu", True)
    assert found["ceilings"]["copy_bytes_per_s"] > 0
    levels = {(result["level"], result["phase"], result["batch"]) for result in found["results"]}
    assert levels == {
        ("S", "decode", 1),
        ("S", "decode", 4),
        ("S", "prefill", 1),
        ("S", "prefill", 2),
        ("E", "decode", 4),
    }
    assert all(result["value"] > 0 and result["floor"] > 0 for result in found["results"])
    assert all(result["kernels"] > 0 for result in found["results"] if result["level"] == "S")
    assert "tiny-llama    S     decode" in done.stdout


@pytest.mark.slow
def test_every_part_runs_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "result.json"

    done = run("--out", str(out))

    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["checks"]
    assert all(check["passed"] for check in found["checks"])
    assert {result["level"] for result in found["results"]} == {"K", "S", "E"}
    assert found["peers"][0]["ratio"] > 0


def test_parts_are_skipped_when_the_time_is_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--presets", "tiny-llama", "--minutes", "0"]) == 0

    assert "ceilings: skipped, the time is up" in capsys.readouterr().out


def make_record(tmp_path: Path, limit_s: float = 60.0) -> Record:
    return Record(torch.device("cpu"), limit_s, tmp_path / "result.json", {})


def fail(error: Exception) -> Callable[[], None]:
    def part() -> None:
        raise error

    return part


def test_a_failed_part_is_recorded_and_the_run_continues(tmp_path: Path) -> None:
    record, ran = make_record(tmp_path), []

    record.attempt("ceilings", fail(torch.OutOfMemoryError("CUDA out of memory\nadvice")))
    record.attempt("kernels", lambda: ran.append("kernels"))

    stored = json.loads((tmp_path / "result.json").read_text())
    assert ran == ["kernels"]
    assert [(part["name"], part["error"]) for part in stored["parts"]] == [
        ("ceilings", "OutOfMemoryError: CUDA out of memory"),
        ("kernels", None),
    ]
    assert record.failed
    assert "failed: ceilings: OutOfMemoryError: CUDA out of memory" in render(record, None)


def test_parts_are_skipped_after_the_device_has_failed(tmp_path: Path) -> None:
    record, ran = make_record(tmp_path), []

    record.attempt("kernels", fail(torch.AcceleratorError("CUDA error: an illegal memory access")))
    record.attempt("steps", lambda: ran.append("steps"))

    assert ran == []
    assert "steps: skipped, the device has failed" in record.notes
    assert json.loads((tmp_path / "result.json").read_text())["device_error"].endswith("an illegal memory access")


def test_a_hanging_part_times_out(tmp_path: Path) -> None:
    record = make_record(tmp_path)

    record.attempt("peer", threading.Event().wait, limit_s=0.05)

    assert record.parts[0]["error"] == "TimeoutError: not done after 0 s"


def test_a_deadline_restores_the_previous_alarm() -> None:
    before = signal.getsignal(signal.SIGALRM)
    others_s, _ = signal.getitimer(signal.ITIMER_REAL)

    with deadline(30):
        assert signal.getitimer(signal.ITIMER_REAL)[0] <= 30

    assert signal.getsignal(signal.SIGALRM) is before
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) == (others_s > 0)


def test_a_kernel_that_raises_on_a_supported_case_fails_its_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = make_record(tmp_path)
    monkeypatch.setattr(conformance, "run", lambda *_: fail(RuntimeError("out of resource: shared memory"))())

    correctness.check_backend(record, select.TORCH)

    assert {(check["found"], check["passed"]) for check in record.checks} == {(None, False)}
    assert not record.is_valid
    assert any("shared memory" in note for note in record.notes)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test double captures and replays decode steps."""
    monkeypatch.setattr(select, "BACKENDS", (TABLES,))
    monkeypatch.setattr(
        prepare,
        "_graphed",
        lambda forward, _loaded, choice, _options: GraphedForward(forward, Recorder, choice.block_size),
    )


def test_captured_steps_are_checked_and_timed(captured: None, tmp_path: Path) -> None:
    record, plan = make_record(tmp_path), replace(MeasurePlan.quick(), prefills=((1, 16),), engine_steps=8)

    with torch.inference_mode():
        rig = Rig("tiny-llama", plan, load_format="auto")
        correctness.compare_graphs(record, rig)
        measure_steps(record, plan, rig, until=60.0)
        measure_engine(record, plan, rig, until=60.0)
        rig.close()

    assert [part["error"] for part in record.parts] == [None] * 5
    # Three rows run in the graph of four.
    assert [check["name"].split(" rows")[0] for check in record.checks] == [f"tiny-llama, {rows}" for rows in (1, 3, 4)]
    assert all(check["passed"] for check in record.checks)
    graphed = [
        result.settings["graph"] for result in record.results if result.phase == "decode" and result.level == "S"
    ]
    assert graphed == [True, True]


def test_a_graph_with_another_result_makes_every_number_invalid(
    captured: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, plan = make_record(tmp_path), MeasurePlan.quick()

    with torch.inference_mode():
        rig = Rig("tiny-llama", plan, load_format="auto")
        assert rig.prepared.graphs is not None
        monkeypatch.setattr(rig.prepared.graphs, "computed", lambda inputs: rig.prepared.forward(inputs) + 1)
        correctness.compare_graphs(record, rig)
        rig.close()

    assert not record.is_valid


def test_an_unreadable_earlier_result_only_drops_the_ratios(tmp_path: Path) -> None:
    (earlier := tmp_path / "engine.json").write_text('{"results": [{"level": "S"}]}')

    assert f"could not read the earlier result {earlier}: TypeError" in render(make_record(tmp_path), earlier)


def test_a_failed_check_marks_every_later_number_invalid() -> None:
    record = Record(torch.device("cpu"), 60, None, {})
    record.add("tiny-llama", "S", "decode", 1, 32, 2.0, floor=1.0)
    record.check("a kernel", 0.5, 0.01)
    record.add("tiny-llama", "S", "decode", 8, 32, 2.0)

    assert [result.valid for result in record.results] == [True, False]
    assert record.results[0].efficiency == 0.5
    assert "NOT VALID" in render(record, None)


@pytest.mark.parametrize(
    ("preset", "ctx", "rows", "decode_ms"),
    [("llama-3.1-8b", 512, 1, 3.51), ("llama-3.2-1b", 2048, 128, 2.57), ("bloom-560m", 512, 8, 0.35)],
)
def test_decode_floors_equal_the_published_table(preset: str, ctx: int, rows: int, decode_ms: float) -> None:
    floors = Floors(preset, {"copy_bytes_per_s": 4.3e12, "bf16_flop_per_s": 790e12})

    found = floors.decode_ms(rows, ctx)

    assert found == pytest.approx(decode_ms, rel=0.02)


def test_prefill_floors_equal_the_published_table() -> None:
    floors = Floors("llama-3.1-8b", {"copy_bytes_per_s": 4.3e12, "bf16_flop_per_s": 790e12})

    assert floors.prefill_ms(1, 2048) == pytest.approx(37.6, rel=0.02)
    assert floors.prefill_ms(1, 8192) == pytest.approx(167, rel=0.02)


def test_goals_are_looked_up_by_preset_and_size() -> None:
    def goals(preset: str, phase: str, batch: int, context: int) -> tuple[float | None, float | None]:
        return goals_of(Measurement(preset, "S", phase, batch, context, 1.0, "ms"))

    assert goals("qwen2.5-7b", "decode", 32, 512) == (0.62, 0.78)
    assert goals("llama-3.1-8b", "prefill", 4, 2048) == (0.65, 0.77)
    assert goals("tiny-llama", "decode", 1, 512) == (None, None)
