"""Round a decoder's linears block by block; the inputs of a block are the outputs of the rounded blocks before it.

The model stays on its device. One block at a time is moved to the compute device in float32, and freed after rounding.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from reference_server.errors import StartupError, UnsupportedError
from reference_server.model_server.gptq.round_weight import GPTQSettings, Hessian, round_weight
from reference_server.model_server.gptq.write_checkpoint import fits
from reference_server.model_server.models.quantizer import quantizable
from reference_server.model_server.quantization import schemes
from reference_server.model_server.quantization.int4 import GroupedIntegers
from reference_server.model_server.quantization.schemes import Quantization

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of a decoder: name of their list, modules, and names of the linears to round in each block."""

    name: str
    modules: list[Any]
    linears: list[list[str]]

    @classmethod
    def of(cls, model: Any, bits: int) -> "Blocks":
        """Find the blocks. Raises UnsupportedError for a model without a list of blocks."""
        names = [name.rpartition(".")[0] for name in quantizable(model, Quantization(schemes.find("gptq"), None))]
        lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
        if not any(name.startswith(f"{each}.") for each in lists for name in names):
            raise UnsupportedError(f"{type(model).__name__} has no list of blocks with linears that can be quantized")
        chosen = max(lists, key=lambda each: sum(name.startswith(f"{each}.") for name in names))
        modules = list(model.get_submodule(chosen))
        linears = []
        for number in range(len(modules)):
            prefix = f"{chosen}.{number}."
            inside = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
            linears.append([name for name in inside if _fits(modules[number].get_submodule(name), prefix + name, bits)])
        return cls(chosen, modules, linears)

    @property
    def input_sizes(self) -> list[int]:
        """Distinct numbers of inputs of the linears to round."""
        pairs = zip(self.modules, self.linears, strict=True)
        return sorted({_shape(block.get_submodule(name))[1] for block, names in pairs for name in names})

    @property
    def linears_in_block(self) -> list[str] | None:
        """Names of the rounded linears in a block; None if all linears are rounded."""
        rounded = {name for names in self.linears for name in names}
        modules = [
            name for block in self.modules for name, each in block.named_modules() if isinstance(each, nn.Linear)
        ]
        return None if rounded.issuperset(modules) else sorted(rounded)


def _is_transposed(linear: Any) -> bool:
    return "Conv1D" in type(linear).__name__


def _shape(linear: Any) -> tuple[int, int]:
    """Outputs, inputs."""
    first, second = linear.weight.shape
    return (second, first) if _is_transposed(linear) else (first, second)


def _fits(linear: Any, name: str, bits: int) -> bool:
    if fits(_shape(linear), bits):
        return True
    logger.warning("%s is not quantized: %d x %d weights do not fill 32-bit words", name, *_shape(linear))
    return False


@torch.no_grad()
def round_blocks(
    model: Any,
    blocks: Blocks,
    windows: Sequence[Sequence[int]],
    settings: GPTQSettings,
    device: torch.device,
    write: Callable[[str, GroupedIntegers], None],
) -> None:
    """Call `write` with the name of each linear and its rounded weight. Frees the blocks of the model.

    windows: token ids, all of one length.
    """
    base = model.base_model
    calls = _calls(base, blocks.modules, windows[0])
    hidden = [_first_input(base, blocks.modules[0], window) for window in windows]
    started = time.monotonic()
    for number, block in enumerate(blocks.modules):
        block.to(device, torch.float32)
        call = calls[number].to(device)
        hessians = _hessians(block, blocks.linears[number], call, hidden, device)
        for name in blocks.linears[number]:
            path = f"{blocks.name}.{number}.{name}"
            write(path, _round(block.get_submodule(name), hessians[name].mean(), settings, path))
        hidden = [call(block, each.to(device)).to(each.device) for each in hidden]
        block.to("meta")
        done, left = number + 1, len(blocks.modules) - number - 1
        remaining_s = (time.monotonic() - started) / done * left
        logger.info("Quantize: [%d/%d] -- ETA: %s", done, done + left, timedelta(seconds=round(remaining_s)))


def _round(linear: Any, hessian: Tensor, settings: GPTQSettings, path: str) -> GroupedIntegers:
    """Round the weight of a linear in place."""
    weight = linear.weight.t() if _is_transposed(linear) else linear.weight
    try:
        rounded = round_weight(weight, hessian, settings)
    except ValueError as error:
        raise StartupError(f"could not quantize {path}: {error}") from error
    weight.copy_(rounded.dequantize(torch.float32))
    return rounded


@dataclass(frozen=True, slots=True)
class BlockCall:
    """Arguments of a block besides the hidden states: masks, positions. Equal for all windows of one length."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def to(self, device: torch.device) -> "BlockCall":
        """Move the tensors to a device; floating-point tensors become float32."""
        args, kwargs = pytree.tree_map_only(
            Tensor,
            lambda each: each.to(device, torch.float32 if each.is_floating_point() else each.dtype),
            (self.args, self.kwargs),
        )
        return BlockCall(args, kwargs)

    def __call__(self, block: Any, hidden: Tensor) -> Tensor:
        """hidden: [1, tokens, hidden_size]; returns the same shape."""
        result = block(hidden, *self.args, **self.kwargs)
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output


def _calls(base: Any, blocks: list[Any], window: Sequence[int]) -> list[BlockCall]:
    """The arguments that the model passes to each block; masks may differ between blocks."""
    calls: list[BlockCall] = []

    def record(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        calls.append(BlockCall(args[1:], rest))

    with _hooked([block.register_forward_pre_hook(record, with_kwargs=True) for block in blocks]):
        base(torch.tensor([window]), use_cache=False)
    assert len(calls) == len(blocks), "every block must be called exactly once"
    return calls


class _FirstBlockReached(Exception):
    """Stops the forward before the first block."""


def _first_input(base: Any, block: Any, window: Sequence[int]) -> Tensor:
    """The input of the first block for a window: [1, tokens, hidden_size], float32."""
    inputs: list[Tensor] = []

    def stop(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.append(args[0] if args else kwargs["hidden_states"])
        raise _FirstBlockReached

    with _hooked([block.register_forward_pre_hook(stop, with_kwargs=True)]), suppress(_FirstBlockReached):
        base(torch.tensor([window]), use_cache=False)
    return inputs[0].float()


def _hessians(
    block: Any, names: list[str], call: BlockCall, hidden: list[Tensor], device: torch.device
) -> dict[str, Hessian]:
    """The Hessian of each linear over all windows; linears with the same input tensor share one."""
    hessians: dict[str, Hessian] = {}
    seen: list[tuple[Tensor, Hessian]] = []

    def observer(name: str) -> Callable[[Any, tuple[Tensor, ...]], None]:
        def add(_: Any, args: tuple[Tensor, ...]) -> None:
            inputs = args[0]
            shared = next((hessian for other, hessian in seen if other is inputs), None)
            if shared is not None:
                hessians[name] = shared
                return
            hessian = hessians.setdefault(name, Hessian(inputs.shape[-1], device))
            hessian.add(inputs)
            seen.append((inputs, hessian))

        return add

    with _hooked([block.get_submodule(name).register_forward_pre_hook(observer(name)) for name in names]):
        for each in hidden:
            call(block, each.to(device))
            seen.clear()
    return hessians


@contextmanager
def _hooked(handles: list[Any]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
