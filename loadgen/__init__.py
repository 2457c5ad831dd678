"""Measures LLM servers under load: `measure`, `sweep` and `compare` are the commands of `tgi-bench` as functions.

Names are imported on first use, so that `import loadgen` costs nothing. docs/python.md has examples.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loadgen.errors import LoadgenError, MeasurementError, StartError, TargetError, UsageError, WorkerError
    from loadgen.library import ComparisonResult, Run, SweepResult, compare, measure, sweep

_LIBRARY = ("ComparisonResult", "Run", "SweepResult", "compare", "measure", "sweep")

__all__ = [
    "ComparisonResult",
    "LoadgenError",
    "MeasurementError",
    "Run",
    "StartError",
    "SweepResult",
    "TargetError",
    "UsageError",
    "WorkerError",
    "compare",
    "measure",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module("loadgen.library" if name in _LIBRARY else "loadgen.errors")
    return getattr(module, name)


def __dir__() -> list[str]:
    return list(__all__)
