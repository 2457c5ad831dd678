"""The memory of a CPU, and the number of blocks that fit into it."""

from pathlib import Path

import pytest
import torch

from reference_server.errors import ShardError
from reference_server.model_server.device import DeviceMemory
from reference_server.model_server.memory.cache_blocks import (
    GIB,
    PeakTensorBytes,
    available_bytes,
    blocks_in_free_memory,
    blocks_that_fit,
    device_bytes,
)
from reference_server.model_server.options import EngineOptions


def test_blocks_fill_the_memory_beside_weights_and_prefill() -> None:
    assert blocks_that_fit(1000.0, weight_bytes=300, peak_bytes=250, block_bytes=100) == 4


def test_blocks_of_an_accelerator_leave_memory_for_adapters_that_are_loaded_later() -> None:
    memory = DeviceMemory(free_bytes=80, total_bytes=100)

    assert blocks_in_free_memory(memory, 0.9, 10) == 7
    assert blocks_in_free_memory(memory, 0.9, 10, reserved_bytes=25) == 4


def test_without_memory_for_a_block_the_error_names_the_flags() -> None:
    with pytest.raises(ShardError, match=r"--cpu-memory-gib.*--cuda-memory-fraction.*--max-batch-prefill-tokens"):
        blocks_that_fit(GIB / 2, weight_bytes=GIB, peak_bytes=0, block_bytes=1)


def test_configured_memory_counts_as_the_devices() -> None:
    assert device_bytes(EngineOptions("model", cpu_memory_gib=1.5)) == 3 * GIB // 2
    assert 0 < device_bytes(EngineOptions("model")) <= 4 * GIB


def test_a_lower_limit_of_the_container_counts(tmp_path: Path) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    proc.mkdir()
    cgroup.mkdir()
    (proc / "meminfo").write_text("MemTotal:  9000000 kB\nMemAvailable:    4000000 kB\n")
    assert available_bytes(proc, cgroup) == 4_000_000 * 1024

    (cgroup / "memory.current").write_text("1000\n")
    (cgroup / "memory.max").write_text("max\n")
    assert available_bytes(proc, cgroup) == 4_000_000 * 1024

    (cgroup / "memory.max").write_text("501000\n")
    assert available_bytes(proc, cgroup) == 500_000


def test_the_peak_counts_live_tensors() -> None:
    with PeakTensorBytes() as tensors:
        first = torch.ones(1000)
        second = first.exp()
        del first
        third = second + 1
        del second
        view = third[:10]
        view += 1

    assert tensors.peak == 8000
