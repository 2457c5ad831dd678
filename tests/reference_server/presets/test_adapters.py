"""The built-in adapters of `preset:tiny-llama`: small, and visible in the text."""

import pytest

from reference_server.adapter_source import parse_adapters
from reference_server.errors import UnsupportedError
from reference_server.messages import Batch, ChooserParameters, Request, StoppingParameters, WarmupRequest
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.options import EngineOptions
from reference_server.presets import catalog

PROMPT = "What is Deep Learning?"


async def text_of(shard: LocalShard, id_: int, adapter_id: str | None) -> str:
    blocks = tuple(range(8 * id_ + 1, 8 * id_ + 9))
    request = Request(
        *(id_, (PROMPT,), 100, ChooserParameters(), StoppingParameters(60, ignore_eos_token=True)),
        blocks=blocks,
        num_slots=100,
        adapter_id=adapter_id,
    )
    result = await shard.prefill(Batch(id_, (request,)))
    while result.generations[0].generated_text is None:
        assert result.batch is not None
        result = await shard.decode([result.batch])
    return result.generations[0].generated_text.text


async def test_the_adapters_change_the_style_of_the_text() -> None:
    adapters = parse_adapters(["exclaim=preset:exclaim", "bullets=preset:bullets"])
    options = EngineOptions("preset:tiny-llama", cpu_memory_gib=0.1, compute_threads=1, adapters=adapters)
    shard = LocalShard.load(options)
    warm = Request(0, (PROMPT,), 16, ChooserParameters(), StoppingParameters(1))
    await shard.warmup(WarmupRequest(Batch(0, (warm,)), 64))

    plain, exclaimed, bulleted = [await text_of(shard, id_, name) for id_, name in enumerate((None, *catalog.ADAPTERS))]
    shard.close()

    assert "!" not in plain
    assert "machine learning!" in exclaimed
    assert "\n- " in bulleted
    assert "\n- " not in plain


def test_the_files_are_small_and_an_unknown_name_is_refused_with_the_list() -> None:
    for name in catalog.ADAPTERS:
        directory = catalog.find_adapter(f"preset:{name}")
        assert directory is not None
        assert sum(path.stat().st_size for path in directory.iterdir()) < 200_000
    with pytest.raises(UnsupportedError, match="preset:exclaim, preset:bullets"):
        catalog.find_adapter("preset:poet")
