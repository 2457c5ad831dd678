"""Skips tests whose measurement was invalid because the machine was busy."""

import pytest

WITHOUT_A_RESULT = (3, 4)
"""Exit codes: not decided, of which too few valid runs are one cause, and not measured."""


def skip_if_not_measured(code: int, output: str) -> None:
    """Skip the test if the command ended without a result and names the reason of an invalid run."""
    reasons = [line.strip() for line in output.splitlines() if "invalid run: " in line]
    if code in WITHOUT_A_RESULT and reasons:
        pytest.skip(f"the machine is busy: {reasons[-1]}")
