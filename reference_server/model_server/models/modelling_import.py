"""Imports Transformers' modelling without packages that only training and torch's compiler need.

Transformers imports accelerate, scipy and torch's distributed tensors where it finds them, and marks functions for the
compiler, which imports the compiler with sympy and triton. A shard uses none of them.
"""

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

MODELLING = ("transformers.generation.utils", "transformers.modeling_utils")
UNUSED_PACKAGES = ("accelerate", "scipy")
COMPILER = "torch._dynamo"
INDEX_MODE = f"{COMPILER}._trace_wrapped_higher_order_op"


def import_modelling() -> None:
    """Import Transformers' modelling, unless it or the compiler is imported already.

    Afterwards Transformers regards the hidden packages as missing; other imports of the process are not affected. If
    Transformers needs more of the compiler than its decorators, it is imported again without replacements.
    """
    if COMPILER in sys.modules or MODELLING[1] in sys.modules:
        return
    with contextlib.suppress(ImportError, AttributeError), _packages_hidden(), _compiler_replaced():
        for name in MODELLING:
            importlib.import_module(name)
    importlib.import_module(MODELLING[1])


@contextlib.contextmanager
def _packages_hidden() -> Iterator[None]:
    """Transformers checks only once whether a package is installed, and caches the result."""
    with _in_place({name: None for name in UNUSED_PACKAGES if name not in sys.modules}):
        installed = importlib.import_module("transformers.utils.import_utils")
        is_available = torch.distributed.is_available
        torch.distributed.is_available = lambda: False
        try:
            installed.is_torch_distributed_available()
        finally:
            torch.distributed.is_available = is_available
        yield


@contextlib.contextmanager
def _compiler_replaced() -> Iterator[None]:
    """Its decorators return their functions; the one class that Transformers takes is imported when it is called."""
    compiler: Any = ModuleType(COMPILER)
    compiler.__path__ = []
    compiler.disable = compiler.allow_in_graph = compiler.assume_constant_result = _as_it_is
    index_mode: Any = ModuleType(INDEX_MODE)
    index_mode.TransformGetItemToIndex = lambda: importlib.import_module(INDEX_MODE).TransformGetItemToIndex()
    try:
        with _in_place({COMPILER: compiler, INDEX_MODE: index_mode}):
            yield
    finally:
        vars(torch).pop("_dynamo", None)


def _as_it_is(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    return _as_it_is if function is None else function


@contextlib.contextmanager
def _in_place(modules: dict[str, Any]) -> Iterator[None]:
    """`sys.modules` with these modules, which were not imported. None: the import fails."""
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            sys.modules.pop(name, None)
