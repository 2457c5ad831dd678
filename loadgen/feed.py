"""Prompts and their request bodies, made before the load starts as far as memory allows."""

from collections import deque
from collections.abc import Iterator

from loadgen.datasets.prompt import Prompt
from loadgen.protocols.dialect import Dialect

MAX_BYTES_AHEAD = 64 * 2**20


class Feed:
    """An iterator of (prompt, body); making a long prompt during the load would delay the events of others."""

    def __init__(self, prompts: Iterator[Prompt], dialect: Dialect) -> None:
        self._prompts = prompts
        self._dialect = dialect
        self._ready: deque[tuple[Prompt, bytes]] = deque()

    def prepare(self, count: int, max_bytes: int = MAX_BYTES_AHEAD) -> None:
        """Make up to `count` requests ahead, and no more than fit."""
        size = 0
        while len(self._ready) < count and size < max_bytes:
            made = self._make()
            if made is None:
                return
            self._ready.append(made)
            size += len(made[1])

    def __iter__(self) -> Iterator[tuple[Prompt, bytes]]:
        return self

    def __next__(self) -> tuple[Prompt, bytes]:
        made = self._ready.popleft() if self._ready else self._make()
        if made is None:
            raise StopIteration
        return made

    def _make(self) -> tuple[Prompt, bytes] | None:
        prompt = next(self._prompts, None)
        return None if prompt is None else (prompt, self._dialect.body(prompt))
