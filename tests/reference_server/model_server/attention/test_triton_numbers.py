"""The Triton kernels' numbers, on a CPU by Triton's interpreter in a process of its own, against dense float64."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest

LIMITS = {"float32": 2e-6, "float16": 2e-3}


def interpreted(*arguments: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.models.devices.triton_interpreter", *arguments],
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=3600,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def reason_to_skip() -> str | None:
    if sys.platform != "linux":
        return "Triton is made for Linux alone"
    release = tuple(map(int, version("triton").split(".")[:2]))
    if release < (3, 9) and tuple(map(int, version("numpy").split(".")[:2])) >= (2, 4):
        # Its interpreter breaks on loops whose bounds are known at run time.
        return f"Triton {version('triton')} does not interpret with NumPy {version('numpy')}"
    return None


pytestmark = pytest.mark.skipif(reason_to_skip() is not None, reason=str(reason_to_skip()))


@pytest.mark.slow
def test_every_mask_page_and_group_equals_dense_attention() -> None:
    found = interpreted()

    assert len(found) >= 20
    assert [each for each in found if not each["error"] <= LIMITS[each["dtype"]]] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_long_rows_of_every_case_equal_dense_attention() -> None:
    found = interpreted("--long-rows")

    assert {each["dtype"] for each in found} == {*LIMITS}
    assert [each for each in found if not each["error"] <= LIMITS[each["dtype"]]] == []
