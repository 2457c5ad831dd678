"""A small study on the embedded preset through the command line, from the derived space to its report."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.busy_machine import skip_if_not_measured

TUNE = Path(sys.executable).with_name("tgi-tune")
QUICK_STUDY = Path(__file__).parents[2] / "docs" / "quick-study.toml"


def tune(folder, *words):
    done = subprocess.run([TUNE, *words], cwd=folder, capture_output=True, text=True, check=False)
    skip_if_not_measured(done.returncode, done.stderr)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_tuning_9_without_a_file_two_calls_make_one_study_and_the_second_launches_nothing(tmp_path):
    words = ("run", "--trials", "4", "--quick", "--json", "--warmup", "1s", "--duration", "5s", "--simulator", "off")

    first = json.loads(tune(tmp_path, *words))
    [folder] = (tmp_path / "studies").iterdir()
    launches = sorted(path.relative_to(folder) for path in folder.rglob("events.jsonl"))
    second = json.loads(tune(tmp_path, *words))

    assert second == first
    assert sorted(path.relative_to(folder) for path in folder.rglob("events.jsonl")) == launches
    assert len(launches) >= 4 + 2 + 3
    assert (folder / "report.html").exists()
    # Also without the simulator as proposer, `simulate` and `plan` can follow.
    predicted = json.loads(tune(tmp_path, "simulate", "run", "--requests", "40", "--json", "--force"))
    assert predicted["metrics"]["output_tokens_per_s"] > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_defaults_of_the_quick_study_have_room(tmp_path):
    words = ("noise", str(QUICK_STUDY), "--noise-runs", "2", "--warmup", "1s", "--duration", "4s", "--json")

    found = json.loads(tune(tmp_path, *words))

    assert found["runs"] == 2
