"""Skips tests whose measurement was invalid because the machine was busy."""

import pytest

NOT_MEASURED = 4


def skip_if_not_measured(code: int, output: str) -> None:
    """Skip the test if the command ended with the exit code of an invalid run, and with the reason of the run."""
    reasons = [line.strip() for line in output.splitlines() if "invalid run: " in line]
    if code == NOT_MEASURED and reasons:
        pytest.skip(f"the machine is busy: {reasons[-1]}")
