"""Loading, warm-up and the choice of kernels: examples M21 and M22, and refusals at start."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from reference_server.errors import ArgumentError, ShardError, UnsupportedError
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.forward.inputs import RaggedInputs
from reference_server.model_server.forward.ragged import RaggedForward
from reference_server.model_server.options import EngineOptions
from tests.support.models.tiny_models import save_tiny_model
from tests.support.models.tiny_shards import loaded, tiny_options, warm_up


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def shard(directory: Path) -> Iterator[LocalShard]:
    yield from loaded(directory)


async def test_model_server_M21_warmup_counts_the_blocks_that_fit(shard: LocalShard) -> None:
    reply = await warm_up(shard, max_prefill_tokens=40)

    # 2 layers, 16 tokens, 2 K/V heads of 12, keys and values, 4 bytes each.
    bytes_per_block = 2 * 16 * 2 * 12 * 2 * 4
    assert reply.weight_bytes is not None
    assert reply.prefill_peak_bytes is not None
    free = int(0.01 * 2**30) - reply.weight_bytes - reply.prefill_peak_bytes
    assert reply.max_supported_total_tokens == free // bytes_per_block * 16
    assert reply.max_total_tokens == 256
    assert reply.max_input_tokens == 255
    assert reply.backends["kernels"] == "fused"
    # The peak is counted, not sampled, so the limits are equal in every run.
    assert await warm_up(shard, max_prefill_tokens=40) == reply


async def test_the_weights_of_a_fused_forward_are_counted(directory: Path) -> None:
    weight_bytes = []
    for fuse in (True, False):
        fused = LocalShard.load(tiny_options(directory, fuse=fuse))
        weight_bytes.append((await warm_up(fused, max_prefill_tokens=40)).weight_bytes)
        fused.close()

    weights = load_file(directory / "model.safetensors")
    assert weight_bytes == [sum(weight.nbytes for weight in weights.values())] * 2


async def test_model_server_M21_given_limits_are_echoed(shard: LocalShard) -> None:
    reply = await warm_up(shard, max_input_tokens=100, max_total_tokens=120)

    assert (reply.max_input_tokens, reply.max_total_tokens) == (100, 120)


async def test_model_server_M21_without_chunking_the_prefill_is_the_total(directory: Path) -> None:
    shard = LocalShard.load(tiny_options(directory, prefill_chunking=False))
    reply = await warm_up(shard, max_prefill_tokens=40)
    shard.close()

    assert (reply.max_input_tokens, reply.max_total_tokens) == (39, 40)


async def test_model_server_M21_half_the_memory_fraction_gives_fewer_blocks(directory: Path) -> None:
    replies = []
    for fraction in (1.0, 0.5):
        shard = LocalShard.load(tiny_options(directory, memory_fraction=fraction))
        replies.append(await warm_up(shard))
        shard.close()

    whole, half = (reply.max_supported_total_tokens for reply in replies)
    assert whole is not None
    assert half is not None
    assert half < whole / 2 < whole


async def test_model_server_M21_running_out_of_memory_names_the_setting_to_lower(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(self: RaggedForward, inputs: RaggedInputs) -> torch.Tensor:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")

    shard = LocalShard.load(tiny_options(directory))
    monkeypatch.setattr(RaggedForward, "__call__", out_of_memory)

    with pytest.raises(RuntimeError, match=r"handle 40 prefill tokens\. You need to decrease `--max-batch-prefill-"):
        await warm_up(shard, max_prefill_tokens=40)
    shard.close()


async def test_model_server_M21_no_room_for_a_block_names_the_flags(directory: Path) -> None:
    shard = LocalShard.load(tiny_options(directory, cpu_memory_gib=0.0002))

    with pytest.raises(ShardError, match=r"--cpu-memory-gib.*--max-batch-prefill-tokens"):
        await warm_up(shard)
    shard.close()


@pytest.mark.parametrize(
    ("attention", "impl", "block_size", "chunking"),
    [
        (None, "flashdecoding", 16, True),
        ("paged", "paged", 16, False),
        ("flashdecoding", "flashdecoding", 256, True),
        ("flashinfer", "flashinfer", 1, True),
        ("torch", "torch", 16, True),
    ],
)
async def test_model_server_M22_attention_fixes_the_page(
    directory: Path, attention: str | None, impl: str, block_size: int, chunking: bool
) -> None:
    shard = LocalShard.load(tiny_options(directory, attention=attention))
    info = await shard.info()
    shard.close()

    assert not info.requires_padding
    assert (info.attention_impl, info.block_size, info.support_chunking) == (impl, block_size, chunking)
    assert (info.dtype, info.device_type) == ("torch.float32", "cpu")


def test_model_server_M22_unknown_attention_fails_at_start(directory: Path) -> None:
    with pytest.raises(ArgumentError, match="`--attention triton` is not served on this device"):
        LocalShard.load(tiny_options(directory, attention="triton"))
    with pytest.raises(ArgumentError, match="cannot be served with `--attention paged`"):
        LocalShard.load(tiny_options(directory, attention="paged", prefix_caching=True))


def test_an_unserved_family_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')

    with pytest.raises(UnsupportedError, match=r"vit; supported are Llama \(llama\), .*BLOOM \(bloom\)"):
        LocalShard.load(tiny_options(tmp_path))


def test_weights_beyond_the_memory_are_refused_before_they_are_loaded(directory: Path) -> None:
    with pytest.raises(ArgumentError, match=r"take 14\.9\d GiB, but only 4\.00 GiB .*`--cpu-memory-gib`"):
        LocalShard.load(EngineOptions("preset:llama-3.1-8b", dtype="bfloat16", cpu_memory_gib=4))
