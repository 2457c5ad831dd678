import json
import subprocess
import sys
from pathlib import Path

import pytest

from reference_server.router import scheduling


def loaded_by(*modules):
    """The top-level modules and the dotted ones that a fresh interpreter holds after importing these."""
    code = f"import json, sys\nfor name in {modules!r}: __import__(name)\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(json.loads(done.stdout))


SCHEDULING = tuple(
    f"reference_server.router.scheduling.{path.stem}"
    for path in sorted(Path(scheduling.__path__[0]).glob("*.py"))
    if path.stem != "__init__"
)


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        (("reference_server.router.app", "reference_server.router.cli"), {"torch", "transformers"}),
        (
            ("loadgen.cli", "loadgen.runner", "loadgen.target.target"),
            {"torch", "locust", "gevent", "reference_server", "optuna"},
        ),
        (
            ("tuner.cli", "tuner.study.search", "tuner.study.confirm", "tuner.study.optuna_study"),
            {"torch", "locust", "gevent"},
        ),
        (("tuner.cli",), {"optuna", "pandas"}),
        (("loadgen", "tuner"), {"pydantic", "pandas", "numpy", "locust", "gevent", "optuna", "loadgen.library"}),
        (("loadgen.library", "tuner.library"), {"torch", "locust", "gevent"}),
        (
            ("reports.pages.run_page", "reports.gate.compare"),
            {"torch", "locust", "gevent", "loadgen", "tuner", "reference_server"},
        ),
        (("reports.run_store",), {"pandas", "pyarrow", "numpy"}),
        (SCHEDULING, {"asyncio", "pydantic", "torch", "numpy", "grpc", "logging"}),
        (("reference_server.config",), {"torch", "grpc", "asyncio"}),
    ],
    ids=lambda value: ",".join(sorted(value)) if isinstance(value, set) else value[0],
)
def test_importing_costs_only_what_the_architecture_says(modules, absent):
    assert loaded_by(*modules) & absent == set()


def test_the_worker_alone_loads_locust():
    assert {"locust", "gevent"} <= loaded_by("loadgen.generator.worker")


def test_below_its_cli_the_model_server_needs_torch_and_transformers_only():
    loaded = loaded_by("reference_server.model_server.local_shard")

    assert {"pydantic", "grpc", "fastapi", "google.protobuf"} & loaded == set()
