"""Which device a shard computes on: decided here, once."""

from dataclasses import dataclass

import torch

from reference_server.errors import StartupError, UnsupportedError

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
