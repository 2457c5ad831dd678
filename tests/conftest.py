"""Isolates the suite from the environment it is started in, before anything reads that; sets limits of slow tests."""

import pytest

from tests.support import environment

environment.isolate()

SLOW_LIMIT_S = 1800


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A slow test may run beside others on a busy machine: its limit only ends one that hangs."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT_S))
