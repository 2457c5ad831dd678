"""`tgi-bench run --join`: starts a worker of a master on another machine, and shows its progress."""

import argparse
import json
import os
import signal
import subprocess
import sys
from typing import Any

from loadgen.config.bench_config import BenchConfig
from loadgen.config.distribution import JOIN_KEY_VARIABLE, LOOPBACK, MASTER_PORT, Address
from loadgen.config.parsing import environment, flag_name
from loadgen.errors import MeasurementError, UsageError
from loadgen.generator.worker_messages import JoinPlan
from loadgen.interrupts import Interrupted, TwoStageInterrupt
from loadgen.progress import ProgressDisplay


def join_address(args: argparse.Namespace) -> Address:
    """The address in `--join`. Raises UsageError if flags set a load as well: the master sends it."""
    names = [name for name in (*BenchConfig.model_fields, "config", "out", "web") if getattr(args, name) is not None]
    names += [name for name in ("master", "dry_run", "json") if getattr(args, name)]
    if names:
        raise UsageError(f"{flag_name(names[0])} does not go with --join; give it to the master")
    return Address.parse("join", args.join, Address(LOOPBACK, MASTER_PORT))


def join_key() -> str:
    return environment(JOIN_KEY_VARIABLE).get(JOIN_KEY_VARIABLE, "")


def join(address: Address, key: str, progress: ProgressDisplay) -> int:
    """Work for one load. Returns the exit code.

    Raises UsageError without a key, MeasurementError if the master does not answer, refuses, or is lost.
    """
    if not key:
        raise UsageError(f"--join needs {JOIN_KEY_VARIABLE} in the environment: the master prints it with its address")
    progress.show(f"joining {address}")
    plan = JoinPlan(address.host, address.port, os.getpid(), key)
    worker = subprocess.Popen(
        [sys.executable, "-m", "loadgen.generator.distributed.group_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    last: dict[str, Any] = {}
    try:
        with TwoStageInterrupt(worker.terminate, worker.kill) as signals:
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


def _show(message: dict[str, Any], progress: ProgressDisplay) -> None:
    match message["type"]:
        case "joined":
            progress.show(f"joined as worker {message['index']} of {message['count']}")
        case "progress":
            progress.update(message)
        case "done":
            progress.show(f"done ({message['stop_reason']}); the master stored the records")


def signal_or_code(code: int) -> str:
    """The signal or exit code that ended a process.

    >>> signal_or_code(-9), signal_or_code(1)
    ('SIGKILL', 'exit code 1')
    """
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
