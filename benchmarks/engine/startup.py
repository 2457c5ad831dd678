"""Time from `text-generation-launcher` to the first streamed token, by phase, for several starts.

    python benchmarks/engine/startup.py [--model preset:tiny-llama] [--times 5] [--json FILE] [-- LAUNCHER FLAG ...]

Each phase ends with a line of the launcher's log; its time is the arrival of the line. The first start reads uncached
files and is shown separately. `imports` is the CPU time to import the modules of each process, the smallest of three.
"""

import argparse
import json
import os
import platform
import resource
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

PHASES = (
    ("launcher", "Waiting for 1 shard"),
    ("shard: imports, weights, kernels", "loaded "),
    ("shard: listen", "Server started at"),
    ("launcher: health poll", "All shards are ready"),
    ("router: imports, connect", "Warming up model"),
    ("warm-up, tokenizer", "Connected"),
    ("router: listen, first token", "first token"),
)
"""The phases in order, and a text in the log line that ends each."""
MODULES = {
    "launcher": "reference_server.launcher.cli",
    "shard": "reference_server.model_server.calls.local_shard",
    "  of which torch": "torch",
    "router": "reference_server.router.start.startup",
}
START_LIMIT_S = 180.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="preset:tiny-llama")
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file to write the measurements to")
    parser.add_argument("flags", nargs="*", help="further flags of the launcher, after `--`")
    args = parser.parse_args()
    imports = {name: import_cpu_s(module) for name, module in MODULES.items()}
    starts = []
    for number in range(args.times + 1):
        starts.append(start(args.model, args.flags))
        print(f"start {number}: {sum(starts[-1].values()):.2f} s", file=sys.stderr)
    first, warm = starts[0], starts[1:]
    print(f"{args.model}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, seconds")
    print(f"{'phase':<36}{'median':>8}{'least':>8}{'most':>8}{'first':>8}")
    for phase, _ in PHASES:
        row(phase, [each[phase] for each in warm], first[phase])
    row("launcher to first token", [sum(each.values()) for each in warm], sum(first.values()))
    print("imports, CPU s: " + ", ".join(f"{name.strip()} {cpu_s:.2f}" for name, cpu_s in imports.items()))
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "starts": starts, "imports_cpu_s": imports}, indent=1))


def row(name: str, values: Sequence[float], first: float) -> None:
    print(f"{name:<36}{statistics.median(values):>8.2f}{min(values):>8.2f}{max(values):>8.2f}{first:>8.2f}")


def start(model: str, flags: Sequence[str]) -> dict[str, float]:
    """Start and stop once; returns the seconds of each phase."""
    port = free_port()
    command = [sys.executable, "-m", "reference_server.launcher.cli", "--model-id", model, "--port", str(port), *flags]
    ends: dict[str, float] = {}
    started = time.perf_counter()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as launcher:
        reader = threading.Thread(target=note_phases, args=(launcher, ends), daemon=True)
        reader.start()
        try:
            wait_for_first_token(launcher, f"http://127.0.0.1:{port}/generate_stream", started)
            ends[PHASES[-1][0]] = time.perf_counter()
        finally:
            launcher.send_signal(signal.SIGTERM)
            launcher.wait()
            reader.join()
    seconds, last = {}, started
    for phase, line in PHASES:
        assert phase in ends, f"the launcher did not log {line!r}"
        seconds[phase] = ends[phase] - last
        last = ends[phase]
    return seconds


def note_phases(launcher: "subprocess.Popen[str]", ends: dict[str, float]) -> None:
    assert launcher.stdout is not None
    for line in launcher.stdout:
        for phase, text in PHASES[:-1]:
            if phase not in ends and text in line:
                ends[phase] = time.perf_counter()


def wait_for_first_token(launcher: "subprocess.Popen[str]", url: str, started: float) -> None:
    body = json.dumps({"inputs": "Once upon", "parameters": {"max_new_tokens": 2}}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    while True:
        assert launcher.poll() is None, f"the launcher ended with {launcher.returncode}"
        assert time.perf_counter() - started < START_LIMIT_S, "the server did not start"
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                assert answer.readline().startswith(b"data:")
                return
        except (urllib.error.URLError, ConnectionError):
            # The socket is bound before the model is loaded, but does not listen yet.
            time.sleep(0.01)


def import_cpu_s(module: str) -> float:
    """CPU seconds of a new interpreter that imports a module."""
    times = []
    for _ in range(3):
        before = cpu_s_of_children()
        subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
        times.append(cpu_s_of_children() - before)
    return min(times)


def cpu_s_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
