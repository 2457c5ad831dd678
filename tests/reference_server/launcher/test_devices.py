import os
import stat
from pathlib import Path

import pytest

from reference_server.errors import UnsupportedError
from reference_server.launcher.devices import Gpu, available_memory_bytes, multiply_single, probe_devices


def install_nvidia_smi(directory: Path, output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program on PATH that prints `output`."""
    tool = directory / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{directory}{os.pathsep}{os.environ['PATH']}")


def test_gpus_are_those_that_nvidia_smi_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvidia_smi(tmp_path, "NVIDIA L4, 23034, 8.9\nNVIDIA L4, 23034, [N/A]", monkeypatch)

    devices = probe_devices({"NVIDIA_VISIBLE_DEVICES": "all"})

    assert devices.gpus == (Gpu("NVIDIA L4", 23034, 8.9), Gpu("NVIDIA L4", 23034, None))
    assert devices.visible == 2


def test_a_card_that_is_too_old_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvidia_smi(tmp_path, "NVIDIA GeForce GTX 1080, 8192, 6.1", monkeypatch)

    with pytest.raises(UnsupportedError, match=r"GTX 1080 has compute capability 6\.1, but at least 7\.5 is needed"):
        probe_devices({})


@pytest.mark.parametrize(
    ("variable", "name"), [("ZE_AFFINITY_MASK", "Intel XPU"), ("HABANA_VISIBLE_DEVICES", "Intel Gaudi")]
)
def test_an_accelerator_that_nothing_serves_is_refused_by_name(
    variable: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(UnsupportedError, match=f"{variable} requests an {name} device"):
        probe_devices({variable: "0"})


def test_amds_cards_are_left_to_the_shards_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    assert probe_devices({"ROCR_VISIBLE_DEVICES": "0,1"}).gpus == ()


@pytest.mark.parametrize(
    ("name", "compute_name", "teraflops"),
    [
        ("NVIDIA L4", "nvidia-l4", 121), ("Tesla T4", "nvidia-t4", 65),
        ("NVIDIA GeForce RTX 4090", "nvidia-4090", 82), ("NVIDIA A100 80GB PCIe", "nvidia-a100-sxm4-80gb", 312),
        ("NVIDIA H100 80GB HBM3", "nvidia-h100-80fb-hbm3", 900), ("NVIDIA H200", "nvidia-h200", 989),
        ("NVIDIA RTX 6000 Ada", "nvidia-rtx-6000-ada", None),
    ],
)  # fmt: skip
def test_names_of_cards(name: str, compute_name: str, teraflops: int | None) -> None:
    gpu = Gpu(name, 1)

    assert (gpu.compute_name, gpu.teraflops) == (compute_name, teraflops)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 4096 * 1024),
        ({"memory.max": "max", "memory.current": "5"}, 4096 * 1024),
        ({"memory.max": "3000", "memory.current": "1000"}, 2000),
        ({"memory.max": "1000", "memory.current": "3000"}, 0),
        ({"memory/memory.limit_in_bytes": "3000", "memory/memory.usage_in_bytes": "500"}, 2500),
    ],
)
def test_available_memory_respects_a_containers_limit(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9999 kB\nMemAvailable:    4096 kB\n")
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    assert available_memory_bytes(tmp_path) == expected


def test_the_tightest_of_nested_limits_counts(tmp_path: Path) -> None:
    groups = tmp_path / "sys/fs/cgroup/user/session"
    groups.mkdir(parents=True)
    (groups.parent / "memory.max").write_text("2000")
    (groups / "memory.max").write_text("3000")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("1:name=systemd:/x\n0::/user/session\n")
    (tmp_path / "proc/meminfo").write_text("MemAvailable:    4096 kB\n")

    assert available_memory_bytes(tmp_path) == 2000


def test_products_round_to_single_precision() -> None:
    assert multiply_single(3.0, 0.1) == 0.30000001192092896
