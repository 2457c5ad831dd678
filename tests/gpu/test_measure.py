"""The measure command on a GPU with small shapes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(420)
def test_every_part_runs_and_every_check_passes(gpu: torch.device, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [sys.executable, "-m", "reference_server.model_server.measure", "--quick", "--presets", "tiny-llama"]

    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, timeout=400)

    found = json.loads(out.read_text())
    assert [part for part in found["parts"] if part["error"] is not None] == []
    assert [check for check in found["checks"] if not check["passed"]] == []
    assert any("graph against eager, bitwise" in check["name"] for check in found["checks"])
    steps = [result for result in found["results"] if (result["level"], result["phase"]) == ("S", "decode")]
    assert all(step["settings"]["graph"] for step in steps)
    engine = [result for result in found["results"] if result["level"] == "E"]
    assert all(0 <= result["settings"]["idle_share"] <= 1 for result in engine)
    assert done.returncode == 0, done.stderr
