"""A request's ids with the first tokens of a draft after them, without a copy."""

from collections.abc import Sequence
from typing import overload


class DraftedIds(Sequence[int]):
    """`ids`, then `draft[:count]`."""

    __slots__ = ("_count", "_draft", "_ids")

    def __init__(self, ids: list[int], draft: Sequence[int], count: int) -> None:
        self._ids = ids
        self._draft = draft
        self._count = count

    def __len__(self) -> int:
        return len(self._ids) + self._count

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [*self._ids, *self._draft[: self._count]][index]
        position = index + len(self) if index < 0 else index
        known = len(self._ids)
        return self._ids[position] if position < known else self._draft[: self._count][position - known]
