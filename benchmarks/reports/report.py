"""Measures the time and the peak memory of finishing, summarizing and reporting a run.

    python -m benchmarks.reports.report --requests 10000 --events 100

Writes a synthetic run directory, then runs `tgi-bench report` on it in a subprocess.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from reports.run_schema import RequestRecord
from reports.run_store import JsonlWriter, RunManifest, write_client, write_manifest

STEP_NS = 20_000_000
RATE = 200.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--events", type=int, default=100, help="Token events of each request.")
    parser.add_argument(
        "--directory", type=Path, help="Directory of the run, which is kept. Default: a temporary directory."
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = args.directory or Path(scratch) / "run"
        written_s = write_run(directory, args.requests, args.events)
        seconds, cpu_s, peak_bytes = time_report(directory)
    found = {
        "requests": args.requests,
        "events": args.requests * args.events,
        "written_s": round(written_s, 2),
        "report_s": round(seconds, 2),
        "report_cpu_s": round(cpu_s, 2),
        "peak_mib": round(peak_bytes / 2**20),
    }
    print(json.dumps(found))
    return 0


def write_run(directory: Path, requests: int, events: int) -> float:
    """Write the files of a worker; returns the time in seconds."""
    began_s = time.perf_counter()
    directory.mkdir(parents=True, exist_ok=True)
    length_s = requests / RATE
    write_manifest(directory, RunManifest("speed", mode="poisson", window_end_s=length_s, stop_reason="duration"))
    write_client(directory, {"workers": [{"worker": 0, "loop_lag_p99_s": 0.001, "cpu_share": 0.2}]})
    with JsonlWriter(directory / "requests.jsonl") as writer:
        for record in _records(requests, events):
            writer.write(record.to_json())
    return time.perf_counter() - began_s


def _records(requests: int, events: int) -> Iterator[RequestRecord]:
    random = np.random.default_rng(0)
    sent = np.cumsum(random.exponential(1e9 / RATE, requests)).astype(np.int64)
    for index in range(requests):
        gaps = (STEP_NS * random.lognormal(0, 0.3, events - 1)).astype(np.int64).tolist()
        first = int(sent[index]) + 50_000_000 + int(random.exponential(3e7))
        last = first + sum(gaps)
        yield RequestRecord(
            run_id="speed",
            request_id=f"speed-{index}",
            prompt_id=f"synthetic-0-{index}",
            t_intended_ns=int(sent[index]),
            t_dispatch_ns=int(sent[index]),
            t_sent_ns=int(sent[index]) + 100_000,
            t_headers_ns=first - 1_000_000,
            t_first_ns=first,
            t_first_answer_ns=first,
            t_last_ns=last,
            t_end_ns=last + 100_000,
            finish_reason="length",
            http_status=200,
            input_tokens=128,
            requested_output_tokens=events,
            output_tokens=events,
            first_event_tokens=1,
            tokens_source="server_stream",
            events=events,
            gap_ns=gaps,
        )


def time_report(directory: Path) -> tuple[float, float, int]:
    """Wall seconds, CPU seconds and peak resident bytes of `tgi-bench report`."""
    began_s = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "loadgen.cli", "report", str(directory)], check=True, stdout=subprocess.DEVNULL
    )
    seconds = time.perf_counter() - began_s
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024


if __name__ == "__main__":
    sys.exit(main())
