"""`tgi-bench run --join`: starts a worker for a master elsewhere, and shows what it does."""

import json
import os
import signal
import subprocess
import sys
from typing import Any

from loadgen.distribution import Address
from loadgen.errors import MeasurementError
from loadgen.interrupts import FirstAsksSecondEnds, Interrupted
from loadgen.plan import JoinPlan
from loadgen.progress import Progress


def join(address: Address, key: str, progress: Progress) -> int:
    """Take part in one load. Returns the exit code.

    Raises MeasurementError where there is no master, it refuses, or it is lost.
    """
    progress.say(f"joining {address}")
    plan = JoinPlan(address.host, address.port, os.getpid(), key)
    worker = subprocess.Popen(
        [sys.executable, "-m", "loadgen.joined"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    last: dict[str, Any] = {}
    try:
        with FirstAsksSecondEnds(worker.terminate, worker.kill) as signals:
            worker.stdin.write(json.dumps(plan.to_json()).encode())
            worker.stdin.close()
            for line in worker.stdout:
                last = json.loads(line)
                _show(last, progress)
            worker.wait()
    finally:
        progress.close()
        if worker.poll() is None:
            worker.kill()
            worker.wait()
        worker.stdout.close()
    if signals.first is not None:
        raise Interrupted(signals.first)
    if last.get("type") != "done":
        raise MeasurementError(str(last.get("text") or f"the worker ended with {signal_or_code(worker.returncode)}"))
    return 0


def _show(message: dict[str, Any], progress: Progress) -> None:
    match message["type"]:
        case "joined":
            progress.say(f"joined as worker {message['index']} of {message['count']}")
        case "progress":
            progress.update(message)
        case "done":
            progress.say(f"done ({message['stop_reason']}); the master has the records")


def signal_or_code(code: int) -> str:
    """How a process ended, in words.

    >>> signal_or_code(-9), signal_or_code(1)
    ('SIGKILL', 'exit code 1')
    """
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
