"""The device that a shard computes on, its memory, and the errors that it raises."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from reference_server.errors import StartupError, UnsupportedError

logger = logging.getLogger(__name__)

SERVED = {"cuda": "NVIDIA GPUs, and AMD's by a torch for ROCm"}
"""Supported accelerators, by torch's name for them."""
UNUSED = {"mps": "Apple's GPUs"}
"""Accelerators that are not used: the CPU computes instead."""


def choose_device(rank: int = 0) -> torch.device:
    """The device of a rank on this machine: a supported accelerator, else the CPU.

    Raises UnsupportedError for an accelerator that is not supported.
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
    """Make `device` the default of kernels and allocations. Raises StartupError if it cannot be used."""
    if device.type == "cpu":
        return
    try:
        torch.accelerator.set_device_index(device.index)
    except RuntimeError as error:
        raise StartupError(f"could not use {device}: {error}") from error


def prepare(device: torch.device, memory_fraction: float) -> None:
    """Limit this process to a fraction of an accelerator's memory, and use tensor cores for float32 products.

    An allocation beyond `memory_fraction` of the device's memory fails as out of memory.
    """
    if device.type != "cuda":
        return
    torch.cuda.set_per_process_memory_fraction(memory_fraction, device)
    torch.set_float32_matmul_precision("high")


def release_unused(device: torch.device) -> None:
    """Return unused memory of the allocator to the device. An error of a failed device is only logged."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.empty_cache()
    except RuntimeError as error:
        logger.warning("could not return unused memory to the device: %s", first_line(error))


@contextmanager
def no_waits() -> Iterator[None]:
    """Raise RuntimeError inside the block where the host would synchronize with a GPU stream."""
    previous_mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # The warning: some synchronizations may not be detected.
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(previous_mode)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed. The CPU allocator raises a plain RuntimeError, recognised by its text."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error)


def is_of_device(error: Exception) -> bool:
    """Whether the error is fatal for the device: out of memory, or a failed accelerator."""
    return is_out_of_memory(error) or isinstance(error, torch.AcceleratorError)


def first_line(error: Exception) -> str:
    """The first line of an error's message; torch appends debugging advice in further lines."""
    return next(iter(str(error).splitlines()), type(error).__name__)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Free and total memory of an accelerator, in bytes, over all processes."""

    free_bytes: int
    total_bytes: int

    @classmethod
    def of(cls, device: torch.device) -> "DeviceMemory":
        """Synchronize, then read. Memory that this process's allocator caches counts as used."""
        torch.cuda.synchronize(device)
        return cls(*torch.cuda.mem_get_info(device))
