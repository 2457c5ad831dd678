"""Which device a shard computes on: decided here, once. Its memory, and the errors that are its own."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from reference_server.errors import StartupError, UnsupportedError

logger = logging.getLogger(__name__)

SERVED = {"cuda": "NVIDIA GPUs, and AMD's by a torch for ROCm"}
"""Accelerators that a shard computes on where there is one, by torch's name for them."""
UNUSED = {"mps": "Apple's GPUs"}
"""Accelerators that this version leaves alone, to compute on the CPU."""


def choose_device(rank: int = 0) -> torch.device:
    """The device of a rank on this machine, an accelerator where torch sees one that is served.

    Raises UnsupportedError naming an accelerator that nothing here serves.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type in UNUSED:
        return torch.device("cpu")
    if accelerator.type not in SERVED:
        raise UnsupportedError(
            f"rank {rank}: the accelerator {accelerator.type!r} is not supported. Hide it from this process, or "
            "install a torch for the CPU"
        )
    return torch.device(accelerator.type, rank % torch.accelerator.device_count())


def make_current(device: torch.device) -> None:
    """Let kernels and allocations without a device of their own go there. Raises StartupError if it cannot be used."""
    if device.type == "cpu":
        return
    try:
        torch.accelerator.set_device_index(device.index)
    except RuntimeError as error:
        raise StartupError(f"{device} cannot be used: {error}") from error


def prepare(device: torch.device, memory_fraction: float) -> None:
    """Settings of this process for an accelerator: how much it may hold, and float32 products on tensor cores.

    Beyond `memory_fraction` of the device's memory an allocation fails as if there were no more.
    """
    if device.type != "cuda":
        return
    torch.cuda.set_per_process_memory_fraction(memory_fraction, device)
    torch.set_float32_matmul_precision("high")


def release_unused(device: torch.device) -> None:
    """Give back memory that the allocator keeps and nothing holds. A device that has failed is left alone."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.empty_cache()
    except RuntimeError as error:
        logger.warning("no memory could be given back: %s", first_line(error))


@contextmanager
def no_waits() -> Iterator[None]:
    """Raise RuntimeError inside the block where the host would wait for what a GPU's stream computes."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # That it may overlook some.
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def is_out_of_memory(error: Exception) -> bool:
    """An accelerator's allocator has a class for it; a CPU's says it in words."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


def is_of_device(error: Exception) -> bool:
    """Whether no further work can be expected: no memory is left, or the device itself has failed."""
    return is_out_of_memory(error) or isinstance(error, torch.AcceleratorError)


def first_line(error: Exception) -> str:
    """What happened, with its numbers; advice on debugging follows in further lines."""
    return next(iter(str(error).splitlines()), type(error).__name__)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of an accelerator's memory: what no process holds, and all there is."""

    free_bytes: int
    total_bytes: int

    @classmethod
    def of(cls, device: torch.device) -> "DeviceMemory":
        """Once everything that was launched is done, with what the allocator keeps for itself counted as taken."""
        torch.cuda.synchronize(device)
        return cls(*torch.cuda.mem_get_info(device))
