"""Runs the trap suite: each tool on each trap's server, one run after the other. Our own tool runs as a command."""

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from loadgen.errors import MeasurementError
from loadgen.selftest.trap_companions import run_tool
from loadgen.selftest.trap_judgement import VALID, ToolReport, TrapResult
from loadgen.selftest.trap_rows import Trap, TrapCase, TrapLoad
from loadgen.selftest.trap_server import MODEL, trap_server
from reports.metrics.summary import metric_value

HONEST_RUNS = 10
WARMUP_S = 1.0
FAILED_EARLY = "no result"

# Runs a case's load once on a server and reads the tool's report: URL, case, folder of the run.
RunCase = Callable[[str, TrapCase, Path], ToolReport]


def check_traps(
    traps: Sequence[Trap],
    run: RunCase,
    *,
    is_peer: bool = False,
    with_honest: bool = True,
    honest_runs: int = HONEST_RUNS,
) -> Iterator[TrapResult]:
    """The result of each trap; row 0 runs `honest_runs` times. A peer cannot run honest loads with flags of our own."""
    for trap in traps:
        can_run = with_honest and not (is_peer and trap.honest.load.own_flags)
        runs = honest_runs - 1 if trap.number == 0 else int(can_run)
        deceptive = measure_case(trap.deceptive, run)
        yield TrapResult(trap, deceptive, [measure_case(trap.honest, run) for _ in range(runs)])


def measure_case(case: TrapCase, run: RunCase) -> ToolReport:
    """Start the server, run the load as often as the case needs, and return the last report."""
    with tempfile.TemporaryDirectory(prefix="trap-") as folder, trap_server(case.behaviour) as url:
        report = ToolReport({}, problem=FAILED_EARLY)
        for number in range(case.load.runs):
            directory = Path(folder) / str(number)
            directory.mkdir()
            try:
                report = run(url, case, directory)
            except MeasurementError as error:
                return ToolReport({}, problem=str(error))
        return report


def run_own(url: str, case: TrapCase, folder: Path) -> ToolReport:
    """One run of `tgi-bench run`. Raises MeasurementError."""
    words = [sys.executable, "-m", "loadgen.cli", "run", "--url", url, "--out", str(folder / "run")]
    done = run_tool([*words, *own_flags(case.load)], url, case.companion, folder, os.environ)
    try:
        summary = json.loads((folder / "run" / "summary.json").read_bytes())
    except (OSError, ValueError) as error:
        raise MeasurementError(f"tgi-bench run ended with {done.returncode}: {done.stdout[-300:].strip()}") from error
    return read_summary(summary, is_open_loop=case.load.rate is not None)


def own_flags(load: TrapLoad) -> list[str]:
    """The flags of `tgi-bench run` for a load. Users start spread over the time of an answer."""
    # The server counts tokens as TGI does, and cannot force lengths.
    flags = ["--model", MODEL, "--api", "openai-chat", "--engine", "tgi"]
    flags += ["--input-tokens", str(load.input_tokens), "--output-tokens", str(load.output_tokens)]
    if load.rate is not None:
        flags += ["--mode", "constant", "--rate", f"{load.rate:g}"]
    else:
        flags += ["--concurrency", str(load.users)]
    if load.requests is not None:
        flags += ["--requests", str(load.requests)]
    else:
        flags += ["--duration", f"{load.duration_s:g}s", "--warmup", f"{WARMUP_S:g}s"]
        flags += [] if load.rate is not None else ["--ramp-up", f"{WARMUP_S:g}s"]
    return [*flags, *load.own_flags]


def read_summary(summary: Mapping[str, Any], *, is_open_loop: bool) -> ToolReport:
    """Our own report, from `summary.json`."""
    values: dict[str, float | None] = {}
    for name in ("ttft_mean_ms", "tpot_mean_ms", "itl_mean_ms", "e2e_mean_ms", "requests_per_s", "output_tokens_per_s"):
        with contextlib.suppress(KeyError):
            values[name] = metric_value(summary, name, is_open_loop)
    lengths = summary["workload"]["lengths"]
    values |= {f"{name}_mean": lengths[name]["mean"] for name in ("input_tokens", "output_tokens")}
    values["failed"] = sum(count for status, count in summary["counts"].items() if status != "ok")
    reasons = [*summary["verdict"]["reasons"], *summary["verdict"].get("findings", ())]
    return ToolReport(
        values,
        summary["verdict"]["status"],
        tuple(reason["check"] for reason in reasons if reason["level"] != VALID),
        tuple(reason["check"] for reason in reasons if reason["level"] == VALID),
        window_s=summary["window"]["end_s"] - summary["window"]["start_s"],
    )
