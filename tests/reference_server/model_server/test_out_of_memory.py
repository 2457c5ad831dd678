"""No memory at warm-up, at prefill, at decode, in the sampler; a device that has failed. Injected: there is no GPU."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from reference_server.model_server import device, engine
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.decoding.sampling import TokenChooser
from reference_server.model_server.forward.inputs import RaggedInputs
from reference_server.model_server.memory.kv_cache import KVCache
from reference_server.model_server.stepper import RunAhead
from tests.support.models.shard_driver import ShardDriver
from tests.support.models.tiny_models import random_prompt, save_tiny_model
from tests.support.models.tiny_shards import tiny_options, warm_up

ALLOCATOR = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has 2.00 MiB free."
OUT_OF_MEMORY = torch.OutOfMemoryError(f"{ALLOCATOR}\nSee the documentation.")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(params=["call by call", "ahead, read first", "ahead, launch first"])
def shard(directory: Path, request: pytest.FixtureRequest) -> Iterator[LocalShard]:
    shard = LocalShard.load(tiny_options(directory, run_ahead=request.param != "call by call"))
    if request.param.endswith("launch first"):
        shard.engine.stepper.run_ahead = RunAhead.BEFORE_READ
    yield shard
    shard.close()


@pytest.fixture
def plain(directory: Path) -> Iterator[LocalShard]:
    shard = LocalShard.load(tiny_options(directory))
    yield shard
    shard.close()


def fail_forward(shard: LocalShard, error: Exception, when: Callable[[RaggedInputs], bool]) -> None:
    stepper = shard.engine.stepper
    forward = stepper.forward

    def failing(inputs: RaggedInputs) -> Tensor:
        if when(inputs):
            raise error
        return forward(inputs)

    stepper.forward = failing


async def test_reliability_F4_the_warm_up_error_names_the_flag_to_lower_and_the_allocators_bytes(
    plain: LocalShard,
) -> None:
    fail_forward(plain, OUT_OF_MEMORY, lambda inputs: True)

    with pytest.raises(RuntimeError) as raised:
        await warm_up(plain, 64)

    assert str(raised.value) == (
        "Not enough memory to handle 64 prefill tokens. You need to decrease `--max-batch-prefill-tokens`: " + ALLOCATOR
    )


async def test_reliability_F4_a_cache_that_does_not_fit_names_its_flag(
    plain: LocalShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def make(*args: Any) -> KVCache:
        made.append(args)
        if len(made) == 2:
            raise OUT_OF_MEMORY
        return KVCache(*args)

    monkeypatch.setattr(engine, "KVCache", make)

    with pytest.raises(RuntimeError, match=r"for \d+ K/V blocks.*`--cuda-memory-fraction`: CUDA out of memory"):
        await warm_up(plain, 64)


async def test_another_error_of_warm_up_is_unchanged(plain: LocalShard) -> None:
    fail_forward(plain, RuntimeError("a shape is wrong"), lambda inputs: True)

    with pytest.raises(RuntimeError, match=r"^a shape is wrong$"):
        await warm_up(plain, 64)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_reliability_F5_out_of_memory_in_a_step_ends_the_shard(
    shard: LocalShard, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = []
    await warm_up(shard)
    driver = ShardDriver(shard)
    fail_forward(shard, OUT_OF_MEMORY, lambda inputs: (inputs.logits_index is None) == (phase == "decode"))
    monkeypatch.setattr(engine, "release_unused", released.append)

    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        await driver.run(driver.request(1, random_prompt(9), 6))

    assert released == [torch.device("cpu")]


@pytest.mark.parametrize("error", [OUT_OF_MEMORY, torch.AcceleratorError("an illegal memory access")])
async def test_reliability_F7_a_device_error_in_the_sampler_fails_the_whole_step(
    plain: LocalShard, error: RuntimeError, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise error

    await warm_up(plain)
    driver = ShardDriver(plain)
    monkeypatch.setattr(TokenChooser, "choose", failing)

    with pytest.raises(type(error)):
        await driver.run(driver.request(1, random_prompt(9), 6))


def test_errors_that_count_as_out_of_memory() -> None:
    cpu = RuntimeError("[enforce fail at alloc_cpu.cpp:125] DefaultCPUAllocator: can't allocate memory: you tried to")

    assert all(map(device.is_out_of_memory, [OUT_OF_MEMORY, cpu, MemoryError()]))
    assert not device.is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert [device.first_line(error) for error in (OUT_OF_MEMORY, MemoryError())] == [ALLOCATOR, "MemoryError"]


def test_a_failed_device_releases_no_memory_and_logs_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing() -> None:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure\nadvice")

    monkeypatch.setattr(torch.cuda, "empty_cache", failing)

    device.release_unused(torch.device("cuda", 0))

    assert caplog.messages == ["could not return unused memory to the device: CUDA error: unspecified launch failure"]


def test_a_gpu_gives_this_process_its_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *args: asked.append(args))
    monkeypatch.setattr(torch, "set_float32_matmul_precision", asked.append)

    device.prepare(torch.device("cpu"), 0.5)
    device.prepare(gpu, 0.5)

    assert asked == [(0.5, gpu), "high"]
