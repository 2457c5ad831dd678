"""Isolates the suite from the environment it is started in, before anything reads that; sets limits of slow tests."""

import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from tests.support import environment
from tests.support.shared_compiling import import_own_part

if TYPE_CHECKING:
    from tests.support.forked_loads import LoadsOfTests

environment.isolate()
# Imports and collected tests live until the end: not one garbage collection is spent on them.
gc.disable()

# On a busy machine, one example may take seconds.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

SLOW_LIMIT_S = 1800


def pytest_collection(session: pytest.Session) -> None:
    """Transformers' modelling first, as a shard imports it: its own way loads torch's compiler in each process."""
    if process := getattr(session.config, "workerinput", None):
        from reference_server.model_server.models.modelling_import import import_modelling

        import_modelling()
        import_own_part(session.config, int(process["workerid"].removeprefix("gw")), process["workercount"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A slow test may run at the same time as others on a busy machine: its limit only ends a test that hangs."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_LIMIT_S))


def pytest_configure(config: pytest.Config) -> None:
    """Unfreeze at the end: libraries report objects that the interpreter cannot collect at exit as leaks."""
    config.add_cleanup(gc.unfreeze)


def pytest_collection_finish() -> None:
    gc.enable()
    gc.freeze()


@pytest.fixture(scope="session")
def load_forker() -> "Iterator[LoadsOfTests]":
    """Starts load processes for the tests that measure in their own process."""
    from tests.support.forked_loads import LoadsOfTests

    forker = LoadsOfTests()
    yield forker
    forker.close()
