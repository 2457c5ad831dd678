"""Which device a shard computes on: decided here, once."""

import torch

from reference_server.errors import UnsupportedError

UNUSED = {
    "cuda": "NVIDIA GPUs, and AMD's by a torch for ROCm",
    "mps": "Apple's GPUs",
}
"""Accelerators that this version leaves alone, to compute on the CPU, by torch's name for them."""


def choose_device(rank: int = 0) -> torch.device:
    """The device of a rank on this machine. Raises UnsupportedError naming an accelerator that nothing here serves."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type not in UNUSED:
        raise UnsupportedError(
            f"rank {rank}: the accelerator {accelerator.type!r} is not supported. Hide it from this process, or "
            "install a torch for the CPU"
        )
    return torch.device("cpu")
