"""Records the torch operators of a step: numbers, shapes, tensors from outside, and waits."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Each would wait for a device, to know how large its result is.
SIZED_BY_VALUES = (
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.bincount.default,
    torch.ops.aten._unique2.default,
    torch.ops.aten.unique_dim.default,
    torch.ops.aten.unique_consecutive.default,
)


@dataclass(frozen=True)
class Call:
    """One operator: its name, every argument that is no tensor, each tensor's shape, and the addresses from outside."""

    operator: str
    numbers: tuple[object, ...]
    shapes: tuple[tuple[int, ...], ...]
    addresses: tuple[int | None, ...]


@dataclass
class StepRecorder(TorchDispatchMode):  # type: ignore[misc]
    """Records what runs inside the block. `waits` are the calls for which a host would wait for its device.

    Tensors are kept, so that an address seen again is the same tensor's.
    """

    calls: list[Call] = field(default_factory=list)
    waits: list[str] = field(default_factory=list)
    num_kernels: int = 0
    _made: set[int] = field(default_factory=set)
    _kept: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        leaves = tree_leaves((args, kwargs))
        given = list(_tensors(leaves))
        result = func(*args, **(kwargs or {}))
        made = list(_tensors(tree_leaves(result)))
        if self._waits(func, args, result, bool(given)):
            self.waits.append(str(func))
        # A view costs a device nothing.
        self.num_kernels += not getattr(func, "is_view", False)
        self.calls.append(
            Call(
                operator=str(func),
                numbers=tuple(leaf for leaf in leaves if not isinstance(leaf, Tensor)),
                shapes=tuple(tuple(tensor.shape) for tensor in given),
                addresses=tuple(None if _storage(each) in self._made else each.data_ptr() for each in given),
            )
        )
        outside = {_storage(tensor) for tensor in given} - self._made
        self._made.update(_storage(tensor) for tensor in made if _storage(tensor) not in outside)
        self._kept += [*given, *made]
        return result

    def _waits(self, func: Callable[..., Any], args: Sequence[Any], result: Any, has_tensors: bool) -> bool:
        if func in SIZED_BY_VALUES:
            return True
        if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default, torch.ops.aten.index_put.default):
            return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
        if func is torch.ops.aten.repeat_interleave.Tensor:
            return True
        # `.item()`, `if tensor`, `torch.equal`.
        return has_tensors and isinstance(result, bool | int | float)


def _tensors(leaves: Sequence[Any]) -> Iterator[Tensor]:
    return (leaf for leaf in leaves if isinstance(leaf, Tensor))


def _storage(tensor: Tensor) -> int:
    # Weights in oneDNN's layout have no storage to look at.
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)
