"""Test processes that run side by side share the work of compiling: each compiles a part of the test modules first.

All test processes collect the same modules in the same order. Without byte code, as in a new clone, each of them would
rewrite the assertions of every module at the same time as the others.
"""

import contextlib
import importlib
from itertools import islice
from pathlib import Path

import pytest


def import_own_part(config: pytest.Config, worker: int, workers: int) -> None:
    """Import this process's part of the test modules: one of `workers` equal ranges in the order of collection.

    A module that fails is imported again by its collection, which reports the error.
    """
    modules = sorted(
        path.relative_to(config.rootpath).with_suffix("")
        for folder in _folders(config)
        for path in folder.rglob("test_*.py")
    )
    size = -(-len(modules) // workers)
    for module in islice(modules, worker * size, (worker + 1) * size):
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(module.parts))


def _folders(config: pytest.Config) -> list[Path]:
    return [path for each in config.args if (path := config.invocation_params.dir / each).is_dir()]
