"""The Triton kernels' numbers, on a CPU by Triton's interpreter in a process of its own, against dense float64."""

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

LIMITS = {"float32": 2e-6, "float16": 2e-3}


def interpreted(*arguments: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.triton_interpreter", *arguments],
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=900,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def test_every_mask_page_and_group_gives_what_dense_attention_gives() -> None:
    found = interpreted()

    assert len(found) >= 20
    assert [each for each in found if not each["error"] <= LIMITS[each["dtype"]]] == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_combination_gives_what_dense_attention_gives() -> None:
    found = interpreted("--all")

    assert [each for each in found if not each["error"] <= LIMITS[each["dtype"]]] == []
