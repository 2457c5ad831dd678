"""The measuring command: every part on a CPU with small shapes, on a machine that has nothing but torch's side."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from reference_server.model_server.measure.__main__ import main
from reference_server.model_server.measure.record import Record, Result
from reference_server.model_server.measure.rig import Floors
from reference_server.model_server.measure.table import goals_of, render

# As on a bare machine: what the server and the client need beside torch, transformers, numpy and safetensors.
ABSENT = (
    "pydantic", "pydantic_settings", "fastapi", "uvicorn", "uvloop", "orjson", "grpc", "prometheus_client", "locust",
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


def test_time_that_is_up_leaves_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick", "--presets", "tiny-llama", "--minutes", "0"]) == 0

    assert "ceilings: not begun, the time is up" in capsys.readouterr().out


def test_a_failed_check_marks_every_later_number() -> None:
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
def test_floors_are_those_of_the_published_table(preset: str, ctx: int, rows: int, decode_ms: float) -> None:
    floors = Floors(preset, {"copy_bytes_per_s": 4.3e12, "bf16_flop_per_s": 790e12})

    found = floors.decode_ms(rows, ctx)

    assert found == pytest.approx(decode_ms, rel=0.02)


def test_prefill_floors_are_those_of_the_published_table() -> None:
    floors = Floors("llama-3.1-8b", {"copy_bytes_per_s": 4.3e12, "bf16_flop_per_s": 790e12})

    assert floors.prefill_ms(1, 2048) == pytest.approx(37.6, rel=0.02)
    assert floors.prefill_ms(1, 8192) == pytest.approx(167, rel=0.02)


def test_goals_are_looked_up_by_size() -> None:
    def goals(preset: str, phase: str, batch: int, context: int) -> tuple[float | None, float | None]:
        return goals_of(Result(preset, "S", phase, batch, context, 1.0, "ms"))

    assert goals("qwen2.5-7b", "decode", 32, 512) == (0.62, 0.78)
    assert goals("llama-3.1-8b", "prefill", 4, 2048) == (0.65, 0.77)
    assert goals("tiny-llama", "decode", 1, 512) == (None, None)
