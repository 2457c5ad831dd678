"""One rank of a sharded model in its own process: runs a scripted load and prints the generated ids.

Arguments: RANK WORLD_SIZE RENDEZVOUS_FILE MODEL_DIRECTORY[@KV_CACHE_DTYPE] ...
"""

import asyncio
import functools
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from reference_server.adapter_source import AdapterSource
from reference_server.messages import (
    Batch,
    ChooserParameters,
    Image,
    InputChunk,
    Request,
    StoppingParameters,
    WarmupRequest,
)
from reference_server.model_server.calls.local_shard import LocalShard
from reference_server.model_server.distributed import Rendezvous, open_group
from reference_server.model_server.options import EngineOptions
from reference_server.model_server.quantization.integers import float_products
from reference_server.transport.shard import until_loaded
from tests.support.models.shard_driver import ShardDriver
from tests.support.models.tiny_models import random_prompt, text_of
from tests.support.models.tiny_vision import SavedVisionModel, picture

FLOAT8_NAMES: dict[str, Literal["fp8_e4m3fn", "fp8_e5m2"]] = {"fp8_e4m3fn": "fp8_e4m3fn", "fp8_e5m2": "fp8_e5m2"}
PROMPTS = [random_prompt(length) for length in (4, 20, 2, 11)]


async def run_load(directory: Path, rank: int, world_size: int) -> dict[str, Any]:
    """Run greedy and seeded requests together; returns the outcomes of this rank's requests, and its limits.

    The adapters in `directory`/adapters are used by the first requests, one each; the last one is loaded at run time.
    """
    name, _, cache = directory.name.partition("@")
    directory = directory.with_name(name)
    adapters = tuple(AdapterSource(path.name, str(path)) for path in sorted((directory / "adapters").glob("*")))
    options = EngineOptions(
        str(directory),
        dtype="float32",
        cpu_memory_gib=0.01,
        compute_threads=1,
        adapters=adapters[:-1],
        kv_cache_dtype=FLOAT8_NAMES.get(cache),
    )
    adapter_ids = dict(enumerate(each.name for each in adapters))
    prompts = [(prompt, (text_of(prompt),)) for prompt in PROMPTS]
    if (directory / "preprocessor_config.json").exists():
        prompts = image_prompts(directory)
    # Rounded inputs have a scale for each part of a row, and the ranks cut rows elsewhere.
    with float_products():
        shard = LocalShard.load(options, rank, world_size)
    request = Request(0, (text_of([1] * 16),), 16, ChooserParameters(), StoppingParameters(1))
    reply = await shard.warmup(WarmupRequest(Batch(0, (request,)), 16))
    for each in adapters[-1:]:
        await until_loaded(functools.partial(shard.load_adapter, each))
    driver = ShardDriver(shard)
    seeded = ChooserParameters(temperature=0.8, seed=7)
    first = await driver.prefill(
        *(
            driver.request(id_, ids, chunks=chunks, adapter_id=adapter_ids.get(id_))
            for id_, (ids, chunks) in enumerate(prompts)
        ),
        driver.request(4, prompts[1][0], parameters=seeded, chunks=prompts[1][1]),
    )
    # All ranks receive the same calls; each returns the tokens of its own requests only.
    while first.batch is not None:
        first = await driver.decode(first.batch)
    shard.close()
    return {
        "outcomes": {str(id_): outcome.ids for id_, outcome in driver.outcomes.items() if outcome.ids},
        "tokens": reply.max_supported_total_tokens,
        "bytes": reply.weight_bytes,
        "kernels": reply.backends["kernels"],
    }


def image_prompts(directory: Path) -> list[tuple[list[int], tuple[InputChunk, ...]]]:
    """Ids and chunks of four prompts, three of them with images."""
    saved = SavedVisionModel(directory, model=None)
    wide, small = picture(20, 45), picture(9, 9, seed=2)
    found: list[tuple[list[int], tuple[InputChunk, ...]]] = []
    for parts in (("w3 w4", wide, "w9"), (small, "w5"), ("w7 w8 w9",), ("w2", small, "w4", wide)):
        chunks = tuple(part if isinstance(part, str) else Image(part, "image/png") for part in parts)
        found.append((saved.prompt_ids(parts), chunks))
    return found


async def run_rank(rank: int, world_size: int, rendezvous: Path, directories: Iterable[Path]) -> list[dict[str, Any]]:
    """The results of one rank on each model."""
    group = open_group(rank, world_size, Rendezvous(file=rendezvous), "cpu")
    try:
        return [await run_load(directory, rank, world_size) for directory in directories]
    finally:
        group.close()


def main() -> None:
    rank, world_size, rendezvous, *directories = sys.argv[1:]
    results = asyncio.run(run_rank(int(rank), int(world_size), Path(rendezvous), map(Path, directories)))
    print(json.dumps({"results": results, "modules": sorted(sys.modules)}))
