"""What counts as memory on a CPU, and how blocks are counted out of it."""

from pathlib import Path

import pytest
import torch

from reference_server.errors import ShardError
from reference_server.model_server.options import EngineOptions
from reference_server.model_server.warmup import GIB, PeakTensorBytes, available_bytes, blocks_that_fit, device_bytes


def test_blocks_fill_what_weights_and_prefill_leave() -> None:
    assert blocks_that_fit(1000.0, weight_bytes=300, peak_bytes=250, block_bytes=100) == 4


def test_no_block_is_an_error_that_names_the_flags() -> None:
    with pytest.raises(ShardError, match=r"--cpu-memory-gib.*--cuda-memory-fraction.*--max-batch-prefill-tokens"):
        blocks_that_fit(GIB / 2, weight_bytes=GIB, peak_bytes=0, block_bytes=1)


def test_the_given_memory_is_the_devices() -> None:
    assert device_bytes(EngineOptions("model", cpu_memory_gib=1.5)) == 3 * GIB // 2
    assert 0 < device_bytes(EngineOptions("model")) <= 4 * GIB


def test_a_containers_limit_counts_where_it_is_lower(tmp_path: Path) -> None:
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


def test_the_peak_counts_tensors_while_they_live() -> None:
    with PeakTensorBytes() as tensors:
        first = torch.ones(1000)
        second = first.exp()
        del first
        third = second + 1
        del second
        view = third[:10]
        view += 1

    assert tensors.peak == 8000
