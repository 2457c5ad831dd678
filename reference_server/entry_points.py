"""The commands of the server as entry points: a base install lacks their packages, and the message names the extra."""

import importlib
import sys

OURS = ("reference_server", "loadgen", "tuner", "reports")


def launcher() -> int:
    return _run("text-generation-launcher", "reference_server.launcher.cli")


def router() -> int:
    return _run("text-generation-router", "reference_server.router.cli")


def server() -> int:
    return _run("text-generation-server", "reference_server.model_server.cli")


def benchmark() -> int:
    return _run("text-generation-benchmark", "reference_server.benchmark.cli")


def _run(command: str, module: str) -> int:
    try:
        main = importlib.import_module(module).main
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in OURS:
            raise
        sys.stderr.write(f"{command}: {error.name} is not installed: pip install 'tgi-bench[server]'\n")
        return 1
    return int(main() or 0)
