"""The report of `--env`: platform, versions, output of the vendors' tools, missing packages."""

import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

from reference_server.launcher.devices import run_tool

TOOLS = (("nvidia-smi",), ("xpu-smi", "discovery"), ("hl-smi",))
# Extra, its feature, and a module that is importable if it is installed.
EXTRAS = (
    ("server", "the model server", "torch"),
    ("quantization", "bitsandbytes' eight and four bits", "bitsandbytes"),
    ("flash-attn", "attention with softcap and ALiBi on CUDA", "flash_attn"),
    ("grammar", "constrained decoding", "outlines_core"),
    ("otlp", "tracing", "opentelemetry.sdk"),
)


def environment_report() -> str:
    """Lines of `name: value`; the output of a tool is indented below its name."""
    lines = [
        f"target: {platform.machine()}-{platform.system().lower()}",
        f"python: {platform.python_version()} ({platform.python_compiler()})",
        f"commit: {_commit()}",
        *(f"{name}: {_version(name)}" for name in ("tgi-bench", "torch", "transformers", "grpcio")),
    ]
    for command in TOOLS:
        output = run_tool(*command)
        lines.append(f"{command[0]}: {_indented(output)}" if output else f"{command[0]}: N/A")
    return "Runtime environment\n" + "\n".join(lines + [f"missing: {text}" for text in _missing()])


def _missing() -> Iterator[str]:
    """Tools and extras that are not installed."""
    if Path("/dev/nvidia0").exists() and shutil.which("nvidia-smi") is None:
        yield "the NVIDIA driver's tools (nvidia-smi), for the GPU"
    if shutil.which("nvidia-smi") is not None and shutil.which("nvcc") is None:
        yield "the CUDA toolkit (nvcc), needed only to build flash-attn"
    for extra, feature, module in EXTRAS:
        if not _is_installed(module):
            yield f"{feature}: pip install 'tgi-bench[{extra}]'"


def _is_installed(module: str) -> bool:
    try:
        return util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "N/A"


def _commit() -> str:
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return "N/A"
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return "N/A"
    return done.stdout.strip()


def _indented(text: str) -> str:
    return "\n    ".join(["", *text.splitlines()])
