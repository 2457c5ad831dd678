"""Finds settings of LLM servers for a load: `tune` is `tgi-tune run` as a function.

Names are imported on first use, so `import tuner` is fast. docs/python.md has an example.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuner.errors import TunerError
    from tuner.library import Study, tune

__all__ = ["Study", "TunerError", "tune"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("tuner.errors" if name == "TunerError" else "tuner.library"), name)


def __dir__() -> list[str]:
    return list(__all__)
