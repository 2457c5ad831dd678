"""An event loop whose time is a count that jumps to the next timer as soon as nothing else can be done."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`time()` is in ns, so that delays are exact integers. No file is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 0
        self._clock_resolution = 0.5  # a timer is due at its time, and not only after it

    def time(self) -> float:
        return float(self.now_ns)

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self.now_ns = max(self.now_ns, round(self._scheduled[0]._when))
        super()._run_once()


def run_in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`; sleeps are in ns and take no time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
