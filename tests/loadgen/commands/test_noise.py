"""`tgi-bench noise --interleave`: a side against itself, and the components of its noise."""

import contextlib
import json
import random

import pytest

from loadgen import cli, program
from loadgen.commands import noise
from reports.gate.side_run import SideRun


class DrawnServer:
    """A launched server with noise of the launch and of each slice."""

    pid = None

    def __init__(self, draw):
        self.draw, self.launch = draw, draw.gauss(0, 0.02)

    def measured(self, directory, salt):
        return lambda: self.run(directory, salt)

    def run(self, directory, salt):
        factor = 1 + self.launch + self.draw.gauss(0, 0.01)
        values = {"output_tokens_per_s": 900 / factor, "ttft_p50_ms": 20 * factor, "tpot_p50_ms": 5 * factor}
        return SideRun("x", values | {"error_rate": 0.0})


class DrawnSlices:
    def __init__(self):
        self.draw, self.launches = random.Random(5), 0

    @contextlib.contextmanager
    def launch(self, side, log):
        self.launches += 1
        yield DrawnServer(self.draw)

    def salt_of(self, text):
        return text


@pytest.fixture
def slices(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program, "raise_on_signals", lambda: None)
    monkeypatch.setattr(noise, "num_gpus", lambda: 0)
    double = DrawnSlices()
    monkeypatch.setattr(noise, "live_measure", lambda load, metrics, progress, start_load: double)
    return double


@pytest.mark.slow
def test_trust_C5_gate_noise_prints_launch_drift_and_within_run(slices, tmp_path, capsys):
    assert cli.main(["noise", "command:serve", "--runs", "40", "--interleave", "4", "--out", "noise"]) == 0

    shown = capsys.readouterr().out
    assert "40 launches of 4 interleaved slices" in shown
    assert all(word in shown for word in ("launch", "drift", "within", "separate"))
    assert slices.launches == 40
    components = {each["name"]: each for each in json.loads((tmp_path / "noise/noise.json").read_text())["components"]}
    assert components["tpot_p50_ms"]["launch"] ** 0.5 == pytest.approx(0.02, abs=0.008)
    assert components["tpot_p50_ms"]["within"] ** 0.5 == pytest.approx(0.01, abs=0.002)


def test_interleaved_noise_needs_two_pairs(slices, capsys):
    assert cli.main(["noise", "command:serve", "--runs", "3", "--interleave", "4"]) == 2
    assert "`runs` is 3 but must be 4 to 100" in capsys.readouterr().err
