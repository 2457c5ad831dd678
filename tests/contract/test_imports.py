import json
import subprocess
import sys

import pytest


def loaded_by(*modules):
    """The top-level modules and the dotted ones that a fresh interpreter holds after importing these."""
    code = f"import json, sys\nfor name in {modules!r}: __import__(name)\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(json.loads(done.stdout))


PURE_ROUTER = tuple(
    f"reference_server.router.{name}"
    for name in ("request", "queue", "admission", "blocks", "radix", "segments", "scheduler")
)


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        (("reference_server.router.app", "reference_server.router.cli"), {"torch", "transformers"}),
        (
            ("loadgen.cli", "loadgen.runner", "loadgen.target"),
            {"torch", "locust", "gevent", "reference_server", "optuna"},
        ),
        (("tuner.cli", "tuner.search", "tuner.confirm", "tuner.study"), {"torch", "locust", "gevent"}),
        (("tuner.cli",), {"optuna", "pandas"}),
        (("reports.report", "reports.compare"), {"torch", "locust", "gevent", "loadgen", "tuner", "reference_server"}),
        (("reports.results",), {"pandas", "pyarrow", "numpy"}),
        (PURE_ROUTER, {"asyncio", "pydantic", "torch", "grpc"}),
        (("reference_server.config",), {"torch", "grpc", "pydantic_settings", "asyncio"}),
    ],
    ids=lambda value: ",".join(sorted(value)) if isinstance(value, set) else value[0],
)
def test_importing_costs_only_what_the_architecture_says(modules, absent):
    assert loaded_by(*modules) & absent == set()


def test_the_worker_alone_loads_locust():
    assert {"locust", "gevent"} <= loaded_by("loadgen.worker")


def test_below_its_cli_the_model_server_needs_torch_and_transformers_only():
    loaded = loaded_by("reference_server.model_server.shard")

    assert {"pydantic", "grpc", "fastapi", "google.protobuf"} & loaded == set()
