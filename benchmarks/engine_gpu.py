"""The engine on a GPU, in ten minutes: checked, measured against what the device allows, and beside Transformers.

    python -m benchmarks.engine_gpu [--minutes 9] [--presets llama-3.2-1b,llama-3.1-8b,bloom-560m] [--quick] [--http]

Runs `reference_server.model_server.measure` and stores its JSON under benchmarks/results/, named by device and day; the
newest stored result of the same device is what the new one is compared with. A bare machine is enough: torch,
transformers, numpy and safetensors. `--http` adds benchmarks.engine, the server through HTTP beside its peers, for
which the server's and the client's packages have to be installed.
"""

import argparse
import datetime
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"
HTTP_NEEDS = ("pydantic", "pydantic_settings", "fastapi", "uvicorn", "uvloop", "grpc", "google.protobuf", "locust")


def main() -> int:
    """Measure, print the tables; the exit code of what measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--presets")
    parser.add_argument("--attention")
    parser.add_argument("--parts")
    parser.add_argument("--quick", action="store_true", help="few and small shapes, to see that everything runs")
    parser.add_argument("--http", action="store_true", help="also through HTTP, beside the peers")
    parser.add_argument("--out", type=Path, help="where the JSON goes instead")
    args = parser.parse_args()
    earlier = sorted(RESULTS.glob(f"engine-{device_name()}-*.json"))
    path = args.out or RESULTS / f"engine-{device_name()}-{datetime.date.today():%Y-%m-%d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "reference_server.model_server.measure"]
    command += ["--minutes", str(args.minutes), "--out", str(path)]
    for name in ("presets", "attention", "parts"):
        if getattr(args, name):
            command += [f"--{name}", getattr(args, name)]
    if args.quick:
        command.append("--quick")
    before = [each for each in earlier if each != path]
    if before:
        command += ["--before", str(before[-1])]
    code = subprocess.call(command, cwd=RESULTS.parents[1])
    print(f"stored in {path}")
    if args.http:
        code = through_http(args.quick, path.with_name(f"{path.stem}-http.json")) or code
    return code


def through_http(quick: bool, path: Path) -> int:
    """The server as users reach it; skipped by name where its packages are missing."""
    missing = [name for name in HTTP_NEEDS if importlib.util.find_spec(name.partition(".")[0]) is None]
    if missing:
        print(f"through HTTP: skipped, {', '.join(missing)} are not installed")
        return 0
    command = [sys.executable, "-m", "benchmarks.engine", "--json", str(path)]
    command += ["--quick"] if quick else ["--models", "preset:llama-3.1-8b", "--concurrency", "1", "8", "64", "256"]
    return subprocess.call(command, cwd=RESULTS.parents[1])


def device_name() -> str:
    """The device as a part of a file's name."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main())
