"""Measures the engine on a GPU in ten minutes: checks, and timings against device limits and Transformers.

    python -m benchmarks.engine.on_gpu [--minutes 9] [--presets llama-3.2-1b,llama-3.1-8b,bloom-560m] [--quick] [--http]

Runs `reference_server.model_server.measure`, stores its JSON under benchmarks/results/ by device and day, and compares
it with the newest stored result of the same device. Needs torch, transformers, numpy and safetensors. `--http` adds
level H: launcher and load generator on separate processors, and vLLM under the same load if it is installed. It also
needs the packages of server and client.
"""

import argparse
import datetime
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from reference_server.presets import catalog

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parents[1] / "results"
HTTP_NEEDS = ("pydantic", "fastapi", "uvicorn", "uvloop", "grpc", "google.protobuf", "locust")
OVERTIME_S = 180.0
"""A part may exceed its limit by this time; then its process is killed, because it may hang in a call into C."""
TIMED_OUT = 124
HTTP_PRESET = "llama-3.1-8b"


def main() -> int:
    """Measure and print the tables; returns the exit code of the measuring process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--presets")
    parser.add_argument("--attention")
    parser.add_argument("--parts")
    parser.add_argument("--quick", action="store_true", help="a few small shapes, to check that everything runs")
    parser.add_argument("--http", action="store_true", help="also measure through HTTP, and vLLM if it is installed")
    parser.add_argument("--out", type=Path, help="path of the JSON file, instead of benchmarks/results/")
    args = parser.parse_args()
    earlier = sorted(RESULTS.glob(f"engine-{device_name()}-????-??-??.json"))
    path = (args.out or RESULTS / f"engine-{device_name()}-{datetime.date.today():%Y-%m-%d}.json").absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "reference_server.model_server.measure"]
    command += ["--minutes", str(args.minutes), "--out", str(path)]
    for name in ("presets", "attention", "parts"):
        if getattr(args, name):
            command += [f"--{name}", getattr(args, name)]
    if args.quick:
        command.append("--quick")
    if before := [each for each in earlier if each != path]:
        command += ["--before", str(before[-1])]
    code = run(command, args.minutes * 60 + OVERTIME_S)
    print(f"stored in {path}")
    if args.http:
        code = through_http(args.quick, path) or code
    return code


def run(command: Sequence[str], limit_s: float, cpus: Sequence[int] = (), **streams: Any) -> int:
    """The exit code of a command. It runs in its own process group, which is killed after `limit_s`."""
    with subprocess.Popen([*on_cpus(cpus), *command], cwd=ROOT, start_new_session=True, **streams) as process:
        try:
            return process.wait(limit_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            print(f"killed after {limit_s:.0f} s: {shlex.join(command)}", file=sys.stderr)
            return TIMED_OUT


def through_http(quick: bool, measured: Path) -> int:
    """Level H: each server in turn under closed loops, on other processors than the load generator.

    The results are stored next to the file `measured`. Returns an exit code.
    """
    missing = [name for name in HTTP_NEEDS if importlib.util.find_spec(name.partition(".")[0]) is None]
    if missing:
        print(f"through HTTP: skipped, {', '.join(missing)} are not installed")
        return 0
    preset = "tiny-llama" if quick else HTTP_PRESET
    shape = ("1,4", 32, 8, "3s", "1s") if quick else ("1,8,64,256", 512, 128, "20s", "5s")
    server_cpus, client_cpus = halves(sorted(os.sched_getaffinity(0)))
    results: dict[str, Any] = {"preset": preset, "server_cpus": server_cpus, "client_cpus": client_cpus, "servers": {}}
    code = 0
    for name, command in servers(preset).items():
        series = closed_loops([*on_cpus(server_cpus), *command], client_cpus, *shape)
        results["servers"][name] = series
        code = max(code, series["exit_code"])
        for point in series.get("points", ()):
            rate, step_rate = point["metrics"].get("output_tokens_per_s"), engine_rate(measured, preset, point["load"])
            of_engine = "" if not (rate and step_rate) else f" = {rate / step_rate:.2f} of the engine's"
            validity = "" if point["is_valid"] else "; NOT VALID, see its report"
            print(f"H {name} {preset}, {point['load']:.0f} streams: {rate} tokens/s{of_engine}{validity}")
        if series["exit_code"]:
            print(f"H {name} {preset}: failed with {series['exit_code']}: {series['error']}")
    path = measured.with_name(f"{measured.stem}-http.json")
    path.write_text(json.dumps(results, indent=1))
    print(f"stored in {path}")
    return code


def servers(preset: str) -> dict[str, list[str]]:
    """The command of each installed server, with random weights and without prefix caching."""
    chosen = catalog.find(f"preset:{preset}")
    assert chosen is not None
    launcher = [sys.executable, "-m", "reference_server.launcher.cli", "--model-id", f"preset:{preset}"]
    commands = {"tgi-bench": [*launcher, "--load-format", "dummy", "--prefix-caching", "false"]}
    if importlib.util.find_spec("vllm") is not None:
        commands["vllm"] = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", "{port}"),
            *("--model", str(chosen.directory), "--tokenizer", str(chosen.tokenizer_directory)),
            *("--load-format", "dummy", "--dtype", "bfloat16", "--no-enable-prefix-caching"),
        ]
    return commands


def closed_loops(
    server: Sequence[str], cpus: Sequence[int], points: str, prompt: int, new: int, duration: str, warmup: str
) -> dict[str, Any]:
    """Results of `tgi-bench sweep` for one server, or the error."""
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "runs"
        command = [
            *(sys.executable, "-m", "loadgen.cli", "sweep", "--points", points, "--order", "ascending", "--json"),
            *("--input-tokens", str(prompt), "--output-tokens", str(new), "--duration", duration, "--warmup", warmup),
            *("--ready-timeout", "600", "--out", str(runs), "--server", shlex.join(server)),
        ]
        limit_s = 900.0
        output, errors = Path(folder) / "sweep.json", Path(folder) / "stderr"
        with output.open("w") as out, errors.open("w") as err:
            code = run(command, limit_s, cpus, stdout=out, stderr=err)
        try:
            return {"command": shlex.join(server), "exit_code": code, "error": None, **json.loads(output.read_text())}
        except json.JSONDecodeError:
            return {"command": shlex.join(server), "exit_code": code or 1, "error": errors.read_text()[-2000:]}


def engine_rate(measured: Path, preset: str, streams: float) -> float | None:
    """Output tokens/s at level E with run-ahead, in the result file `measured`."""
    if not measured.is_file():
        return None
    for result in json.loads(measured.read_text())["results"]:
        is_engine = (result["preset"], result["level"], result["batch"]) == (preset, "E", streams)
        if is_engine and result["settings"].get("run_ahead"):
            return float(streams / result["value"] * 1e3)
    return None


def halves(cpus: Sequence[int]) -> tuple[list[int], list[int]]:
    """The processors of the server and of the load generator; with fewer than four, both use all.

    >>> halves([0, 1, 2, 3]), halves([0, 1])
    (([0, 1], [2, 3]), ([0, 1], [0, 1]))
    """
    if len(cpus) < 4:
        return list(cpus), list(cpus)
    middle = len(cpus) // 2
    return list(cpus[:middle]), list(cpus[middle:])


def on_cpus(cpus: Sequence[int]) -> list[str]:
    """The prefix that binds a command to processors with `taskset`; empty if it is not installed."""
    tool = shutil.which("taskset")
    return [] if tool is None or not cpus else [tool, "--cpu-list", ",".join(map(str, cpus))]


def device_name() -> str:
    """The name of the device, for file names."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main())
