"""Load processes of tests: forked from one that has imported locust, for the runs of the test's own process.

Tests of the commands start real processes, which start theirs.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loadgen.config.distribution import Distribution
from loadgen.generator import load_process
from loadgen.generator.forked_load import LoadForker
from loadgen.generator.load_process import RunningLoad
from loadgen.generator.worker_messages import WorkerPlan

START_LOAD = load_process.start_load
"""The start of a real process, for tests that look for it."""


class LoadsOfTests:
    """Forks the loads of tests; the forker starts with the first of them."""

    @functools.cached_property
    def _forker(self) -> LoadForker:
        return LoadForker()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Fork the load processes of runs of this process that have one worker."""

        def start(plan: WorkerPlan, distribution: Distribution, out: Path) -> RunningLoad:
            start_one = self._forker.start if distribution.is_alone else START_LOAD
            return start_one(plan, distribution, out)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(load_process, "start_load", start)
            yield

    def close(self) -> None:
        """End the forker, if it has started."""
        if "_forker" in vars(self):
            self._forker.close()
