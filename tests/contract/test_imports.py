import json
import subprocess
import sys
from pathlib import Path

import pytest

from reference_server.router import scheduling

IMPORT_IN_TURN = """
import json, sys
for modules in json.loads(sys.argv[1]):
    for name in modules:
        __import__(name)
    print(json.dumps(sorted(sys.modules)))
"""


def loaded_by(*steps):
    """The loaded modules of a new interpreter after each step. Steps are cumulative."""
    command = [sys.executable, "-c", IMPORT_IN_TURN, json.dumps(steps)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return [set(json.loads(line)) for line in done.stdout.splitlines()]


SCHEDULING = tuple(
    f"reference_server.router.scheduling.{path.stem}"
    for path in sorted(Path(scheduling.__path__[0]).glob("*.py"))
    if path.stem != "__init__"
)


SERVER = {"torch", "transformers"}
LOAD = {"torch", "locust", "gevent"}


# An interpreter for each chain; each step names modules to import, and those that are not loaded by then.
@pytest.mark.parametrize(
    "steps",
    [
        [
            (SCHEDULING, {"asyncio", "pydantic", "torch", "numpy", "grpc", "logging"}),
            (("reference_server.configuration.config",), {"torch", "grpc", "asyncio"}),
            (("reference_server.router.app", "reference_server.router.cli"), SERVER),
        ],
        [
            (("reports.run_store",), {"pandas", "pyarrow", "numpy"}),
            (
                ("reports.pages.run_page", "reports.gate.compare"),
                LOAD | {"loadgen", "tuner", "reference_server"},
            ),
            (("loadgen.cli", "loadgen.runner", "loadgen.target.target"), LOAD | {"reference_server", "optuna"}),
            (("tuner.cli", "tuner.study.study_search", "tuner.study.confirmation", "tuner.study.optuna_study"), LOAD),
            (("loadgen.library", "tuner.library"), LOAD),
        ],
        [
            (("loadgen", "tuner"), {"pydantic", "pandas", "numpy", "locust", "gevent", "optuna", "loadgen.library"}),
            (("tuner.cli",), {"optuna", "pandas"}),
        ],
    ],
    ids=["server", "reports to tuner", "libraries"],
)
def test_importing_loads_only_the_modules_that_the_architecture_allows(steps):
    loaded = loaded_by(*(modules for modules, _ in steps))

    assert [names & absent for names, (_, absent) in zip(loaded, steps, strict=True)] == [set()] * len(steps)


@pytest.mark.slow
def test_the_worker_alone_loads_locust():
    [loaded] = loaded_by(("loadgen.generator.worker",))

    assert {"locust", "gevent"} <= loaded


@pytest.mark.slow
def test_below_its_cli_the_model_server_needs_torch_and_transformers_only():
    [loaded] = loaded_by(("reference_server.model_server.calls.local_shard",))

    assert {"pydantic", "grpc", "fastapi", "google.protobuf"} & loaded == set()
