"""The choice of a rank's device, without an accelerator."""

from types import SimpleNamespace

import pytest
import torch
from transformers import PretrainedConfig

from reference_server.model_server.device import choose_device, make_current, no_waits
from reference_server.model_server.models import loader
from reference_server.model_server.models.loader import resolve_dtype
from reference_server.model_server.options import EngineOptions


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: SimpleNamespace(type="cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)


def test_ranks_take_gpus_in_turn(two_gpus: None) -> None:
    assert [str(choose_device(rank)) for rank in range(4)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]


def test_without_an_accelerator_the_device_is_the_cpu() -> None:
    assert choose_device() == torch.device("cpu")
    make_current(torch.device("cpu"))


def test_the_dtype_on_a_gpu_is_that_of_the_model() -> None:
    gpu, options = torch.device("cuda", 0), EngineOptions("model")

    assert resolve_dtype(options, gpu, PretrainedConfig(dtype=torch.float16)) is torch.float16
    assert resolve_dtype(options, gpu, PretrainedConfig()) is torch.bfloat16
    assert resolve_dtype(EngineOptions("m", dtype="float32"), gpu, PretrainedConfig()) is torch.float32


@pytest.mark.parametrize(
    ("instructions", "product", "is_packed", "expected"),
    [
        (True, True, False, torch.bfloat16),
        (False, True, True, torch.bfloat16),
        (False, True, False, torch.float32),
        (False, False, True, torch.float32),
    ],
)
def test_the_dtype_on_a_cpu_is_bfloat16_if_all_parts_of_the_model_are_fast_in_it(
    monkeypatch: pytest.MonkeyPatch, instructions: bool, product: bool, is_packed: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr(loader, "has_bfloat16", lambda: instructions)
    monkeypatch.setattr(loader, "has_bfloat16_product", lambda: product)
    cpu, config = torch.device("cpu"), PretrainedConfig(dtype=torch.float16)

    assert resolve_dtype(EngineOptions("m"), cpu, config, is_packed=is_packed) is expected
    assert resolve_dtype(EngineOptions("m", dtype="float32"), cpu, config, is_packed=is_packed) is torch.float32


def test_waits_are_errors_only_inside_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[object] = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    with pytest.raises(RuntimeError), no_waits():
        raise RuntimeError("called a synchronizing CUDA operation")

    assert modes == [0, "error", 0]
