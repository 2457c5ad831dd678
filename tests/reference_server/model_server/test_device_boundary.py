"""A step is launched without waiting for the device and without mixing its tensors with the host's."""

import os
import subprocess
import sys


def test_launching_waits_for_nothing_and_mixes_no_devices() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.stand_in_device"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=170,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{kind}, {how}" for kind in ("greedy", "sampled", "penalised", "mixed") for how in ("launched", "graphed")
    ]


def test_nothing_at_import_asks_for_a_device() -> None:
    script = "import sys, reference_server.model_server.engine, torch; sys.exit(torch.cuda.is_initialized())"

    assert subprocess.run([sys.executable, "-c", script], timeout=120).returncode == 0
