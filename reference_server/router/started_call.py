"""A coroutine that starts at once, in the task that makes it, and is awaited later.

A task would start in the next turn of the event loop, and is one more object to wake.
"""

from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


class StartedCall(Generator[Any, Any, T]):
    """Runs `coroutine` up to the first thing that it waits for. Await it once, or close it.

    An error before that is raised when it is awaited.
    """

    __slots__ = ("_coroutine", "_error", "_has_resumed", "_waits_for")

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self._has_resumed = False
        self._error: Exception | None = None
        try:
            self._waits_for = coroutine.send(None)
        except Exception as error:  # StopIteration has the result
            self._error = error

    def __await__(self) -> Generator[Any, Any, T]:
        return self

    def send(self, value: Any) -> Any:
        """The next thing to wait for. For the task that awaits this call."""
        if self._has_resumed:
            return self._coroutine.send(value)
        self._has_resumed = True
        if self._error is not None:
            raise self._error
        return self._waits_for

    def throw(self, *error: Any) -> Any:
        """Raise an error, such as a cancellation, where the coroutine waits. For the task that awaits this call."""
        self._has_resumed = True
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """Abandon the call if it is not over."""
        self._coroutine.close()
