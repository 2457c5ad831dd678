"""Starts the process that makes a load: one worker, or the master of several."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from loadgen.distribution import Distribution
from loadgen.errors import WorkerError
from loadgen.plan import WorkerPlan

WORKER_LOG = "worker.log"


def start_load(plan: WorkerPlan, distribution: Distribution, out: Path) -> "subprocess.Popen[bytes]":
    """Start the one worker, or the master of several."""
    if distribution.is_alone:
        return _start_process("loadgen.worker", plan.to_json(), out)
    told = {"plan": plan.to_json(), "distribution": distribution.to_json()}
    return _start_process("loadgen.master", told, out)


def _start_process(module: str, told: dict[str, Any], out: Path) -> "subprocess.Popen[bytes]":
    """In a session of its own, so that a Ctrl-C reaches it through us alone."""
    with (out / WORKER_LOG).open("wb") as log:
        worker = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
    assert worker.stdin is not None
    try:
        worker.stdin.write(json.dumps(told).encode())
        worker.stdin.close()
    except OSError as error:
        worker.kill()
        worker.wait()
        raise WorkerError(f"the load generator's process did not start\n{log_tail(out)}") from error
    return worker


def log_tail(out: Path) -> str:
    """The last lines that the processes wrote to their log."""
    try:
        return "\n".join((out / WORKER_LOG).read_text(errors="replace").splitlines()[-20:])
    except OSError:
        return ""
