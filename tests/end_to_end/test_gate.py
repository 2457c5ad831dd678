"""The whole gate with processes: launches, loads, verdicts, and the files they leave.

On a busy machine a run may be invalid: every test accepts `not_measured`. A comparison of three pairs there may also
decide nothing, so one is repeated.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOISY_SERVER = "tests.support.servers.noisy_server"
LOAD = ["--concurrency", "4", "--requests", "40", "--input-tokens", "8", "--output-tokens", "4"]


def tgi_bench(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "loadgen.cli", *words]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)


def server(directory: Path, name: str, gap_s: float, factor: float = 1.0, noise: float = 0.04) -> str:
    slowed = f"{sys.executable} {ROOT / 'benchmarks' / 'reports' / 'slowed_server.py'} --factor {factor}"
    return f"{slowed} {sys.executable} -m {NOISY_SERVER} --gap {gap_s} --noise {noise} --launches {directory / name}"


def compare(directory: Path, factor: float, *words: str, noise: float = 0.04) -> tuple[int, dict[str, object]]:
    """Noisy servers whose B takes `factor` times as long: the exit code and comparison.json."""
    sides = (
        f"command:{server(directory, 'a', 0.01, noise=noise)}",
        f"command:{server(directory, 'b', 0.01, factor, noise)}",
    )
    done = tgi_bench(directory, "compare", *sides, *LOAD, "--out", "gate", "--json", *words)
    assert done.returncode in (0, 1, 3, 4), done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.slow
def test_tuning_12_5_the_same_server_twice_is_never_a_regression(tmp_path: Path) -> None:
    code, found = compare(tmp_path, 1.0, "--pairs", "2")

    assert code in (0, 3, 4)
    assert found["verdict"] != "regression"
    assert {path.name for path in (tmp_path / "gate").glob("pair*")} >= {"pair01-a", "pair01-b"}


@pytest.mark.slow
def test_tuning_12_5_a_server_of_a_third_of_the_speed_is_a_regression(tmp_path: Path) -> None:
    for _ in range(3):
        shutil.rmtree(tmp_path / "gate", ignore_errors=True)
        code, found = compare(tmp_path, 3.0, "--pairs", "3", "--junit", "gate.xml")
        if found["verdict"] != "inconclusive":
            break

    assert (code, found["verdict"]) in ((1, "regression"), (4, "not_measured"))
    assert (tmp_path / "gate.xml").exists()
    page = (tmp_path / "gate/report.md").read_text()
    assert ("same prompts" in page and "Server A" in page) or code == 4


@pytest.mark.slow
def test_reliability_F48_a_side_that_does_not_start_is_never_a_pass_and_the_pairs_stay(tmp_path: Path) -> None:
    started = f"command:{server(tmp_path, 'a', 0.005)}"

    done = tgi_bench(tmp_path, "compare", started, "command:false", *LOAD, "--out", "gate", "--junit", "gate.xml")

    assert done.returncode == 4
    assert "Pair 1 could not be measured: the server ended with exit code 1" in done.stdout
    assert "ended with exit code 1" in (tmp_path / "gate.xml").read_text()
    assert (tmp_path / "gate/pair01-a/summary.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_tuning_12_5_equal_servers_and_ten_percent_through_the_sequential_gate(tmp_path: Path) -> None:
    for name, factor, codes in (("equal", 1.0, (0, 3, 4)), ("slower", 1.1, (1, 3, 4))):
        (tmp_path / name).mkdir()
        code, _ = compare(tmp_path / name, factor)
        assert code in codes


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_trust_C5_gate_slices_of_a_server_slowed_by_five_percent_share_their_launches(tmp_path: Path) -> None:
    code, found = compare(tmp_path, 1.05, "--interleave", "4", "--pairs", "4", "--equal-contention", noise=0.0)

    assert (code, found["verdict"]) in ((1, "regression"), (3, "inconclusive"), (4, "not_measured"))
    if code != 4:
        assert found["slices"] == 4
        assert len(list((tmp_path / "gate").glob("pair0?-slice0?-[ab]/summary.json"))) == 32
        assert [len((tmp_path / side).read_text().splitlines()) for side in "ab"] == [4, 4]
        page = (tmp_path / "gate/report.md").read_text()
        assert "drift within a pair" in page
        assert ("adjusted to equal contention" in page) == sys.platform.startswith("linux")
